"""The seed of every random stream of training and of its examples.

Each stream has a seed of its own: a hash of the run's seed, of what the stream is for and of its place in the run. Sums
and products of small numbers will not do, because generators may ignore a part of their seed: torch's for the CPU
keeps the low 32 bits.
"""

from __future__ import annotations

import hashlib
import json
from typing import Literal

#: What random numbers are drawn for, and what else their seed depends on.
Purpose = Literal[
    "initial weights",  # parameter name
    "sample order",  # epoch, block of shards
    "dropout",  # global step, micro-batch of the global batch
    "stochastic rounding",  # global step
    "tensor-parallel region",  # region of the micro-step or update, tensor-parallel rank
    "Neuron stochastic rounding",
    "pairs of segments",  # phase, split, part of the corpus
    "shuffling and masking",  # phase, split, shard
]


def derive_seed(run_seed: int, purpose: Purpose, *parts: int | str) -> int:
    """The seed of the stream for `purpose` at the place `parts`: a number in [0, 2⁶³), which every generator takes.

    Any 32 bits of it are as good as any others. n streams of a generator that keeps b bits of its seed have about
    n² / 2ᵇ⁺¹ pairs that coincide by chance.
    """
    words = json.dumps([run_seed, purpose, *parts])  # unambiguous, and refuses what is neither int nor str
    return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=8).digest(), "little") >> 1
