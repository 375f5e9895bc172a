"""The compile cache of neuronx-cc: its location, the flag that names it, and the locks that killed compilers leave.

Imports no torch, because Precompile uses it too.
"""

from __future__ import annotations

import fcntl
import re
from collections.abc import Callable
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.files import disk_errors

#: The variable with the flags for neuronx-cc and for its wrapper, which manages the cache.
CC_FLAGS = "NEURON_CC_FLAGS"
#: Each process that uses the cache holds a shared lock on this file.
IN_USE = "in-use"
_FLAG = re.compile(r"--?[\w-]+")
#: `--cache_dir=X` or `--cache_dir X`, with the space before it.
CACHE_DIR = re.compile(r"(?:^|\s+)--cache_dir(?:=|\s+)(\S+)")


def node_cache(cache: Path, node: int) -> Path:
    """One machine's part of a cache. Machines do not share one: neuronx-cc's locks are not reliable over NFS."""
    return (cache / f"node-{node}").absolute()


def merge_flags(theirs: str, ours: str) -> tuple[str, list[str]]:
    """NEURON_CC_FLAGS from the user's flags and ours, and a remark on each conflict.

    The user's flag wins over ours of the same name, except for `--cache_dir`: a stage is responsible for the content of
    the one it names.
    """
    remarks = []
    if cache := CACHE_DIR.search(ours):
        for found in set(CACHE_DIR.findall(theirs)) - {cache[1]}:
            remarks.append(f"your --cache_dir={found} is not used; this run uses its own, {cache[1]}")
        theirs = CACHE_DIR.sub("", theirs)
    given = {word.partition("=")[0]: word for word in theirs.split() if _FLAG.match(word)}
    added = []
    for flag in ours.split():
        name = flag.partition("=")[0]
        if name not in given:
            added.append(flag)
        elif given[name] != flag:
            remarks.append(f"your {given[name]} instead of {flag}")
    return " ".join(filter(None, [theirs.strip(), *added])), remarks


def use_cache(cache: Path, log: Callable[[str], None]) -> TextIOWrapper:
    """Mark `cache` as in use while the returned file is open; if no other process uses it, remove stale locks.

    A killed compiler leaves its lock files (`*.lock`), and others that need the same graph would wait forever.
    Raises `DiskError`.
    """
    with disk_errors(cache):
        cache.mkdir(parents=True, exist_ok=True)
        mark = (cache / IN_USE).open("a", encoding="utf-8")
        try:
            fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass  # locks of the other processes may be live
        else:
            for lock in cache.rglob("*.lock"):
                lock.unlink(missing_ok=True)
                log(f"removed {lock}, a stale lock of a killed compiler")
        fcntl.flock(mark, fcntl.LOCK_SH)
    return mark


def compiled_modules(cache: Path) -> list[dict[str, Any]]:
    """The modules in `cache`: hash, and seconds between the first file and the result.

    Raises `UserError` if one has not been compiled, or there is none.
    """
    modules = sorted(path.parent for path in cache.rglob("MODULE_*/model.hlo_module.pb*"))
    if not modules:
        raise UserError(f"neuron_parallel_compile left no graph in {cache}; see its output above")
    found = []
    for module in modules:
        compiled = module / "model.neff"
        if not compiled.exists() or not compiled.stat().st_size:
            raise UserError(f"{module} was not compiled; see its model.log, then run the same command again")
        began = min(path.stat().st_mtime for path in module.iterdir())
        seconds = round(compiled.stat().st_mtime - began, 1)
        found.append({"hash": module.name.removeprefix("MODULE_"), "seconds": seconds})
    return found
