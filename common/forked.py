"""Start commands by forking a process that has imported torch: they begin in milliseconds instead of seconds.

`start_python` starts `python -m module …` through the fork server of this process, or of the one that started it. It
starts a new interpreter if there is no server, or if the command needs variables that are read when Python or a library
starts. A forked command has its starter's directory, signal handling, cores and limits. It is killed when its starter
or the server ends.

Linux only: elsewhere every command is a new interpreter.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import json
import math
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

from common.fork_server import LIMITS, MOST_BYTES, MOST_DESCRIPTORS, ROOM_FOR_NAMES
from common.process import PARENT_VARIABLE

#: Environment variable: the descriptor on which a command's descendants reach the server.
VARIABLE = "FORK_SERVER"
#: What commands that use torch import; none of these modules is itself run as a command.
PRELOADED = (
    *("torch", "torch.distributed.run", "h5py", "tensorboard.summary.writer.record_writer", "trainer.launch.failure"),
    *("trainer.options", "trainer.loop", "trainer.devices.select", "trainer.checkpoint.interop.write"),
    *("stages.evaluation.bert",),
)
#: Prefixes of variables that Python, the C library, torch and the libraries it links read only once, at start-up.
_READ_AT_START = (
    *("PYTHON", "LD_", "GLIBC_", "MALLOC_", "LC_", "LANG", "TZ", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_"),
    *("ATEN_", "DNNL_", "ONEDNN_", "TORCH", "PYTORCH_", "C10_", "HDF5_"),
)
#: Exceptions, which a forked command takes from its own environment.
_TAKEN_OVER = ("PYTHONUNBUFFERED", "OMP_NUM_THREADS", "TORCHELASTIC_", "TORCH_NCCL_")
_LONGEST_POLL_S = 1e6  # in milliseconds it fits into a C int
_SIGNALS = tuple(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})


class Forked:
    """A command that the server has forked or is about to. Its process group and session are its own."""

    def __init__(self, words: Sequence[str], reply: socket.socket) -> None:
        """`reply`: on it the process sends its id, then the server its exit status."""
        self.args = list(words)
        self.returncode: int | None = None
        self._reply = reply
        self._pid: int | None = None
        self._receiving = threading.RLock()  # a signal's handler may interrupt its own thread

    @property
    def pid(self) -> int:
        """Waits until the server has forked. Raises `ConnectionError` if it ended before that."""
        while self._pid is None and self.returncode is None:
            self._receive(None)
        if self._pid is None:
            raise ConnectionError("it was never forked")
        return self._pid

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status, as `subprocess.Popen` gives it; that of SIGKILL if it died with the server.

        Raises `subprocess.TimeoutExpired`.
        """
        ends = time.monotonic() + (timeout or 0.0)
        while self.returncode is None:
            left = None if timeout is None else max(0.0, ends - time.monotonic())
            if not self._receive(left) and timeout is not None and left == 0:
                raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def signal_group(self, signum: signal.Signals) -> None:
        """Signal its process group; if it is not forked yet, it never will be."""
        if self._pid is None and not self._receive(0):
            self._end(-signum)
        if self._pid is not None:  # also after its end: workers of its group may be left
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._pid, signum)

    def _receive(self, timeout: float | None) -> bool:
        """Take the server's next message; returns whether one came in time."""
        with contextlib.suppress(ValueError):  # another thread has seen the end
            poll = select.poll()
            poll.register(self._reply, select.POLLIN)
            poll.poll(None if timeout is None else math.ceil(1000 * min(timeout, _LONGEST_POLL_S)))
        with self._receiving:
            try:
                if self.returncode is None:
                    self._take(self._reply.recv(64, socket.MSG_DONTWAIT))
            except OSError:  # no message, or a signal handler has ended it
                return self.returncode is not None
            return True

    def _take(self, said: bytes) -> None:
        what, _, number = said.decode().partition(" ")
        if what == "pid":
            self._pid = int(number)
        else:
            self._end(int(number) if what == "status" else -signal.SIGKILL)

    def _end(self, status: int) -> None:
        self.returncode = status
        self._reply.close()


class NewInterpreter(subprocess.Popen[bytes]):
    """A command with an interpreter of its own."""

    def signal_group(self, signum: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signum)


@dataclass
class _Client:
    """The server that this process uses."""

    control: socket.socket
    #: What the server's environment was when it started.
    environment: Mapping[str, str]
    process: subprocess.Popen[bytes] | None = None


_client: _Client | None = None
_finding = threading.Lock()


def start(preloaded: Sequence[str] = PRELOADED) -> None:
    """Start the server for this process and the commands that it starts, unless it has one. Returns immediately.

    Does nothing if importing torch also imports a device's package, which may not survive a fork.
    """
    global _client
    if _client is not None and _client.process is not None and _client.process.poll() is not None:
        stop()
    if not hasattr(os, "pidfd_open") or _current() is not None or entry_points(group="torch.backends"):
        return
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "common.fork_server", str(theirs.fileno()), *preloaded, ROOM_FOR_NAMES],
            stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()],
            env={**os.environ, PARENT_VARIABLE: str(os.getpid())},
        )  # fmt: skip
    _client = _Client(ours, dict(os.environ), process)
    atexit.register(stop)


def stop() -> None:
    """End the server that this process has started, and with it the commands that it has forked."""
    global _client
    if _client is not None and _client.process is not None:
        _client.control.close()
        _client.process.kill()
        _client.process.wait()
        _client = None


def _current() -> _Client | None:
    """The server of this process: its own, or the one that it was given."""
    global _client
    with _finding:
        given = os.environ.pop(VARIABLE, "")
        if _client is None and given:
            descriptor, inode, environment = given.split(" ", 2)
            # Children that do not inherit the descriptor may inherit the variable.
            with contextlib.suppress(OSError):
                if os.fstat(int(descriptor)).st_ino == int(inode):
                    _client = _Client(socket.socket(fileno=int(descriptor)), json.loads(environment))
        return _client


def start_python(
    words: Sequence[str],
    *,
    environment: Mapping[str, str],
    output: int,
    errors: int | None = None,
    keep_open: Sequence[int] = (),
    directory: Path | None = None,
    prefix: Sequence[str] = (),
) -> Forked | NewInterpreter:
    """Start `python words…` in a session of its own, its output and errors going to descriptors.

    `errors`: as `output` if None; `keep_open`: more descriptors to inherit; `directory`: this process's if None;
    `prefix`: words that start Python elsewhere, where this process's server cannot be reached.
    """
    client = None if prefix else _current()
    errors = output if errors is None else errors
    way, control = ({}, []) if client is None else _way_to(client)
    variables = {**{name: value for name, value in environment.items() if name != VARIABLE}, **way}
    keep_open = [*keep_open, *control]
    if client is not None and words[0] == "-m" and _read_at_start(environment) == _read_at_start(client.environment):
        with contextlib.suppress(OSError):  # it has died, or the command is too long for a message
            descriptors = {0: None, 1: output, 2: errors, **{number: number for number in keep_open}}
            return _fork(client, words, variables, directory, descriptors)
    return NewInterpreter(
        [*prefix, sys.executable, *words], stdin=subprocess.DEVNULL, stdout=output, stderr=errors, env=variables,
        pass_fds=keep_open, cwd=directory, start_new_session=True,
    )  # fmt: skip


def way_to_server() -> tuple[dict[str, str], list[int]]:
    """The variable and the descriptor by which a child process reaches this one's server, if it has one."""
    client = _current()
    return ({}, []) if client is None else _way_to(client)


def _way_to(client: _Client) -> tuple[dict[str, str], list[int]]:
    control = client.control.fileno()
    fixed = json.dumps(_read_at_start(client.environment))
    return {VARIABLE: f"{control} {os.fstat(control).st_ino} {fixed}"}, [control]


def _read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_READ_AT_START) and not name.startswith(_TAKEN_OVER)
    }


def _fork(
    client: _Client,
    words: Sequence[str],
    environment: Mapping[str, str],
    directory: Path | None,
    descriptors: Mapping[int, int | None],
) -> Forked:
    """`descriptors`: the command's → this process's; None: /dev/null. Raises `OSError`."""
    request = {
        "words": list(words),
        "environment": dict(environment),
        "directory": str(directory or os.getcwd()),
        "ignored": [signum for signum in _SIGNALS if signal.getsignal(signum) == signal.SIG_IGN],
        "blocked": [int(signum) for signum in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
        "cores": list(os.sched_getaffinity(0)),
        "limits": [resource.getrlimit(limit) for limit in LIMITS],
        "descriptors": list(descriptors),
    }
    message = json.dumps(request).encode()
    if len(message) > MOST_BYTES or len(descriptors) >= MOST_DESCRIPTORS:  # one is for the reply
        raise OSError(errno.EMSGSIZE, os.strerror(errno.EMSGSIZE))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, open(os.devnull, "rb") as nothing:
        sources = [nothing.fileno() if source is None else source for source in descriptors.values()]
        try:
            socket.send_fds(client.control, [message], [theirs.fileno(), *sources])
        except OSError:
            ours.close()
            raise
    return Forked(words, ours)
