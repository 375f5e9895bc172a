"""`python -m tests.trainer.devices.no_waiting …` is `python -m trainer …` on a GPU, where torch refuses whatever makes
a step wait for it. Prints how many steps were watched."""

from __future__ import annotations

import sys
from typing import Any

import torch

from trainer.__main__ import main
from trainer.loop import Trainer

#: The first steps allocate memory and load kernels.
UNWATCHED = 2


def watch() -> list[int]:
    """Watch every later step; returns a list that grows by one for each."""
    steps: list[int] = []
    train_step = Trainer.train_step

    def watched(self: Trainer, *args: Any) -> bool:
        torch.cuda.set_sync_debug_mode("error" if len(steps) >= UNWATCHED else "default")
        try:
            steps.append(len(steps))
            return train_step(self, *args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    Trainer.train_step = watched  # type: ignore[method-assign]
    return steps


if __name__ == "__main__":
    seen = watch()
    status = main()
    print(f"watched {len(seen) - UNWATCHED} steps")
    sys.exit(status)
