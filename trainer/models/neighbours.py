"""Initial weights with which heads attend to neighbouring tokens, and to tokens that have the same neighbour.

Random heads attend to all tokens alike, and take thousands of sequences to learn that its neighbours tell most about a
masked word; until then the loss stays at that of word frequencies. A convolution has this built in; attention
can start from it too (Zheng et al. 2024, arXiv:2404.01139, for images). What stands beside the same word elsewhere in
the row tells more: induction heads (Olsson et al. 2022, arXiv:2209.11895), which form late in training, copy it.

S: tokens in a row, H: hidden size, L: layers, A: heads, d: head size, F: frequencies, P: the model's positions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trainer.models.config import ModelConfig
from trainer.models.initial import InitialValues

_POSITIONS = "bert.embeddings.position_embeddings.weight"
_ATTENTION = "bert.encoder.layer.{}.attention."
_QUERY, _KEY = (_ATTENTION + f"self.{name}.weight" for name in ("query", "key"))
_VALUES, _OUTPUTS = (
    [_ATTENTION.format(layer) + name for layer in (0, 1)] for name in ("self.value.weight", "output.dense.weight")
)
_TRANSFORM = "cls.predictions.transform.dense"

#: Most frequencies of the position embeddings, and the exponent that spaces them. Evenly spaced ones (1) repeat: 16 of
#: them cannot tell a distance of 64 tokens from 0. With 1.5 the sum of 16 cosines is at most 0.46 of its peak at any
#: other distance up to 511.
_FREQUENCIES_MAX, _SPACING = 16, 1.5
#: Amplitude of the positions' waves, in standard deviations of a word embedding's elements; and length of the rows of
#: query and key with that many frequencies and heads of 64, as in all of the published models.
_AMPLITUDE, _GAIN = 1.5, 1.5
#: Heads of the second layer that look for the same neighbour, and how much of a word each copies.
_INDUCTION_HEADS, _COPIED = 2, 0.5
#: Least cosine between an untrained position's embedding, which weight decay and rounding change, and its wave.
_STILL_A_WAVE = 0.99
#: Bias at which GELU is near its linear part.
_LINEAR_GELU = 2.0


def position_directions(config: ModelConfig) -> slice:
    """The last 2F of the hidden state's H directions: those of the position embeddings, where words have zeros."""
    H = config.hidden_size
    F = min(_FREQUENCIES_MAX, H // config.num_attention_heads // 2, H // 4)
    return slice(H - 2 * F, H)


def neighbour_weights(config: ModelConfig, draw: InitialValues) -> dict[str, Tensor]:
    """The tensors whose initial values are not BERT's, whole, by name; an element that is NaN has BERT's.

    A head of layers 0 to 2 rotates the query's waves by its offset, so that its scores are F cosines that agree only
    where the key is that far away. The masked-LM head's projection is the identity of the other directions.
    """
    H, L = config.hidden_size, config.num_hidden_layers
    waves, d, frequencies = position_directions(config), H // config.num_attention_heads, _frequencies(config)
    transform = torch.eye(H)
    transform[waves] = math.nan
    given = {
        _POSITIONS: _waves(config),
        f"{_TRANSFORM}.weight": transform,
        f"{_TRANSFORM}.bias": torch.full((H,), _LINEAR_GELU),
        **(_induction_weights(config, draw) if L > 1 else {}),
    }
    # A score is a sum over frequencies, divided by √d: the largest is the same in all models.
    gain = _GAIN * math.sqrt(_FREQUENCIES_MAX / len(frequencies) * math.sqrt(d / 64))
    for layer, offsets in enumerate(_offsets(config)[:L]):
        query, key = (given.setdefault(name.format(layer), torch.full((H, H), math.nan)) for name in (_QUERY, _KEY))
        for head, offset in offsets.items():
            rows = slice(head * d, head * d + 2 * len(frequencies))
            query[rows] = key[rows] = 0
            query[rows, waves] = _rotation(frequencies * offset).float() * gain
            key[rows, waves] = torch.eye(2 * len(frequencies)) * gain
    return given


def _offsets(config: ModelConfig) -> list[dict[int, int]]:
    """How many tokens after its own each head attends to, for the first layers; the third is like the first."""
    A = config.num_attention_heads
    distances = [sign * distance for distance in range(1, A + 1) for sign in (-1, 1)]
    first = dict(enumerate(distances[:A]))
    second = dict(zip(range(_INDUCTION_HEADS, A), distances[A:], strict=False))
    return [first, second, first]


def _induction_weights(config: ModelConfig, draw: InitialValues) -> dict[str, Tensor]:
    """Two heads of layer 0 add what the word before, and after, is to the hidden state, each along its own directions.
    The query and the key of a head of layer 1 both read these, so it attends to tokens with the same neighbour, and
    copies their words: the transpose of a random matrix about inverts it."""
    H, waves = config.hidden_size, position_directions(config)
    mine = slice(0, min(_INDUCTION_HEADS, config.num_attention_heads) * (H // config.num_attention_heads))
    tied = [name.format(1) for name in (_QUERY, _KEY)]
    given = {name: torch.full((H, H), math.nan) for name in (_VALUES[0], _OUTPUTS[0], _VALUES[1], _OUTPUTS[1], *tied)}
    for value in _VALUES:  # about as long as what they read
        given[value][mine] = draw.normal(value, (H, H), H**-0.5)[mine]
        given[value][mine, waves] = 0
    given[_OUTPUTS[0]][:, mine] = draw.normal(_OUTPUTS[0], (H, H), H**-0.5)[:, mine]
    given[_OUTPUTS[0]][waves, mine] = 0  # the positions stay as they are, for the third layer too
    for name in tied:
        given[name][mine] = given[_OUTPUTS[0]][:, mine].T
    given[_OUTPUTS[1]][:, mine] = _COPIED * given[_VALUES[1]][mine].T
    return given


@torch.no_grad()
def scale_untrained(positions: Tensor, trained: int, config: ModelConfig) -> str:
    """Make the position embeddings from `trained` on as large as the waves of those before it have become, if they are
    still waves; returns a line for the log. `positions`: (P, H), on the CPU.

    Training makes the waves larger, and the queries and keys that read them follow. The same number on all machines:
    its products are exact, and `fsum` rounds once.
    """
    waves = _waves(config).double()
    known, new = positions[:trained].double(), positions[trained:].double()
    if torch.nn.functional.cosine_similarity(new, waves[trained:]).min() < _STILL_A_WAVE:
        return (
            f"position embeddings from {trained} on are not those that --initial_attention neighbours begins with: kept"
        )
    size = _size(known, waves[:trained])
    growth = size / _size(new, waves[trained:])
    positions[trained:] = (waves[trained:] * size).to(positions.dtype)
    return f"position embeddings from {trained} on, untrained so far, grow {growth:.2f}-fold, as the trained ones did"


def _size(positions: Tensor, waves: Tensor) -> float:
    """The factor by which `waves` come nearest to `positions`, by least squares."""
    return math.fsum((positions * waves).flatten().tolist()) / math.fsum(waves.square().flatten().tolist())


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
