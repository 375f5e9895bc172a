"""What a process of ours does about its parent and its signals."""

from __future__ import annotations

import ctypes
import io
import os
import signal
import socket
import sys

from common.errors import EXIT_INTERRUPTED

#: Set by whoever starts one of our commands, to its process id: the command is to die with it.
PARENT_VARIABLE = "STAGE_PARENT_PID"
#: Which of several machines this is, and the address of the first: torchrun's own names for its defaults.
NODE_RANK_VARIABLE, MASTER_ADDR_VARIABLE = "PET_NODE_RANK", "PET_MASTER_ADDR"
#: Name of a thread that holds no lock a forked child needs.
HEARTBEAT_THREAD = "heartbeat"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
#: What asks a process of ours to save and stop. SIGUSR1: a scheduler, ahead of its time limit. SIGHUP: a terminal that
#: is closed.
STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP})
#: Numbers of those that torchrun's starter ignores, as under nohup: torchrun itself would not hand that on to workers.
IGNORED_VARIABLE = "TRAINER_IGNORED_SIGNALS"


def available_cores() -> int:
    """Processors that this process may use, as far as the system tells."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def print_in_any_locale() -> None:
    """Have characters that the terminal's encoding lacks printed as "?", instead of failing with them."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def node_rank() -> int:
    """Which of several machines this is; 0 where there is one. torchrun tells its workers as GROUP_RANK."""
    return int(os.environ.get("GROUP_RANK") or os.environ.get(NODE_RANK_VARIABLE, "0"))


def stop_early_on_signals() -> None:
    """Until there is something to save, a stop signal ends the process at once, as one that can go on.

    (`trainer.launch.torchrun` blocks the signals for itself, and its children begin with them blocked.)
    """
    heeded = heeded_signals()
    for signum in STOP_SIGNALS:
        signal.signal(signum, (lambda *_: os._exit(EXIT_INTERRUPTED)) if signum in heeded else signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def is_ignored(signum: int) -> bool:
    """Whether whoever started this process has it ignore a signal, as nohup does with SIGHUP."""
    return signal.getsignal(signum) == signal.SIG_IGN


def heeded_signals() -> frozenset[signal.Signals]:
    """The stop signals, without those that this process was started to ignore."""
    ignored = {int(number) for number in os.environ.get(IGNORED_VARIABLE, "").split()}
    return frozenset(signum for signum in STOP_SIGNALS if signum not in ignored and not is_ignored(signum))


def shell_status(code: int) -> int:
    """The exit status of a process as shells count it: 128 more than the signal that killed it."""
    return code if code >= 0 else 128 - code


def free_port() -> int:
    """A TCP port of this machine that nobody listens on now."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def die_with_starter() -> None:
    """`die_with_parent` for a command that was started by one of ours, directly or through torchrun."""
    starter = os.environ.pop(PARENT_VARIABLE, None)
    if starter is not None:
        die_with_parent(int(starter))
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent()


def die_with_parent(expected_parent: int | None = None) -> None:
    """Ask Linux to SIGKILL this process when its parent dies, so that no orphan holds a device or a lock.

    If the parent (`expected_parent`, when given) is gone already, exit at once. Elsewhere than on Linux: only that.
    """
    prctl = getattr(ctypes.CDLL(None, use_errno=True), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if expected_parent is not None and os.getppid() != expected_parent:
        os._exit(1)
