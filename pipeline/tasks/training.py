"""What all trainings have in common: how they are started, when they are started again, what they leave."""

from __future__ import annotations

from typing import Any

from common.errors import UserError
from common.files import read_json
from pipeline.launchers import process
from pipeline.launchers.restarts import FINAL_STATUSES, Restarts, newest_checkpoint
from pipeline.tasks.luigid_progress import has_audience
from pipeline.tasks.stage import Stage
from stages.directory import manifest


class Training(Stage):
    """Runs the trainer in processes of its own; an interrupted one goes on from its last checkpoint."""

    on_cluster = on_all_nodes = resumes = True
    _restarts = Restarts()

    @property
    def accepts_messages(self) -> bool:
        """Luigi's question; what it takes is in `luigid_progress`."""
        return has_audience()

    def machine_options(self) -> dict[str, Any]:
        """The trainer's options that say where and how, and not what."""
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
        """The trainer with those options, on as many workers as the settings say."""
        cluster = self.settings.cluster
        arguments = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        switches = {"--compile": cluster.compile, "--spot_watch": cluster.spot_watch}
        trainer = ["-m", "trainer", *arguments, *flags, *(name for name, on in switches.items() if on)]
        if cluster.nnodes > 1:
            # Trainings that may run at the same time do not meet: the two phases, and the MLP.
            port = cluster.master_port + getattr(self, "phase", 3) - 1
            # Which of the nodes it is on, and where they meet, the launcher says in the environment.
            meeting = [
                f"--nnodes={cluster.nnodes}",
                f"--master_port={port}",
                f"--rdzv_conf=timeout={cluster.join_timeout_s:g}",
            ]
        elif cluster.nproc_per_node > 1:
            # Standalone: a port of its own, so that two runs on one machine do not meet.
            meeting = ["--standalone", "--local-addr=127.0.0.1"]
        else:
            return trainer
        workers = f"--nproc_per_node={cluster.nproc_per_node}"
        return ["-m", "trainer.launch.torchrun", *meeting, "--max-restarts=0", workers, *trainer]

    def hang_timeout_s(self) -> float:
        return self.settings.cluster.hang_timeout_s

    def may_restart(self, result: process.ProcessResult) -> bool:
        """After a crash or a hang, yes, until `MAX_RESTARTS` of them in a row have not brought one more checkpoint."""
        if result.status in FINAL_STATUSES:
            return False
        self._restarts = self._restarts.at(newest_checkpoint(self.directory))
        return not self._restarts.are_too_many

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
