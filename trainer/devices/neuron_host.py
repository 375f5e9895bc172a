"""What Trainium's lanes ask of a machine: worker counts that its runtime supports, open files. Imports no torch."""

from __future__ import annotations

import re
import resource

from common.errors import UserError

#: NeuronCores of a trn1 instance → worker counts that the XLA lane's runtime supports (AWS's tutorials of BERT, "Number
#: of workers", and of the MLP).
_WORKERS = {2: (1, 2), 32: (1, 2, 8, 32)}
#: The limit on open files that AWS's scripts set; each worker opens sockets to many others.
_OPEN_FILES = 65535


def raise_open_files() -> str:
    """Raise this process's limit on open files as far as AWS advises and the hard limit allows; returns a line for the
    log."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    if soft == resource.RLIM_INFINITY:
        return "ulimit -n unlimited"
    advice = f" (AWS advises {_OPEN_FILES}; on 'Too many open files' raise the hard limit)"
    return f"ulimit -n {soft}" + (advice if soft < _OPEN_FILES else "")


def visible_cores(value: str) -> int:
    """The number of cores in a `NEURON_RT_VISIBLE_CORES` such as `0-7`, `3` or `0,2,4-5`. Raises `UserError`."""
    count = 0
    for part in value.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        extent = int(match[2] or match[1]) - int(match[1]) + 1 if match else 0
        if extent < 1:
            raise UserError(f"NEURON_RT_VISIBLE_CORES={value} is not a list of cores; write 0-7 or 0,2,4-5")
        count += extent
    return count


def check_workers(local_workers: int, total: int, visible: str | None) -> None:
    """Raise `UserError` unless the XLA lane's runtime supports `local_workers` workers on a machine of `total` logical
    cores; `visible`: NEURON_RT_VISIBLE_CORES."""
    usable = total if visible is None else min(total, visible_cores(visible))
    # Instances that are not in the table: any number that fits.
    allowed = [count for count in _WORKERS.get(total, range(1, total + 1)) if count <= usable]
    if local_workers not in allowed:
        seen = f"{total} NeuronCores" + ("" if visible is None else f", {usable} of them visible")
        raise UserError(
            f"{local_workers} workers on this machine of {seen}; its runtime supports "
            f"{', '.join(map(str, allowed))}; change nproc_per_node"
        )
