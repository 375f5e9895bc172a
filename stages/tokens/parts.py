"""Assigns documents to the training or held-out split, and to parts of the tokenized corpus."""

from __future__ import annotations

import math
import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path

from common.errors import UserError
from common.workers import Workers
from stages.directory.builders import Builders
from stages.text.base import Document, Source
from stages.text.corpus import raw_documents
from stages.tokens.files import TEST, TRAINING

#: Approximate characters of text per part. Random next sentences come from the same part, so it must hold many
#: documents; a part is planned in one go, so several copies must fit into memory.
_PART_CHARACTERS = 8 << 20
#: Characters per unit of work of a process.
_BATCH_CHARACTERS = 1 << 20


def share_held_out(sources: list[Source], share: float) -> float:
    """`share`, raised if the corpus is so small that fewer than two documents would be held out."""
    if not share:
        return 0.0
    enough = math.ceil(2 / share)
    documents = sum(1 for _ in islice(raw_documents(sources, Counter()), enough))
    if documents == enough:
        return share
    if documents < 4:
        way_out = ", or hold none out (--held-out 0)" if documents > 1 else ""
        raise UserError(
            f"the corpus has {documents} document{'s' if documents > 1 else ''}; at least 4 are needed, 2 of them held "
            f"out (next sentences are drawn from other documents); put a blank line between documents{way_out}"
        )
    print(f"note: only {documents} documents; 2 of them are held out, which is more than {share:g}", file=sys.stderr)
    return 2 / documents


def _held_out_flags(share: float, seed: int) -> Iterator[bool]:
    """Yield for each document whether it is held out: one drawn at random from every block of 1/`share`."""
    if not share:
        while True:
            yield False
    draw = random.Random(f"held out {seed}")
    start = block = 0
    while True:
        block += 1
        end = math.ceil(block / share - 1e-9)  # for share = 2 / n, 2 / share may exceed n by rounding
        chosen = start + draw.randrange(end - start) if end > start else -1
        for number in range(start, end):
            yield number == chosen
        start = end


def split_documents(
    sources: list[Source],
    held_out_sources: list[Source],
    share: float,
    seed: int,
    dropped: Counter[str],
    workers: Workers | None = None,
) -> Iterator[tuple[str, Document]]:
    """Yield (split, raw document) for the whole corpus, always in the same order; `workers` as in `raw_documents`."""
    for document, held_out in zip(raw_documents(sources, dropped, workers), _held_out_flags(share, seed), strict=False):
        yield (TEST if held_out else TRAINING), document
    if held_out_sources:
        for document in raw_documents(held_out_sources, dropped, workers):
            yield TEST, document


class Parts:
    """Groups the documents of one split into parts of at least two documents (if the split has two)."""

    def __init__(self) -> None:
        self.number = 0
        self._held: list[Document] = []
        self._current: list[Document] = []
        self._characters = 0

    def add(self, document: Document) -> list[Document]:
        """Add a document; returns the documents of a completed part, else []."""
        full: list[Document] = []
        if self._characters >= _PART_CHARACTERS and len(self._current) > 1:
            full, self._held, self._current, self._characters = self._held, self._current, [], 0
        self._current.append(document)
        self._characters += len(document)
        return full

    def rest(self) -> list[list[Document]]:
        """The remaining parts at the end; a single last document joins the previous part."""
        if len(self._current) > 1:
            return [part for part in (self._held, self._current) if part]
        return [part for part in (self._held + self._current,) if part]


class SharedParts:
    """Which parts are made here, and which of the others already exist."""

    def __init__(self, directory: Path, builders: Builders, done: Callable[[int], None]) -> None:
        """`done`: called with the characters of each part that is not made here, once it is there."""
        self.directory, self._builders, self._done = directory, builders, done
        self._awaited: dict[Path, int] = {}

    def is_made_here(self, path: Path, number: int, documents: list[Document]) -> bool:
        if self._builders.makes(number) and not path.exists():
            return True
        self._awaited[path] = sum(map(len, documents))
        if len(self._awaited) == 1 or path.exists():
            self.look()
        return False

    def look(self) -> None:
        if not self._awaited:
            return
        names = set(os.listdir(self.directory))
        for path in [path for path in self._awaited if path.name in names]:
            self._done(self._awaited.pop(path))

    def are_all_there(self) -> bool:
        self.look()
        return not self._awaited


def in_batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Group consecutive documents into batches large enough to be worth sending to a worker process."""
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
