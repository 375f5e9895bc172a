"""A wrapper around torchrun: exits with its workers' status and without a traceback, dies with its parent, and forwards
stop signals without a deadline (torchrun kills workers after 30 s). With several nodes it names the missing ones.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

from common.errors import EXIT_INTERRUPTED, EXIT_SOFTWARE, UserError
from common.forked import Forked, NewInterpreter, start, start_python
from common.process import (
    IGNORED_VARIABLE,
    PARENT_VARIABLE,
    STOP_SIGNALS,
    THREADS_VARIABLE,
    die_with_starter,
    heeded_signals,
    shell_status,
)

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler


def run() -> int:
    """Start workers with torchrun's arguments; returns 0, the status of the worker that failed first, or 69 if a node
    is missing."""
    die_with_starter()
    os.environ[PARENT_VARIABLE] = str(os.getpid())  # lets workers see that it died before they started
    heeded = heeded_signals()
    os.environ[IGNORED_VARIABLE] = " ".join(str(int(signum)) for signum in STOP_SIGNALS - heeded)
    if "OMP_NUM_THREADS" in os.environ:
        os.environ[THREADS_VARIABLE] = "1"
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    threading.Thread(target=_forward_signals, args=(heeded,), daemon=True).start()
    start()  # imports torch while this process does
    return _torchrun()


def _torchrun() -> int:
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous
    from torch.distributed.run import main

    # Workers report their own errors; torchrun's log would repeat them as a table and a traceback.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    SubprocessHandler._popen = _start_worker  # type: ignore[assignment, method-assign]
    # For events that nobody reads, torchrun inspects the stack and with it every imported module: 1.5 s of CPU time.
    dynamic_rendezvous.get_method_name = lambda depth=2: "rendezvous"
    try:
        store = _meet_others()
        # torchrun's log directory would stay in /tmp after a kill, and nothing is written there.
        main([f"--log-dir={os.devnull}", *sys.argv[1:]])
        del store  # kept open until torchrun has finished
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_status
    except ChildFailedError as error:
        return shell_status(error.get_first_failure()[1].exitcode)
    except DistError as error:
        # Another node's torchrun has exited.
        print(f"error: lost the other nodes: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
        return EXIT_SOFTWARE
    return 0


_workers: list[Forked | NewInterpreter] = []


def _start_worker(handler: SubprocessHandler, args: tuple[str, ...], env: dict[str, str]) -> Any:
    """Replaces torchrun's way to start a worker: forks it from a process that has imported torch, if there is one."""
    words = [word for word in args[1:3] if word != "-u"]
    worker = start_python([*words, *args[3:]], environment={**env, "PYTHONUNBUFFERED": "1"}, output=1, errors=2)
    _workers.append(worker)
    return worker


def _meet_others() -> TCPStore | None:
    """Wait for the other nodes, if any. Raises `UserError`."""
    from torch.distributed.run import parse_args

    from trainer.launch.rendezvous import choose_interface, meet

    args = parse_args(sys.argv[1:])
    nodes = int(args.nnodes) if args.nnodes.isdigit() else 1
    if nodes == 1 or args.rdzv_backend != "static":
        return None
    conf = dict(pair.split("=", 1) for pair in args.rdzv_conf.split(",") if pair)
    store = meet(
        args.master_addr,
        args.master_port,
        rank=args.node_rank,
        nodes=nodes,
        command=[str(args.nproc_per_node), args.training_script, *args.training_script_args],
        timeout_s=float(conf.get("timeout", 600)),
    )
    interface = choose_interface(args.master_addr, args.master_port)
    place = f"{args.master_addr}:{args.master_port}"
    print(f"node {args.node_rank} of {nodes}, which meet at {place}; talks over {interface}", flush=True)
    return store


def _forward_signals(heeded: frozenset[signal.Signals]) -> None:
    """Forward stop signals to the workers; they are blocked in this process, so torchrun's handlers never run."""
    while True:
        signal.sigwait(heeded)
        if not _workers:
            os._exit(EXIT_INTERRUPTED)
        for worker in _workers:
            if worker.returncode is None:
                with contextlib.suppress(ProcessLookupError, ConnectionError):
                    os.kill(worker.pid, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(run())
