"""Tokenized corpora, small and made up."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from stages.directory.manifest import StageDirectory
from stages.text.corpus import TokenizeOptions
from stages.tokens import parts
from stages.tokens.encode import tokenize_corpus


def make_tokens(directory: Path, *, documents: int, vocab_size: int = 120, held_out: float = 0.1) -> Path:
    """A tokenized corpus of several parts, each document with words of its own kind."""
    draw = random.Random(0)
    text = []
    for _ in range(documents):
        words = ["".join(draw.choices("abcdefgh", k=draw.randint(2, 6))) for _ in range(30)]
        text += [" ".join(draw.choices(words, k=draw.randint(3, 12))) for _ in range(draw.randint(2, 15))] + [""]
    path = directory.with_suffix(".txt")
    path.write_text("\n".join(text))
    options = TokenizeOptions(sources=(str(path),), vocab_size=vocab_size, held_out=held_out)
    with StageDirectory.begin(directory, options.identity) as work, pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "_PART_CHARACTERS", 8_000)
        tokenize_corpus(work, options, processes=1)
    return directory
