"""The GPU's operations with their kernels: the self-test accepts them, and a whole model computes what torch's do."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.helpers.support import MODEL, synthetic_rows
from tests.trainer.data.test_packed import write_both
from tests.trainer.devices.gradient_sums import require_autograds_sums
from tests.trainer.models.test_bert import batch_of
from trainer.data.bert_batch import IGNORED, BertBatch
from trainer.data.order import Samples
from trainer.data.reader import BatchReader
from trainer.data.shards import ShardSet
from trainer.devices.base import Device
from trainer.devices.cpu import CpuDevice
from trainer.devices.select import select_alone
from trainer.machine import arithmetic, randomness
from trainer.models.bert import BertForPreTraining
from trainer.models.config import ModelConfig
from trainer.models.operations import Operations
from trainer.precision import Precision

pytest.importorskip("triton", reason="needs Triton, which is for Linux")

from trainer.devices.cuda_operations import CudaOperations

#: torch 2.11 warns where a backward pass's thread multiplies before anything else has used the GPU there.
pytestmark = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA context")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Kernels(CpuDevice):
    """A CPU whose operations are a GPU's: the kernels are interpreted."""

    def __init__(self) -> None:
        self.torch_device, self.operations = torch.device("cpu"), CudaOperations(has_triton=True)

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)


@pytest.fixture
def subject() -> Any:
    device: Device = select_alone("cuda") if DEVICE == "cuda" else Kernels()
    config = SimpleNamespace(precision="autocast")
    return SimpleNamespace(device=device, devices={"eager": device}, model=ModelConfig(**MODEL), config=config)


@pytest.mark.parametrize(
    "check",
    [
        arithmetic.check_operations, arithmetic.check_attention_mask, randomness.check_dropout_rate,
        pytest.param(randomness.check_dropout_independence, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_the_self_test_accepts_them(monkeypatch: pytest.MonkeyPatch, subject: Any, check: Any) -> None:
    monkeypatch.setattr(randomness, "_N", 1 << 13)  # the interpreter takes minutes for more
    findings = list(check(subject))
    assert findings
    assert [finding for finding in findings if not finding.passed] == []


def gradients(
    model: BertForPreTraining, batch: BertBatch, dtype: torch.dtype | None = None
) -> tuple[float, dict[str, Tensor]]:
    """The loss, a mean, and its gradients, in float64; under autocast to `dtype`, if it is given."""
    with torch.autocast(DEVICE, dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        loss = sum(model(batch)) / len(batch.masked_labels)
    found = torch.autograd.grad(loss, list(model.parameters()))
    return loss.item(), {
        name: gradient.double() for (name, _), gradient in zip(model.named_parameters(), found, strict=True)
    }


def packed_rows(tmp_path: Path) -> BertBatch:
    """With as many sequences as there may be, some of them empty, as for a compiled graph."""
    _, packed = write_both(tmp_path, 5)
    shards = ShardSet.open(packed)
    rows = np.arange(shards.rows)
    reader = BatchReader(shards, vocab_size=MODEL["vocab_size"], static_shapes=True)
    (batch,), _ = reader.micro_batches(Samples(0 * rows, rows), len(rows))
    return batch


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rows", "without padding", "packed"])
def test_a_model_under_autocast_is_float64s_but_for_rounding(tmp_path: Path, kind: str) -> None:
    """As near as torch's own operations under autocast, in bf16, or half as near: the interpreter cuts off where a GPU
    rounds. Two layers, sequences of several lengths."""
    on_host = (
        packed_rows(tmp_path) if kind == "packed" else batch_of(synthetic_rows(3, seq_len=32, max_pred_len=5, seed=3))
    )
    unpadded = on_host.without_padding() if kind == "without padding" else on_host
    batch, kernels_batch = (given.map(lambda tensor: tensor.to(DEVICE)) for given in (on_host, unpadded))
    exact = BertForPreTraining(ModelConfig(**MODEL).without_dropout()).double().to(DEVICE)
    exact.initialise(seed=1)
    with torch.no_grad():
        for name, parameter in exact.named_parameters():  # else scores are so small that attention is a mean
            if "query" in name or "key" in name:
                parameter *= 20
    true, expected = gradients(exact, batch)
    errors = []
    for operations in (CudaOperations(has_triton=True), Operations()):
        model = BertForPreTraining(ModelConfig(**MODEL).without_dropout(), operations).to(DEVICE)
        model.load_state_dict(exact.state_dict())
        given = kernels_batch if isinstance(operations, CudaOperations) else batch
        loss, found = gradients(model, given, torch.bfloat16)
        assert loss == pytest.approx(true, rel=2.0**-9)  # half a unit of bf16; a mean of losses has less
        difference = sum((found[name] - expected[name]).square().sum() for name in expected)
        errors.append(float(difference / sum(x.square().sum() for x in expected.values())) ** 0.5)
        for name in ("encoder.layer.0.attention.self.query.weight", "encoder.layer.1.attention.self.value.bias"):
            one, other = found[f"bert.{name}"], expected[f"bert.{name}"]
            assert (one - other).norm() <= 12 * 2.0**-8 * other.norm(), name  # a rounding for each product before it
    ours, theirs = errors
    assert ours <= 2 * theirs


@pytest.mark.slow
def test_sums_are_autograds_bit_by_bit() -> None:
    require_autograds_sums(CudaOperations(has_triton=True), Precision("autocast"), DEVICE)


def test_words_that_fill_up_the_vocabulary_change_nothing() -> None:
    """Loss and gradients are those of torch's cross-entropy in float64."""
    x, weight, bias = torch.randn(8, 16), torch.randn(70, 16), torch.randn(70)
    given = [one.to(DEVICE).requires_grad_() for one in (x, weight, bias)]
    labels = torch.tensor([0, 69, IGNORED, 3, 5, 7, 68, 1], device=DEVICE)
    loss = CudaOperations(has_triton=True).words_cross_entropy(*given, labels)
    ours = [loss, *torch.autograd.grad(loss, given)]
    wide = [one.detach().double().requires_grad_() for one in given]
    true = F.cross_entropy(F.linear(*wide), labels, ignore_index=IGNORED, reduction="sum")
    for one, other in zip(ours, [true, *torch.autograd.grad(true, wide)], strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_training_drops_with_the_kernels_and_evaluation_does_not() -> None:
    batch = batch_of(synthetic_rows(2, seq_len=32, max_pred_len=5, seed=3)).map(lambda tensor: tensor.to(DEVICE))
    config = ModelConfig(**{**MODEL, "hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.3})
    model = BertForPreTraining(config, CudaOperations(has_triton=True)).to(DEVICE)
    model.initialise(seed=1)
    found = []
    for training, seed in ((True, 1), (True, 1), (True, 2), (False, 1), (False, 2)):
        torch.manual_seed(seed)
        with torch.no_grad(), torch.autocast(DEVICE, dtype=torch.bfloat16):
            found.append(model.train(training)(batch)[0].item())
    assert found[0] == found[1] != found[2]
    assert found[3] == found[4]


def test_without_words_to_predict_there_is_no_loss() -> None:
    """No kernel is started for no rows."""
    operations = CudaOperations(has_triton=True)
    logits = torch.zeros(0, 7, device=DEVICE, requires_grad=True)
    assert operations.cross_entropy(logits, torch.zeros(0, dtype=torch.int64, device=DEVICE)) == 0
