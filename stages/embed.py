"""Initial word embeddings from the text: from which tokens occur near each other, and how often each occurs.

Word embeddings are the truncated SVD of the tokens' positive pointwise mutual information, each scaled to the length
of BERT's random ones; the output bias is the log of the tokens' frequencies (Meister et al. 2023, arXiv:2212.09686).
`python -m trainer --word_embeddings OUT/embeddings.safetensors` starts from them.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from common.errors import UserError
from common.options import option
from stages.directory.command import run
from stages.directory.manifest import Output, StageDirectory
from stages.directory.options import StageOptions, fingerprints, parse, stage_parser
from trainer.data.file_names import TRAINING_SHARDS
from trainer.models.config import ModelConfig

#: How the chain may start: from random embeddings, or from this stage's.
RANDOM, COOCCURRENCE = INITIAL_WORD_EMBEDDINGS = ("random", "cooccurrence")
#: In the stage's directory.
EMBEDDINGS = "embeddings.safetensors"
#: One more than the largest id that is counted.
_VOCABULARY_MAX = 1 << 20


@dataclass(frozen=True, kw_only=True)
class EmbedOptions(StageOptions):
    """The data set, and the length of an embedding."""

    module: ClassVar = "stages.embed"
    stage: ClassVar = "embed_words"
    format_version: ClassVar = 4  # 4: counts within 2 tokens; 3: training begins with embeddings twice as large

    data: Path = option(names=("data",), metavar="DATA", help=f"a directory with {TRAINING_SHARDS} shards")
    hidden_size: int = option(least=1, unit="elements", help="length of an embedding: the model's hidden size")
    seed: int = option(12349, least=0, help="seed of the SVD's random start")

    def upstream(self) -> dict[str, str]:
        return fingerprints(dataset=self.data)

    def inputs(self, hashes: Any, upstream: Any) -> dict[str, Any]:
        if "dataset" in upstream:
            return {}
        from stages.examples.sampled_rows import sampled_shards

        names = sampled_shards(sorted(path.name for path in self.data.glob(TRAINING_SHARDS)))
        return {"data": {Path(file.path).name: file.sha256 for file in hashes.hash(self.data / name for name in names)}}


def embed(work: StageDirectory, options: EmbedOptions) -> dict[str, Any]:
    """Write `EMBEDDINGS` and complete `work`; returns the counts. Raises `UserError`."""
    import math

    import numpy as np
    import torch

    from stages.examples.cooccurrence import Cooccurrences, positive_pmi, word_vectors
    from stages.examples.sampled_rows import sampled_rows, text_rows
    from trainer.checkpoint.format import write_tensors
    from trainer.data.shards import ShardSet
    from trainer.models.bert import OUTPUT_BIAS, WORD_EMBEDDINGS
    from trainer.seeds import derive_seed

    shards = ShardSet.open(options.data, TRAINING_SHARDS)
    counts = np.zeros(_VOCABULARY_MAX, np.int64)
    pairs = Cooccurrences(_VOCABULARY_MAX)
    with work.progress("count pairs", len(sampled_rows(shards)), "sequences") as bar:
        for ids, is_text in text_rows(shards, _VOCABULARY_MAX):
            counts += np.bincount(ids[is_text], minlength=len(counts))
            pairs.add(ids, is_text)
            bar.update(len(ids))
    if not counts.any():
        raise UserError(f"{options.data} holds no text: each row is [CLS], [SEP] and padding; give another data set")
    counts = counts[: int(counts.nonzero()[0][-1]) + 1]
    vectors = word_vectors(
        positive_pmi(pairs.matrix(len(counts))), options.hidden_size, derive_seed(options.seed, "word embeddings")
    )
    # The length of a vector of normally distributed values.
    scale = ModelConfig.initializer_range * math.sqrt(options.hidden_size)
    embeddings = torch.nn.functional.pad(vectors * scale, (0, options.hidden_size - vectors.shape[1]))
    bias = torch.from_numpy(np.log((counts + 1) / (counts.sum() + len(counts)))).float()
    file = work.path / EMBEDDINGS
    write_tensors(file, {WORD_EMBEDDINGS: embeddings.contiguous(), OUTPUT_BIAS: bias}, {})
    found = {"tokens": int(counts.sum()), "embedded": int(vectors.any(dim=1).sum()), "vocabulary": len(counts)}
    work.finish([Output.of(work.path, file)], found)
    return found


def parser() -> argparse.ArgumentParser:
    return stage_parser(EmbedOptions, __doc__)


def main() -> None:
    options, out = parse(EmbedOptions, parser())
    if not options.data.is_dir():
        raise UserError(f"there is no directory {options.data}; give one with {TRAINING_SHARDS} shards")
    with StageDirectory.begin(out, options.identity) as work:
        counts = embed(work, options)
    print(f"{counts['embedded']:,} words embedded, from {counts['tokens']:,} tokens: {out / EMBEDDINGS}")


if __name__ == "__main__":
    run(main)
