"""Reports of a running stage to a central scheduler, and messages from it.

With luigid every stage reports its progress in percent, a status line and the address of TensorBoard, and a training
accepts the message `checkpoint`. Luigi's local scheduler shows nothing, and gets no reports.

`luigi.worker.TaskProcess._forward_attributes` sets the task's report functions only for the duration of `run`, and
`luigi.worker.Worker` makes a message queue only for tasks with `accepts_messages`.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from luigi.interface import core
from luigi.rpc import RPCError

from common.errors import Interrupted
from common.files import PROGRESS, SAVE_REQUEST, read_json
from pipeline.launchers.restarts import checkpoint_steps
from pipeline.status import tensorboard
from pipeline.status.chain import StageTask
from trainer.checkpoint.directory import CHECKPOINTS, checkpoint_path

if TYPE_CHECKING:
    from luigi.worker import SchedulerMessage


#: Seconds between two reports.
_INTERVAL_S = 2.0
#: The message that asks a training for a checkpoint.
CHECKPOINT = "checkpoint"


def has_audience() -> bool:
    """Whether there is a central scheduler."""
    return not core().local_scheduler


@contextlib.contextmanager
def reports(stage: StageTask) -> Iterator[None]:
    """Report on `stage` during the block. Errors of reporting do not affect the stage."""
    if not has_audience():
        yield
        return
    reporter = _Reporter(stage)
    reporter.start()
    try:
        yield
    except (KeyboardInterrupt, Interrupted):  # ends at once: the scheduler may be gone
        raise
    except BaseException:
        reporter.finish()
        raise
    reporter.finish()


class _Reporter(threading.Thread):
    """Reads progress from disk, as the command may run on another machine."""

    def __init__(self, stage: StageTask) -> None:
        super().__init__(name="reporter", daemon=True)
        self._stage = stage
        # Luigi removes them from the task when it ends.
        task: Any = stage
        self._tell_line, self._tell_percentage = task.set_status_message, task.set_progress_percentage
        self._tell_url, self._messages = task.set_tracking_url, task.scheduler_messages
        self._began = time.monotonic()
        self._told: dict[str, object] = {}
        #: The message that waits for a checkpoint, and the steps of earlier checkpoints.
        self._waiting: tuple[SchedulerMessage, set[int]] | None = None
        self._over = threading.Event()

    def finish(self) -> None:
        """Stop reporting: a late report would tell luigi's scheduler that the task is running again."""
        self._over.set()
        self.join()

    def run(self) -> None:
        while not self._over.is_set():
            with contextlib.suppress(RPCError):  # luigi logs it itself
                self._report()
                self._answer()
            self._over.wait(_INTERVAL_S)

    def _report(self) -> None:
        progress = read_json(self._stage.directory / PROGRESS) or {}
        self._tell("line", self._tell_line, status_line(progress, time.monotonic() - self._began))
        if progress.get("total"):
            self._tell("percentage", self._tell_percentage, min(100, int(100 * progress["done"] / progress["total"])))
        address = tensorboard.address(self._stage.settings.work_dir)
        if address is not None:
            self._tell("url", self._tell_url, address)

    def _tell(self, what: str, tell: Any, value: object) -> None:
        if self._told.get(what) != value:
            tell(value)
            self._told[what] = value

    def _answer(self) -> None:
        """Pass a message on to the training, and answer it when the checkpoint exists."""
        directory = self._stage.directory
        if self._waiting is None:
            if self._messages is None:
                return
            try:
                message = self._messages.get_nowait()
            except queue.Empty:
                return
            if message != CHECKPOINT:
                message.respond(f"'{message}' is not understood; this stage takes the message '{CHECKPOINT}'")
                return
            self._waiting = message, checkpoint_steps(directory)
            (directory / SAVE_REQUEST).touch()
        message, before = self._waiting
        if new := checkpoint_steps(directory) - before:
            message.respond(f"saved: {checkpoint_path(directory / CHECKPOINTS, max(new))}")
            self._waiting = None


def status_line(progress: dict[str, Any], seconds: float) -> str:
    """`steps 120 of 500, phase 1, loss 3.214, 12.3 steps/s, 0:00:31 left`, from progress.json."""
    if not progress:
        return f"running for {timedelta(seconds=round(seconds))}"
    done, total, unit, per_s = (progress[name] for name in ("done", "total", "unit", "per_s"))
    parts = ([] if done is None else [f"{unit} {done:,} of {total:,}"]) + [str(progress["label"])]
    if per_s:
        left = timedelta(seconds=round((total - done) / per_s))
        parts += [f"{per_s:,.3g} {unit}/s" if per_s < 1000 else f"{per_s:,.0f} {unit}/s", f"{left} left"]
    return ", ".join(parts)
