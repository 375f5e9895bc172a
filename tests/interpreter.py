"""Triton's interpreter, by which tests run the GPU's kernels on the CPU, program by program, where there is no GPU."""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Any

import numpy as np
import torch


@functools.cache
def interpret_kernels() -> None:
    """From here on, in this process; before Triton is imported, which decides it then. Mends what the interpreter of
    Triton 3.5 cannot do: a loop to a number that was loaded, with numpy from 2.4 on, and products of bf16 matrices."""
    if torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        return
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.language as tl
    from triton import knobs
    from triton.runtime import interpreter

    knobs.runtime.interpret = True
    del os.environ["TRITON_INTERPRET"]  # which other processes would inherit
    patch, dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot

    def patched(tensor: Any, *scope: Any) -> None:  # a scope from Triton 3.6 on
        patch(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, wide(a), wide(b), *rest)

    def wide(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    interpreter._patch_lang_tensor = patched
    interpreter.InterpreterBuilder.create_dot = create_dot
