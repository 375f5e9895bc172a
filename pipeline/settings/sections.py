"""All settings: one class for each section of luigi.cfg, and `Settings` with all sections.

A setting that a stage or the trainer takes as an option has that option's limits (`setting`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

import luigi

from common.errors import UserError
from common.secrets import Secret
from pipeline.console.select import CONSOLES
from pipeline.settings.cluster import Cluster, Kubernetes, Slurm
from pipeline.settings.parameters import (
    Address,
    Choice,
    DurationOrEmpty,
    Sha256OrEmpty,
    Switch,
    Webhook,
    Words,
    in_section,
    number,
    setting,
    whole,
)
from pipeline.settings.trackers import Trackers
from stages.embed import INITIAL_WORD_EMBEDDINGS
from stages.evaluate import EvaluateOptions
from stages.mnist import MnistOptions
from stages.shard import ShardOptions
from stages.store.options import StoreOptions
from stages.text.corpus import TokenizeOptions
from stages.transfer.urls import Transport
from trainer.config import TrainConfig
from trainer.models.config import PRESETS, ModelConfig
from trainer.registry import INITIAL_ATTENTION, NEW_POSITIONS

#: Values of [store] push and pull.
STORED_STAGES = ("all", "shards", "models", "none")
#: Value of [nights] start_from.
PREVIOUS = "previous"


class Run(luigi.Config):
    work_dir = luigi.StrParameter()
    start_from = luigi.StrParameter()
    seed: int = whole(0, 2**31 - 1)
    console = Choice(CONSOLES)
    log_interval: int = setting(TrainConfig, "log_interval")
    non_finite: str = setting(TrainConfig, "non_finite")
    non_finite_limit: int = setting(TrainConfig, "non_finite_limit")
    replica_check_steps: int = setting(TrainConfig, "replica_check_steps")
    processes: int = setting(TokenizeOptions, "processes")
    report_interval_s: float = number(0)
    stage_hang_timeout_s: float = number(0)


class Corpus(luigi.Config):
    source = luigi.StrParameter()
    held_out_source = luigi.StrParameter()
    held_out: float = setting(TokenizeOptions, "held_out", most=0.5)
    document: str = setting(TokenizeOptions, "document")
    vocab_file = luigi.StrParameter()
    vocab_size: int = setting(TokenizeOptions, "vocab_size", least=64, most=1 << 20)
    lower_case: bool = setting(TokenizeOptions, "lower_case")
    max_unknown_share: float = setting(TokenizeOptions, "max_unknown_share")


class Dataset(luigi.Config):
    phase1_url = Address()
    phase2_url = Address()
    phase1_sha256 = Sha256OrEmpty()
    phase2_sha256 = Sha256OrEmpty()
    s3_profile = luigi.StrParameter()
    s3_endpoint = Address()
    connections: int = setting(Transport, "connections")
    low_speed_limit_bytes_per_s: float = setting(Transport, "low_speed_limit_bytes_per_s")
    low_speed_time_s: float = setting(Transport, "low_speed_time_s")
    keep_archive = Switch()
    next_sentence: bool = setting(ShardOptions, "next_sentence")
    masking: str = setting(ShardOptions, "masking")
    dupe_factor: int = setting(ShardOptions, "dupe_factor")
    short_seq_prob: float = setting(ShardOptions, "short_seq_prob")
    whole_word_mask: bool = setting(ShardOptions, "whole_word_mask")
    shards: int = setting(ShardOptions, "shards")

    def url(self, phase: int) -> Secret:
        return self.phase1_url if phase == 1 else self.phase2_url

    def sha256(self, phase: int) -> str:
        return self.phase1_sha256 if phase == 1 else self.phase2_sha256

    @property
    def transport(self) -> dict[str, Any]:
        """The options for downloads, as stages take them."""
        names = ("connections", "s3_profile", "s3_endpoint", "low_speed_limit_bytes_per_s", "low_speed_time_s")
        return {name: getattr(self, name) for name in names}


class Model(luigi.Config):
    preset = Choice(tuple(PRESETS))
    vocab_size: int | None = whole(1, empty=True)
    num_hidden_layers: int | None = whole(1, empty=True)
    hidden_size: int | None = whole(1, empty=True)
    num_attention_heads: int | None = whole(1, empty=True)
    intermediate_size: int | None = whole(1, empty=True)
    max_position_embeddings: int = whole(8)
    hidden_dropout_prob: float = number(0, 0.999)
    attention_probs_dropout_prob: float = number(0, 0.999)

    @property
    def downloaded_vocab_size(self) -> int:
        """Vocabulary size for data without a vocabulary: the setting, else that of `bert-large-uncased`."""
        return self.vocab_size or ModelConfig().vocab_size

    def config(self, vocab_size: int) -> ModelConfig:
        """The model; its vocabulary size is `vocab_size` unless the settings give one."""
        given = {name: value for name, value in self.param_kwargs.items() if value is not None and name != "preset"}
        return ModelConfig.preset(self.preset, **{"vocab_size": vocab_size, **given})


class Phase(luigi.Config):
    """The keys that [phase1] and [phase2] have in common."""

    seq_len: int = setting(ShardOptions, "seq_len", least=8)
    max_pred_len: int = setting(ShardOptions, "max_pred_len")
    masked_lm_prob: float = setting(ShardOptions, "masked_lm_prob", least=0.001)
    final_masked_lm_prob: float | None = number(0.001, 1, empty=True)
    sampled_softmax: int = whole(0)
    next_sentence_weight: float = number(0.001, 1000)
    pack: bool = setting(ShardOptions, "pack")
    global_batch_size: int = whole(1)
    micro_batch_size: int = setting(TrainConfig, "micro_batch_size")
    batch_ramp_steps: int = setting(TrainConfig, "batch_ramp_steps")
    batch_ramp_parts: int = setting(TrainConfig, "batch_ramp_parts")
    optimizer: str = setting(TrainConfig, "optimizer")
    lr: float = setting(TrainConfig, "lr")
    adamw_lr_ratio: float = setting(TrainConfig, "adamw_lr_ratio")
    schedule: str = setting(TrainConfig, "schedule")
    warmup_steps: int = setting(TrainConfig, "warmup_steps")
    decay_share: float = setting(TrainConfig, "decay_share")
    max_steps: int = setting(TrainConfig, "max_steps")
    budget = DurationOrEmpty()
    weight_decay: float = setting(TrainConfig, "weight_decay")
    max_grad_norm: float = setting(TrainConfig, "max_grad_norm")
    ckpt_interval_steps: int = setting(TrainConfig, "ckpt_interval_steps", least=0)
    ckpt_interval_minutes: float = setting(TrainConfig, "ckpt_interval_minutes")
    num_ckpts_to_keep: int = setting(TrainConfig, "num_ckpts_to_keep")
    minimal_ckpt: bool = setting(TrainConfig, "minimal_ckpt")


class Phase1(Phase):
    word_embeddings = Choice(INITIAL_WORD_EMBEDDINGS)
    initial_attention = Choice(INITIAL_ATTENTION)


class Phase2(Phase):
    start_from = Address()
    new_positions = Choice(NEW_POSITIONS)


class Precision(luigi.Config):
    mode: str = setting(TrainConfig, "precision")
    grad_reduce_in_bf16: bool = setting(TrainConfig, "grad_reduce_in_bf16")

    @property
    def options(self) -> dict[str, Any]:
        """The trainer's options; the default of `grad_reduce_in_bf16`, added later, is left out of identities."""
        return {"precision": self.mode, **({"grad_reduce_in_bf16": True} if self.grad_reduce_in_bf16 else {})}


class Evaluation(luigi.Config):
    max_samples: int = setting(EvaluateOptions, "max_samples")
    blimp = luigi.StrParameter()
    blimp_samples: int = setting(EvaluateOptions, "blimp_samples")


class Card(luigi.Config):
    license = Words("[a-z0-9][a-z0-9.-]*", "licences as the Hub names them, such as apache-2.0")
    language = Words("[a-z]{2,3}|code|multilingual", "ISO 639 codes, such as en")
    datasets = Words(r"[\w.-]+/[\w.-]+", "data sets of the Hub, such as wikimedia/wikipedia")


class Store(luigi.Config):
    url = Address()
    push = Choice(STORED_STAGES)
    pull = Choice(STORED_STAGES)
    s3_profile = luigi.StrParameter()
    s3_endpoint = Address()
    connections: int = setting(StoreOptions, "connections")
    encryption: str = setting(StoreOptions, "encryption")
    kms_key = luigi.StrParameter()
    lease_s: float = setting(StoreOptions, "lease_s")

    def check(self) -> None:
        """Raise `UserError` unless the settings agree."""
        _ = self.options

    @property
    def options(self) -> StoreOptions | None:
        """How the store is reached; None: there is none."""
        if not self.url:
            return None
        with in_section("store"):
            return StoreOptions(**{n: v for n, v in self.param_kwargs.items() if n not in ("push", "pull")})


class Mnist(luigi.Config):
    url = Address()
    checksums: str = setting(MnistOptions, "checksums")
    epochs: int = whole(1)
    batch_size: int = setting(TrainConfig, "micro_batch_size")
    lr: float = setting(TrainConfig, "lr")
    precision: str = setting(TrainConfig, "precision")
    ckpt_interval_steps: int = setting(TrainConfig, "ckpt_interval_steps", least=0)
    log_interval: int = setting(TrainConfig, "log_interval")


class Nights(luigi.Config):
    start_from = Choice(("", PREVIOUS))
    gate_tolerance: float | None = number(0, 100, empty=True)
    keep: int = whole(1)
    webhook = Webhook()


@dataclass(frozen=True)
class Settings:
    """All sections, valid individually and together."""

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
    card: Card
    store: Store
    trackers: Trackers
    mnist: Mnist
    nights: Nights

    def phase(self, phase: int) -> Phase:
        return self.phase1 if phase == 1 else self.phase2

    @property
    def work_dir(self) -> Path:
        return Path(self.run.work_dir)

    def grad_accum_usteps(self, phase: int) -> int:
        """Micro-steps per optimizer step. Raises `UserError` with the equation if the batch does not divide."""
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


#: The classes of all sections.
SECTIONS: tuple[type[luigi.Config], ...] = tuple(get_type_hints(Settings).values())


def section_name(section: type[luigi.Config]) -> str:
    """The section of luigi.cfg that a class reads: [phase1] for Phase1."""
    return section.__name__.lower()
