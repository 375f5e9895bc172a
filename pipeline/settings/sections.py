"""All settings: one class for each section of luigi.cfg, and `Settings` with all sections."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import luigi

from common.errors import UserError
from common.secrets import Secret
from pipeline.settings.cluster import Cluster, Kubernetes, Slurm
from pipeline.settings.parameters import (
    Address,
    Choice,
    Number,
    NumberOrEmpty,
    Sha256OrEmpty,
    Switch,
    Webhook,
    Whole,
    WholeOrEmpty,
)
from stages.embed import WORD_EMBEDDINGS
from stages.mnist import CHECKSUMS
from stages.shard import DYNAMIC, STATIC
from stages.text.corpus import DOCUMENT_ENDS
from stages.transfer.urls import CONNECTIONS_MAX
from trainer.config import OPTIMIZERS, PRESETS, ModelConfig
from trainer.registry import NON_FINITE, PRECISIONS, SCHEDULES


class Run(luigi.Config):
    work_dir = luigi.StrParameter()
    seed = Whole(0, 2**31 - 1)
    log_interval = Whole(1)
    non_finite = Choice(NON_FINITE)
    non_finite_limit = Whole(0)
    replica_check_steps = Whole(0)
    processes = Whole(0)
    report_interval_s = Number(0)
    stage_hang_timeout_s = Number(0)


class Corpus(luigi.Config):
    source = luigi.StrParameter()
    held_out_source = luigi.StrParameter()
    held_out = Number(0, 0.5)
    document = Choice(DOCUMENT_ENDS)
    vocab_file = luigi.StrParameter()
    vocab_size = Whole(64, 1 << 20)
    lower_case = Switch()
    max_unknown_share = Number(0, 1)


class Dataset(luigi.Config):
    phase1_url = Address()
    phase2_url = Address()
    phase1_sha256 = Sha256OrEmpty()
    phase2_sha256 = Sha256OrEmpty()
    s3_profile = luigi.StrParameter()
    s3_endpoint = Address()
    connections = Whole(1, CONNECTIONS_MAX)
    low_speed_limit_bytes_per_s = Number(0)
    low_speed_time_s = Number(1)
    keep_archive = Switch()
    next_sentence = Switch()
    masking = Choice((STATIC, DYNAMIC))
    dupe_factor = Whole(1, 1000)
    short_seq_prob = Number(0, 1)
    whole_word_mask = Switch()
    shards = Whole(1, 100_000)

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
        """Vocabulary size for data without a vocabulary: the setting, else that of `bert-large-uncased`."""
        return self.vocab_size or ModelConfig().vocab_size

    def config(self, vocab_size: int) -> ModelConfig:
        """The model; its vocabulary size is `vocab_size` unless the settings give one."""
        given = {name: value for name, value in self.param_kwargs.items() if value is not None and name != "preset"}
        return ModelConfig.preset(self.preset, **{"vocab_size": vocab_size, **given})


class Phase(luigi.Config):
    """The keys that [phase1] and [phase2] have in common."""

    seq_len = Whole(8, 1 << 16)
    max_pred_len = Whole(1)
    masked_lm_prob = Number(0.001, 1)
    final_masked_lm_prob = NumberOrEmpty(0.001, 1)
    pack = Switch()
    global_batch_size = Whole(1)
    micro_batch_size = Whole(1)
    batch_ramp_steps = Whole(0)
    batch_ramp_parts = Whole(2)
    optimizer = Choice(OPTIMIZERS)
    lr = Number(0)
    schedule = Choice(SCHEDULES)
    warmup_steps = Whole(0)
    decay_share = Number(0.001, 1)
    max_steps = Whole(1)
    weight_decay = Number(0)
    max_grad_norm = Number(0)
    ckpt_interval_steps = Whole(0)
    ckpt_interval_minutes = Number(0)
    num_ckpts_to_keep = Whole(-1)
    minimal_ckpt = Switch()


class Phase1(Phase):
    word_embeddings = Choice(WORD_EMBEDDINGS)


class Phase2(Phase):
    start_from = Address()


class Precision(luigi.Config):
    mode = Choice(PRECISIONS)


class Evaluation(luigi.Config):
    max_samples = Whole(1)
    blimp = luigi.StrParameter()
    blimp_samples = Whole(0)


class Mnist(luigi.Config):
    url = Address()
    checksums = Choice(CHECKSUMS)
    epochs = Whole(1)
    batch_size = Whole(1)
    lr = Number(0)
    precision = Choice(PRECISIONS)
    ckpt_interval_steps = Whole(0)
    log_interval = Whole(1)


class Nights(luigi.Config):
    keep = Whole(1)
    webhook = Webhook()


SECTIONS: tuple[type[luigi.Config], ...] = (
    *(Run, Corpus, Dataset, Model, Phase1, Phase2),
    *(Precision, Cluster, Slurm, Kubernetes, Evaluation, Mnist, Nights),
)


@dataclass(frozen=True)
class Settings:
    """All sections, each and together valid."""

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


def section_name(section: type[luigi.Config]) -> str:
    """The section of luigi.cfg that a class reads: [phase1] for Phase1."""
    return section.__name__.lower()
