"""Variables that must be set before torch is imported."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from common.process import node_rank
from trainer.devices.neuron_cache import node_cache

#: Where native torch-neuronx keeps what it has compiled, according to third parties. The second holds its locks.
_CACHES = {
    "TORCH_NEURONX_NEFF_CACHE_DIR": "neff",
    "TORCH_NEURONX_NEFF_LOCAL_CACHE_DIR": "locks",
    "TORCH_NEURONX_HLO_CACHE_DIR": "hlo",
}


def use_compile_cache(words: Sequence[str]) -> None:
    """Set torch-neuronx's caches to the `--compile_cache` among a command line's words, if there is one."""
    for index, word in enumerate(words):
        name, _, value = word.partition("=")
        if name == "--compile_cache":
            cache = node_cache(Path(value or "".join(words[index + 1 : index + 2])), node_rank())
            for variable, folder in _CACHES.items():
                os.environ[variable] = str(cache / folder)
            os.environ.setdefault("NKI_ENABLE_TRACE_CACHE", "0")  # it may keep stale kernels
