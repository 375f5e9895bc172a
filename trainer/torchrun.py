"""torchrun, but it ends with its workers' exit status and without a traceback of its own, and dies with its parent."""

from __future__ import annotations

import logging
import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

from trainer.process import die_with_starter


def run() -> int:
    """Start workers as torchrun's own arguments say; returns 0, or the status of the worker that failed first."""
    die_with_starter()
    # What went wrong is in the workers' own words; torchrun's log repeats it as a table and a traceback.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        main()
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        return code if code > 0 else 128 - code  # killed by a signal: as shells count
    return 0


if __name__ == "__main__":
    sys.exit(run())
