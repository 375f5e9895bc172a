"""torchrun, but it ends with its workers' exit status and without a traceback of its own, dies with its parent, and
hands a stop signal on to the workers, as long as they may need (torchrun kills them after 30 s). With `--nnodes` above
1 it says whom it waits for, and who has not come.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading

import psutil
from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main, parse_args

from common.errors import EXIT_INTERRUPTED, EXIT_NODE_MISSING, EXIT_SOFTWARE, EXIT_USER_ERROR, NodeMissing, UserError
from common.process import (
    IGNORED_VARIABLE,
    PARENT_VARIABLE,
    STOP_SIGNALS,
    die_with_starter,
    heeded_signals,
    shell_status,
)
from trainer.launch.rendezvous import choose_interface, meet


def run() -> int:
    """Start workers as torchrun's own arguments say; returns 0, or the status of the worker that failed first;
    69 if another node did not come."""
    die_with_starter()
    os.environ[PARENT_VARIABLE] = str(os.getpid())  # the workers' parent: they see if it died before they began
    heeded = heeded_signals()
    os.environ[IGNORED_VARIABLE] = " ".join(str(int(signum)) for signum in STOP_SIGNALS - heeded)
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    threading.Thread(target=_hand_on_signals, args=(heeded,), daemon=True).start()
    # What went wrong is in the workers' own words; torchrun's log repeats it as a table and a traceback.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        store = _meet_others()
        # Its folder of logs would stay in /tmp when it is killed, and nothing is written there.
        main([f"--log-dir={os.devnull}", *sys.argv[1:]])
        del store  # torchrun has used it
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return EXIT_NODE_MISSING if isinstance(error, NodeMissing) else EXIT_USER_ERROR
    except ChildFailedError as error:
        return shell_status(error.get_first_failure()[1].exitcode)
    except DistError as error:
        # Between nodes: another one's torchrun has gone.
        print(f"error: lost the other nodes: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
        return EXIT_SOFTWARE
    return 0


def _meet_others() -> TCPStore | None:
    """Wait for the other nodes, if there are any. Raises `UserError`."""
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


def _hand_on_signals(heeded: frozenset[signal.Signals]) -> None:
    """Blocked in this process, a stop signal waits here, whatever handler torchrun has set for it."""
    while True:
        signal.sigwait(heeded)
        workers = psutil.Process().children()
        if not workers:
            os._exit(EXIT_INTERRUPTED)
        for worker in workers:
            worker.send_signal(signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(run())
