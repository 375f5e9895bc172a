"""BERT's encoder, in Hugging Face's names.

B: rows in the micro-batch, S: tokens in a row, H: hidden size, t: tensor-parallel ranks, W: places that are used.
"""

from __future__ import annotations

from torch import Tensor, nn

from trainer.models.config import ModelConfig
from trainer.models.operations import AttentionMask, Operations
from trainer.parallel.fp32_sums import LayerNorm
from trainer.parallel.tensor import RowLinear, TensorParallel


class Dropout(nn.Module):
    def __init__(self, p: float, ops: Operations) -> None:
        super().__init__()
        self.p = p
        self._ops = ops

    def forward(self, x: Tensor) -> Tensor:
        return self._ops.dropout(x, self.p) if self.training and self.p > 0 else x


class SelfAttention(nn.Module):
    def __init__(self, config: ModelConfig, ops: Operations, ranks: TensorParallel) -> None:
        super().__init__()
        self.head_size = config.hidden_size // config.num_attention_heads
        mine = ranks.share(config.hidden_size)
        self.query = nn.Linear(config.hidden_size, mine)
        self.key = nn.Linear(config.hidden_size, mine)
        self.value = nn.Linear(config.hidden_size, mine)
        self._ranks = ranks
        self.dropout_p = config.attention_probs_dropout_prob
        self._ops = ops

    def forward(self, x: Tensor, mask: AttentionMask) -> Tensor:
        """(B, S, H) → (B, S, H / t)."""
        x = self._ranks.copy(x)
        dropout_p = self.dropout_p if self.training else 0.0
        with self._ranks.region():
            layers = self.query, self.key, self.value
            return self._ops.self_attention(x, layers, self.head_size, mask, dropout_p)


class DenseAndNorm(nn.Module):
    """Hugging Face's BertSelfOutput and BertOutput: a projection, dropout, the residual, LayerNorm."""

    def __init__(self, inputs: int, config: ModelConfig, ops: Operations, ranks: TensorParallel) -> None:
        super().__init__()
        self.dense = RowLinear(inputs, config.hidden_size, ranks)
        self.LayerNorm = LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout_p = config.hidden_dropout_prob
        self._ops = ops

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The result, and the same as the next residual."""
        dropout_p = self.dropout_p if self.training else 0.0
        return self._ops.dense_add_norm(x, self.dense, residual, self.LayerNorm, dropout_p)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, ops: Operations, ranks: TensorParallel) -> None:
        super().__init__()
        self.self = SelfAttention(config, ops, ranks)
        self.output = DenseAndNorm(config.hidden_size, config, ops, ranks)

    def forward(self, x: Tensor, residual: Tensor, mask: AttentionMask, places: Tensor | None) -> tuple[Tensor, Tensor]:
        attended = self.self(x, mask)
        if places is not None:
            attended = attended.flatten(0, 1).index_select(0, places)
            residual = residual.flatten(0, 1).index_select(0, places)
        out: tuple[Tensor, Tensor] = self.output(attended, residual)
        return out


class Intermediate(nn.Module):
    def __init__(self, config: ModelConfig, ops: Operations, ranks: TensorParallel) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, ranks.share(config.intermediate_size))
        self._ops, self._ranks = ops, ranks

    def forward(self, x: Tensor) -> Tensor:
        return self._ops.dense_gelu(self._ranks.copy(x), self.dense)


class Layer(nn.Module):
    def __init__(self, config: ModelConfig, ops: Operations, ranks: TensorParallel) -> None:
        super().__init__()
        self.attention = Attention(config, ops, ranks)
        self.intermediate = Intermediate(config, ops, ranks)
        self.output = DenseAndNorm(config.intermediate_size, config, ops, ranks)

    def forward(
        self, x: Tensor, residual: Tensor, mask: AttentionMask, places: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(B, S, H) → (B, S, H), twice, as `residual` is `x` again; with `places` (W,), indices of the flattened
        tokens, those only: (W, H)."""
        x, residual = self.attention(x, residual, mask, places)
        out: tuple[Tensor, Tensor] = self.output(self.intermediate(x), residual)
        return out


class Encoder(nn.Module):
    def __init__(self, config: ModelConfig, ops: Operations, ranks: TensorParallel) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Layer(config, ops, ranks) for _ in range(config.num_hidden_layers))

    def forward(self, x: Tensor, mask: AttentionMask, places: Tensor) -> Tensor:
        """(B, S, H) → (W, H), at the `places` (W,) that are used: the last layer computes no others."""
        *before, last = self.layer
        residual = x
        for layer in before:
            x, residual = layer(x, residual, mask)
        out: Tensor = last(x, residual, mask, places)[0]
        return out
