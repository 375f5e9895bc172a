"""Threads that run alongside a block."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def beside(work: Callable[[threading.Event], object], *, name: str | None = None) -> Iterator[None]:
    """Run `work` in a thread alongside the block. At the block's end its event is set and the thread is joined."""
    over = threading.Event()
    thread = threading.Thread(target=work, args=(over,), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
