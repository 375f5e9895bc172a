"""Settings that cannot be together: refused before anything starts, by the rules of the stages and of the trainer."""

from __future__ import annotations

import os

from common.errors import UserError
from pipeline.settings.origin import commented_line
from pipeline.settings.parameters import in_section
from pipeline.settings.sections import Dataset, Phase, Precision, Settings
from stages.shard import STATIC
from trainer.data.batch_ramp import BatchRamp
from trainer.registry import fallback_names, require_agreement, require_ddp_alone, require_device, require_warmup


def check_together(settings: Settings) -> None:
    """Raises `UserError`."""
    cluster = settings.cluster
    cluster.check()
    _check_training(settings)
    settings.store.check()
    settings.trackers.check(cluster)
    if cluster.launcher == "slurm":
        _check_slurm(settings)
    if cluster.launcher == "kubernetes":
        settings.kubernetes.check(cluster)
    for phase in (1, 2):
        at = settings.phase(phase)
        _check_precision(phase, at.optimizer, settings.precision.mode)
        usteps, per_execution = settings.grad_accum_usteps(phase), cluster.batches_per_execution
        if usteps % per_execution:
            raise UserError(
                f"[phase{phase}] has {usteps} micro-steps in a step, which [cluster] batches_per_execution = "
                f"{per_execution} does not divide; change one of them"
            )
        _check_ramp(phase, at, at.global_batch_size // usteps * per_execution)
        if at.seq_len > settings.model.max_position_embeddings:
            raise UserError(
                f"[phase{phase}] seq_len = {at.seq_len} is longer than [model] max_position_embeddings = "
                f"{settings.model.max_position_embeddings}; shorten the one or raise the other"
            )
        if at.budget is None:
            _check_warmup(phase, at)
        if settings.dataset.masking == STATIC and not settings.dataset.url(phase):
            _check_static_masks(phase, at)
        if not settings.dataset.url(phase):
            _check_copies(settings.dataset)
        if at.max_pred_len > at.seq_len:
            raise UserError(
                f"[phase{phase}] max_pred_len = {at.max_pred_len} is more than seq_len = {at.seq_len}; lower it"
            )
    _check_model(settings)


def _check_slurm(settings: Settings) -> None:
    settings.slurm.check()
    if line := commented_line("slurm", "sbatch_lines", "#SBATCH"):
        raise UserError(f"[slurm] sbatch_lines: line {line} is a comment, for its #; leave out #SBATCH")


def _check_training(settings: Settings) -> None:
    """Refuse what every training would refuse hours later, once it is started."""
    cluster, reduces_in_bf16 = settings.cluster, settings.precision.grad_reduce_in_bf16
    how = {name: getattr(cluster, name) for name in ("tensor_parallel_size", "compile", "shard_optimizer")}
    fallback_names(cluster.allow_fallbacks, _written)
    require_ddp_alone(cluster.data_parallel, **how, grad_reduce_in_bf16=reduces_in_bf16, written=_written)
    if not os.environ.get("DISABLE_XLA"):  # with which another device is used, on the machine that trains
        require_device(cluster.device, data_parallel=cluster.data_parallel, **how, written=_written)


def _written(name: str, value: object) -> str:
    """The trainer's option as the setting that it comes from."""
    section = "precision" if name in vars(Precision) else "cluster"
    return f"[{section}] {name} = {str(value).lower() if value is True else value}"


def _check_precision(number: int, optimizer: str, mode: str) -> None:
    try:
        require_agreement(optimizer, mode)
    except UserError as error:
        raise UserError(f"[phase{number}] optimizer = {optimizer}, [precision] mode = {mode}: {error}") from None


def _check_model(settings: Settings) -> None:
    with in_section("model"):
        model = settings.model.config(settings.model.downloaded_vocab_size)
        model.require_divisible(settings.cluster.tensor_parallel_size)


def _check_copies(dataset: Dataset) -> None:
    if dataset.dupe_factor > 1 and dataset.masking != STATIC and not dataset.next_sentence:
        raise UserError(
            f"[dataset] dupe_factor = {dataset.dupe_factor} does not go with next_sentence = false and masking = "
            f"{dataset.masking}: the copies would be the same rows; set it to 1, or mask statically"
        )


def _check_ramp(number: int, phase: Phase, unit: int) -> None:
    """`unit`: samples that all workers execute at once."""
    with in_section(f"phase{number}"):
        BatchRamp(phase.batch_ramp_steps, phase.batch_ramp_parts).require_whole_parts(phase.global_batch_size, unit)


def _check_warmup(number: int, phase: Phase) -> None:
    with in_section(f"phase{number}"):
        require_warmup(
            phase.schedule, warmup_steps=phase.warmup_steps, max_steps=phase.max_steps, decay_share=phase.decay_share
        )


def _check_static_masks(number: int, phase: Phase) -> None:
    if phase.final_masked_lm_prob is not None:
        raise UserError(
            f"[phase{number}] final_masked_lm_prob = {phase.final_masked_lm_prob} does not go with [dataset] masking = "
            f"static, whose masks are made once; leave it empty"
        )
    needed = round(phase.seq_len * phase.masked_lm_prob)
    if needed > phase.max_pred_len:
        raise UserError(
            f"[phase{number}] masked_lm_prob = {phase.masked_lm_prob} of seq_len = {phase.seq_len} are {needed} masked "
            f"positions, more than max_pred_len = {phase.max_pred_len}; raise that, or lower the share"
        )
