"""Faulty devices: the CPU with one fault each.

`python -m tests.helpers.faulty.devices FAULT …` is `python -m trainer …` where the device cpu is the faulty one.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from common.errors import UserError
from trainer import registry
from trainer.data.batch import B
from trainer.devices.cpu import CpuDevice
from trainer.devices.cpu_operations import CpuOperations
from trainer.devices.inductor import Inductor
from trainer.models.operations import Operations
from trainer.parallel.mesh import Group, Mesh


class Sound(CpuDevice):
    """No fault. It does not compile, which would take most of the time."""

    def make_compiler(self, cache: str | None) -> Inductor:
        raise UserError("this stand-in has no compiler")


class WrongGradients(Sound):
    """The gradient of attention's queries is 2 % too large."""

    class Wrong(Operations):
        def attention(self, query: Tensor, *rest: Any) -> Tensor:
            return super().attention(_Scaled.apply(query), *rest)

    operations = Wrong()


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 1.02 * gradient


class DroppedAllReduce(Sound):
    """Every worker keeps its own gradients, as under PyTorch/XLA with a world of one."""

    def all_reduce(self, tensors: list[Tensor], group: Group, *, sums: bool = True) -> None:
        pass


class RepeatedDropoutMask(Sound):
    """Each seeding starts the same stream."""

    def seed(self, seed: int) -> None:
        super().seed(0)


class StaleGraph(CpuDevice):
    """A graph is found by its shapes alone, whatever constants it was compiled with."""

    class Stale:
        graphs: Sequence[dict[str, Any]] = ()

        def __init__(self) -> None:
            self._modules: dict[str, nn.Module] = {}

        def compile(self, model: nn.Module) -> Callable[..., Any]:
            weights = dict(model.named_parameters())

            def run(given: Any) -> Any:
                parts = [*weights.values(), *([given] if isinstance(given, Tensor) else vars(given).values())]
                key = repr([type(model), *(None if part is None else part.shape for part in parts)])
                return functional_call(self._modules.setdefault(key, model), weights, (given,))

            return run

    def make_compiler(self, cache: str | None) -> Any:
        return self.Stale()


class NarrowedIntegers(Sound):
    """Integers have 16 bits on the device."""

    def put(self, batch: B) -> B:
        return super().put(batch.map(lambda x: x.to(torch.int16).to(x.dtype) if x.dtype == torch.int64 else x))


class WrongMask(Sound):
    """Padding is attended to."""

    class Wrong(CpuOperations):
        def attention_mask(
            self, sequence_ids: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None = None
        ) -> Tensor:
            return torch.ones(len(sequence_ids), 1, 1, sequence_ids.shape[1], dtype=torch.bool)

    operations = Wrong()


class SwappedShards(Sound):
    """An all-reduce made of a reduce-scatter and an all-gather that puts the two parts in the wrong order."""

    def all_reduce(self, tensors: list[Tensor], group: Group, *, sums: bool = True) -> None:
        super().all_reduce(tensors, group, sums=sums)
        for tensor in tensors:
            half = tensor.numel() // 2
            flat = tensor.view(-1)
            flat[: 2 * half] = flat[: 2 * half].roll(half)


class LostUpdate(Sound):
    """The third update of fp32 weights is lost."""

    class Loses(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._fused_adamw_.default and args[0][0].dtype == torch.float32:
                self.calls += 1
                if self.calls == 3:
                    return None
            return func(*args, **(kwargs or {}))

    def start(self, mesh: Mesh) -> None:
        super().start(mesh)
        self.Loses().__enter__()


class RoundedAtRandom(Sound):
    """No fault. What is computed in fp32 becomes bf16 stochastically, from a state that cannot be saved, as on Trainium
    with NEURON_RT_STOCHASTIC_ROUNDING_EN=1."""

    class Rounds(TorchDispatchMode):
        random = torch.Generator()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if func not in _ROUNDED or out.dtype != torch.bfloat16:
                return out
            wide = [x.float() if isinstance(x, Tensor) and x.dtype == torch.bfloat16 else x for x in args]
            exact = (wide[0] if func is torch.ops.aten._to_copy.default else func(*wide, **(kwargs or {}))).float()
            below = torch.randint(2**16, exact.shape, generator=self.random, dtype=torch.int32)
            return ((exact.contiguous().view(torch.int32) + below) & -(2**16)).view(torch.float32).to(torch.bfloat16)

    def start(self, mesh: Mesh) -> None:
        super().start(mesh)
        self.Rounds().__enter__()

    def resumes_exactly(self, precision: str) -> bool:
        return not precision.endswith("-sr")

    def require_precision(self, name: str) -> None:
        pass

    def round_stochastically(self, x: Tensor) -> Tensor:
        return x


_ROUNDED = {
    getattr(torch.ops.aten, name).default for name in ("mm", "bmm", "addmm", "baddbmm", "_softmax", "_to_copy", "gelu")
} | {torch.ops.aten.mul.Tensor, torch.ops.aten.add.Tensor}


class RoundedAtRandomWithWrongMask(RoundedAtRandom, WrongMask):
    """Both."""


class StoppedWhileItTrains(Sound):
    """No fault; a stop signal arrives in the first step of the training that the self-test resumes."""

    trains = False

    def resumes_exactly(self, precision: str) -> bool:
        self.trains = True
        return super().resumes_exactly(precision)

    def put(self, batch: B) -> B:
        if self.trains:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().put(batch)


class UnlikeTheRoots(Sound):
    """No fault; workers other than the root's have no bf16."""

    def automatic_precision(self) -> tuple[str, str]:
        return ("fp32", "no bf16") if int(os.environ["RANK"]) else ("autocast", "bf16")


if __name__ == "__main__":
    registry.DEVICES["cpu"] = f"tests.helpers.faulty.devices:{sys.argv[1]}"
    sys.argv = ["trainer", *sys.argv[2:]]
    runpy.run_module("trainer", run_name="__main__", alter_sys=True)
