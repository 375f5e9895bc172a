"""Token ids → the shards of one phase: pairs of segments, or whole sentences, as HDF5."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from common.errors import UserError
from common.options import option
from common.process import available_cores
from stages.directory.builders import ALONE, Builders
from stages.directory.command import run
from stages.directory.manifest import StageDirectory, why_incomplete
from stages.directory.options import BuildOptions, parse, stage_parser
from stages.directory.records import read_manifest
from stages.examples.form import (
    DOC_SENTENCES,
    FULL_SENTENCES,
    PACKED_SEQUENCES,
    SEGMENT_PAIR,
    SPECIAL_POSITIONS,
    Form,
)
from stages.text.corpus import TokenizeOptions

#: Values of `--masking`.
STATIC, DYNAMIC = "static", "dynamic"


@dataclass(frozen=True, kw_only=True)
class ShardOptions(BuildOptions):
    """The tokens of one phase's shards, and how to make the shards from them."""

    module: ClassVar = "stages.shard"
    stage: ClassVar = "shard_dataset"
    format_version: ClassVar = 2  # 2: the phases draw from independent random streams

    tokens: Path = option(help="finished directory of stages.tokenize", names=("--tokens",), metavar="DIR")
    seq_len: int = option(
        help="tokens in a row: 128 in phase 1, 512 in phase 2", unit="tokens", least=SPECIAL_POSITIONS + 2, most=1 << 15
    )
    max_pred_len: int = option(
        help="maximum masked positions in a row: 20 in phase 1, 80 in phase 2", unit="positions", least=1
    )
    next_sentence: bool = option(
        True,
        help="pairs of segments with next-sentence labels; without: as many whole sentences as fit, across documents, "
        "or with --pack within one (RoBERTa's FULL-SENTENCES and DOC-SENTENCES)",
        omit_default=True,
    )
    masking: str = option(
        STATIC,
        choices=(STATIC, DYNAMIC),
        help="static: masks are part of the shards, so --dupe-factor copies differ; dynamic: the trainer masks rows as "
        "it reads them, differently each epoch; held-out shards are masked either way, 15 % of their tokens",
        omit_default=True,
    )
    dupe_factor: int = option(
        Form.dupe_factor, help="times each document is cut into sequences", unit="times", least=1, most=1000
    )
    masked_lm_prob: float = option(
        Form.masked_lm_prob, help="share of tokens that static masks hide", unit="share", least=0, most=1
    )
    short_seq_prob: float = option(
        Form.short_seq_prob, help="share of documents whose pairs are cut to a random shorter length", unit="share",
        least=0, most=1,
    )  # fmt: skip
    whole_word_mask: bool = option(False, help="with static masks, mask all pieces of a word together")
    pack: bool = option(
        False, help=f"pack up to {PACKED_SEQUENCES} sequences into a row; held-out ones are never packed"
    )
    shards: int | None = option(
        None,
        help="number of training shards (default: shards of about 64 MB, at least 8)",
        unit="files",
        least=1,
        most=100_000,
    )
    test_shards: int = option(
        1, help="number of shards of held-out documents", unit="files", least=1, most=100_000, omit_default=True
    )
    seed: int = option(12345, help="seed of pairs and masks", least=0, most=1 << 63)
    phase: int = option(
        1, least=1, most=2, decides=False,  # the identity has a field of its own for it
        help="phase that trains on them, 1 or 2; each has its own random streams",
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_pred_len > self.seq_len:
            raise UserError(f"--max-pred-len is {self.max_pred_len}; allowed: up to --seq-len, {self.seq_len}")
        if not self.next_sentence and self.masking == DYNAMIC and self.dupe_factor > 1:
            raise UserError(
                f"--dupe-factor {self.dupe_factor} with --no-next-sentence and --masking dynamic would make identical "
                f"copies of each row; allowed: 1, or static masks"
            )

    @property
    def form(self) -> Form:
        return Form(
            seq_len=self.seq_len,
            max_pred_len=self.max_pred_len,
            sequences=SEGMENT_PAIR if self.next_sentence else DOC_SENTENCES if self.pack else FULL_SENTENCES,
            dupe_factor=self.dupe_factor,
            masked_lm_prob=self.masked_lm_prob,
            short_seq_prob=self.short_seq_prob,
            whole_word_mask=self.whole_word_mask,
            sequences_per_row=PACKED_SEQUENCES if self.pack else 1,
            is_masked=self.masking == STATIC,
        )

    def parameters(self) -> dict[str, Any]:
        """Without the options of dynamic masks, which are the trainer's; static masks that differ from those of the
        held-out shards are recorded as such. Only pairs are shortened."""
        found = super().parameters()
        if not self.next_sentence:
            del found["short_seq_prob"]
        if self.masking == DYNAMIC:
            return {name: value for name, value in found.items() if name not in ("masked_lm_prob", "whole_word_mask")}
        if (self.masked_lm_prob, self.whole_word_mask) != (Form.masked_lm_prob, False):
            found["held_out_masks"] = "15 % of the tokens"
        return found

    def upstream(self) -> dict[str, str]:
        return {TokenizeOptions.stage: tokens_fingerprint(self.tokens)}


def tokens_fingerprint(directory: Path) -> str:
    """The fingerprint of a finished tokenized corpus; raises `UserError` if there is none in `directory`."""
    manifest = read_manifest(directory)
    if manifest is None or manifest["stage"] != TokenizeOptions.stage:
        raise UserError(
            f"{directory} is not a finished tokenized corpus; make one there with python -m stages.tokenize"
        )
    fingerprint: str = manifest["fingerprint"]
    if (reason := why_incomplete(directory, fingerprint)) is not None:
        raise UserError(f"the tokenized corpus {directory} cannot be used: {reason}; make it again")
    return fingerprint


def shard_dataset(work: StageDirectory, options: ShardOptions, builders: Builders = ALONE) -> dict[str, Any]:
    """Write the shards to `work` and complete it; returns the counts.

    Raises `UserError` if the corpus is too small, `DiskError` if the disk lacks space.
    """
    from stages.examples.shards import make_shards
    from stages.tokens.files import TEST, TRAINING

    return make_shards(
        work,
        options.tokens,
        options.form,
        shards={TRAINING: options.shards, TEST: options.test_shards},
        seed=options.seed,
        phase=options.phase,
        processes=options.processes or available_cores(),
        builders=builders,
    )


def parser() -> argparse.ArgumentParser:
    return stage_parser(ShardOptions, __doc__)


def main() -> None:
    options, out = parse(ShardOptions, parser())
    builders = Builders.here(options.builders)
    with builders.begin(out, options.identity) as work:
        counts = shard_dataset(work, options, builders)
    if not builders.is_first:
        return
    print(f"{counts['training_rows']:,} training and {counts['test_rows']:,} test rows: {out}")


if __name__ == "__main__":
    run(main)
