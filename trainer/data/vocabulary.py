"""A WordPiece vocabulary: its file, and what the examples need to know about it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.errors import UserError
from trainer.data.hdf5 import Array

PAD, UNK, CLS, SEP, MASK = SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
#: Prefix of a piece that continues a word.
CONTINUATION = "##"
#: The vocabulary's name in a tokenizer's directory, and beside shards that are masked when they are read.
VOCABULARY_FILE = "vocab.txt"
#: A million pieces, the maximum of [corpus] vocab_size, of 64 bytes each.
_VOCABULARY_BYTES_MAX = 64 << 20


@dataclass(frozen=True)
class Vocabulary:
    """The properties of the ids that masking needs."""

    size: int
    cls: int
    sep: int
    mask: int
    #: Ids that may replace a masked token: all but the special ones.
    ordinary: Array
    #: Whether each id is a word continuation, (size,) bool.
    continues: Array

    @classmethod
    def of(cls, pieces: list[str]) -> Vocabulary:
        """From the pieces of a WordPiece vocabulary, which has all special tokens."""
        ids = {piece: number for number, piece in enumerate(pieces)}
        special = {ids[token] for token in SPECIAL_TOKENS}
        ordinary = np.array([number for number in range(len(pieces)) if number not in special])
        continues = np.array([piece.startswith(CONTINUATION) for piece in pieces])
        return cls(len(pieces), ids[CLS], ids[SEP], ids[MASK], ordinary, continues)


def read_vocabulary(path: Path, *, pads: bool = True) -> list[str]:
    """Read the pieces of a `vocab.txt`, one per line, in id order. `pads`: for rows, which are filled up with id 0.

    Raises `UserError` if the file is missing, too large or not UTF-8, lacks a special token, repeats a piece, or does
    not begin with [PAD] although it `pads`.
    """
    try:
        if path.stat().st_size > _VOCABULARY_BYTES_MAX:
            raise UserError(
                f"the vocabulary {path} has {path.stat().st_size:,} bytes, more than {_VOCABULARY_BYTES_MAX:,}; name a "
                f"vocab.txt, one piece per line"
            )
        pieces = path.read_bytes().decode("utf-8").replace("\r\n", "\n").rstrip("\n").split("\n")
    except OSError as error:
        raise UserError(f"cannot read the vocabulary {path}: {error.strerror}; name a vocab.txt") from None
    except UnicodeDecodeError as error:
        raise UserError(f"the vocabulary {path} is not UTF-8 at offset {error.start}; name a vocab.txt") from None
    known = set(pieces)
    missing = [token for token in SPECIAL_TOKENS if token not in known]
    if missing:
        raise UserError(
            f"the vocabulary {path} lacks {', '.join(missing)}; it must hold {' '.join(SPECIAL_TOKENS)}, one per line"
        )
    if pads and pieces[0] != PAD:
        raise UserError(
            f"the vocabulary {path} begins with {pieces[0]!r}; its first piece must be {PAD}: rows are filled up with 0"
        )
    (piece, count), *_ = Counter(pieces).most_common(1)
    if count > 1:
        second = pieces.index(piece, pieces.index(piece) + 1)
        raise UserError(f"the vocabulary {path} holds {piece!r} again on line {second + 1}; each piece must occur once")
    return pieces
