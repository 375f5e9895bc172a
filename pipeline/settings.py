"""The only reader of luigi.cfg: every setting typed, in range, and known.

The defaults are the file luigi.cfg that comes with the project; what the user's own luigi.cfg, LUIGI_CONFIG_PATH or
the command line (`--Phase1-lr 1e-3`) says is laid over it. Each section is a luigi Config.
"""

from __future__ import annotations

import configparser
import difflib
import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import luigi
from luigi.configuration import get_config
from luigi.task_register import Register

from pipeline.cluster import Cluster, Kubernetes, Slurm
from pipeline.parameters import Number, Sha256OrEmpty, Switch, Text, Whole, WholeOrEmpty
from stages.corpus import DOCUMENT_ENDS
from stages.mnist import CHECKSUMS
from stages.sources import CONNECTIONS_MAX
from trainer.config import OPTIMIZERS, PRECISIONS, PRESETS, ModelConfig
from trainer.errors import UserError
from trainer.parallel.plan import require_divisible

#: Sections that belong to luigi itself; everything else must be ours or a task's.
_LUIGI_SECTIONS = frozenset(
    (
        *("core", "retcode", "scheduler", "worker", "logging", "execution_summary", "batch_notifier", "resources"),
        *("email", "smtp", "sendgrid", "task_history", "task_status", "metrics", "prometheus", "cors"),
    )
)


class Run(luigi.Config):
    work_dir = Text()
    seed = Whole(0, 2**31 - 1)
    log_interval = Whole(1)
    processes = Whole(0)
    report_interval_s = Number(0)


class Corpus(luigi.Config):
    source = Text()
    held_out_source = Text()
    held_out = Number(0, 0.5)
    document = Text(DOCUMENT_ENDS)
    vocab_file = Text()
    vocab_size = Whole(64, 1 << 20)
    lower_case = Switch()
    max_unknown_share = Number(0, 1)


class Dataset(luigi.Config):
    phase1_url = Text()
    phase2_url = Text()
    phase1_sha256 = Sha256OrEmpty()
    phase2_sha256 = Sha256OrEmpty()
    s3_profile = Text()
    s3_endpoint = Text()
    connections = Whole(1, CONNECTIONS_MAX)
    keep_archive = Switch()
    dupe_factor = Whole(1, 1000)
    masked_lm_prob = Number(0.001, 1)
    short_seq_prob = Number(0, 1)
    whole_word_mask = Switch()
    shards = Whole(1, 100_000)

    def url(self, phase: int) -> str:
        return self.phase1_url if phase == 1 else self.phase2_url

    def sha256(self, phase: int) -> str:
        return self.phase1_sha256 if phase == 1 else self.phase2_sha256

    @property
    def transport(self) -> dict[str, Any]:
        """How stages fetch things, as their options."""
        return {"connections": self.connections, "s3_profile": self.s3_profile, "s3_endpoint": self.s3_endpoint}


class Model(luigi.Config):
    preset = Text(tuple(PRESETS))
    vocab_size = WholeOrEmpty()
    num_hidden_layers = WholeOrEmpty()
    hidden_size = WholeOrEmpty()
    num_attention_heads = WholeOrEmpty()
    intermediate_size = WholeOrEmpty()
    max_position_embeddings = Whole(8)
    hidden_dropout_prob = Number(0, 1)
    attention_probs_dropout_prob = Number(0, 1)

    @property
    def downloaded_vocab_size(self) -> int:
        """Of data that comes without its vocabulary: the setting, else that of `bert-large-uncased`."""
        return self.vocab_size or ModelConfig().vocab_size

    def config(self, vocab_size: int) -> ModelConfig:
        """The model, with a vocabulary of `vocab_size` unless the settings give one."""
        given = {name: value for name, value in self.param_kwargs.items() if value is not None and name != "preset"}
        return ModelConfig.preset(self.preset, **{"vocab_size": vocab_size, **given})


class Phase(luigi.Config):
    """What [phase1] and [phase2] have in common: all keys of the first."""

    seq_len = Whole(8, 1 << 16)
    max_pred_len = Whole(1)
    pack = Switch()
    global_batch_size = Whole(1)
    micro_batch_size = Whole(1)
    optimizer = Text(OPTIMIZERS)
    lr = Number(0)
    warmup_steps = Whole(0)
    max_steps = Whole(1)
    weight_decay = Number(0)
    max_grad_norm = Number(0)
    ckpt_interval_steps = Whole(0)
    ckpt_interval_minutes = Number(0)
    num_ckpts_to_keep = Whole(-1)


class Phase1(Phase):
    pass


class Phase2(Phase):
    start_from = Text()


class Precision(luigi.Config):
    mode = Text(PRECISIONS)


class Evaluation(luigi.Config):
    max_samples = Whole(1)


class Mnist(luigi.Config):
    url = Text()
    checksums = Text(CHECKSUMS)
    epochs = Whole(1)
    batch_size = Whole(1)
    lr = Number(0)
    precision = Text(PRECISIONS)
    ckpt_interval_steps = Whole(0)
    log_interval = Whole(1)


SECTIONS: tuple[type[luigi.Config], ...] = (
    *(Run, Corpus, Dataset, Model, Phase1, Phase2),
    *(Precision, Cluster, Slurm, Kubernetes, Evaluation, Mnist),
)


@dataclass(frozen=True)
class Settings:
    """All sections, validated alone and together."""

    run: Run
    corpus: Corpus
    dataset: Dataset
    model: Model
    phase1: Phase1
    phase2: Phase2
    precision: Precision
    cluster: Cluster
    slurm: Slurm
    kubernetes: Kubernetes
    evaluation: Evaluation
    mnist: Mnist

    def phase(self, phase: int) -> Phase:
        return self.phase1 if phase == 1 else self.phase2

    @property
    def work_dir(self) -> Path:
        return Path(self.run.work_dir)

    def grad_accum_usteps(self, phase: int) -> int:
        """Micro-steps in an optimizer step. Raises `UserError` with the equation if the batch does not divide."""
        settings, cluster = self.phase(phase), self.cluster
        workers = cluster.data_parallel_size
        usteps, rest = divmod(settings.global_batch_size, settings.micro_batch_size * workers)
        if rest or not usteps:
            nodes = ""
            if cluster.nnodes > 1:
                nodes = f" ({cluster.nnodes} nodes × {cluster.nproc_per_node} / {cluster.tensor_parallel_size})"
            raise UserError(
                f"[phase{phase}] global_batch_size = micro_batch_size × grad_accum_usteps × data-parallel size does "
                f"not hold for any whole grad_accum_usteps: {settings.global_batch_size} = "
                f"{settings.micro_batch_size} × ? × {workers}{nodes}; "
                f"change one of the three"
            )
        return usteps


def section_name(section: type[luigi.Config]) -> str:
    """The section of luigi.cfg that a class reads: [phase1] for Phase1."""
    return section.__name__.lower()


@functools.cache
def load() -> Settings:
    """The settings of this process. Raises `UserError`: one line for the first thing that is wrong."""
    path = os.environ.get("LUIGI_CONFIG_PATH")
    if path is not None and not Path(path).is_file():
        raise UserError(f"LUIGI_CONFIG_PATH = {path}: there is no such file; give a .cfg file, or unset it")
    _refuse_unknown()
    sections: dict[str, Any] = {}
    for section in SECTIONS:
        try:
            sections[section_name(section)] = section()
        except ValueError as error:  # luigi's wrapping of what a parameter raises
            if not isinstance(error.__cause__, UserError):
                raise
            raise UserError(f"[{section_name(section)}] {error.__cause__}") from None
    settings = Settings(**sections)
    _check_together(settings)
    return settings


def add_defaults() -> None:
    """Lay the project's luigi.cfg under whatever luigi has read, so that it holds in any directory."""
    here = Path(__file__).parent
    defaults = configparser.ConfigParser(interpolation=None)
    # An installed package carries the file; a checkout has it one level up.
    defaults.read_string(next(p for p in (here / "luigi.cfg", here.parent / "luigi.cfg") if p.exists()).read_text())
    config = get_config()
    for section in defaults.sections():
        for key, value in defaults.items(section):
            if not config.has_option(section, key):
                config.set(section, key, value.replace("%", "%%"))


def _refuse_unknown() -> None:
    config = get_config()
    ours = {section_name(section): {name for name, _ in section.get_params()} for section in SECTIONS}
    tasks = set(Register.task_names())
    for section in config.sections():
        if section not in ours:
            if section not in _LUIGI_SECTIONS | tasks:
                raise UserError(f"[{section}] is not a section of luigi.cfg; {_nearest(section, ours)}")
            continue
        for key in config.options(section):
            if key not in ours[section]:
                raise UserError(f"[{section}] {key} is not a setting; {_nearest(key, ours[section])}")


def _nearest(name: str, known: Any) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else f"allowed: {', '.join(known)}"


def _check_together(settings: Settings) -> None:
    """What no single setting can know. Raises `UserError`."""
    cluster = settings.cluster
    cluster.check()
    if cluster.launcher == "slurm":
        settings.slurm.check()
    if cluster.launcher == "kubernetes":
        settings.kubernetes.check()
    for phase in (1, 2):
        at = settings.phase(phase)
        usteps, per_execution = settings.grad_accum_usteps(phase), cluster.batches_per_execution
        if usteps % per_execution:
            raise UserError(
                f"[phase{phase}] has {usteps} micro-steps in a step, which [cluster] batches_per_execution = "
                f"{per_execution} does not divide; change one of them"
            )
        if at.seq_len > settings.model.max_position_embeddings:
            raise UserError(
                f"[phase{phase}] seq_len = {at.seq_len} is longer than [model] max_position_embeddings = "
                f"{settings.model.max_position_embeddings}; shorten the one or raise the other"
            )
        if at.warmup_steps > at.max_steps:
            raise UserError(
                f"[phase{phase}] warmup_steps = {at.warmup_steps} is more than max_steps = {at.max_steps}; lower it"
            )
        if at.max_pred_len > at.seq_len:
            raise UserError(
                f"[phase{phase}] max_pred_len = {at.max_pred_len} is more than seq_len = {at.seq_len}; lower it"
            )
    require_divisible(settings.model.config(settings.model.downloaded_vocab_size), cluster.tensor_parallel_size)
