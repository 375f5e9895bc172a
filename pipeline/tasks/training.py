"""What all trainings have in common: their command and their manifest."""

from __future__ import annotations

from typing import Any

from common.errors import UserError
from common.files import read_json
from pipeline.launchers.torchrun import trainer_command
from pipeline.luigi_adapters.luigid_progress import has_audience
from pipeline.tasks.stage import Stage
from stages.directory import manifest
from stages.directory.manifest import StartTime


class Training(Stage):
    """Runs the trainer, which resumes from its last checkpoint."""

    on_cluster = on_all_nodes = resumes = True

    @property
    def accepts_messages(self) -> bool:
        """Asked by luigi; `luigid_progress` handles the messages."""
        return has_audience()

    def machine_options(self) -> dict[str, Any]:
        """The trainer's options that decide where and how it trains, but not what."""
        cluster, run = self.settings.cluster, self.settings.run
        return {
            "non_finite": run.non_finite,
            "non_finite_limit": run.non_finite_limit,
            "replica_check_steps": run.replica_check_steps,
            "device": cluster.device,
            "data_parallel": cluster.data_parallel,
            "batches_per_execution": cluster.batches_per_execution,
            "collective_timeout": cluster.collective_timeout_s,
        }

    def launched(self, options: dict[str, Any], flags: list[str]) -> list[str]:
        """The trainer with these options, on as many workers as the settings say."""
        # Trainings that may run at the same time use different ports: the two phases, and the MLP.
        return trainer_command(self.settings.cluster, options, flags, port_offset=getattr(self, "phase", 3) - 1)

    @property
    def hang_timeout_s(self) -> float:
        return self.settings.cluster.hang_timeout_s

    def finish(self, start: StartTime) -> None:
        """Write the manifest: the last checkpoint is the output, the trainer's results are the counts."""
        results = read_json(self.directory / "results.json")
        if results is None:
            raise UserError(f"{self.directory / 'results.json'} is missing although training ended; run the same again")
        if self.max_steps is not None and results["steps"] < self.max_steps:
            raise UserError(
                f"{self.label} ended with exit status 0 at step {results['steps']} of {self.max_steps}; "
                f"run the same again"
            )
        name = f"checkpoints/ckpt_{results['global_step']}"
        entries = read_json(self.directory / name / "manifest.json")
        if entries is None:
            raise UserError(f"{self.directory / name} is missing although training ended; run the same again")
        outputs = [manifest.Output(f"{name}/{e['path']}", e["bytes"], e["sha256"]) for e in entries["files"]]
        counts = {**results, "checkpoint": name}
        manifest.finish(self.directory, self.identity, outputs, counts, start=start)
