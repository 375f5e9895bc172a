"""Text → token ids, once: both phases are cut from them. `python -m stages.tokenize --help`.

Held-out documents are put aside first; the vocabulary is learned from the others only. Parts of the corpus are made
in order, each written whole, so that a rerun goes on at the first that is missing, and the bytes do not depend on
the number of processes.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from stages.command import run
from stages.corpus import BUILTIN, CorpusOptions, Source, open_sources, sentences
from stages.manifest import Output, StageDirectory
from stages.parts import Parts, share_held_out, split_documents
from stages.tokens import (
    SPLITS,
    TEST,
    TOKENIZER,
    TRAINING,
    Tokens,
    part_path,
    part_paths,
    total_counts,
    write_part,
)
from stages.wordpiece import (
    UNK,
    Encoder,
    learn_vocabulary,
    read_vocabulary,
    save_tokenizer,
)
from stages.workers import Workers, processes_asked_for
from trainer.data.shards import id_dtype

#: What a process tokenizes at a time.
_BATCH_CHARACTERS = 1 << 20
#: A vocabulary is learned from at most about this much text, spread evenly over the corpus.
_VOCABULARY_BYTES = 100 << 20


@dataclass(frozen=True)
class _Batch:
    """Consecutive documents of one part, for one process at a time."""

    part: Path
    last: bool
    documents: list[str]
    tokenizer: Path
    lower_case: bool


@dataclass(frozen=True)
class _Encoded:
    part: Path
    last: bool
    characters: int
    tokens: Tokens


def tokenize_corpus(work: StageDirectory, options: CorpusOptions, *, processes: int) -> dict[str, Any]:
    """Fill `work` with the tokenizer and the token parts, and finish it; returns the counts. Raises `UserError`."""
    sources, held_out_sources = open_sources(options.sources), open_sources(options.held_out_sources)
    share = 0.0 if held_out_sources else share_held_out(sources, options.held_out)
    vocabulary = _tokenizer(work.path / TOKENIZER, options, sources, share)

    dropped: Counter[str] = Counter()
    documents = split_documents(sources, held_out_sources, share, options.seed, dropped)
    ready: list[Tokens] = []
    total = sum(source.size for source in (*sources, *held_out_sources))
    with Workers(processes) as workers, work.progress("tokenize", total, "B") as bar:
        batches = _batches(work.path, documents, lower_case=options.lower_case, skipped=bar.update)
        for encoded in workers.map(_encode, batches):
            ready.append(encoded.tokens)
            if encoded.last:
                write_part(encoded.part, ready)
                ready = []
            bar.update(encoded.characters)
    counts = _counts(work.path, vocabulary, dropped)
    work.finish(_outputs(work.path), counts)
    return counts


def _counts(directory: Path, vocabulary: list[str], dropped: Counter[str]) -> dict[str, Any]:
    by_split = {split: total_counts(part_paths(directory, split)) for split in SPLITS}
    total = by_split[TRAINING] + by_split[TEST]
    for key in [key for key in total if key.startswith("dropped ")]:
        dropped[key.removeprefix("dropped ")] += total[key]
    return {
        "documents": by_split[TRAINING]["documents"],
        "held_out_documents": by_split[TEST]["documents"],
        "sentences": total["sentences"],
        "tokens": total["tokens"],
        "vocab_size": len(vocabulary),
        "unknown_share": round(total["unknown"] / max(total["tokens"], 1), 6),
        "dropped": dict(sorted(dropped.items())),
    }


def _tokenizer(directory: Path, options: CorpusOptions, sources: list[Source], share: float) -> list[str]:
    """Make the tokenizer's files if they are not there yet; returns the vocabulary."""
    if options.vocab_file is not None:
        vocabulary = read_vocabulary(options.vocab_file)
    elif (directory / "vocab.txt").exists():
        vocabulary = read_vocabulary(directory / "vocab.txt")
    else:
        stride = max(1, math.ceil(sum(source.size for source in sources) / _VOCABULARY_BYTES))
        split = split_documents(sources, [], share, options.seed, Counter())
        training = ([document] for which, document in split if which == TRAINING)
        vocabulary = learn_vocabulary(
            islice(training, 0, None, stride), size=options.vocab_size, lower_case=options.lower_case
        )
        if len(vocabulary) < options.vocab_size:
            print(f"note: this text gives a vocabulary of only {len(vocabulary)} pieces", file=sys.stderr)
    directory.mkdir(exist_ok=True)
    save_tokenizer(directory, vocabulary, lower_case=options.lower_case)
    return vocabulary


def _batches(
    directory: Path, documents: Iterator[tuple[str, str]], *, lower_case: bool, skipped: Any
) -> Iterator[_Batch]:
    """The work of the parts that are not there yet, part by part; calls `skipped` with the characters of the others."""
    splits = {split: Parts() for split in SPLITS}

    def batches_of(split: str, part_documents: list[str]) -> Iterator[_Batch]:
        path = part_path(directory, split, splits[split].number)
        splits[split].number += 1
        if path.exists():
            skipped(sum(map(len, part_documents)))
            return
        batch: list[str] = []
        characters = 0
        for number, document in enumerate(part_documents, 1):
            batch.append(document)
            characters += len(document)
            last = number == len(part_documents)
            if last or characters >= _BATCH_CHARACTERS:
                yield _Batch(path, last, batch, directory / TOKENIZER, lower_case)
                batch, characters = [], 0

    for split, document in documents:
        if full := splits[split].add(document):
            yield from batches_of(split, full)
    for split in SPLITS:
        for rest in splits[split].rest():
            yield from batches_of(split, rest)


@functools.cache
def _encoder(tokenizer: Path, lower_case: bool) -> Encoder:
    return Encoder(read_vocabulary(tokenizer / "vocab.txt"), lower_case=lower_case)


def _encode(batch: _Batch) -> _Encoded:
    """Split and tokenize a batch, without what has no tokens."""
    vocabulary = read_vocabulary(batch.tokenizer / "vocab.txt")
    found = [sentences(document) for document in batch.documents]
    ids, lengths = _encoder(batch.tokenizer, batch.lower_case).encode([s for document in found for s in document])
    owners = np.repeat(np.arange(len(found)), [len(document) for document in found])[lengths > 0]
    per_document = np.bincount(owners, minlength=len(found))
    counts = {
        "documents": int(np.count_nonzero(per_document)),
        "sentences": len(owners),
        "tokens": len(ids),
        "unknown": int(np.count_nonzero(ids == vocabulary.index(UNK))),
        "dropped sentences: no tokens": len(lengths) - len(owners),
        "dropped documents: no tokens": int(np.count_nonzero(per_document == 0)),
    }
    tokens = Tokens(
        ids.astype(id_dtype(len(vocabulary))),
        lengths[lengths > 0].astype(np.uint32),
        per_document[per_document > 0].astype(np.uint32),
        {key: count for key, count in counts.items() if count},
    )
    return _Encoded(batch.part, batch.last, sum(map(len, batch.documents)), tokens)


def _outputs(directory: Path) -> list[Output]:
    paths = [*sorted((directory / TOKENIZER).iterdir()), *sorted(directory.glob("tokens_*.hdf5"))]
    return [Output.of(directory, path) for path in paths]


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(prog="python -m stages.tokenize", description="Turn text into token ids, once.")
    default = CorpusOptions(sources=(BUILTIN,))
    add = options.add_argument
    add("--source", action="append", required=True, metavar="builtin|FILE|GLOB", help="text; may be given repeatedly")
    add("--held-out-source", action="append", default=[], metavar="FILE|GLOB", help="text to evaluate on, all of it")
    add("--out", type=Path, required=True, metavar="DIR", help="stage directory to make or go on with")
    add("--vocab-file", type=Path, metavar="FILE", help="vocab.txt to use; left out, a vocabulary is learned")
    add("--vocab-size", type=int, default=default.vocab_size, help="pieces to learn (default %(default)s)")
    add("--lower-case", action=argparse.BooleanOptionalAction, default=default.lower_case, help="uncased model")
    add("--held-out", type=float, default=default.held_out, help="share of documents to evaluate on (%(default)s)")
    add("--seed", type=int, default=default.seed, help="decides which documents are held out (%(default)s)")
    add("--processes", type=int, default=0, help="changes no output (default: one for each core)")
    return options


def main() -> None:
    args = parser().parse_args()
    options = CorpusOptions(
        sources=tuple(args.source),
        held_out_sources=tuple(args.held_out_source),
        vocab_file=args.vocab_file,
        vocab_size=args.vocab_size,
        lower_case=args.lower_case,
        held_out=args.held_out,
        seed=args.seed,
    )
    processes = processes_asked_for(args.processes)
    with StageDirectory.begin(args.out, options.identity) as work:
        counts = tokenize_corpus(work, options, processes=processes)
    documents = f"{counts['documents']:,} documents and {counts['held_out_documents']:,} held out"
    print(f"{documents}, {counts['tokens']:,} tokens: {args.out}")


if __name__ == "__main__":
    run(main)
