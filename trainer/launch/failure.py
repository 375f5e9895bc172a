"""How a failed worker exits, so that a run ends with one exit status and one line, whichever worker fails first."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback

from torch.distributed import DistBackendError, DistError

from common.errors import EXIT_SOFTWARE, AgreedError, UserError
from trainer.launch.preemption import signalled
from trainer.parallel.mesh import Mesh

#: Seconds that a worker which lost another waits for torchrun to see the other's exit status; and that workers with an
#: error that all agreed on wait for the root's, before which it prints the line.
_PATIENCE_S, _ROOTS_TURN_S = 20.0, 2.0
#: Substrings of the errors of gloo, NCCL and torch's store when another worker has exited or does not answer.
_SIGNS_OF_LOSS = ("gloo/transport", "Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL")


def end(error: Exception, mesh: Mesh) -> int:
    """Report the error and return the exit status; with several workers, exit here.

    When a worker fails, the others lose their connection to it and may exit before it does. torchrun takes the status
    of the worker that exits first, so the others wait until it has seen the one that failed.
    """
    alone = mesh.world_size == 1
    status = error.exit_status if isinstance(error, UserError) else EXIT_SOFTWARE
    if isinstance(error, UserError):
        if not isinstance(error, AgreedError) or mesh.is_root:
            who = "" if alone or isinstance(error, AgreedError) else f"worker {mesh.rank}: "
            sys.stderr.write(f"error: {who}{error}\n")  # one write: other workers may print at the same time
        else:
            _await_the_others(_ROOTS_TURN_S)
    elif not alone and is_loss(error):
        sys.stderr.write(f"worker {mesh.rank} {_said(error)}\n")
        sys.stderr.flush()
        _await_the_others(_PATIENCE_S)
    else:
        traceback.print_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    if alone and isinstance(error, UserError):
        return status
    # Without cleanup: threads may hang in a collective, and destroying a process group that has lost a member aborts
    # the process.
    os._exit(status)


def _await_the_others(most_s: float) -> None:
    """Until torchrun sends SIGTERM, as it does once it has seen a failed worker: that may have been long ago."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if not signalled.is_set():
        time.sleep(most_s)


def _said(error: Exception) -> str:
    """NCCL's own failures look like the loss of a worker, and give their cause in later lines."""
    if isinstance(error, DistBackendError):
        return f"has lost another worker, or NCCL has failed here, and stops: {error}"
    return f"lost the connection to another worker and stops: {str(error).splitlines()[0]}"


def is_loss(error: Exception) -> bool:
    """Whether a collective failed because of another worker."""
    if isinstance(error, DistError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS_OF_LOSS)
