"""Weights & Biases: its server, or offline files that `wandb sync` uploads."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping

from trainer.metrics.trackers.base import TrackedRun
from trainer.metrics.trackers.options import TrackerOptions

#: The directory that the library makes in the training's.
_DIRECTORY = "wandb"
#: Seconds that the server may take to begin a run.
_BEGIN_S = 30.0


class WandbTracker:
    """A run of the project. The library has a process of its own, which ends with this one."""

    def __init__(self, run: TrackedRun, options: TrackerOptions) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # reports of its own errors, to its maker
        import wandb

        is_online = options.wandb_mode == "online"
        if not is_online:
            # What a killed process left there lacks its last seconds, and a separate file would repeat steps.
            for path in (run.directory / _DIRECTORY).glob(f"offline-run-*-{run.id}"):
                shutil.rmtree(path)
        self._run = wandb.init(
            project=options.project, id=run.id, name=run.name, config=dict(run.parameters),
            mode="online" if is_online else "offline",
            resume="allow" if is_online else None, dir=run.directory, reinit="create_new",
            # This process is not the training: its code, output and use of the machine say nothing about that.
            settings=wandb.Settings(
                console="off", silent=True, init_timeout=_BEGIN_S, allow_val_change=True, disable_git=True,
                save_code=False, x_disable_meta=True, x_disable_stats=True, x_save_requirements=False,
            ),
        )  # fmt: skip
        #: Offline there is nothing yet: every step is written again.
        self.last_step = self._run.starting_step - 1 if self._run.resumed else 0

    def add(self, step: int, scalars: Mapping[str, float], at: float) -> None:
        self._run.log({**scalars, "_timestamp": at}, step=step, commit=True)
        self.last_step = step

    def flush(self) -> None:
        """Does nothing: the library sends by itself, and says only at the end that everything is sent."""

    def summarise(self, results: Mapping[str, float]) -> None:
        self._run.summary.update(dict(results))

    def close(self, *, is_whole: bool = False) -> None:
        self._run.finish(exit_code=0 if is_whole else 1)
