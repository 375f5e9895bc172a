"""`--spawn N`: the trainer starts its own N workers on this machine, with our torchrun, in place of this process."""

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
    """Become `torchrun --nproc_per_node WORKERS -m trainer` with the options `words`, `--spawn` left out.

    Raises `UserError` if the number is not positive, or if torchrun has started this process already.
    """
    if workers < 1:
        raise UserError(f"--spawn {workers} is not a number of workers; allowed: 1 or more")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise UserError(f"--spawn {workers} under torchrun starts workers twice; leave one of them out")
    option = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    option.add_argument("--spawn")
    _, rest = option.parse_known_args(words)
    # Until torchrun takes care of them, signals wait: the handlers of this process do not survive.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    launcher = ["-m", "trainer.launch.torchrun", "--standalone", "--local-addr=127.0.0.1", "--max-restarts=0"]
    os.execv(sys.executable, [sys.executable, *launcher, f"--nproc_per_node={workers}", "-m", "trainer", *rest])
