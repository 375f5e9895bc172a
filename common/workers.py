"""A pool of worker processes that returns results in the order of the tasks and leaves no process behind."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import TypeVar

from common.errors import UserError
from common.process import HEARTBEAT_THREAD, die_with_parent, fork_without_warning

Task = TypeVar("Task")
Result = TypeVar("Result")

#: Tasks submitted ahead per process: enough to keep it busy, few enough to bound memory.
_AHEAD = 3


class Workers:
    """A context with `processes` worker processes; with one, the work is done in this process.

    Enter it before this process starts threads, which rule out a fast fork.
    """

    def __init__(self, processes: int) -> None:
        self._processes = processes
        self._pool: ProcessPoolExecutor | None = None

    @property
    def are_several(self) -> bool:
        return self._processes > 1

    def map(self, function: Callable[[Task], Result], tasks: Iterable[Task]) -> Iterator[Result]:
        """Yield `function(task)` for each of `tasks`, in order; tasks are read as needed.

        Raises what `function` raises, and `UserError` if a worker process dies.
        """
        if self._pool is None:
            yield from map(function, tasks)
            return
        waiting: deque[Future[Result]] = deque()
        try:
            for task in tasks:
                waiting.append(self._pool.submit(function, task))
                if len(waiting) >= _AHEAD * self._processes:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool:
            raise UserError(
                "a worker process died (killed, or out of memory); run the same again to resume, with fewer processes "
                "if memory is short"
            ) from None

    def __enter__(self) -> Workers:
        if self._processes > 1:
            self._pool = ProcessPoolExecutor(
                self._processes, mp_context=get_context(_start_method()), initializer=_begin_worker,
                initargs=(os.getpid(),),
            )  # fmt: skip
            with fork_without_warning():
                self._pool.submit(os.getpid)
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None


def _start_method() -> str:
    """fork, which saves 0.25 s of imports, unless this process has threads: forking those can deadlock."""
    # The heartbeat holds no lock that a worker needs.
    others = [thread for thread in threading.enumerate() if thread.name != HEARTBEAT_THREAD]
    return "fork" if sys.platform == "linux" and len(others) == 1 else "spawn"


def _begin_worker(parent: int) -> None:
    # Ctrl-C reaches the whole foreground process group; the parent alone handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(parent)
