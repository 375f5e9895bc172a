"""Initial weights with which the first layer's heads attend to neighbouring tokens.

Random heads attend to all tokens alike, and take thousands of sequences to learn that its neighbours tell most about a
masked word; until then the loss stays at that of word frequencies. A convolution has this built in; attention
can start from it too (Zheng et al. 2024, arXiv:2404.01139, for images).

S: tokens in a row, H: hidden size, A: heads, d: head size, F: frequencies, P: the model's positions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trainer.models.config import ModelConfig

_POSITIONS = "bert.embeddings.position_embeddings.weight"
_QUERY, _KEY = (f"bert.encoder.layer.0.attention.self.{name}.weight" for name in ("query", "key"))
_TRANSFORM = "cls.predictions.transform.dense"

#: Most frequencies of the position embeddings, and the exponent that spaces them. Evenly spaced ones (1) repeat: 16 of
#: them cannot tell a distance of 64 tokens from 0. With 1.5 the sum of 16 cosines is at most 0.46 of its peak at any
#: other distance up to 511.
_FREQUENCIES_MAX, _SPACING = 16, 1.5
#: Amplitude of the positions' waves, in standard deviations of a word embedding's elements; and length of the rows of
#: query and key.
_AMPLITUDE, _GAIN = 1.5, 1.5
#: Least cosine between an untrained position's embedding, which weight decay and rounding change, and its wave.
_STILL_A_WAVE = 0.99
#: Bias at which GELU is near its linear part.
_LINEAR_GELU = 2.0


def position_directions(config: ModelConfig) -> slice:
    """The last 2F of the hidden state's H directions: those of the position embeddings, where words have zeros."""
    H = config.hidden_size
    F = min(_FREQUENCIES_MAX, H // config.num_attention_heads // 2, H // 4)
    return slice(H - 2 * F, H)


def neighbour_weights(config: ModelConfig) -> dict[str, Tensor]:
    """The tensors whose initial values are not random, whole, by name; rows of zeros stay random.

    Head h of layer 0 rotates the query's waves by its offset (-1, 1, -2, 2, …), so that its scores are F cosines that
    agree only where the key is that far away. The masked-LM head's projection is the identity of the other directions.
    """
    H, A = config.hidden_size, config.num_attention_heads
    waves, d, frequencies = position_directions(config), H // A, _frequencies(config)
    F = len(frequencies)
    query, key = torch.zeros(A, d, H), torch.zeros(A, d, H)
    for head in range(A):
        offset = (head // 2 + 1) * (1 if head % 2 else -1)
        key[head, : 2 * F, waves] = torch.eye(2 * F) * _GAIN
        query[head, : 2 * F, waves] = _rotation(frequencies * offset).float() * _GAIN
    transform = torch.diag(torch.cat([torch.ones(H - 2 * F), torch.zeros(2 * F)]))
    return {
        _POSITIONS: _waves(config),
        _QUERY: query.flatten(0, 1),
        _KEY: key.flatten(0, 1),
        f"{_TRANSFORM}.weight": transform,
        f"{_TRANSFORM}.bias": torch.full((H,), _LINEAR_GELU),
    }


@torch.no_grad()
def scale_untrained(positions: Tensor, trained: int, config: ModelConfig) -> str:
    """Multiply the position embeddings from `trained` on by how much the waves of those before it grew in training, if
    they are still waves; returns a line for the log. `positions`: (P, H), on the CPU.

    Training makes the waves some three times as large, and the queries and keys that read them follow. The same number
    on all machines: its products are exact, and `fsum` rounds once.
    """
    waves = _waves(config).double()
    known, new = positions[:trained].double(), positions[trained:].double()
    if torch.nn.functional.cosine_similarity(new, waves[trained:]).min() < _STILL_A_WAVE:
        return (
            f"position embeddings from {trained} on are not those that --initial_attention neighbours begins with: kept"
        )
    old = waves[:trained]
    growth = math.fsum((known * old).flatten().tolist()) / math.fsum(old.square().flatten().tolist())
    positions[trained:] = (waves[trained:] * growth).to(positions.dtype)
    return f"position embeddings from {trained} on, untrained so far, grow {growth:.2f}-fold, as the trained ones did"


def _frequencies(config: ModelConfig) -> Tensor:
    """(F,) in radians per position, in (0, π)."""
    waves = position_directions(config)
    F = (waves.stop - waves.start) // 2
    frequencies: Tensor = math.pi * ((torch.arange(F, dtype=torch.float64) + 0.5) / F) ** _SPACING
    return frequencies


def _waves(config: ModelConfig) -> Tensor:
    """(P, H): position p is cos(w p), sin(w p) for F frequencies w, in `position_directions`."""
    angles = torch.arange(config.max_position_embeddings)[:, None] * _frequencies(config)
    positions = torch.zeros(config.max_position_embeddings, config.hidden_size)
    positions[:, position_directions(config)] = torch.stack([angles.cos(), angles.sin()], dim=-1).flatten(1).float()
    positions *= config.initializer_range * _AMPLITUDE
    return positions


def _rotation(angles: Tensor) -> Tensor:
    """(F,) → (2F, 2F): turns each wave's (cos, sin) by its angle."""
    cos, sin = angles.cos(), angles.sin()
    turned: Tensor = torch.block_diag(*torch.stack([cos, -sin, sin, cos], dim=-1).reshape(-1, 2, 2))
    return turned
