"""Gradients that devices add to their sums themselves are those that autograd would have added."""

from __future__ import annotations

import torch

from tests.helpers.support import MODEL, synthetic_rows
from tests.trainer.models.test_bert import batch_of
from trainer.models.bert import WORD_EMBEDDINGS, BertForPreTraining
from trainer.models.config import ModelConfig
from trainer.models.operations import Operations
from trainer.optim.parameters import FlatParameters
from trainer.precision import Precision


def require_autograds_sums(operations: Operations, precision: Precision, device: str) -> None:
    """Over two steps of two micro-steps, weights changing in between: in the second, converted weights are new."""
    rows = [batch_of(synthetic_rows(3, seq_len=32, max_pred_len=5, seed=seed)) for seed in (1, 2)]
    batches = [batch.map(lambda tensor: tensor.to(device)) for batch in rows]
    sums = []
    for by_operations in (True, False):
        model = BertForPreTraining(ModelConfig(**MODEL).without_dropout(), operations).to(precision.dtype)
        model.initialise(seed=1)
        parameters = FlatParameters(model.to(device), lambda _: True, 1, precision)
        for parameter in model.parameters():
            assert parameter.gradient_sum is parameter.grad  # type: ignore[attr-defined]
            if not by_operations:
                del parameter.gradient_sum
        for _ in range(2):
            parameters.zero_gradients()
            with precision.step_context(device), operations.step_context():
                for batch in batches:
                    with precision.forward_context(device):
                        losses = model(batch)
                    sum(losses).backward()
            with torch.no_grad():
                for weight in parameters.groups[0].weights:
                    weight *= 0.9
        sums.append(dict(parameters.named([group.gradients for group in parameters.groups])))
    for (which, one), other in zip(sums[0].items(), sums[1].values(), strict=True):
        assert one.abs().max() > 0, which
        if which == WORD_EMBEDDINGS:  # autograd adds those of both uses before it adds them to the sum
            rounding = torch.finfo(one.dtype).eps * other.abs().max()
            assert (one - other).abs().max() <= 4 * rounding
        else:
            assert torch.equal(one, other), which
