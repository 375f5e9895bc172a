"""How a worker ends that has failed, so that a run ends with one status and one line whichever worker fails first."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback

from torch.distributed import DistError

from common.errors import EXIT_SOFTWARE, AgreedError, UserError
from trainer.parallel.mesh import Mesh

#: Seconds that a worker which has lost another leaves to torchrun to see the other's status.
_PATIENCE_S = 20.0
#: In the messages of gloo, NCCL and torch's store when another worker has gone, or does not answer.
_SIGNS_OF_LOSS = ("gloo/transport", "Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL")


def end(error: Exception, mesh: Mesh) -> int:
    """Say what has ended this worker, and return the exit status of its process; one of several ends here.

    A worker that fails takes the others with it: they lose their connection to it, and may be gone before it is. So
    they wait until torchrun, which ends with the status of the first that it sees end, has seen the one that failed.
    """
    alone = mesh.world_size == 1
    status = error.exit_status if isinstance(error, UserError) else EXIT_SOFTWARE
    if isinstance(error, UserError):
        if not isinstance(error, AgreedError) or mesh.is_root:
            who = "" if alone or isinstance(error, AgreedError) else f"worker {mesh.rank}: "
            sys.stderr.write(f"error: {who}{error}\n")  # in one piece: other workers may be saying something, too
    elif not alone and _is_loss(error):
        reason = str(error).splitlines()[0]
        sys.stderr.write(f"worker {mesh.rank} has lost the others, and ends with them: {reason}\n")
        sys.stderr.flush()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # torchrun's, once it has seen the one that failed
        time.sleep(_PATIENCE_S)
    else:
        traceback.print_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    if alone and isinstance(error, UserError):
        return status
    # At once: threads may be in a collective operation that never ends, and a process group that is torn down while
    # another worker is gone aborts the process.
    os._exit(status)


def _is_loss(error: Exception) -> bool:
    """Whether a collective operation has failed because of another worker."""
    if isinstance(error, DistError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS_OF_LOSS)
