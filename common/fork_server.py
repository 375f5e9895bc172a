"""`python -m common.fork_server DESCRIPTOR MODULE…`: imports the modules, then forks commands on request over a socket
(`common.forked`); a forked child becomes `python -m module …`, with its requester's environment, directory, limits etc.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import io
import json
import os
import resource
import runpy
import selectors
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from setproctitle import setproctitle

from common.process import (
    PARENT_VARIABLE,
    SAVING_S,
    STOP_SIGNALS,
    die_with_parent,
    die_with_starter,
    fork_without_warning,
)

#: Seconds between checks on commands that must end.
_LOOK_S = 1.0
#: The most bytes and descriptors that a request may have.
MOST_BYTES, MOST_DESCRIPTORS = 1 << 18, 64
#: Limits that a request carries, in this order.
LIMITS = tuple(sorted(value for name, value in vars(resource).items() if name.startswith("RLIMIT_")))

#: The last argument: room for a process's name in `ps`, which is written over its arguments.
ROOM_FOR_NAMES = "." * 8192


def main() -> NoReturn:
    """Import, then fork on request; a forked child returns from `serve` and becomes the requested command."""
    die_with_starter()
    atexit.register(_end)  # registered first, so called last
    # The server ends with whoever started it. A signal to a freshly forked child stays pending.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    setproctitle("python -m common.fork_server")
    control = socket.socket(fileno=int(sys.argv[1]))
    for name in sys.argv[2:-1]:
        with contextlib.suppress(ImportError):  # the command that needs it reports it
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # so that no child's collector copies the pages
    server = os.getpid()
    request = _Server(control).serve()
    global _status
    try:
        _become(request, server)
        runpy.run_module(request["words"][1], run_name="__main__", alter_sys=True)
        _status = 0
    except SystemExit as ended:
        _status = ended.code & 0xFF if isinstance(ended.code, int) else int(ended.code is not None)
        raise
    except KeyboardInterrupt:
        _status = None
        raise
    sys.exit()


#: A child's exit status; None: it was interrupted.
_status: int | None = 1


def _end() -> None:
    """End a child with its status, but without freeing what it has imported, which takes half a second with torch."""
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
    except Exception:  # Python tries again, says why it cannot, and decides on the status
        return
    if _status is None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(128 + signal.SIGINT if _status is None else _status)


class _Server:
    """Forks commands on request, and tells each requester how its command ended."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._ready = selectors.DefaultSelector()
        self._ready.register(control, selectors.EVENT_READ)
        #: By process id.
        self._replies: dict[int, socket.socket] = {}
        #: By process id: the time by which a command must have ended because its requester has.
        self._deadlines: dict[int, float] = {}

    def serve(self) -> dict[str, Any]:
        """Serve until nobody holds the other end of `control`. Returns only in children."""
        while True:
            for key, _ in self._ready.select(_LOOK_S if self._deadlines else None):
                if key.fileobj is self._control:
                    request = self._fork()
                    if request is not None:
                        return request
                elif isinstance(key.fileobj, socket.socket):
                    self._stop(key)
                else:
                    self._reap(key)
            for pid in [pid for pid, deadline in self._deadlines.items() if time.monotonic() > deadline]:
                os.kill(pid, signal.SIGKILL)

    def _fork(self) -> dict[str, Any] | None:
        """Returns the request in the child."""
        said, received, _, _ = socket.recv_fds(self._control, MOST_BYTES, MOST_DESCRIPTORS)
        if not said:
            os._exit(0)
        reply = socket.socket(fileno=received[0])
        try:
            with fork_without_warning():
                pid = os.fork()
        except OSError as error:  # other commands go on
            print(f"error: a command could not be forked: {error}", file=sys.stderr, flush=True)
            pid = -1
        if pid == 0:
            self._ready.close()
            self._control.close()
            for other in self._replies.values():
                other.close()
            return _started(json.loads(said), received[1:], reply)
        for descriptor in received[1:]:
            os.close(descriptor)
        if pid == -1:
            reply.close()
            return None
        self._replies[pid] = reply
        self._ready.register(reply, selectors.EVENT_READ, pid)
        self._ready.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
        return None

    def _stop(self, key: selectors.SelectorKey) -> None:
        """The requester ended before its command. SIGTERM ends that at once, unless it has something to save."""
        if key.data in self._replies:
            self._ready.unregister(key.fileobj)
            os.kill(key.data, signal.SIGTERM)
            self._deadlines[key.data] = time.monotonic() + SAVING_S

    def _reap(self, key: selectors.SelectorKey) -> None:
        _, status = os.waitpid(key.data, 0)
        self._ready.unregister(key.fileobj)
        os.close(key.fd)
        reply = self._replies.pop(key.data)
        self._deadlines.pop(key.data, None)
        with contextlib.suppress(KeyError):
            self._ready.unregister(reply)
        with contextlib.suppress(OSError):
            reply.send(f"status {os.waitstatus_to_exitcode(status)}".encode())
        reply.close()


def _started(request: dict[str, Any], received: Sequence[int], reply: socket.socket) -> dict[str, Any]:
    """In the child: take the descriptors and answer with the id."""
    os.setsid()
    above = max([*request["descriptors"], *received]) + 1
    high = [os.dup2(source, above + index) for index, source in enumerate(received)]
    reply_at = os.dup2(reply.detach(), above + len(high), inheritable=False)
    for number in {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, *high, reply_at}:
        with contextlib.suppress(OSError):
            os.close(number)
    for number, source in zip(request["descriptors"], high, strict=True):
        os.dup2(source, number, inheritable=True)
        os.close(source)
    with socket.socket(fileno=reply_at) as answer:
        try:
            answer.send(f"pid {os.getpid()}".encode())
        except OSError:  # the requester has ended
            os._exit(1)
    return request


def _become(request: dict[str, Any], server: int) -> None:
    """Give this process the environment, directory, limits etc. of whoever requested it from `server`."""
    words, environment = request["words"], request["environment"]
    die_with_parent(server)
    if PARENT_VARIABLE in environment:
        environment[PARENT_VARIABLE] = str(server)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(request["directory"])
    sys.path[0] = request["directory"]
    sys.argv = [words[1], *words[2:]]
    tempfile.tempdir = None
    os.sched_setaffinity(0, request["cores"])
    for limit, values in zip(LIMITS, request["limits"], strict=True):
        resource.setrlimit(limit, tuple(values))
    for signum in request["ignored"]:
        signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    if "numpy.random" in sys.modules:  # Python's random reseeds itself
        sys.modules["numpy.random"].seed()
    threads = _threads(environment.get("OMP_NUM_THREADS", ""))
    if threads and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(threads)
    _open_streams(at_once=environment.get("PYTHONUNBUFFERED", "") not in ("", "0"))
    # Replaces the server's name.
    setproctitle(" ".join(["python", *words]).encode(errors="replace").decode())


def _threads(value: str) -> int:
    """The first of a list, as libgomp reads it; 0 for what is not a count, which libgomp ignores."""
    first = value.split(",")[0].strip()
    return int(first) if first.isdecimal() else 0


def _open_streams(*, at_once: bool) -> None:
    """As Python does at start-up: what the server's streams know of its own files is not true of these."""
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        like, unbuffered = getattr(sys, name), at_once and mode == "w"
        binary: Any = open(descriptor, f"{mode}b", buffering=0 if unbuffered else -1, closefd=False)  # noqa: SIM115
        (binary if unbuffered else binary.raw).name = f"<{name}>"
        is_live = not at_once and (binary.isatty() or descriptor == 2)
        stream = io.TextIOWrapper(
            binary, like.encoding, like.errors, newline="\n", line_buffering=is_live, write_through=unbuffered
        )
        stream.mode = mode  # type: ignore[misc]
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


if __name__ == "__main__":
    main()
