"""How far a run has moved its weights, from a sample of each tensor."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

#: Elements of each tensor that are examined.
_SAMPLED = 1024
#: A tensor is frozen if it moved by less than this share of what the median tensor did. Weight decay alone only
#: shortens a tensor; apart from that, it leaves only rounding.
_FROZEN = 1e-3


class Movement:
    """The change of `weights` since the first measurement."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = weights
        self._first = self._sample()

    def _sample(self) -> dict[str, Tensor]:
        parts = {}
        for name, tensor in self._weights.items():
            flat = tensor.detach().reshape(-1)
            parts[name] = flat[:: max(1, flat.numel() // _SAMPLED) | 1][:_SAMPLED].float()
        together = torch.cat(list(parts.values())).cpu()  # one transfer
        return dict(zip(parts, together.split([len(part) for part in parts.values()]), strict=True))

    def measure(self) -> tuple[float, list[str]]:
        """The median over the tensors of |change| / |first value|, and those that did not move though most did."""
        moved, turned = {}, {}
        for name, now in self._sample().items():
            first = self._first[name]
            size = first.norm().clamp(min=1e-12)
            moved[name] = float((now - first).norm() / size)
            turned[name] = float((now - first * ((now @ first) / size**2)).norm() / size)
        median = sorted(moved.values())[len(moved) // 2]
        usual = sorted(turned.values())[len(turned) // 2]
        frozen = [name for name, value in turned.items() if value < _FROZEN * usual] if usual > 1e-3 else []
        return median, frozen
