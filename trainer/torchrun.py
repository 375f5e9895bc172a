"""torchrun, but it ends with its workers' exit status and without a traceback of its own, dies with its parent, and
hands a stop signal on to the workers, as long as they may need (torchrun kills them after 30 s).
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading

import psutil
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

from trainer.errors import EXIT_INTERRUPTED
from trainer.process import PARENT_VARIABLE, STOP_SIGNALS, die_with_starter


def run() -> int:
    """Start workers as torchrun's own arguments say; returns 0, or the status of the worker that failed first."""
    die_with_starter()
    os.environ[PARENT_VARIABLE] = str(os.getpid())  # the workers' parent: they see if it died before they began
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    threading.Thread(target=_hand_on_signals, daemon=True).start()
    # What went wrong is in the workers' own words; torchrun's log repeats it as a table and a traceback.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        main()
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        return code if code > 0 else 128 - code  # killed by a signal: as shells count
    return 0


def _hand_on_signals() -> None:
    """Blocked in this process, a stop signal waits here, whatever handler torchrun has set for it."""
    while True:
        signal.sigwait(STOP_SIGNALS)
        workers = psutil.Process().children()
        if not workers:
            os._exit(EXIT_INTERRUPTED)
        for worker in workers:
            worker.send_signal(signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(run())
