"""`python -m trainer.metrics.sending TRACKER DIRECTORY`: sends a training's numbers to a tracker, alongside it.

It reads metrics.jsonl, up to the step of the newest checkpoint: what comes after may be trained again, and a tracker
takes nothing back. After a kill the tracker itself says where to continue. Runs until its standard input ends, and then
sends what is left. Exit status: 0 the tracker has everything, 1 it does not.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from common.errors import UserError, one_line
from common.files import METRICS, disk_errors, read_json
from common.options import add_options, from_namespace
from common.process import die_with_starter, give_way
from common.secrets import redact, redact_tracebacks
from trainer.checkpoint.directory import CHECKPOINTS, whole_checkpoints
from trainer.metrics.results import recorded_steps
from trainer.metrics.trackers.base import RemoteTracker, TrackedRun
from trainer.metrics.trackers.options import TrackerOptions
from trainer.registry import TENSORBOARD, TRACKERS, load

#: Seconds between two looks for a new checkpoint, and the longest pause after an error.
_LOOK_S, _LONGEST_S = 1.0, 60.0
#: Fields of a record that are not curves.
_NOT_CURVES = ("step", "time")


class Sender:
    """Sends the steps of one run to one tracker."""

    def __init__(self, name: str, run: TrackedRun, options: TrackerOptions) -> None:
        self._name, self._run, self._options = name, run, options
        self._tracker: RemoteTracker | None = None
        #: Bytes of metrics.jsonl whose records the tracker has.
        self._read = 0

    def send(self) -> RemoteTracker:
        """Send what is final and not sent yet. Raises whatever the tracker's library raises."""
        if self._tracker is None:
            self._tracker = load(TRACKERS[self._name])(self._run, self._options)
            self._read = 0
        tracker, directory = self._tracker, self._run.directory
        final = next((step for step, _ in whole_checkpoints(directory / CHECKPOINTS)), 0)
        had = tracker.last_step
        for record, size in recorded_steps(directory / METRICS, self._read):
            step = record["step"]
            if step > final:
                break
            if step > had:
                numbers = {k: v for k, v in record.items() if isinstance(v, int | float) and k not in _NOT_CURVES}
                tracker.add(step, numbers, record["time"])
            self._read += size
        tracker.flush()
        return tracker

    def close(self, results: Mapping[str, float]) -> None:
        """Send what is left and the `results` of an evaluation. Raises like `send`."""
        tracker = self.send()
        if results:
            tracker.summarise(results)
        tracker.close(is_whole=tracker.last_step >= self._run.last_step)

    def begin_again(self) -> None:
        """After an error: ask the tracker again what it has."""
        self._tracker = None


def follow(sender: Sender, name: str, results: Mapping[str, float], say: Callable[[str], None]) -> int:
    """Send until the end of the standard input; returns the exit status."""
    pause_s, is_over = _LOOK_S, False
    while True:
        try:
            if is_over:
                sender.close(results)
                return 0
            sender.send()
            if pause_s > _LOOK_S:
                say(f"note: {name} answers again")
            pause_s = _LOOK_S
        except Exception as error:  # libraries have no common base
            sender.begin_again()
            if pause_s == _LOOK_S:
                say(f"note: {name}: {type(error).__name__}: {one_line(error)}; it will be retried")
            if is_over:
                return 1
            pause_s = min(2 * pause_s, _LONGEST_S)
        is_over = _ends_within(pause_s)


def _ends_within(seconds: float) -> bool:
    """Whether the standard input ends within that time."""
    deadline = time.monotonic() + seconds
    while select.select([0], [], [], max(0.0, deadline - time.monotonic()))[0]:
        if not os.read(0, 1024):
            return True
    return False


def numbers_of(path: Path) -> dict[str, float]:
    """The numbers among the counts of a complete stage's manifest. Raises `UserError`."""
    counts = (read_json(path) or {}).get("counts")
    if not isinstance(counts, dict):
        raise UserError(f"{path} is not the manifest of a complete stage; give the manifest.json of an evaluation")
    return {
        f"evaluation/{name}": value
        for name, value in counts.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def main() -> int:
    p = argparse.ArgumentParser(prog="python -m trainer.metrics.sending", description=__doc__)
    p.add_argument("tracker", choices=[name for name in TRACKERS if name != TENSORBOARD])
    p.add_argument("directory", type=Path, help="of the training")
    p.add_argument("--results", type=Path, metavar="MANIFEST", help="of an evaluation, whose counts are sent too")
    add_options(p, TrackerOptions)
    args = p.parse_args()
    sender = Sender(args.tracker, TrackedRun.read(args.directory), from_namespace(TrackerOptions, args))
    results = numbers_of(args.results) if args.results else {}
    with disk_errors(args.directory):
        lock = (args.directory / f"{args.tracker}.lock").open("w", encoding="utf-8")
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # waits for another sender, such as that of a training that continues
        return follow(sender, args.tracker, results, _alone_on_stderr())


def _alone_on_stderr() -> Callable[[str], None]:
    """Prints a line, without secrets. From now on all others are silent: the libraries and their processes report
    much that is not about the training, and raise what is."""
    own = os.fdopen(os.dup(2), "w", encoding="utf-8", errors="replace")
    with open(os.devnull, "wb") as nothing:
        for descriptor in (1, 2):
            os.dup2(nothing.fileno(), descriptor)
    return lambda line: print(redact(line), file=own, flush=True)


if __name__ == "__main__":
    die_with_starter()
    redact_tracebacks()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # its starter ends it
    give_way()
    try:
        sys.exit(main())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_status)
