"""BERT for pretraining: Hugging Face's `BertForPreTraining`, or `BertForMaskedLM` without next-sentence prediction,
parameter for parameter, with the masked-LM head, and the last layer after its attention, computed only where they are
used.

The modules are our own because importing Hugging Face's takes longer than the trainer's whole start-up may
(docs/decisions.md). Names, shapes and results are the same (tests/trainer/models/test_bert.py).

B: rows in the micro-batch, S: tokens in a row, H: hidden size, M: masked positions and Q: sequences in the
whole micro-batch, V: vocabulary. A row is one sequence or, if packed, several that do not attend to each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainer.data.bert_batch import IGNORED, BertBatch
from trainer.models.base import Model
from trainer.models.config import ModelConfig
from trainer.models.encoder import Dropout, Encoder
from trainer.models.initial import InitialValues
from trainer.models.operations import Operations
from trainer.models.sampled_softmax import sampled_words
from trainer.parallel.fp32_sums import Embedding, LayerNorm, at_least_fp32
from trainer.parallel.shares import put_share, whole_shape
from trainer.parallel.tensor import (
    TensorParallel,
    VocabularyEmbedding,
    own_labels,
    own_words,
    vocabulary_cross_entropy,
)

WORD_EMBEDDINGS = "bert.embeddings.word_embeddings.weight"
OUTPUT_BIAS = "cls.predictions.bias"
#: Prefixes of the parameters that only next-sentence prediction has.
NEXT_SENTENCE_HEAD = ("bert.pooler.", "cls.seq_relationship.")


class Embeddings(nn.Module):
    def __init__(self, config: ModelConfig, ops: Operations, ranks: TensorParallel) -> None:
        super().__init__()
        self.word_embeddings = VocabularyEmbedding(config.vocab_size, config.hidden_size, ranks)
        self.position_embeddings = Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type_embeddings = Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = Dropout(config.hidden_dropout_prob, ops)
        self._ops = ops

    def forward(self, batch: BertBatch) -> Tensor:
        words = self._ops.embedding(batch.input_ids, self.word_embeddings)
        positions = self.position_embeddings(batch.position_ids)
        x = words + self.token_type_embeddings(batch.segment_ids) + positions
        out: Tensor = self.dropout(self.LayerNorm(x))
        return out

    @torch.no_grad()
    def keep_words_out_of(self, directions: slice) -> None:
        """Set these columns of the embeddings of words and token types to 0."""
        for table in (self.word_embeddings, self.token_type_embeddings):
            table.weight[:, directions] = 0

    @torch.no_grad()
    def multiply(self, factor: float) -> None:
        """All embeddings, of words, positions and token types. Their sum is normalized: logits change, and how fast
        training turns them."""
        for table in (self.word_embeddings, self.position_embeddings, self.token_type_embeddings):
            table.weight.mul_(factor)


class Pooler(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, first: Tensor) -> Tensor:
        return torch.tanh(self.dense(first))


class Bert(nn.Module):
    def __init__(self, config: ModelConfig, ops: Operations, ranks: TensorParallel) -> None:
        super().__init__()
        self.embeddings = Embeddings(config, ops, ranks)
        self.encoder = Encoder(config, ops, ranks)
        self.pooler = Pooler(config) if config.next_sentence else None


class Transform(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.LayerNorm = LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.LayerNorm(F.gelu(self.dense(x)))
        return out


class Predictions(nn.Module):
    """The masked-LM head. The decoder's weight is tied to the word embeddings; the bias is its own."""

    def __init__(self, config: ModelConfig, ops: Operations, ranks: TensorParallel) -> None:
        super().__init__()
        self._ops = ops
        self.transform = Transform(config)
        self.bias = nn.Parameter(torch.empty(ranks.share(config.vocab_size)))
        self._ranks = ranks

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """(M, H) → (M, K) logits of the words whose weights (K, H) and biases (K,) are given."""
        return F.linear(self._ranks.copy(self.transform(x)), self._ops.weight(weight), bias)


class Heads(nn.Module):
    def __init__(self, config: ModelConfig, ops: Operations, ranks: TensorParallel) -> None:
        super().__init__()
        self.predictions = Predictions(config, ops, ranks)
        self.seq_relationship = nn.Linear(config.hidden_size, 2) if config.next_sentence else None


class BertForPreTraining(Model):
    """Hugging Face's model of that name, or its BertForMaskedLM if the config has no next-sentence prediction.

    `parameters()` has each tied tensor once.
    """

    def __init__(
        self,
        config: ModelConfig,
        ops: Operations | None = None,
        ranks: TensorParallel | None = None,
        sampled_softmax: int = 0,
    ) -> None:
        """`ops`: the device's operations; None: torch's. `ranks`: the tensor-parallel ranks that share the model; None:
        it is not split. `sampled_softmax`: words drawn beside a micro-batch's labels in training; 0: all."""
        super().__init__()
        self._sampled_softmax = sampled_softmax
        self.config = config
        self._ranks = ranks or TensorParallel()
        self._ops = ops or Operations()
        self.bert = Bert(config, self._ops, self._ranks)
        self.cls = Heads(config, self._ops, self._ranks)

    def logits(self, batch: BertBatch) -> tuple[Tensor, Tensor | None]:
        """Masked-LM logits (M, V / t) at the masked positions, and next-sentence logits (Q, 2), or None if the model
        or the batch is without next-sentence prediction."""
        masked, next_sentence = self._encoded(batch)
        weight, bias = self.bert.embeddings.word_embeddings.weight, self.cls.predictions.bias
        return self.cls.predictions(masked, weight, bias), next_sentence

    def forward(self, batch: BertBatch) -> tuple[Tensor, ...]:
        """Summed cross-entropies in nats: over the masked positions, and with next-sentence prediction over the
        sequences; scalars.

        Computed in fp32 at least, whatever the logits' type. With `sampled_softmax` training's first is an estimate.
        """
        masked, next_sentence = self._encoded(batch)
        masked_lm_loss = self._masked_lm_loss(masked, batch.masked_labels)
        if next_sentence is None:
            return (masked_lm_loss,)
        assert batch.next_sentence_labels is not None
        return masked_lm_loss, F.cross_entropy(
            at_least_fp32(next_sentence), batch.next_sentence_labels, ignore_index=IGNORED, reduction="sum"
        )

    def _encoded(self, batch: BertBatch) -> tuple[Tensor, Tensor | None]:
        """The encoder's output at the masked positions (M, H), and next-sentence logits as in `logits`."""
        mask = self._ops.attention_mask(batch.sequence_ids, batch.packed_bounds, batch.max_seqlen)
        x, predictions = self.bert.embeddings(batch), len(batch.masked_index)
        if batch.first_index is None or self.bert.pooler is None or self.cls.seq_relationship is None:
            return self.bert.encoder(x, mask, batch.masked_index), None
        x = self.bert.encoder(x, mask, torch.cat([batch.masked_index, batch.first_index]))
        return x[:predictions], self.cls.seq_relationship(self.bert.pooler(x[predictions:]))

    def _masked_lm_loss(self, masked: Tensor, labels: Tensor) -> Tensor:
        weight: Tensor = self.bert.embeddings.word_embeddings.weight
        bias: Tensor = self.cls.predictions.bias
        mine, own = own_labels(labels, len(weight), self._ranks), own_words(self.config.vocab_size, self._ranks)
        if self.training and self._sampled_softmax and own:
            drawn = -(-self._sampled_softmax // self._ranks.size)
            with self._ranks.region():
                weight, bias, mine = sampled_words(weight[:own], bias[:own], mine, drawn)
        if self._ranks.size == 1:
            return self._ops.words_cross_entropy(self.cls.predictions.transform(masked), weight, bias, mine)
        logits = self.cls.predictions(masked, weight, bias)
        return vocabulary_cross_entropy(at_least_fp32(logits), mine, labels != IGNORED, own, self._ranks)

    @torch.no_grad()
    def initialise(self, seed: int, given: Mapping[str, Tensor] | None = None) -> None:
        """BERT's initial weights: normal(0, initializer_range), zero biases, unit LayerNorms, a zero [PAD] row.

        Each tensor depends on (seed, its name) alone, so neither order nor parallel layout changes it. `given`: first
        rows of whole tensors, by name, to use instead where they are not NaN.
        """
        draw, given = InitialValues(seed), given or {}
        for name, parameter in self.named_parameters():
            shape = whole_shape(name, tuple(parameter.shape), self.config.vocab_size, self._ranks.size)
            if name.endswith("LayerNorm.weight"):
                values = torch.ones(shape)
            elif name.endswith("bias"):
                values = torch.zeros(shape)
            else:
                values = draw.normal(name, shape, self.config.initializer_range)
                if name == WORD_EMBEDDINGS:
                    values[0].zero_()  # [PAD]
            if name in given:
                first = values[: len(given[name])]
                first.copy_(torch.where(given[name].isnan(), first, given[name]))
            put_share(parameter, name, values, self._ranks)


def has_next_sentence_head(names: Iterable[str]) -> bool:
    """Whether any of a model's parameters is next-sentence prediction's: a whole model has all of those or none."""
    return any(name.startswith(NEXT_SENTENCE_HEAD) for name in names)


def is_hidden_matrix(name: str) -> bool:
    """Whether Muon updates the parameter: the encoder's weight matrices."""
    return name.startswith("bert.encoder.") and name.endswith(".weight") and "LayerNorm" not in name


def has_weight_decay(name: str) -> bool:
    """Whether AdamW's and LAMB's decay applies to the parameter: to all but biases and LayerNorms."""
    return not (name.endswith("bias") or "LayerNorm" in name)
