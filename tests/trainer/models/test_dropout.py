"""Dropout is applied where Hugging Face's model applies it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers.support import MODEL, synthetic_rows
from tests.trainer.models.test_bert import batch_of
from trainer.data.bert_batch import BertBatch
from trainer.devices import cpu_kernels
from trainer.devices.cpu_kernels import operators
from trainer.devices.cpu_operations import CpuOperations
from trainer.models.bert import BertForPreTraining
from trainer.models.config import ModelConfig
from trainer.models.operations import Operations

transformers = pytest.importorskip("transformers")

ROWS, S = 4, 32


def drop(x: Tensor, p: float) -> Tensor:
    """Dropout without chance: an element's position decides whether it is dropped."""
    places = torch.arange(x.numel()).mul(7919).remainder(1009).view(x.shape)
    return x * (places >= 1009 * p) / (1 - p)


class Fixed(Operations):
    attention = Operations.attention_by_products  # which uses `dropout`

    def dropout(self, x: Tensor, p: float) -> Tensor:
        if x.shape[0] <= ROWS * S:
            return drop(x, p)
        # The last layer's: the batch below asks for all tokens, then for each row's first one again.
        kept = drop(torch.ones_like(x[: ROWS * S]), p)
        return x * torch.cat([kept, kept[::S]])


@pytest.mark.parametrize(("hidden", "attention"), [(0.1, 0.0), (0.0, 0.1), (0.1, 0.3)])
def test_dropout_is_where_hugging_faces_is(monkeypatch: pytest.MonkeyPatch, hidden: float, attention: float) -> None:
    """Both models drop the same elements: their logits agree, in training too, and dropout affects them."""
    monkeypatch.setattr(torch.nn.functional, "dropout", lambda x, p, training=True, inplace=False: (
        drop(x, p) if training and p else x
    ))  # fmt: skip
    config = ModelConfig(**{**MODEL, "hidden_dropout_prob": hidden, "attention_probs_dropout_prob": attention})
    ours = BertForPreTraining(config, Fixed()).double()
    ours.initialise(seed=1)
    settings = transformers.BertConfig(**config.to_hugging_face(), attn_implementation="eager")
    theirs = transformers.BertForPreTraining(settings).double()
    theirs.load_state_dict(ours.state_dict(), strict=False)
    theirs.tie_weights()
    arrays: dict[str, Any] = {
        name: torch.from_numpy(value.astype(np.int64))
        for name, value in synthetic_rows(ROWS, seq_len=S, max_pred_len=5, seed=0).items()
    }
    batch = BertBatch(
        arrays["input_ids"], arrays["segment_ids"], arrays["input_mask"], torch.arange(S)[None],
        torch.arange(ROWS * S), torch.zeros(ROWS * S), S * torch.arange(ROWS), arrays["next_sentence_labels"],
    )  # fmt: skip
    logits = {}
    for training in (True, False):
        words, pairs = ours.train(training).logits(batch)
        expected = theirs.train(training)(batch.input_ids, batch.sequence_ids, batch.segment_ids)
        real = batch.sequence_ids.flatten() > 0  # nobody reads what is computed for padding
        of_words = expected.prediction_logits.flatten(0, 1)
        torch.testing.assert_close(words[real], of_words[real], rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(pairs, expected.seq_relationship_logits, rtol=1e-9, atol=1e-11)
        logits[training] = words
    assert not torch.allclose(logits[True], logits[False], rtol=1e-3)


@pytest.mark.skipif(cpu_kernels.library() is None, reason="needs a C compiler")
def test_kernels_drop_in_the_same_places_with_the_same_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """The embeddings, then in each layer attention's weights and the outputs of two projections."""
    config = ModelConfig(**{**MODEL, "hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.2})
    model = BertForPreTraining(config, CpuOperations())
    model.initialise(seed=1)
    shares, drawn = [], operators.dropped
    monkeypatch.setattr(operators, "dropped", lambda p: (shares.append(p), drawn(p))[1])
    batch = batch_of(synthetic_rows(2, seq_len=32, max_pred_len=5, seed=3))
    model(batch)
    assert shares == [0.3, *[0.2, 0.3, 0.3] * MODEL["num_hidden_layers"]]
    shares.clear()
    model.eval()(batch)
    assert not any(shares)
