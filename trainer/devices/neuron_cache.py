"""The compile cache of neuronx-cc: where each machine's is, how the compiler is told, and the locks it leaves behind.

Imports no torch: the stage that compiles ahead uses it, too.
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

#: The variable that hands flags to neuronx-cc, and to its wrapper, which keeps the cache.
CC_FLAGS = "NEURON_CC_FLAGS"
#: Holds a shared lock for each process that works with the cache.
IN_USE = "in-use"
_FLAG = re.compile(r"--?[\w-]+")
#: `--cache_dir=X` or `--cache_dir X`, with the space before it.
_CACHE_DIR = re.compile(r"(?:^|\s+)--cache_dir(?:=|\s+)(\S+)")


def node_cache(cache: Path, node: int) -> Path:
    """One machine's part of a cache. Machines share none: neuronx-cc's locks cannot be relied on over NFS."""
    return (cache / f"node-{node}").absolute()


def merge_flags(theirs: str, ours: str) -> tuple[str, list[str]]:
    """NEURON_CC_FLAGS of the user's flags and ours, and a remark on each of ours that is left out or wins.

    A flag that the user gives wins over ours of the same name, except for `--cache_dir`: where we name one, a stage
    answers for what is in it.
    """
    remarks = []
    if cache := _CACHE_DIR.search(ours):
        for found in set(_CACHE_DIR.findall(theirs)) - {cache[1]}:
            remarks.append(f"your --cache_dir={found} is not used here, but this run's own, {cache[1]}")
        theirs = _CACHE_DIR.sub("", theirs)
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
    """Mark `cache` as in use for as long as the returned file is open; if nobody else uses it, remove stale locks.

    A compiler that is killed leaves its lock files (`*.lock`), and whoever needs the same graph waits for ever.
    Raises `DiskError`.
    """
    with disk_errors(cache):
        cache.mkdir(parents=True, exist_ok=True)
        mark = (cache / IN_USE).open("a", encoding="utf-8")
        try:
            fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass  # their locks may be held
        else:
            for lock in cache.rglob("*.lock"):
                lock.unlink(missing_ok=True)
                log(f"removed {lock}, the lock of a compiler that is no more")
        fcntl.flock(mark, fcntl.LOCK_SH)
    return mark


def compiled_modules(cache: Path) -> list[dict[str, Any]]:
    """The modules in `cache`: hash, and the seconds between its first file and its result.

    Raises `UserError` if one has not been compiled, or there is none.
    """
    modules = sorted(path.parent for path in cache.rglob("MODULE_*/model.hlo_module.pb*"))
    if not modules:
        raise UserError(f"neuron_parallel_compile left no graph in {cache}; what it said is above")
    found = []
    for module in modules:
        compiled = module / "model.neff"
        if not compiled.exists() or not compiled.stat().st_size:
            raise UserError(f"{module} was not compiled; see its model.log, then run the same again")
        began = min(path.stat().st_mtime for path in module.iterdir())
        seconds = round(compiled.stat().st_mtime - began, 1)
        found.append({"hash": module.name.removeprefix("MODULE_"), "seconds": seconds})
    return found
