"""The BERT chain: compile, train phase 1, convert, train phase 2, merge, evaluate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import luigi

from pipeline import launch, summary
from pipeline.dataset import DownloadDataset, dataset_of
from pipeline.stage import Stage, say
from stages import manifest
from trainer.config import ModelConfig
from trainer.errors import EXIT_USER_ERROR, UserError
from trainer.files import read_json

#: Restarts in a row without one more checkpoint before training is given up.
MAX_RESTARTS = 3


class ModelStage(Stage):
    """A stage that has to know the model."""

    def vocabulary(self, phase: int) -> dict[str, Stage]:
        """The stage that knows the vocabulary and its tokenizer; none for downloaded shards."""
        dataset = dataset_of(phase)
        return {} if isinstance(dataset, DownloadDataset) else dataset.requires()

    def model(self, phase: int) -> ModelConfig:
        """The model of a phase: the settings', with the size of the vocabulary, which is complete."""
        size = self.settings.model.downloaded_vocab_size
        for tokens in self.vocabulary(phase).values():
            size = tokens.counts()["vocab_size"]
        return self.settings.model.config(size)

    def model_parameters(self) -> dict[str, Any]:
        """What the settings say of the model; the vocabulary, if left open, is the data set's."""
        return dict(self.settings.model.param_kwargs)


class Precompile(ModelStage):
    """Builds and compiles every graph the phase needs, before a device waits for it."""

    phase = luigi.IntParameter(description="1 or 2")

    def requires(self) -> dict[str, Stage]:
        return {"dataset": dataset_of(self.phase), **self.vocabulary(self.phase)}

    def ingredients(self) -> dict[str, Stage]:
        """Of the data only the size of the vocabulary is in the graphs."""
        return self.vocabulary(self.phase)

    def parameters(self) -> dict[str, Any]:
        """What changes graphs, and nothing else."""
        phase, cluster = self.settings.phase(self.phase), self.settings.cluster
        return {
            "model": self.model_parameters(),
            "seq_len": phase.seq_len,
            "max_pred_len": phase.max_pred_len,
            "micro_batch_size": phase.micro_batch_size,
            "accumulates": self.settings.grad_accum_usteps(self.phase) > 1,
            "optimizer": phase.optimizer,
            "precision": self.settings.precision.mode,
            "device": cluster.device,
            "nproc_per_node": cluster.nproc_per_node,
            "tensor_parallel_size": cluster.tensor_parallel_size,
        }

    def command(self) -> list[str]:
        return ["-m", "stages.precompile", "--out", str(self.directory), "--device", self.settings.cluster.device]


class Pretrain(ModelStage):
    """Trains one phase, in processes of its own; an interrupted phase goes on from its last checkpoint."""

    phase = luigi.IntParameter(description="1 or 2")
    #: The step that was reached when it crashed last, and how often it has crashed there.
    _crashes = (-1, 0)

    def requires(self) -> dict[str, Stage]:
        return {**self.ingredients(), "precompile": Precompile(phase=self.phase)}

    def ingredients(self) -> dict[str, Stage]:
        start: dict[str, Stage] = {"start": ConvertCheckpoint()} if self.phase == 2 else {}
        return {"dataset": dataset_of(self.phase), **self.vocabulary(self.phase), **start}

    def parameters(self) -> dict[str, Any]:
        phase = self.settings.phase(self.phase)
        names = ("seq_len", "max_pred_len", "global_batch_size", "optimizer", "lr", "warmup_steps", "max_steps")
        decides = {name: getattr(phase, name) for name in (*names, "weight_decay", "max_grad_norm")}
        return {
            **decides,
            "seed": self.settings.run.seed,
            "model": self.model_parameters(),
            "precision": self.settings.precision.mode,
        }

    def command(self) -> list[str]:
        phase, cluster = self.settings.phase(self.phase), self.settings.cluster
        model = self.directory / "config.json"
        model.write_text(json.dumps(self.model(self.phase).to_hugging_face(), indent=2))
        options = {
            "data_dir": self.requires()["dataset"].directory,
            "output_dir": self.directory,
            "model_config": model,
            "seq_len": phase.seq_len,
            "max_pred_len": phase.max_pred_len,
            "batch_size": phase.micro_batch_size,
            "grad_accum_usteps": self.settings.grad_accum_usteps(self.phase),
            "max_steps": phase.max_steps,
            "warmup_steps": phase.warmup_steps,
            "lr": phase.lr,
            "optimizer": phase.optimizer,
            "weight_decay": phase.weight_decay,
            "max_grad_norm": phase.max_grad_norm,
            "seed": self.settings.run.seed,
            "precision": self.settings.precision.mode,
            "device": cluster.device,
            "tensor_parallel_size": cluster.tensor_parallel_size,
            "collective_timeout": cluster.collective_timeout_s,
            "ckpt_interval_steps": phase.ckpt_interval_steps,
            "ckpt_interval_minutes": phase.ckpt_interval_minutes,
            "num_ckpts_to_keep": phase.num_ckpts_to_keep,
            "log_interval": self.settings.run.log_interval,
        }
        if self.phase == 2:
            start = self.requires()["start"]
            options["phase1_end_step"] = start.counts()["global_step"]
            options["resume_ckpt_path"] = start.directory / "checkpoint"
        arguments = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        trainer = ["-m", "trainer", *arguments, "--resume_ckpt", *(["--phase2"] if self.phase == 2 else [])]
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


class ConvertCheckpoint(Stage):
    """Phase 1's checkpoint, from whatever devices and layout, as one whole checkpoint on the CPU."""

    def requires(self) -> dict[str, Stage]:
        return {"pretrain": Pretrain(phase=1)}

    def command(self) -> list[str]:
        pretrain = self.requires()["pretrain"]
        source = pretrain.directory / pretrain.counts()["checkpoint"]
        return ["-m", "stages.convert", str(source), str(self.directory), "--to", "native"]


class MergeShards(ModelStage):
    """Phase 2's checkpoint, its tensor-parallel shards joined, as one Hugging Face directory with its tokenizer."""

    def requires(self) -> dict[str, Stage]:
        return {"pretrain": Pretrain(phase=2), **self.vocabulary(2)}

    def command(self) -> list[str]:
        pretrain = self.requires()["pretrain"]
        source = pretrain.directory / pretrain.counts()["checkpoint"]
        command = ["-m", "stages.merge", str(source), str(self.directory)]
        for tokens in self.vocabulary(2).values():
            command += ["--tokenizer", str(tokens.directory / "tokenizer")]
        return command

    @property
    def model_directory(self) -> Path:
        """What `BertForPreTraining.from_pretrained` loads."""
        return self.directory / "model"


class Evaluate(Stage):
    """Masked-LM loss and accuracy and next-sentence accuracy of the merged model on held-out examples."""

    def requires(self) -> dict[str, Stage]:
        return {"merge_shards": MergeShards(), "dataset": dataset_of(2)}

    def parameters(self) -> dict[str, Any]:
        return {"max_samples": self.settings.evaluation.max_samples, "max_pred_len": self.settings.phase2.max_pred_len}

    def command(self) -> list[str]:
        merged = self.requires()["merge_shards"]
        assert isinstance(merged, MergeShards)
        return [
            *("-m", "stages.evaluate", str(merged.model_directory), str(self.requires()["dataset"].directory)),
            *("--out", str(self.directory), "--device", self.settings.cluster.device),
            *("--batch-size", str(self.settings.phase2.micro_batch_size)),
            *(f"--{name.replace('_', '-')}={value}" for name, value in self.parameters().items()),
        ]


class Goal(luigi.Task):
    """Everything up to some stages, and a few lines at the end."""

    def complete(self) -> bool:
        return all(task.complete() for task in self.requires().values())

    def requires(self) -> dict[str, Stage]:
        raise NotImplementedError

    def run(self) -> None:
        self.tell()

    def tell(self) -> None:
        """Say what there is."""
        raise NotImplementedError


class BertPhase1(Goal):
    """Phase 1, up to the checkpoint that phase 2 starts from."""

    def requires(self) -> dict[str, Stage]:
        return {"convert_checkpoint": ConvertCheckpoint()}

    def tell(self) -> None:
        summary.tell_phase1(ConvertCheckpoint(), Pretrain(phase=1), say)


class BertPhase2(Goal):
    """The whole chain, up to the evaluated Hugging Face model."""

    def requires(self) -> dict[str, Stage]:
        # The model by name: if it was deleted, an evaluation that is still there does not make up for it.
        return {"merge_shards": MergeShards(), "evaluate": Evaluate()}

    def tell(self) -> None:
        summary.tell_phase2(MergeShards(), [Pretrain(phase=1), Pretrain(phase=2)], Evaluate(), say)


@luigi.Task.event_handler(luigi.Event.DEPENDENCY_PRESENT)  # type: ignore[untyped-decorator]
def tell_again(task: luigi.Task) -> None:
    """A goal that was reached before is not run: say what there is all the same."""
    if isinstance(task, Goal):
        task.tell()
