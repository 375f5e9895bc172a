"""`--spawn N`: replace this process by our torchrun with N workers on this machine."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from common.errors import UserError
from common.process import STOP_SIGNALS


def spawn(workers: int, words: Sequence[str]) -> NoReturn:
    """Exec `torchrun --nproc_per_node WORKERS -m trainer` with the options `words`, without `--spawn`.

    Raises `UserError` if `workers` is not positive, or if this process was started by torchrun.
    """
    if workers < 1:
        raise UserError(f"--spawn {workers} is not a number of workers; allowed: 1 or more")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise UserError(f"--spawn {workers} under torchrun starts workers twice; leave one of them out")
    option = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    option.add_argument("--spawn")
    _, rest = option.parse_known_args(words)
    # Handlers do not survive exec: block the signals until torchrun handles them.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    launcher = ["-m", "trainer.launch.torchrun", "--standalone", "--local-addr=127.0.0.1", "--max-restarts=0"]
    os.execv(sys.executable, [sys.executable, *launcher, f"--nproc_per_node={workers}", "-m", "trainer", *rest])
