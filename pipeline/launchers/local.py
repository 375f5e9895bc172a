"""On this machine; with several nodes, on this one of those that were started by hand."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from common.console import log
from common.errors import NodeMissing, UserError
from common.process import MASTER_ADDR_VARIABLE, NODE_RANK_VARIABLE
from pipeline.launchers import process
from pipeline.launchers.base import StageCommand
from pipeline.launchers.process import LaunchSpec, ProcessResult
from pipeline.settings.cluster import Cluster
from stages.directory import attempts
from stages.directory.lock import is_held
from stages.directory.manifest import FAILURE, last_failure

#: Seconds between two looks at what node 0 does, and between two lines that say so.
_LOOK_EVERY_S, _TOLD_EVERY_S = 1.0, 30.0


class Local:
    """Child processes of this one."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def run(self, work: StageCommand) -> ProcessResult:
        start = start_on_node(self._cluster.node_rank, self._cluster.master_addr) if work.nodes > 1 else None
        # The account of a run is node 0's.
        with contextlib.nullcontext() if self._cluster.follows else attempts.recording(work.directory) as record:
            result = process.run(
                work.words,
                directory=work.directory,
                fingerprint=work.fingerprint,
                keep_open=(work.lock,),
                hang_timeout_s=work.hang_timeout_s,
                start=start,
            )
            if record is not None:
                record(result.how, result.status, result.error)
        return result


def start_on_node(rank: int, master_addr: str) -> LaunchSpec:
    """How a command is started on one of several nodes."""
    environment = {NODE_RANK_VARIABLE: str(rank), MASTER_ADDR_VARIABLE: master_addr}
    return LaunchSpec(environment=environment, log="stage.log" if rank == 0 else f"stage-node{rank}.log")


def failure_mark(directory: Path) -> object:
    """Differs from what it was as soon as node 0 has noted another failure. Not a time to compare with this machine's:
    clocks of nodes and of the file server differ."""
    try:
        stat = (directory / FAILURE).stat()
    except FileNotFoundError:
        return None
    return stat.st_mtime_ns, stat.st_ino, (directory / FAILURE).read_bytes()


def await_node_0(
    label: str,
    directory: Path,
    why_incomplete: Callable[[], str | None],
    timeout_s: float,
    *,
    failed_before: object,
) -> None:
    """Wait until node 0 has completed the stage. `failed_before`: its `failure_mark` when this run began.

    Raises `UserError` if it fails there, `NodeMissing` if nobody has been at work on it for `timeout_s` seconds.
    """
    alive_at = told_at = time.monotonic()
    last_sign = attempts.last_sign_of_life(directory)
    while (reason := why_incomplete()) is not None:
        now = time.monotonic()
        mark = failure_mark(directory)
        if mark is None:
            failed_before = None  # node 0 has started anew: whatever fails from now on is of this run
        elif mark != failed_before:
            said = last_failure(directory)
            raise UserError(f"{label} failed on node 0: {said.line if said else 'it said nothing'}")
        sign = attempts.last_sign_of_life(directory)
        if is_held(directory) or sign != last_sign:
            alive_at, last_sign = now, sign
        if now - alive_at > timeout_s:
            raise NodeMissing(
                f"{label}: node 0 has not been at work on {directory} for {timeout_s:g} s ({reason}); start the same "
                f"there with node_rank = 0, and share the work directory"
            )
        if now - told_at >= _TOLD_EVERY_S:
            told_at = now
            log(f"{label}: waiting for node 0 ({reason})")
        time.sleep(_LOOK_EVERY_S)
