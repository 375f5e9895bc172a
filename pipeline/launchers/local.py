"""Commands as child processes on this machine, which may be one of several nodes started by hand."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from common import forked
from common.console import log
from common.errors import NodeMissing, UserError
from common.files import parse_utc, read_json
from common.process import MASTER_ADDR_VARIABLE, NODE_RANK_VARIABLE
from pipeline.console.select import console
from pipeline.launchers import process
from pipeline.launchers.base import StageCommand
from pipeline.launchers.process import LaunchSpec, ProcessResult
from pipeline.settings.cluster import Cluster
from stages.directory import attempts
from stages.directory.lock import LOCK, is_held

#: Seconds between checks on node 0, and between log lines.
_CHECK_EVERY_S, _LOG_EVERY_S = 1.0, 30.0


class Local:
    """Runs commands as child processes of this one."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def run(self, work: StageCommand) -> ProcessResult:
        if work.imports_torch:
            forked.start()
        start = start_on_node(self._cluster.node_rank, self._cluster.master_addr) if work.nodes > 1 else None
        # Node 0 alone records attempts.
        with contextlib.nullcontext() if self._cluster.follows else attempts.recording(work.directory) as record:
            result = process.run(
                work.words,
                directory=work.directory,
                fingerprint=work.fingerprint,
                keep_open=(work.lock,),
                showing=console().running(work.label, work.directory),
                hang_timeout_s=work.hang_timeout_s,
                start=start,
            )
            if record is not None:
                record(result.how, result.status, result.error)
        return result


def start_on_node(rank: int, master_addr: str) -> LaunchSpec:
    """How to start a command on one of several nodes."""
    environment = {NODE_RANK_VARIABLE: str(rank), MASTER_ADDR_VARIABLE: master_addr}
    return LaunchSpec(environment=environment, log="stage.log" if rank == 0 else f"stage-node{rank}.log")


def runs_on_node_0(directory: Path) -> bool:
    """Whether node 0 runs the command of the stage in `directory`: whoever holds the lock has recorded a start since it
    took it, and no end. Both times are of node 0's clock."""
    holder = (read_json(directory / LOCK) or {}) if is_held(directory) else {}
    found = attempts.read(directory, running=True, complete=False)
    if not found or found[-1].how != "running" or found[-1].host != holder.get("host"):
        return False
    return found[-1].started >= parse_utc(holder["started"]).timestamp()


class NewFailures:
    """Tells whether node 0 has failed since this object was made. The record of failures may be replaced by that of a
    machine whose checkpoint node 0 fetches: what ended before node 0 took the lock, by its clock, does not count."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._before = directory, attempts.failures(directory)
        self._since: float | None = None

    def __call__(self) -> bool:
        if self._since is None and is_held(self._directory):
            started = (read_json(self._directory / LOCK) or {}).get("started")
            self._since = parse_utc(started).timestamp() if started else None
        return any(ended >= (self._since or 0.0) for ended in attempts.failures(self._directory) - self._before)


def await_node_0(
    label: str, directory: Path, why_incomplete: Callable[[], str | None], timeout_s: float, *, has_failed: NewFailures
) -> None:
    """Wait until node 0 has completed the stage. `has_failed`: made when this run began.

    Raises `UserError` if it fails there; `NodeMissing` if node 0 shows no sign of life for `timeout_s` seconds. Never
    compares times of different machines: the clocks of nodes and of the file server differ.
    """
    alive_at = logged_at = time.monotonic()
    last_sign = attempts.last_sign_of_life(directory)
    while (reason := why_incomplete()) is not None:
        now = time.monotonic()
        if has_failed():
            failure = attempts.last_failure(directory)
            raise UserError(f"{label} failed on node 0: {failure.line if failure else 'it has been restarted since'}")
        sign = attempts.last_sign_of_life(directory)
        if is_held(directory) or sign != last_sign:
            alive_at, last_sign = now, sign
        if now - alive_at > timeout_s:
            raise NodeMissing(
                f"{label}: node 0 has not worked on {directory} for {timeout_s:g} s ({reason}); start the same command "
                f"there with node_rank = 0, and share the work directory"
            )
        if now - logged_at >= _LOG_EVERY_S:
            logged_at = now
            log(f"{label}: waiting for node 0 ({reason})")
        time.sleep(_CHECK_EVERY_S)
