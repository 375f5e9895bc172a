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

#: Compilers, of which one is needed: the one that the variable names, or one of the others.
_CXX, _CC = ("CXX", "g++", "clang++"), ("CC", "gcc", "clang")
#: What Inductor would choose by timing: other kernels add in another order, and a run resumed on another machine, or
#: with another cache, would end with other bytes.
_FIXED = {"shape_padding": False, "triton.autotune_pointwise": False, "dynamic_scale_rblock": False}


class Inductor(Compiler):
    def __init__(self, cache: str | None, *, for_cpu: bool) -> None:
        """`cache`: directory for compiled code; None: torch's. Raises `UserError` if there is no compiler."""
        super().__init__()
        variable, *names = _CXX if for_cpu else _CC
        if not any(map(shutil.which, (os.environ.get(variable, names[0]), *names))):
            language = "C++" if for_cpu else "C"
            raise UserError(f"compile needs a {language} compiler; install {names[0]}, or leave compile off")
        if cache is not None:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache

    def lower(self, graph: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        from torch._inductor import config
        from torch._inductor.compile_fx import compile_fx

        fixed = {**_FIXED, "deterministic": True} if hasattr(config, "deterministic") else _FIXED
        compiled: Any = compile_fx(graph, inputs, config_patches=fixed, decompositions=_rules())
        kernel: Callable[..., Any] = compiled
        return kernel


@functools.cache
def _rules() -> dict[Any, Any]:
    """Inductor's decompositions, without the one for the gradient of embeddings.

    That one adds with atomics, in another order each time: resumed runs ended with other bytes. torch's kernel has a
    fixed order.
    """
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.lowering import make_fallback

    whole = torch.ops.aten.embedding_dense_backward.default
    make_fallback(whole, warn=False, override_decomp=True)
    torch.compiler.config.cache_key_tag = (
        "embedding_dense_backward as a whole"  # not part of the caches' keys otherwise
    )
    return {operation: rule for operation, rule in select_decomp_table().items() if operation is not whole}
