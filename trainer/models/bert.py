"""BERT for pretraining: Hugging Face's `BertForPreTraining`, parameter for parameter, with the masked-LM head
computed at the masked positions only.

The modules are our own because importing Hugging Face's takes longer than a whole start of the trainer may
(docs/decisions.md); names, shapes and results are theirs (tests/trainer/test_bert.py).

B: sequences in the micro-batch, S: tokens in a sequence, H: hidden size, A: heads, M: masked positions in the
whole micro-batch, V: vocabulary.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainer.config import ModelConfig
from trainer.models.operations import Operations

#: Label of a masked position that only fills up a static shape (torch's and Hugging Face's ignore_index).
IGNORED = -100


@dataclass(frozen=True)
class BertBatch:
    """One micro-batch, on one device. All int64."""

    #: (B, S) token ids.
    input_ids: Tensor
    #: (B, S) 0 for the first sentence and padding, 1 for the second sentence.
    segment_ids: Tensor
    #: (B, S) 1 where there is a token, 0 in padding.
    input_mask: Tensor
    #: (M,) places of the masked tokens in the flattened (B·S,) micro-batch.
    masked_index: Tensor
    #: (M,) ids that were there, `IGNORED` where the place is only a filler.
    masked_labels: Tensor
    #: (B,) 1 if the second sentence is a random one.
    next_sentence_labels: Tensor

    def map(self, f: Callable[[Tensor], Tensor]) -> BertBatch:
        """The batch with `f` applied to each tensor."""
        return BertBatch(**{name: f(value) for name, value in vars(self).items()})


class Dropout(nn.Module):
    def __init__(self, p: float, ops: Operations) -> None:
        super().__init__()
        self.p = p
        self._ops = ops

    def forward(self, x: Tensor) -> Tensor:
        return self._ops.dropout(x, self.p) if self.training and self.p > 0 else x


class Embeddings(nn.Module):
    def __init__(self, config: ModelConfig, ops: Operations) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=0)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = Dropout(config.hidden_dropout_prob, ops)

    def forward(self, input_ids: Tensor, segment_ids: Tensor) -> Tensor:
        positions = self.position_embeddings.weight[: input_ids.shape[1]]
        x = self.word_embeddings(input_ids) + self.token_type_embeddings(segment_ids) + positions
        out: Tensor = self.dropout(self.LayerNorm(x))
        return out


class SelfAttention(nn.Module):
    def __init__(self, config: ModelConfig, ops: Operations) -> None:
        super().__init__()
        self.head_size = config.hidden_size // config.num_attention_heads
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout_p = config.attention_probs_dropout_prob
        self._ops = ops

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """(B, S, H) → (B, S, H); `mask` (B, 1, 1, S) bool, True where attention may look."""
        batch, length, _ = x.shape

        def heads(projection: nn.Linear) -> Tensor:
            out: Tensor = projection(x).view(batch, length, -1, self.head_size).transpose(1, 2)
            return out

        dropout_p = self.dropout_p if self.training else 0.0
        out = self._ops.attention(heads(self.query), heads(self.key), heads(self.value), mask, dropout_p)
        return out.transpose(1, 2).reshape(batch, length, -1)


class DenseAndNorm(nn.Module):
    """Hugging Face's BertSelfOutput and BertOutput: a projection, dropout, the residual, LayerNorm."""

    def __init__(self, inputs: int, config: ModelConfig, ops: Operations) -> None:
        super().__init__()
        self.dense = nn.Linear(inputs, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = Dropout(config.hidden_dropout_prob, ops)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        out: Tensor = self.LayerNorm(self.dropout(self.dense(x)) + residual)
        return out


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, ops: Operations) -> None:
        super().__init__()
        self.self = SelfAttention(config, ops)
        self.output = DenseAndNorm(config.hidden_size, config, ops)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        out: Tensor = self.output(self.self(x, mask), x)
        return out


class Intermediate(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.intermediate_size)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.dense(x))


class Layer(nn.Module):
    def __init__(self, config: ModelConfig, ops: Operations) -> None:
        super().__init__()
        self.attention = Attention(config, ops)
        self.intermediate = Intermediate(config)
        self.output = DenseAndNorm(config.intermediate_size, config, ops)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.attention(x, mask)
        out: Tensor = self.output(self.intermediate(x), x)
        return out


class Encoder(nn.Module):
    def __init__(self, config: ModelConfig, ops: Operations) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Layer(config, ops) for _ in range(config.num_hidden_layers))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for layer in self.layer:
            x = layer(x, mask)
        return x


class Pooler(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, first: Tensor) -> Tensor:
        return torch.tanh(self.dense(first))


class Bert(nn.Module):
    def __init__(self, config: ModelConfig, ops: Operations) -> None:
        super().__init__()
        self.embeddings = Embeddings(config, ops)
        self.encoder = Encoder(config, ops)
        self.pooler = Pooler(config)


class Transform(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.LayerNorm(F.gelu(self.dense(x)))
        return out


class Predictions(nn.Module):
    """The masked-LM head. Its decoder's weight is the word embeddings', so only the bias is its own."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.transform = Transform(config)
        self.bias = nn.Parameter(torch.empty(config.vocab_size))

    def forward(self, x: Tensor, decoder_weight: Tensor) -> Tensor:
        """(M, H) → (M, V) logits."""
        return F.linear(self.transform(x), decoder_weight, self.bias)


class Heads(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.predictions = Predictions(config)
        self.seq_relationship = nn.Linear(config.hidden_size, 2)


class BertForPreTraining(nn.Module):
    """Hugging Face's model of that name. `parameters()` has each tied tensor once."""

    def __init__(self, config: ModelConfig, ops: Operations | None = None) -> None:
        """`ops`: how the device does what devices do differently; None: torch's own ways."""
        super().__init__()
        self.config = config
        self.bert = Bert(config, ops or Operations())
        self.cls = Heads(config)

    def logits(self, batch: BertBatch) -> tuple[Tensor, Tensor]:
        """Masked-LM logits (M, V) at the masked positions, and next-sentence logits (B, 2)."""
        mask = batch.input_mask.bool()[:, None, None, :]
        x = self.bert.embeddings(batch.input_ids, batch.segment_ids)
        x = self.bert.encoder(x, mask)
        masked = x.flatten(0, 1).index_select(0, batch.masked_index)
        word_embeddings = self.bert.embeddings.word_embeddings.weight
        return (
            self.cls.predictions(masked, word_embeddings),
            self.cls.seq_relationship(self.bert.pooler(x[:, 0])),
        )

    def forward(self, batch: BertBatch) -> tuple[Tensor, Tensor]:
        """Summed cross-entropies in nats: over the masked positions, and over the sequences; two scalars.

        Computed in fp32 at least, whatever the logits' type.
        """
        masked_lm, next_sentence = self.logits(batch)
        return (
            F.cross_entropy(at_least_fp32(masked_lm), batch.masked_labels, ignore_index=IGNORED, reduction="sum"),
            F.cross_entropy(at_least_fp32(next_sentence), batch.next_sentence_labels, reduction="sum"),
        )

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """BERT's initial weights: normal(0, initializer_range), zero biases, unit LayerNorms, a zero [PAD] row.

        Each tensor depends on (seed, its name) alone, so neither order nor parallel layout changes it.
        """
        for name, parameter in self.named_parameters():
            if name.endswith("LayerNorm.weight"):
                parameter.fill_(1.0)
            elif name.endswith("bias"):
                parameter.zero_()
            else:
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) * 2**31 + seed)
                # fp32 on the CPU on purpose: the same numbers for every device and precision.
                values = torch.empty(parameter.shape).normal_(0.0, self.config.initializer_range, generator=generator)
                parameter.copy_(values)
        self.bert.embeddings.word_embeddings.weight[0].zero_()


def at_least_fp32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def has_weight_decay(name: str) -> bool:
    """Whether AdamW's and LAMB's decay applies to the parameter: to all but biases and LayerNorms."""
    return not (name.endswith("bias") or "LayerNorm" in name)
