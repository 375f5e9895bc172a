"""The BERT chain: compile, train phase 1, convert, train phase 2, merge, evaluate, report."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any, ClassVar

import luigi

from common.files import write_json
from common.options import fields_of, is_left_out
from common.secrets import Secret
from pipeline.status import live_report
from pipeline.tasks import summary
from pipeline.tasks.dataset import CONFIG, ShardDataset, UsesModel, dataset_of, mask_rate, objective_options
from pipeline.tasks.extension import extend
from pipeline.tasks.goal import Goal
from pipeline.tasks.initial_weights import embedded, first_positions, start_inputs, start_options
from pipeline.tasks.nights.parent import parent_of
from pipeline.tasks.stage import Stage
from pipeline.tasks.training import EvaluationStage, Training
from stages.convert import ConvertOptions
from stages.evaluate import EvaluateOptions
from stages.examples.form import PACKED_SEQUENCES
from stages.merge import MergeOptions
from stages.precompile import Graphs, PrecompileOptions, grows
from stages.report import PAGE, ReportOptions
from trainer.config import TrainConfig
from trainer.metrics.budget import fixed_steps


class Reported(Stage):
    """A stage that refreshes WORK/report.html while it runs."""

    def beside(self) -> contextlib.AbstractContextManager[None]:
        return live_report.refresh_periodically(self.sibling(BertPhase2))


class ModelStage(Reported, UsesModel):
    """A stage of the chain that needs the model's config."""


class Precompile(ModelStage):
    """Builds and compiles every graph the phase needs, before a device waits for it."""

    phase = luigi.IntParameter(description="1 or 2")
    on_cluster = on_all_nodes = True
    stored_as = None  # compiled for the machine at hand

    def requires(self) -> dict[str, Stage]:
        return {"dataset": dataset_of(self, self.phase), **self.vocabulary(self.phase)}

    def ingredients(self) -> dict[str, Stage]:
        return self.vocabulary(self.phase)  # the graphs depend on the data only through the vocabulary size

    def options(self) -> PrecompileOptions:
        phase, cluster = self.settings.phase(self.phase), self.settings.cluster
        rate, pack = mask_rate(self, self.phase), phase.pack and isinstance(dataset_of(self, self.phase), ShardDataset)
        graphs = Graphs(
            model=self.model_parameters(),
            seq_len=phase.seq_len,
            max_pred_len=rate.most(phase.seq_len, PACKED_SEQUENCES if pack else 1) if rate else phase.max_pred_len,
            pack=pack,
            micro_batch_size=phase.micro_batch_size,
            accumulates=self.settings.grad_accum_usteps(self.phase) > 1,
            batches_per_execution=cluster.batches_per_execution,
            optimizer=phase.optimizer,
            decays=phase.weight_decay > 0,
            clips=phase.max_grad_norm > 0,
            **self.settings.precision.options | cluster.layout,
            grows=grows(cluster.data_parallel, phase.batch_ramp_steps),
            sampled_softmax=phase.sampled_softmax,
        )
        given = {name: getattr(cluster, name) for name in ("device", "compile", "self_test")}
        return PrecompileOptions(**given, nodes=self.nodes, phase=self.phase, graphs=graphs)

    def command(self) -> list[str]:
        trial = self.sibling(Pretrain, phase=self.phase).trainer_command(self.directory)
        return dataclasses.replace(self.options(), command=tuple(trial)).words(self.directory)


class Pretrain(ModelStage, Training):
    """Trains one phase, in processes of its own; an interrupted phase resumes from its last checkpoint."""

    format_version = 2  # 2: initial weights, sample order and dropout from independent streams
    phase = luigi.IntParameter(description="1 or 2")

    @property
    def max_steps(self) -> int | None:
        phase = self.settings.phase(self.phase)
        return phase.max_steps if phase.budget is None else fixed_steps(self.directory, self.phase)

    def requires(self) -> dict[str, Stage]:
        return {**self.ingredients(), "precompile": self.sibling(Precompile, phase=self.phase)}

    def ingredients(self) -> dict[str, Stage]:
        start: dict[str, Stage] = {"start": self.sibling(ConvertCheckpoint)} if self.phase == 2 else {}
        start.update(embedded(self, self.phase))
        return {"dataset": dataset_of(self, self.phase), **self.vocabulary(self.phase), **start}

    def parameters(self) -> dict[str, Any]:
        phase = self.settings.phase(self.phase)
        # The global batch size identifies the result, not its split: after an out-of-memory error a training can
        # continue with a smaller micro-batch.
        training = {name for name, (_, about) in fields_of(TrainConfig).items() if about.decides} - {"micro_batch_size"}
        given = {name: value for name, value in phase.param_kwargs.items() if name in training}
        if phase.budget is not None:  # how many steps fit is measured later, and differs between machines
            del given["max_steps"]
            given["budget"] = str(phase.budget)
        return {
            **{name: value for name, value in given.items() if not is_left_out(TrainConfig, name, value)},
            **self.objective_identity(self.phase),
            **first_positions(self, self.phase),
            "seq_len": phase.seq_len,
            "global_batch_size": phase.global_batch_size,
            "seed": self.settings.run.seed,
            "model": self.model_parameters(),
            **self.settings.precision.options,
        }

    def inputs(self) -> dict[str, Any]:
        return start_inputs(self, self.phase)

    def prepare(self) -> None:
        super().prepare()
        extend(self)

    def command(self) -> list[str]:
        compiled = self.requires()["precompile"].directory
        start: dict[str, Any] = start_options(self, self.phase)
        if self.phase == 2:
            convert = self.requires()["start"]
            start["phase1_end_step"] = convert.counts()["global_step"]
            start["resume_ckpt_path"] = convert.directory / "checkpoint"
        return self.trainer_command(
            self.directory,
            **start,
            output_dir=self.directory,
            graphs=compiled / "graphs.json",
            compile_cache=compiled / "cache",
            phase2=self.phase == 2,
            resume=True,
            allow_changes="micro_batch_size",
        )

    def result_line(self) -> str:
        """The phase's line in the final summary."""
        if not self.complete():
            return f"phase {self.phase}: {self.directory} is not here, but the model made from it is"
        return summary.phase_line(self.counts(), self.phase)

    def trainer_command(self, directory: Path, **others: Any) -> list[str]:
        """The trainer's command, with the config in `directory`; without `others`, a trial's: initial weights, same
        graphs."""
        phase = self.settings.phase(self.phase)
        return self.launched(
            phase,
            data_dir=dataset_of(self, self.phase).directory,
            model_config=directory / CONFIG,
            seq_len=phase.seq_len,
            max_pred_len=phase.max_pred_len,
            grad_accum_usteps=self.settings.grad_accum_usteps(self.phase),
            max_steps=phase.max_steps if phase.budget is None else None,
            **self.settings.precision.options | {"no-next_sentence": not self.next_sentence},
            **objective_options(self, self.phase),
            **others,
        )


class ConvertCheckpoint(ModelStage):
    """What phase 2 starts from, as one whole checkpoint on the CPU: phase 1's, from whatever devices and layout; or
    the one that [phase2] start_from names, in whatever format, in place of phase 1."""

    @property
    def given(self) -> Secret:
        """The checkpoint that replaces phase 1's; empty: phase 1's is used."""
        return self.settings.phase2.start_from

    def requires(self) -> dict[str, Stage]:
        return self.vocabulary(2) if self.given else {"pretrain": self.sibling(Pretrain, phase=1)}

    def start_line(self) -> str:
        """The line on phase 2's starting point in the final summary."""
        if not self.given:
            return self.sibling(Pretrain, phase=1).result_line()
        counts = self.counts()
        return f"phase 1: replaced by step {counts['global_step']:,} of {self.given} ({counts['format']})"

    def options(self) -> ConvertOptions:
        if not self.given:
            return ConvertOptions(source=Secret.address(str(self.sibling(Pretrain, phase=1).directory)))
        transport = self.settings.dataset.transport
        return ConvertOptions(source=self.given, optimizer=False, model=self.model_parameters(), **transport)

    def prepare(self) -> None:
        if self.given:
            self.write_config(2)

    def command(self) -> list[str]:
        config = self.directory / CONFIG if self.given else None
        return dataclasses.replace(self.options(), config=config).words(self.directory)


class MergeShards(ModelStage):
    """Phase 2's checkpoint, its tensor-parallel shards joined, as one Hugging Face directory with its tokenizer."""

    def requires(self) -> dict[str, Stage]:
        return {"pretrain": self.sibling(Pretrain, phase=2), **self.vocabulary(2)}

    def options(self) -> MergeOptions:
        tokens = self.vocabulary(2).get("tokenize_corpus")
        return MergeOptions(
            source=Secret.address(str(self.requires()["pretrain"].directory)),
            tokenizer=tokens.directory if tokens else None,
            vocab_file=Path(self.given_vocabulary) if self.given_vocabulary else None,
            lower_case=self.settings.corpus.lower_case,
        )

    @property
    def model_directory(self) -> Path:
        """The Hugging Face directory."""
        return self.directory / "model"


class Evaluate(EvaluationStage, Reported):
    """Masked-LM loss and accuracy of the merged model on held-out examples, and next-sentence accuracy if trained."""

    on_cluster = imports_torch = True
    #: The phase whose model and held-out examples are used.
    evaluated_phase: ClassVar[int] = 2

    def requires(self) -> dict[str, Stage]:
        return {"merge_shards": self.sibling(MergeShards), "dataset": dataset_of(self, 2)}

    def options(self) -> EvaluateOptions:
        evaluation, phase, inputs = self.settings.evaluation, self.settings.phase(self.evaluated_phase), self.requires()
        if evaluation.blimp:
            self.sibling(MergeShards).require_tokenizer("[evaluation] blimp")
        return EvaluateOptions(
            model=inputs["merge_shards"].directory,
            data=inputs["dataset"].directory,
            held_out=parent.held_out if (parent := parent_of(self.settings)) else None,
            max_pred_len=phase.max_pred_len,
            max_samples=evaluation.max_samples,
            blimp=Path(evaluation.blimp) if evaluation.blimp else None,
            blimp_samples=evaluation.blimp_samples,
            batch_size=phase.micro_batch_size,
            device=self.settings.cluster.device,
        )


class Report(Reported):
    """The whole run on one page, and the model card beside the model."""

    def requires(self) -> dict[str, Stage]:
        return {"merge_shards": self.sibling(MergeShards), "evaluate": self.sibling(Evaluate)}

    def options(self) -> ReportOptions:
        return ReportOptions(directories=())

    def prepare(self) -> None:
        write_json(self.directory / live_report.SETTINGS, live_report.settings_by_section(self.settings))

    def command(self) -> list[str]:
        settings = self.directory / live_report.SETTINGS
        made = tuple(live_report.stage_directories(self))
        return dataclasses.replace(self.options(), directories=made, settings=settings).words(self.directory)

    @property
    def page(self) -> Path:
        return self.directory / PAGE


class BertPhase1(Goal):
    """Phase 1, up to the checkpoint that phase 2 starts from."""

    def requires(self) -> dict[str, Stage]:
        return {"convert_checkpoint": self.sibling(ConvertCheckpoint)}

    def print_summary(self) -> None:
        convert = self.sibling(ConvertCheckpoint)
        summary.print_phase1(convert.start_line(), convert.directory / "checkpoint")


class BertPhase2(Goal):
    """The whole chain, up to the evaluated Hugging Face model and the report."""

    def requires(self) -> dict[str, Stage]:
        # MergeShards is listed too: otherwise a complete evaluation would hide that its model was deleted.
        tasks: tuple[type[Stage], ...] = (MergeShards, Evaluate, Report)
        return {stage.label: stage for stage in map(self.sibling, tasks)}

    def print_summary(self) -> None:
        convert = self.sibling(ConvertCheckpoint)
        phases = [convert.start_line()] if convert.complete() or not convert.given else []
        phases.append(self.sibling(Pretrain, phase=2).result_line())
        model, page = self.sibling(MergeShards).model_directory, self.sibling(Report).page
        summary.print_phase2(phases, self.sibling(Evaluate).counts(), model, page)
