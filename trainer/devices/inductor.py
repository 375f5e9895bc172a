"""torch.compile with torch's own compiler, for the CPU and GPUs."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from common.errors import UserError
from trainer.devices.compiler import Compiler


class Inductor(Compiler):
    def __init__(self, cache: str | None, *, needs_cxx: bool) -> None:
        """`cache`: directory for compiled code; None: torch's. Raises `UserError` without a compiler that it needs."""
        super().__init__()
        if needs_cxx and not any(map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++"))):
            raise UserError("compile needs a C++ compiler on the CPU; install g++, or leave compile off")
        if cache is not None:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache

    def lower(self, graph: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        from torch._inductor.compile_fx import compile_fx

        compiled: Any = compile_fx(graph, inputs, decompositions=_rules())
        kernel: Callable[..., Any] = compiled
        return kernel


@functools.cache
def _rules() -> dict[Any, Any]:
    """Inductor's decompositions, without that of the gradient of embeddings.

    It adds with atomics, in another order each time: resumed runs ended with other bytes. torch's kernel has a fixed
    order.
    """
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.lowering import make_fallback

    whole = torch.ops.aten.embedding_dense_backward.default
    make_fallback(whole, warn=False, override_decomp=True)
    torch.compiler.config.cache_key_tag = (
        "embedding_dense_backward as a whole"  # not part of the caches' keys otherwise
    )
    return {operation: rule for operation, rule in select_decomp_table().items() if operation is not whole}
