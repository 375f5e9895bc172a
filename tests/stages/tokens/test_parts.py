"""Which documents are held out, and how they are gathered into parts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from common.hashing import InputHashes
from stages.text.corpus import open_sources, raw_documents
from stages.tokens import parts
from stages.tokens.files import TEST
from stages.tokens.parts import Parts, split_documents


def test_held_out_documents_are_a_fixed_share_and_decided_by_the_seed(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("\n\n".join(f"Document {number}." for number in range(500)))
    sources = open_sources([str(text)], InputHashes())
    every = list(raw_documents(sources, Counter()))

    def held_out(share: float, seed: int) -> list[int]:
        split = split_documents(sources, [], share, seed, Counter())
        flags = [which == TEST for which, _ in split]
        assert len(flags) == len(every)
        return [number for number, flag in enumerate(flags) if flag]

    assert len(held_out(0.05, 1)) == 25
    assert len(held_out(0.3, 1)) == pytest.approx(150, abs=1)
    assert held_out(0.05, 1) == held_out(0.05, 1) != held_out(0.05, 2)
    assert held_out(0, 1) == []


def test_parts_hold_at_least_two_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "_PART_CHARACTERS", 10)
    for lengths in ([30, 30, 30], [30, 30, 1, 30, 4], [5] * 9, [30], [3, 30, 3, 30, 3]):
        documents = ["x" * length for length in lengths]
        gatherer = Parts()
        made = [part for document in documents if (part := gatherer.add(document))] + gatherer.rest()
        assert [document for part in made for document in part] == documents
        assert all(len(part) > 1 for part in made) or len(documents) == 1
