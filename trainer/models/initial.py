"""The random initial values of a model's tensors."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from trainer.seeds import derive_seed

#: Bytes at the beginning of a stream that tell it from all others.
_PREFIX_BYTES = 16


class InitialValues:
    """Draws each tensor from a stream of its own, which depends on (run seed, the tensor's name) alone.

    numpy's generator, because it takes all bits of a seed and draws the same numbers with any instruction set. fp32 on
    the CPU: the same numbers for every device and precision.
    """

    def __init__(self, run_seed: int) -> None:
        self._run_seed = run_seed
        self._prefixes: dict[bytes, str] = {}

    def normal(self, name: str, shape: tuple[int, ...], deviation: float) -> Tensor:
        """Normally distributed with mean 0."""
        return torch.from_numpy(self._stream(name).standard_normal(shape, np.float32)).mul_(deviation)

    def uniform(self, name: str, shape: tuple[int, ...], limit: float) -> Tensor:
        """Uniform in [-limit, limit)."""
        return torch.from_numpy(self._stream(name).random(shape, np.float32)).mul_(2).sub_(1).mul_(limit)

    def _stream(self, name: str) -> np.random.Generator:
        seed = derive_seed(self._run_seed, "initial weights", name)
        prefix = np.random.default_rng(seed).bytes(_PREFIX_BYTES)
        other = self._prefixes.setdefault(prefix, name)
        # By chance, once in 10¹³ runs of a model with 1,000 tensors.
        assert other == name, f"seed {self._run_seed} gives {name} and {other} the same random numbers"
        return np.random.default_rng(seed)
