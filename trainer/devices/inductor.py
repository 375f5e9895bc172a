"""torch.compile, for devices that otherwise run eagerly."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from common.errors import UserError


class Inductor:
    """Compiles a model's forward and backward pass for static shapes."""

    def __init__(self, cache: str | None, *, needs_cxx: bool) -> None:
        """`cache`: directory for compiled code; None: torch's. Raises `UserError` without a compiler that it needs."""
        if needs_cxx and not any(map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++"))):
            raise UserError("compile needs a C++ compiler on the CPU; install g++, or leave compile off")
        if cache is not None:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        #: hash, operations and seconds of each graph, in the order they were compiled. The seconds do not include the
        #: backward pass, which is compiled at its first use.
        self.graphs: list[dict[str, Any]] = []

    def compile(self, model: nn.Module) -> Callable[..., Any]:
        """`model`'s forward pass, compiled at its first call."""
        # Dynamo counts compilations by code, whichever model they were for, and runs eagerly after the eighth.
        torch._dynamo.reset()
        return torch.compile(model, backend=self._backend, dynamic=False)

    def _backend(self, graph: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        from torch._inductor.compile_fx import compile_fx

        began = time.monotonic()
        compiled: Any = compile_fx(graph, inputs, decompositions=_rules())
        kernel: Callable[..., Any] = compiled
        shapes = [(tuple(t.shape), str(t.dtype)) if isinstance(t, torch.Tensor) else repr(t) for t in inputs]
        self.graphs.append(
            {
                "hash": hashlib.sha256(f"{graph.code}{shapes}".encode()).hexdigest()[:32],
                "operations": len(graph.graph.nodes),
                "seconds": round(time.monotonic() - began, 3),
            }
        )
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
