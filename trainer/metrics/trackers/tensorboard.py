"""TensorBoard's event files, the only tracker that shows each step immediately."""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: A process may open several in one second: each time that its training is rolled back.
_NUMBERS = itertools.count()


class EventFile:
    """A TensorBoard event file, written by the training thread, which therefore notices a full disk.

    Not torch's SummaryWriter: its import takes 4 s, and it writes from a thread of its own.
    """

    def __init__(self, directory: Path, first_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        directory.mkdir(exist_ok=True)
        now = time.time()
        name = f"events.out.tfevents.{now:.0f}.{socket.gethostname()}.{os.getpid()}.{next(_NUMBERS)}"
        self._event = Event
        self._file = (directory / name).open("xb")
        self._writer = RecordWriter(self._file)
        self._put(Event(wall_time=now, file_version="brain.Event:2"))
        # Tells TensorBoard to drop what an interrupted run recorded from this step on.
        self._put(Event(wall_time=now, step=first_step, session_log=SessionLog(status=SessionLog.START)))

    def add(self, step: int, scalars: Mapping[str, float], at: float) -> None:
        event = self._event(wall_time=at, step=step)
        for name, value in scalars.items():
            event.summary.value.add(tag=name, simple_value=value)
        self._put(event)

    def _put(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()
