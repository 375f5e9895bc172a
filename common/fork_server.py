"""`python -m common.fork_server DESCRIPTOR MODULE…`: imports the modules, then forks commands that are asked for on a
socket (`common.forked`); a forked child becomes `python -m module …`, with the surroundings of whoever asked.
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
from collections.abc import Sequence
from typing import Any, NoReturn, TextIO

from setproctitle import setproctitle

from common.process import PARENT_VARIABLE, STOP_SIGNALS, die_with_parent, die_with_starter

_MOST_BYTES, _MOST_DESCRIPTORS = 1 << 18, 64
#: Limits that a request carries, in this order.
LIMITS = tuple(sorted(value for name, value in vars(resource).items() if name.startswith("RLIMIT_")))

#: The last argument: a process's name in `ps` is written over its arguments.
ROOM_FOR_NAMES = "." * 8192


def main() -> NoReturn:
    """Import, then fork what is asked for; a forked child returns from `_serve` and becomes the command."""
    die_with_starter()
    atexit.register(_end)  # the first, so called last
    # It ends with whoever started it. A signal to a child that has just been forked waits.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    setproctitle("python -m common.fork_server")
    control = socket.socket(fileno=int(sys.argv[1]))
    for name in sys.argv[2:-1]:
        with contextlib.suppress(ImportError):  # the command that needs it says so
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # no child's collector copies the pages
    server = os.getpid()
    request = _serve(control)
    _become(request, server)
    global _status
    try:
        runpy.run_module(request["words"][1], run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        _status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        raise
    except KeyboardInterrupt:
        _status = -signal.SIGINT
        raise
    except BaseException:
        _status = 1
        raise
    sys.exit()


_status = 0


def _end() -> None:
    """End a child with its status, but without freeing what it has imported, which takes half a second with torch."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more; closed by the command
            stream.flush()
    if _status < 0:
        signal.signal(-_status, signal.SIG_DFL)
        os.kill(os.getpid(), -_status)
    os._exit(_status)


def _serve(control: socket.socket) -> dict[str, Any]:
    """Fork until nobody holds the other end of `control`. Returns in children alone."""
    ready = selectors.DefaultSelector()
    ready.register(control, selectors.EVENT_READ)
    replies: dict[int, socket.socket] = {}
    while True:
        for key, _ in ready.select():
            if key.fileobj is control:
                said, received, _, _ = socket.recv_fds(control, _MOST_BYTES, _MOST_DESCRIPTORS)
                if not said:
                    os._exit(0)
                reply = socket.socket(fileno=received[0])
                pid = os.fork()
                if pid == 0:
                    ready.close()
                    control.close()
                    for other in replies.values():
                        other.close()
                    return _started(json.loads(said), received[1:], reply)
                for descriptor in received[1:]:
                    os.close(descriptor)
                replies[pid] = reply
                ready.register(reply, selectors.EVENT_READ, pid)
                ready.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
            elif isinstance(key.fileobj, socket.socket):
                if key.data in replies:  # whoever asked for it has ended before it did
                    ready.unregister(key.fileobj)
                    os.kill(key.data, signal.SIGKILL)
            else:
                _, status = os.waitpid(key.data, 0)
                ready.unregister(key.fileobj)
                os.close(key.fd)
                reply = replies.pop(key.data)
                with contextlib.suppress(KeyError):
                    ready.unregister(reply)
                with contextlib.suppress(OSError):
                    reply.send(str(os.waitstatus_to_exitcode(status)).encode())
                reply.close()


def _started(request: dict[str, Any], received: Sequence[int], reply: socket.socket) -> dict[str, Any]:
    """In the child: take the descriptors and answer with the id."""
    os.setsid()
    above = max([*request["descriptors"], *received]) + 1
    high = [os.dup2(source, above + index) for index, source in enumerate(received)]
    reply_at = os.dup2(reply.detach(), above + len(high), inheritable=False)
    for number in {*range(3, above)} & {int(name) for name in os.listdir("/proc/self/fd")}:
        with contextlib.suppress(OSError):
            os.close(number)
    for number, source in zip(request["descriptors"], high, strict=True):
        os.dup2(source, number, inheritable=True)
        os.close(source)
    with socket.socket(fileno=reply_at) as answer:
        try:
            answer.send(str(os.getpid()).encode())
        except OSError:  # whoever asked for it has ended
            os._exit(1)
    return request


def _become(request: dict[str, Any], server: int) -> None:
    """Give this process the surroundings of whoever asked `server` for it."""
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
    if "OMP_NUM_THREADS" in environment and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(int(environment["OMP_NUM_THREADS"]))
    # The server's streams know of its own files what is not true of these.
    at_once = bool(environment.get("PYTHONUNBUFFERED"))
    sys.stdin = open(0, encoding=sys.stdin.encoding, errors=sys.stdin.errors, closefd=False)  # noqa: SIM115
    sys.stdout, sys.stderr = _stream(1, sys.stdout, at_once), _stream(2, sys.stderr, at_once)
    # In place of the server's.
    setproctitle(" ".join(["python", *words]).encode(errors="replace").decode())


def _stream(descriptor: int, like: TextIO, at_once: bool) -> TextIO:
    binary = open(descriptor, "wb", buffering=0 if at_once else -1, closefd=False)  # noqa: SIM115
    is_live = not at_once and (binary.isatty() or descriptor == 2)
    return io.TextIOWrapper(binary, like.encoding, like.errors, line_buffering=is_live, write_through=at_once)


if __name__ == "__main__":
    main()
