"""What a GPU's training step does, without a GPU: nothing waits for values, and a batch is one copy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from common.errors import UserError
from tests.helpers.support import MODEL, synthetic_rows
from tests.trainer.models.test_bert import batch_of
from trainer.data.batch import Batch
from trainer.data.bert_batch import BertBatch
from trainer.data.loader import Step
from trainer.data.order import Samples
from trainer.devices import cuda
from trainer.devices.cuda import CudaDevice
from trainer.devices.cuda_operations import CudaOperations
from trainer.loop import Trainer
from trainer.models.bert import BertForPreTraining, has_weight_decay, is_hidden_matrix
from trainer.models.config import ModelConfig
from trainer.models.mlp import ImageBatch
from trainer.models.operations import Operations
from trainer.optim.parameters import FlatParameters
from trainer.optim.select import make_optimizer
from trainer.parallel.allreduce import AllReduceModel
from trainer.parallel.mesh import Mesh
from trainer.parallel.tensor import TensorParallel
from trainer.precision import Precision

pytest.importorskip("triton", reason="needs Triton, which is for Linux")


class WithoutValues(CudaDevice):
    """A GPU whose tensors have no values: asking for one, or copying one to the host, fails."""

    def __init__(self) -> None:
        self.torch_device = torch.device("meta")
        self.operations = self.compiled_operations = CudaOperations(has_triton=True)
        self.copies = 0
        self.late: list[Tensor] = []

    def put(self, batch: Any) -> Any:
        def move(buffer: Tensor) -> Tensor:
            self.copies += 1
            return buffer.to(self.torch_device, non_blocking=True)

        return batch.in_one_buffer(move)

    def step_closure(self, f: Any, *tensors: Tensor) -> None:
        self.late += tensors  # the one thing that is read, a step late


class NoCopies(TorchDispatchMode):
    """Fails if a tensor is copied between host and device in a way that blocks the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, kwargs = func(*args, **(kwargs or {})), kwargs or {}
        sources = [x for x in args if isinstance(x, Tensor)][-1:]
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default) and sources:
            assert sources[0].device == out.device or kwargs.get("non_blocking"), (func, sources[0].device, out.device)
        return out


def step_of(batches: list[BertBatch], device: CudaDevice) -> Step:
    rows = np.zeros(8, np.int64)
    return Step(0, 0, map(device.put, batches), (1, 1), 0, Samples(rows, rows), len(batches))


class Nothing:
    """Accepts any call."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


@pytest.mark.parametrize("optimizer", ["AdamW", "LAMB", "Muon", "SGD"])
@pytest.mark.parametrize("precision", ["fp32", "bf16-master", "bf16-sr"])
def test_no_step_asks_for_a_value(optimizer: str, precision: str) -> None:
    """The loop's own step, from a batch on the host to the losses: with dropout, with and without padding."""
    device, mesh = WithoutValues(), Mesh()
    kind = Precision(precision, device.round_stochastically)
    model = BertForPreTraining(ModelConfig(**MODEL), device.operations).to(device.torch_device, kind.dtype).train()
    matrices = is_hidden_matrix if optimizer == "Muon" else lambda name: False
    parameters = FlatParameters(model, has_weight_decay, 2, kind, is_matrix=matrices)
    trainer = Trainer.__new__(Trainer)
    vars(trainer).update(
        config=SimpleNamespace(grad_reduce_in_bf16=False, max_grad_norm=1.0, seed=1),
        workload=SimpleNamespace(losses={"masked": 1.0, "next": 0.1}), device=device, mesh=mesh, precision=kind,
        model=model,
        metrics=Nothing(), agreement=Nothing(), forward=AllReduceModel(model), parameters=parameters,
        optimizer=make_optimizer(optimizer, parameters, weight_decay=0.01, number=None), lr_schedule=lambda step: 1e-3,
        state=SimpleNamespace(global_step=0, advanced=lambda epoch, samples: trainer.state),
        tensor_parallel=TensorParallel(), _number=device_number(device), _all_reduce=lambda tensors: None,
    )  # fmt: skip
    rows = batch_of(synthetic_rows(4, seq_len=32, max_pred_len=5, seed=3))
    batches = [rows, rows.without_padding()] if device.needs_no_padding(kind) else [rows]
    with NoCopies():
        try:
            assert trainer.train_step(step_of(batches, device), [1, 1])
        except (RuntimeError, NotImplementedError) as error:
            pytest.fail(f"assert that no value is asked for: {error}")
    assert device.copies == len(batches)
    assert [tensor.shape for tensor in device.late] == [(3,)]


def device_number(device: CudaDevice) -> Any:
    return lambda value: device.number(value, torch.float32)


@pytest.mark.parametrize("ask", [Tensor.item, Tensor.tolist, Tensor.cpu, Tensor.nonzero, bool])
def test_asking_for_a_value_fails_there(ask: Any) -> None:
    """The test above relies on this."""
    with pytest.raises((RuntimeError, NotImplementedError)):
        ask(torch.ones((), device="meta"))


def test_a_batch_is_one_copy() -> None:
    """All tensors, of any type and shape, unchanged, aligned as kernels need; what is not a tensor stays as it is."""
    calls = []

    def move(buffer: Tensor) -> Tensor:
        calls.append(buffer)
        return buffer.clone()

    rows = batch_of(synthetic_rows(4, seq_len=32, max_pred_len=5, seed=3))
    images = ImageBatch(torch.rand(3, 5), torch.arange(3))
    for batch in (rows, rows.without_padding(), BertBatch(*list(vars(rows).values())[:6], None, None), images):
        calls.clear()
        moved: Batch = batch.in_one_buffer(move)
        assert len(calls) == 1
        assert type(moved) is type(batch)
        storages = set()
        for name, value in vars(batch).items():
            found = getattr(moved, name)
            if isinstance(value, Tensor):
                assert found.dtype == value.dtype
                assert torch.equal(found, value)
                assert found.data_ptr() % 16 == calls[0].clone().data_ptr() % 16 == 0
                storages.add(found.untyped_storage().data_ptr())
            else:
                assert found == value
        assert len(storages) == 1


def layers(head_size: int, dtype: torch.dtype) -> tuple[Tensor, Any]:
    """A GPU's input and layers, without values."""
    x, weight, bias = (
        torch.empty(*shape, 3 * head_size, device="cuda:0", dtype=dtype) for shape in ((2, 16), (3 * head_size,), ())
    )
    return x, [SimpleNamespace(weight=weight, bias=bias, out_features=3 * head_size)] * 3


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("dtype", "has_triton"), [(torch.bfloat16, True), (torch.float32, True), (torch.bfloat16, False)]
)
def test_the_kernel_is_used_where_it_is(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, has_triton: bool, packed: bool
) -> None:
    """For packed rows and for others; otherwise products with a mask."""
    masks: list[Any] = []
    monkeypatch.setattr(Operations, "attention_mask", lambda self, ids, bounds, most=None: (ids, bounds))
    monkeypatch.setattr(Operations, "attention_by_products", lambda self, q, k, v, mask, p: masks.append(mask) or q)
    with FakeTensorMode(), torch.no_grad():
        ids = torch.ones(2, 16, device="cuda:0", dtype=torch.int64)
        bounds = torch.zeros(5, device="cuda:0", dtype=torch.int64) if packed else None
        operations, (x, three) = CudaOperations(has_triton=has_triton), layers(64, dtype)
        out = operations.self_attention(x, three, 64, operations.attention_mask(ids, bounds), 0.1)
    assert (out.shape, out.dtype) == (x.shape, dtype)
    assert masks == ([] if has_triton and dtype == torch.bfloat16 else [(ids, bounds)])


def test_with_a_mask_no_kernel_is_used_that_adds_in_any_order() -> None:
    """torch would choose its memory-efficient kernel on a GPU."""
    operations, x = CudaOperations(), torch.zeros(2, 2, 16, 8, requires_grad=True)
    with Called() as called:
        mask = operations.attention_mask(torch.ones(2, 16, dtype=torch.int64), None, 16)
        operations.attention(x, x, x, mask, 0.1).sum().backward()
    assert not [name for name in called.names if "attention" in name], called.names
    assert [name for name in called.names if "bmm" in name]


class Called(TorchDispatchMode):
    """Records which of torch's operations are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


def test_heads_that_the_kernel_does_not_take_are_refused_without_padding() -> None:
    with FakeTensorMode(), torch.no_grad():
        operations, (x, three) = CudaOperations(has_triton=True), layers(136, torch.bfloat16)
        ids, bounds = (torch.ones(*shape, device="cuda:0", dtype=torch.int64) for shape in ((2, 16), (3,)))
        with pytest.raises(UserError, match=r"heads of dimension 136 in bfloat16; the kernels take at most 128; use "):
            operations.self_attention(x, three, 136, operations.attention_mask(ids, bounds, 8), 0.1)


@pytest.mark.parametrize(
    ("precision", "has_triton", "compiled", "expected"),
    [
        ("autocast", True, False, True), ("bf16-master", True, False, True), ("fp32", True, False, False),
        ("autocast", False, False, False), ("autocast", True, True, False),
    ],
)  # fmt: skip
def test_micro_batches_come_without_padding_where_nothing_needs_rows(
    precision: str, has_triton: bool, compiled: bool, expected: bool
) -> None:
    device = WithoutValues()
    device.operations = CudaOperations(has_triton=has_triton)
    device.compiler = Nothing() if compiled else None  # type: ignore[assignment]
    assert device.needs_no_padding(Precision(precision)) is expected


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("gpu", "they are for NVIDIA GPUs of compute capability 8.0 or more"),
        ("triton", "triton is not installed"),
        (
            "compiler",
            "Triton cannot be used, see that there is a C compiler with Python's headers: "
            "RuntimeError Failed to find C compiler.",
        ),
        (None, None),
    ],
)
def test_why_there_are_no_kernels_is_said(
    monkeypatch: pytest.MonkeyPatch, missing: str | None, said: str | None
) -> None:
    def target() -> None:
        if missing == "compiler":
            raise RuntimeError("Failed to find C compiler.\nMore of it")

    driver = SimpleNamespace(active=SimpleNamespace(get_current_target=target))
    monkeypatch.setattr(cuda, "import_module", lambda name: SimpleNamespace(driver=driver))
    monkeypatch.setattr(cuda.importlib.util, "find_spec", lambda name: None if missing == "triton" else name)
    assert cuda.why_no_triton((7, 5) if missing == "gpu" else (8, 0)) == said
