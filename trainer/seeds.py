"""The seed of every random stream of training and of its examples.

Each stream has its own seed: a hash of the run's seed, the stream's purpose and its position in the run. Sums and
products of small numbers are not enough, because a generator may ignore part of its seed: torch's CPU generator keeps
only the low 32 bits.
"""

from __future__ import annotations

import hashlib
import json
from typing import Literal

#: The purpose of a stream, and what else its seed depends on.
Purpose = Literal[
    "initial weights",  # parameter name
    "word embeddings",
    "sample order",  # epoch, block of shards
    "dropout",  # global step, micro-batch of the global batch
    "stochastic rounding",  # global step
    "tensor-parallel region",  # region of the micro-step or update, tensor-parallel rank
    "Neuron stochastic rounding",
    "pairs of segments",  # phase, split, part of the corpus
    "masked positions",  # epoch
    "masked ids",  # epoch
    "shuffling and masking",  # phase, split, shard
]


def derive_seed(run_seed: int, purpose: Purpose, *parts: int | str) -> int:
    """The seed of the stream for `purpose` at the position `parts`: a number in [0, 2⁶³), as every generator takes.

    All of its bits are equally random. n streams of a generator that keeps b bits of its seed have about n² / 2ᵇ⁺¹
    pairs that collide by chance.
    """
    words = json.dumps([run_seed, purpose, *parts])  # unambiguous, and refuses what is neither int nor str
    return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=8).digest(), "little") >> 1
