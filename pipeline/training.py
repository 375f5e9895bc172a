"""What all trainings have in common: how they are started, when they are started again, what they leave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline import launch
from pipeline.plain_sight import has_audience
from pipeline.stage import Stage
from stages import manifest
from trainer.errors import EXIT_USER_ERROR, UserError
from trainer.files import read_json

#: Restarts in a row without one more checkpoint before training is given up.
MAX_RESTARTS = 3


class Training(Stage):
    """Runs the trainer in processes of its own; an interrupted one goes on from its last checkpoint."""

    #: The step that was reached when it crashed last, and how often it has crashed there.
    _crashes = (-1, 0)

    @property
    def accepts_messages(self) -> bool:
        """Luigi's question; what it takes is in `plain_sight`."""
        return has_audience()

    @property
    def max_steps(self) -> int | None:
        """Optimizer steps in all; None if only the data tells."""
        raise NotImplementedError

    def machine_options(self) -> dict[str, Any]:
        """The trainer's options that say where and how, and not what."""
        cluster = self.settings.cluster
        return {
            "device": cluster.device,
            "data_parallel": cluster.data_parallel,
            "batches_per_execution": cluster.batches_per_execution,
            "collective_timeout": cluster.collective_timeout_s,
        }

    def launched(self, options: dict[str, Any], flags: list[str]) -> list[str]:
        """The trainer with those options, on as many workers as the settings say."""
        cluster = self.settings.cluster
        arguments = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        switches = {"--compile": cluster.compile, "--spot_watch": cluster.spot_watch}
        trainer = ["-m", "trainer", *arguments, *flags, *(name for name, on in switches.items() if on)]
        if cluster.nproc_per_node == 1:
            return trainer
        # Standalone: a port of its own, so that two runs on one machine do not meet.
        torchrun = ["-m", "trainer.torchrun", "--standalone", "--local-addr=127.0.0.1", "--max-restarts=0"]
        return [*torchrun, f"--nproc_per_node={cluster.nproc_per_node}", *trainer]

    def hang_timeout_s(self) -> float:
        return self.settings.cluster.hang_timeout_s

    def may_restart(self, ending: launch.Ending) -> bool:
        """After a crash or a hang, yes, until `MAX_RESTARTS` of them in a row have not brought one more checkpoint.
        What a person has to put right first (exit status 1 or 2) is not tried again."""
        if ending.status in (EXIT_USER_ERROR, 2):
            return False
        step = max((int(path.name.removeprefix("ckpt_")) for path in self._checkpoints()), default=0)
        last_step, restarts = self._crashes
        restarts = restarts + 1 if step == last_step else 1
        self._crashes = (step, restarts)
        return restarts <= MAX_RESTARTS

    def _checkpoints(self) -> list[Path]:
        return [path for path in (self.directory / "checkpoints").glob("ckpt_*") if path.name[5:].isdigit()]

    def finish(self) -> None:
        """The trainer ended well: its last checkpoint is the output, its summary the counts."""
        results = read_json(self.directory / "results.json")
        if results is None:
            raise UserError(f"{self.directory / 'results.json'} is missing although training ended; run the same again")
        name = f"checkpoints/ckpt_{results['global_step']}"
        entries = read_json(self.directory / name / "manifest.json")
        if entries is None:
            raise UserError(f"{self.directory / name} is missing although training ended; run the same again")
        outputs = [manifest.Output(f"{name}/{e['path']}", e["bytes"], e["sha256"]) for e in entries["files"]]
        counts = {**results, "checkpoint": name}
        manifest.finish(self.directory, self.identity, outputs, counts, started=self.started, clock=self.clock)
