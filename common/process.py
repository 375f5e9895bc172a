"""Processes: cores, ranks, parents, stop signals, exit statuses; and ports."""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import random
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

from common.errors import EXIT_INTERRUPTED, UserError

#: Environment variable: the id of the process that started this command, and with which it must die.
PARENT_VARIABLE = "STAGE_PARENT_PID"
#: Environment variable: set if OMP_NUM_THREADS is the user's, as torchrun sets it to 1 where it was not set.
THREADS_VARIABLE = "TRAINER_THREADS_GIVEN"
#: torchrun's environment variables for the rank of this machine and the address of the first one.
NODE_RANK_VARIABLE, MASTER_ADDR_VARIABLE = "PET_NODE_RANK", "PET_MASTER_ADDR"
#: Name of a thread that holds no lock that a forked child would need.
HEARTBEAT_THREAD = "heartbeat"
#: How nice background work is: training comes first on the processors.
_NICENESS = 15
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
#: Seconds by which a process may outlive its parent in order to save.
SAVING_S = 60.0
#: Seconds between checks that the parent is still there.
_PARENT_POLL_S = 1.0
#: Signals that ask the pipeline's own commands, which no scheduler runs, to stop.
USER_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: Signals that ask a process to save and stop. Schedulers send SIGUSR1 ahead of a time limit, a closed terminal SIGHUP.
STOP_SIGNALS = frozenset((*USER_STOP_SIGNALS, signal.SIGUSR1))
#: Environment variable: the stop signals that torchrun's parent ignores, as under nohup. torchrun does not pass it on.
IGNORED_VARIABLE = "TRAINER_IGNORED_SIGNALS"


def available_cores() -> int:
    """CPU cores that this process may use; all of the machine's if the system does not say."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def print_in_any_locale() -> None:
    """Print "?" for characters that the terminal's encoding lacks, instead of raising."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def node_rank() -> int:
    """The rank of this machine, from 0. torchrun passes it to its workers as GROUP_RANK. Raises `UserError`."""
    name = "GROUP_RANK" if os.environ.get("GROUP_RANK") else NODE_RANK_VARIABLE
    value = os.environ.get(name, "0")
    if not (value.isascii() and value.isdigit()):
        raise UserError(f"the environment variable {name} is '{value}'; allowed: the rank of this machine, from 0")
    return int(value)


def stop_early_on_signals() -> None:
    """Until there is something to save, let a stop signal end the process at once with `EXIT_INTERRUPTED`.

    Also unblocks the signals: `trainer.launch.torchrun` blocks them for itself, which its children inherit.
    """
    heeded = heeded_signals()
    for signum in STOP_SIGNALS:
        signal.signal(signum, (lambda *_: os._exit(EXIT_INTERRUPTED)) if signum in heeded else signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def is_ignored(signum: int) -> bool:
    """Whether this process ignores a signal, as it ignores SIGHUP under nohup."""
    return signal.getsignal(signum) == signal.SIG_IGN


def heeded_signals() -> frozenset[signal.Signals]:
    """The stop signals, except those that this process was started to ignore."""
    ignored = {int(number) for number in os.environ.get(IGNORED_VARIABLE, "").split()}
    return frozenset(signum for signum in STOP_SIGNALS if signum not in ignored and not is_ignored(signum))


def give_way() -> None:
    """Compute only when other processes leave processor time. For a process in its own session: Linux divides processor
    time between sessions (autogroups) first, and a process's niceness counts only within its session."""
    os.nice(_NICENESS)
    with contextlib.suppress(OSError):  # no autogroups
        Path("/proc/self/autogroup").write_text(str(_NICENESS), encoding="ascii")


def shell_status(code: int) -> int:
    """A process's exit status as shells give it: 128 + N for one that signal N killed."""
    return code if code >= 0 else 128 - code


def free_port() -> int:
    """A TCP port of the loopback interface on which nothing listens now; for tests and benchmarks. Below the range from
    which systems give ports to clients, which might take it meanwhile. Raises OSError."""
    for _ in range(1000):
        port = random.SystemRandom().randrange(10_000, 32_768)
        with socket.socket() as server, contextlib.suppress(OSError):
            server.bind(("127.0.0.1", port))
            return port
    raise OSError("no port of 127.0.0.1 could be bound in 1,000 attempts")


@contextlib.contextmanager
def fork_without_warning() -> Iterator[None]:
    """For a fork that no thread endangers: Python 3.12 and newer also count the threads of numpy's OpenBLAS, which ends
    them itself before a fork."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        yield


def die_with_starter() -> None:
    """`die_with_parent` for a command that another of this project's commands started, directly or through torchrun."""
    starter = os.environ.pop(PARENT_VARIABLE, None)
    if starter is not None:
        die_with_parent(int(starter))
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent()


def die_with_parent(expected_parent: int | None = None) -> None:
    """Ask Linux to SIGKILL this process when its parent dies, so that no orphan holds a device or a lock.

    Exits at once if the parent is no longer `expected_parent`. Systems other than Linux have only this check.
    """
    global _dies_with_parent
    _dies_with_parent = True
    _signal_at_parents_death(signal.SIGKILL)
    if expected_parent is not None and os.getppid() != expected_parent:
        os._exit(1)


_dies_with_parent = False


def processes_with(pipe: int) -> list[int]:
    """Ids of the other processes that have the pipe of this descriptor open; [] on systems without /proc."""
    wanted, others = f"pipe:[{os.fstat(pipe).st_ino}]", []
    with contextlib.suppress(OSError):
        others = [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]
    return [pid for pid in others if wanted in _opened_by(pid)]


def _opened_by(pid: int) -> set[str]:
    """What the descriptors of a process refer to; empty if it has ended or is another user's."""
    found, folder = set[str](), f"/proc/{pid}/fd"
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):  # closed meanwhile
                found.add(os.readlink(f"{folder}/{name}"))
    return found


def save_when_parent_dies() -> None:
    """From now on a process that was to die with its parent gets a SIGTERM instead, to save what it has and end;
    `SAVING_S` seconds later it is ended. For processes that handle SIGTERM."""
    if not _dies_with_parent:
        return
    parent = os.getppid()
    _signal_at_parents_death(signal.SIGTERM)
    threading.Thread(target=_end_after, args=(parent,), name="parent", daemon=True).start()


def _signal_at_parents_death(signum: signal.Signals) -> None:
    prctl = getattr(ctypes.CDLL(None, use_errno=True), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signum)


def _end_after(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL_S)
    os.kill(os.getpid(), signal.SIGTERM)  # systems other than Linux have not sent it
    time.sleep(SAVING_S)
    os._exit(EXIT_INTERRUPTED)
