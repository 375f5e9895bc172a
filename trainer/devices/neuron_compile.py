"""neuron_parallel_compile, which runs a trial to extract its graphs and then compiles them in parallel. Imports no
torch."""

from __future__ import annotations

import functools
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.errors import UserError
from trainer.devices.neuron_cache import CC_FLAGS, compiled_modules, merge_flags, node_cache, use_cache

_PROGRAM = "neuron_parallel_compile"


class ParallelCompile:
    """Compiles into one part of `cache` for each machine."""

    def __init__(self, cache: Path) -> None:
        self._cache = cache

    def run(self, node: int, trial: list[str], start: Callable[[list[str], dict[str, str]], None]) -> None:
        """Have `start` run a command with variables of its own, which runs `trial` and compiles for machine `node`.

        Raises `UserError` if the program is not installed or leaves a graph uncompiled, `DiskError`.
        """
        program, cache = shutil.which(_PROGRAM), node_cache(self._cache, node)
        if program is None:
            raise UserError(f"{_PROGRAM} is not installed; it comes with torch-neuronx (docs/trainium.md)")
        with use_cache(cache, functools.partial(print, file=sys.stderr, flush=True)):
            start([program, *trial], _environment(cache))
        compiled_modules(cache)

    def modules(self, nodes: int) -> list[dict[str, Any]]:
        """What has been compiled: {"hash", "seconds"}. All machines compile the same, so the first one's list stands
        for all. Raises `UserError` if one of them lacks a part."""
        return [compiled_modules(node_cache(self._cache, node)) for node in range(nodes)][0]


def _environment(cache: Path) -> dict[str, str]:
    """Variables that make the program compile the graphs in `cache`.

    It uses the cache named by its own environment, not the one set by the trainer that it starts.
    """
    flags, _ = merge_flags(os.environ.get(CC_FLAGS, ""), f"--cache_dir={cache} --retry_failed_compilation")
    return {"NEURON_COMPILE_CACHE_URL": str(cache), CC_FLAGS: flags}
