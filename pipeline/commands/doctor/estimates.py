"""How long each stage to make will take and how much disk it needs, from what this machine did before: the manifests of
complete stages in the work directory. What they do not show is unknown."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from common.addresses import url_scheme
from common.errors import UserError
from common.files import METRICS
from pipeline.commands.doctor.finding import Plan
from pipeline.commands.doctor.sizes import checkpoints_kept, parameter_count
from pipeline.status.chain import is_complete
from pipeline.status.stage_dirs import StageDir, StageDirs, last_checkpoint_step, size_bytes
from pipeline.tasks.bert import ConvertCheckpoint, MergeShards, Pretrain
from pipeline.tasks.dataset import DownloadDataset, ShardDataset, TokenizeCorpus
from pipeline.tasks.input_hashes import input_hashes
from pipeline.tasks.mnist import TrainMlp
from pipeline.tasks.stage import Stage
from stages.text.base import Source
from stages.text.wikipedia import WikipediaSource
from stages.view.curves import MetricsFile
from stages.view.status import StageStatus

#: Bytes per parameter in a checkpoint: an fp32 weight, and with the optimizer two fp32 moments.
_WEIGHT_BYTES, _STATE_BYTES = 4, 12
#: Settings that change how many examples there are, not how one is made.
_COUNTS = ("dupe_factor", "shards", "seed")


@dataclass(frozen=True)
class Estimate:
    """What a stage will take; the fields are the keys of `--json`. None: unknown."""

    stage: str
    seconds: float | None = None
    #: At its peak, without what is already in its directory.
    bytes: int | None = None
    #: Where the estimate comes from.
    source: str = "no stage of this kind was made here before"


@dataclass(frozen=True)
class _Before:
    """A complete stage and its amount of work, in a unit that also fits a stage to make."""

    stage_dir: StageDir
    units: float
    #: Bytes of its outputs; seconds of its work, over all attempts if there were several.
    bytes: int
    seconds: float

    @classmethod
    def of(cls, stage_dir: StageDir, units: float = 1.0) -> _Before:
        status = StageStatus(stage_dir.label, state="complete", directory=stage_dir.path)
        seconds = status.seconds_at_work if status.stops else float(stage_dir.record["seconds"])
        return cls(stage_dir, units, status.bytes or 0, seconds)

    def scaled(self, stage: str, units: float, unit: str = "") -> Estimate:
        """What `units` of work take at its rate."""
        share = units / self.units
        rate = f": {self.units / self.seconds:,.4g} {unit}/s" if unit and self.seconds else ""
        return Estimate(
            stage, self.seconds * share, round(self.bytes * share), f"based on {_named(self.stage_dir)}{rate}"
        )


class Estimates:
    """Those of a plan's stages, from all stages of `work_dirs`; the first one's come before the others'."""

    def __init__(self, plan: Plan, work_dirs: Sequence[StageDirs]) -> None:
        self._plan, self._work_dirs = plan, work_dirs

    def all(self) -> list[Estimate]:
        """Estimates of all stages that a run would make, in running order."""
        return [self._with_place(stage, self._of(stage)) for stage in self._plan.to_make()]

    def _of(self, stage: Stage) -> Estimate:
        try:
            match stage:
                case TokenizeCorpus():
                    return self._tokens(stage)
                case ShardDataset():
                    return self._shards(stage)
                case DownloadDataset():
                    return self._download(stage)
                case Pretrain():
                    return self._training(stage)
                case TrainMlp():
                    return self._mlp(stage)
            before = next((one for one in self._before(stage.label) if self._is_alike(one, stage)), None)
            known = _Before.of(before).scaled(stage.label, 1) if before is not None else Estimate(stage.label)
            if known.bytes is None and isinstance(stage, ConvertCheckpoint | MergeShards):
                each = _STATE_BYTES if isinstance(stage, ConvertCheckpoint) else _WEIGHT_BYTES
                source = f"{known.source}; disk from the model's size"
                return Estimate(stage.label, None, each * self._parameters, source)
            return known
        except UserError as error:
            return Estimate(stage.label, source=f"not known yet: {str(error).partition(';')[0]}")
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError):
            return Estimate(stage.label, source="not known: the record of an earlier run is damaged")

    def _with_place(self, stage: Stage, found: Estimate) -> Estimate:
        """The estimate without the bytes that an interrupted run has left."""
        there = size_bytes(stage.directory) if found.bytes is not None and _has_directory(stage) else 0
        return found if found.bytes is None else replace(found, bytes=max(0, found.bytes - there))

    def _before(self, label: str) -> Iterator[StageDir]:
        """Complete stages of this name, newest first, but this machine's before others'."""
        for stage_dirs in self._work_dirs:
            complete = [one for one in stage_dirs.by_label[label] if one.is_complete]
            yield from sorted(complete, key=lambda one: _host(one) not in ("", socket.gethostname()))

    def _made_with(self, stage_dir: StageDir) -> list[StageDir]:
        return next(dirs.made_with(stage_dir) for dirs in self._work_dirs if stage_dir in dirs.all)

    def _is_alike(self, before: StageDir, stage: Stage) -> bool:
        """Whether a stage that has no unit of work was made for the same model."""
        trained = [one for one in self._made_with(before) if one.label.startswith("pretrain")]
        trainings = [one for one in self._plan.stages() if isinstance(one, Pretrain)]
        if trained and trainings:
            return bool(trained[-1].record["parameters"]["model"] == trainings[-1].model_parameters())
        return _differing(before, stage) <= {"versions", "seed"}

    def _tokens(self, stage: TokenizeCorpus) -> Estimate:
        sources, disk_only = _sources(stage), Estimate(stage.label)
        is_dump = any(isinstance(source, WikipediaSource) for source in sources)
        for one in self._before(stage.label):
            counts = one.record["counts"]
            if counts.get("text_bytes"):
                before = _Before.of(one, counts["text_bytes"])
                found = before.scaled(stage.label, _text_bytes(sources), "bytes of text")
                if is_dump == ("pages" in counts["read"]):  # extracting text from markup is most of the work
                    return found
                disk_only = replace(found, seconds=None, source=f"disk {found.source}, with another kind of text")
        return disk_only

    def _number_of_tokens(self, stage: TokenizeCorpus) -> float | None:
        if is_complete(stage):
            return float(stage.counts()["tokens"])
        for one in self._before(stage.label):
            counts = one.record["counts"]
            if counts.get("text_bytes"):
                return float(_text_bytes(_sources(stage)) * counts["tokens"] / counts["text_bytes"])
        return None

    def _shards(self, stage: ShardDataset) -> Estimate:
        (source,) = (one for one in stage.requires().values() if isinstance(one, TokenizeCorpus))
        tokens, options = self._number_of_tokens(source), stage.options()
        if tokens is None:
            return Estimate(stage.label, source="the number of tokens is not known until they are made")
        wanted = options.parameters()
        for one in self._before(stage.label):
            made = one.record["parameters"]
            upstream = [up for up in self._made_with(one) if up.label == source.label]
            if upstream and all(made.get(name) == value for name, value in wanted.items() if name not in _COUNTS):
                units = upstream[0].record["counts"]["tokens"] * made.get("dupe_factor", 1)
                return _Before.of(one, units).scaled(stage.label, tokens * options.dupe_factor, "tokens")
        from stages.examples.shard_writer import row_bytes

        rows = tokens * options.dupe_factor / options.seq_len
        return Estimate(
            stage.label, None, round(rows * row_bytes(options.form, self._vocab_size)),
            "no such examples were made here before; disk from the size of a row, at least",
        )  # fmt: skip

    def _download(self, stage: DownloadDataset) -> Estimate:
        from stages.download import unpacked_bytes

        length = self._plan.lengths.get(f"[dataset] phase{stage.phase}_url")
        if length is None:
            return Estimate(stage.label, source="its size is not known: see network")
        is_here, contents = url_scheme(stage.url) in ("", "file"), unpacked_bytes(stage.url.reveal(), length)
        needs = contents if is_here else length + contents  # a local archive is read where it is
        for one in self._before(stage.label):
            fetched = one.record["counts"].get("source")
            if (fetched is None) == is_here:
                before = _Before.of(one)
                done, wanted = (before.bytes, contents) if is_here else (fetched["length"], length)
                return replace(replace(before, units=done).scaled(stage.label, wanted, "bytes"), bytes=needs)
        return Estimate(stage.label, None, needs, "nothing was downloaded here before; disk from the archive's size")

    def _training(self, stage: Pretrain) -> Estimate:
        seconds, source = self._training_time(stage)
        kept = checkpoints_kept(stage, seconds)
        return Estimate(stage.label, seconds, None if kept is None else kept * self._checkpoint_bytes(stage), source)

    def _training_time(self, stage: Pretrain) -> tuple[float | None, str]:
        """Seconds of the steps that are left, and where that is known from."""
        phase = stage.settings.phase(stage.phase)
        done = (last_checkpoint_step(stage.directory) or 0) if _has_directory(stage) else 0
        own = MetricsFile(stage.directory / METRICS).read().recent("step_time_s") if done else None
        if own is not None and stage.max_steps is not None:
            steps = stage.max_steps - done
            return steps * own, f"based on its own last steps: {1 / own:.4g} steps/s, {steps:,} steps to go"
        if phase.budget is not None:
            return float(phase.budget), "its budget"
        steps = phase.max_steps - done
        for one in self._trained_before(stage):
            counts, batch = one.record["counts"], one.record["parameters"]["global_batch_size"]
            step_s = 60 * counts["train_time_minutes"] / counts["steps"] * phase.global_batch_size / batch
            rate = phase.global_batch_size / step_s
            return steps * step_s, f"based on {_named(one)}: {rate:,.4g} sequences/s, {steps:,} steps"
        return None, "no such training was made here before; disk from the model's size"

    def _mlp(self, stage: TrainMlp) -> Estimate:
        for one in self._before(stage.label):
            if self._ran_alike(one) and _differing(one, stage) <= {"epochs", "lr", "seed"}:
                epochs = one.record["parameters"]["epochs"]
                return _Before.of(one, epochs).scaled(stage.label, stage.parameters()["epochs"], "epochs")
        return Estimate(stage.label)

    def _trained_before(self, stage: Pretrain) -> Iterator[StageDir]:
        """Complete trainings of the same model with the same row length, device and worker count; their steps may
        differ."""
        wanted = {
            "model": stage.model_parameters(),
            **_of(stage.parameters(), "seq_len", "precision", "sampled_softmax"),
        }
        for one in self._before(stage.label):
            same = self._ran_alike(one) and wanted == _of(one.record["parameters"], *wanted)
            if same and one.record["counts"]["steps"]:
                yield one

    def _ran_alike(self, training: StageDir) -> bool:
        """Whether it ran on the device that is asked for now, which older records do not name, with as many workers."""
        cluster = self._plan.settings.cluster
        wanted = {"device": cluster.device, "num_workers": cluster.workers}
        return _of({"device": cluster.device, **training.record["counts"]}, *wanted) == wanted

    def _checkpoint_bytes(self, stage: Pretrain) -> int:
        """Bytes of a checkpoint with its optimizer."""
        if not stage.settings.phase(stage.phase).minimal_ckpt:
            for one in self._trained_before(stage):
                if one.record["parameters"].get("optimizer") == stage.settings.phase(stage.phase).optimizer:
                    return _Before.of(one).bytes
        return _STATE_BYTES * self._parameters

    @property
    def _vocab_size(self) -> int:
        settings = self._plan.settings
        for stage in self._plan.stages():
            if isinstance(stage, TokenizeCorpus) and settings.model.vocab_size is None:
                return int(stage.counts()["vocab_size"]) if is_complete(stage) else settings.corpus.vocab_size
        return settings.model.downloaded_vocab_size

    @property
    def _parameters(self) -> int:
        return parameter_count(self._plan.settings.model.config(self._vocab_size))


def _sources(stage: TokenizeCorpus) -> list[Source]:
    """Raises `UserError`."""
    corpus = stage.options().open(input_hashes(stage.settings.work_dir))
    return [*corpus.sources, *corpus.held_out_sources]


def _text_bytes(sources: Sequence[Source]) -> int:
    """Approximate."""
    return sum(source.text_bytes for source in sources)


def _differing(before: StageDir, stage: Stage) -> set[str]:
    """The parameters of a stage that differ from those of one made before. Raises `UserError`."""
    made, wanted = before.record["parameters"], stage.identity.parameters
    return {name for name in wanted if made.get(name) != wanted[name]}


def _of(values: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: values.get(name) for name in names}


def _has_directory(stage: Stage) -> bool:
    """Whether an earlier run has begun it. False too when its identity cannot be computed."""
    try:
        return stage.directory.is_dir()
    except UserError:
        return False


def _named(stage_dir: StageDir) -> str:
    """Its name, and the machine that made it if that is another one."""
    host = _host(stage_dir)
    return stage_dir.path.name + (f" on {host}" if host not in ("", socket.gethostname()) else "")


def _host(stage_dir: StageDir) -> str:
    """The machine that made it; empty: not recorded."""
    attempts = StageStatus(stage_dir.label, state="complete", directory=stage_dir.path).attempts
    return attempts[-1].host if attempts else ""
