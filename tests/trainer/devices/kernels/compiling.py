"""Compiles all kernels for a GPU generation that need not be here, as their operators call them for BERT-Large and for
the largest heads, and prints the most shared memory that one needs. In a process of its own, without the interpreter.

    python -m tests.trainer.devices.kernels.compiling 90
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from trainer.devices import kernels

TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64"}
HIDDEN, WORDS, LENGTHS = 1024, 30522, (100, 130)


class Recorder:
    """Takes a kernel's calls."""

    def __init__(self, kernel: Any, calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]]) -> None:
        self.kernel, self.calls = kernel, calls

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **options: self.calls.append((self.kernel, args, options))


def recorded() -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    modules = [
        sys.modules[f"trainer.devices.kernels.{name}"] for name in ("attention", "norm", "gelu", "cross_entropy")
    ]
    found = [(module, name, value) for module in modules for name, value in vars(module).items()]
    kernels_there = [(module, name, value) for module, name, value in found if hasattr(value, "arg_names")]
    for module, name, value in kernels_there:
        setattr(module, name, Recorder(value, calls))
    bounds = torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32)
    of_tokens, tokens = bounds.diff().repeat_interleave(bounds.diff()).int(), sum(LENGTHS)
    wide = torch.zeros(tokens, 3 * HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    x, vector = torch.zeros(tokens, HIDDEN, dtype=torch.bfloat16, requires_grad=True), torch.zeros(HIDDEN)
    logits = torch.zeros(8, WORDS, dtype=torch.bfloat16, requires_grad=True)
    results = [kernels.attention(wide, vector, bounds, of_tokens, 130, HIDDEN // size, 0.1) for size in (64, 128)]
    one, two = kernels.bias_dropout_add_norm(x, vector, x, torch.nn.LayerNorm(HIDDEN), 0.1)
    results += [one + two, kernels.bias_dropout_add_norm(x, vector, x, torch.nn.LayerNorm(HIDDEN), 0.1)[0]]
    results += [kernels.bias_gelu(wide, torch.zeros(3 * HIDDEN))]
    results += [kernels.cross_entropy(logits, torch.zeros(8, dtype=torch.int64), -100)]
    for out in results:
        out.sum().backward()
    for module, name, value in kernels_there:  # they call each other by these names
        setattr(module, name, value)
    return calls


def main() -> None:
    capability, shared = int(sys.argv[1]), []
    for kernel, args, options in recorded():
        chosen = {name: options.pop(name) for name in ("num_warps", "num_stages") if name in options}
        signature = {}
        for name, value in itertools.zip_longest(kernel.arg_names, args):
            if name in options:
                signature[name] = "constexpr"
            elif isinstance(value, torch.Tensor):
                signature[name] = TYPES[value.dtype]
            else:
                signature[name] = "i32" if isinstance(value, int) else "fp32"
        pointers = [(index,) for index, kind in enumerate(signature.values()) if kind.startswith("*")]
        aligned = {index: [["tt.divisibility", 16]] for index in pointers}  # as all of torch's memory is
        source = ASTSource(kernel, signature, options, aligned)
        shared.append(compile(source, GPUTarget("cuda", capability, 32), options=chosen).metadata.shared)
    print(len(shared), max(shared))


if __name__ == "__main__":
    main()
