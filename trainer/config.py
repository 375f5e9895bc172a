"""The options of a training run, as a validated frozen dataclass. Imports no torch.

`TrainConfig` is the only definition of a training option: the parser, the checks, the rule for what a resumed run may
change, and docs/options.md are made from its fields.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

from common.duration import Duration
from common.errors import UserError
from common.options import check, fields_of, option
from trainer import registry
from trainer.registry import (
    DATA_PARALLEL,
    NAMED_PRECISIONS,
    NON_FINITE,
    PRECISIONS,
    SCHEDULES,
    fallback_names,
    require_agreement,
    require_ddp_alone,
    require_warmup,
)

#: Values of `--optimizer`, `--precision` …; the pipeline's settings and the stages allow the same.
OPTIMIZERS = tuple(registry.OPTIMIZERS)
DEVICES = ("auto", "neuron", *registry.DEVICES)
_TRAIN, _TRAIN_HOW = {"group": "training"}, {"group": "training", "decides": False}
_CKPT, _MACHINE = ({"group": group, "decides": False} for group in ("checkpoints", "machine"))


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One phase of training. A step is an optimizer step; a micro-step is one forward and backward of one worker.

    An option keeps its name from the tutorials' scripts (`names`), and its help says where its default differs.
    """

    option_separator: ClassVar[str] = "_"

    output_dir: Path = option(
        Path("output"), group="data", decides=False, help="directory for checkpoints, logs and metrics"
    )
    metrics_file: Path | None = option(
        None, group="data", decides=False, help="summary of the run, JSON (default: OUTPUT_DIR/results.json)"
    )
    #: From `--phase2`; phase 2 counts its global steps from `phase1_end_step`.
    phase: int = option(1, names=None, help="the phase")
    phase1_end_step: int = option(
        28125, **_TRAIN, least=0, unit="step", help="for phase 2: global step at which phase 1 ended"
    )
    #: Dropout is drawn for each micro-batch.
    micro_batch_size: int = option(
        8, **_TRAIN, names=("--batch_size",), least=1, unit="samples", help="samples in a micro-step of one worker"
    )
    #: Does not decide the result; the global batch does.
    grad_accum_usteps: int = option(
        64, **_TRAIN_HOW, least=1, unit="micro-steps", help="micro-steps in an optimizer step"
    )
    batch_ramp_steps: int = option(
        0, **_TRAIN, least=0, unit="steps", omit_default=True, help="steps in which the global batch grows; 0: none"
    )
    batch_ramp_parts: int = option(
        2, **_TRAIN, least=2, omit_default=True, help="equal parts of the global batch, each of whole micro-batches"
    )
    max_steps: int = option(
        28125, **_TRAIN, least=1, unit="steps",
        help="optimizer steps in the phase; the learning rate is 0 after the last, except with --schedule constant",
    )  # fmt: skip
    budget: Duration | None = option(
        None, **_TRAIN_HOW, metavar="TIME",
        help="train for a time such as 20m instead of --max_steps: the steps that fit are measured and then fixed",
    )  # fmt: skip
    stop_step: int = option(
        -1, **_TRAIN_HOW, names=("--steps_this_run",), least=-1, unit="steps",
        help="stop after this optimizer step of the phase; -1: the last",
    )  # fmt: skip
    warmup_steps: int = option(
        2000, **_TRAIN, least=0, unit="steps", help="optimizer steps in which the learning rate rises linearly"
    )
    schedule: str = option(
        "linear", **_TRAIN, choices=SCHEDULES, omit_default=True,
        help="learning rate after the warm-up: linear or cosine, down to 0 at the last step; constant; or wsd, "
        "constant and then linear down to 0 in the last --decay_share of the steps",
    )  # fmt: skip
    decay_share: float = option(
        0.2, **_TRAIN, least=0.001, most=1, omit_default=True, help="share of all steps in which wsd decays"
    )
    lr: float = option(
        4e-4, **_TRAIN, least=0, help="peak learning rate; for mnist: per worker, times the number of workers"
    )
    optimizer: str = option(
        "AdamW", **_TRAIN, choices=OPTIMIZERS,
        help="with --precision auto, AdamW_FP32OptimParams means bf16-sr and AdamW_FP32ParamsCopy bf16-master; the "
        "tutorial's default is AdamW_FP32OptimParams",
    )  # fmt: skip
    adamw_lr_ratio: float = option(
        0.3, **_TRAIN, least=0, omit_default=True,
        help="with Muon: the learning rate of embeddings, biases, norms and heads, which use AdamW, divided by --lr",
    )  # fmt: skip
    weight_decay: float = option(0.01, **_TRAIN, least=0, help="weight decay of all parameters but biases and norms")
    max_grad_norm: float = option(1.0, **_TRAIN, least=0, help="L2 norm that gradients are clipped to; 0: never")
    seed: int = option(12349, **_TRAIN, help="seed of initial weights, sample order and dropout")
    precision: str = option(
        "auto", **_TRAIN, choices=PRECISIONS,
        help="autocast: fp32 weights, bf16 products; autocast-sr: the same, rounded stochastically by the hardware "
        "(neuron-xla); bf16-sr: bf16 weights with stochastic rounding; bf16-master: bf16 weights with an fp32 copy; "
        "sums, moments and losses are fp32; auto: by the optimizer's name, else autocast if bf16 is faster, else fp32",
    )  # fmt: skip
    grad_reduce_in_bf16: bool = option(
        False, **_TRAIN, omit_default=True, help="sum gradients over the workers in bf16, half the bytes of fp32"
    )
    non_finite: str = option(
        "skip", **_TRAIN_HOW, choices=NON_FINITE,
        help="when a step's loss, gradients or weights are not finite: skip returns to the last checkpoint and leaves "
        "out the batch of that step; stop ends the run",
    )  # fmt: skip
    non_finite_limit: int = option(
        3, **_TRAIN_HOW, least=0, unit="batches", help="batches of a phase that may be left out"
    )
    replica_check_steps: int = option(
        100, **_TRAIN_HOW, least=0, unit="steps",
        help="optimizer steps between comparisons of the workers' copies of weights and moments, which also precede "
        "every checkpoint; 0: only those",
    )  # fmt: skip
    resume: bool = option(False, **_CKPT, names=("--resume_ckpt",), help="continue from the newest valid checkpoint")
    resume_step: int = option(
        -1, **_CKPT, least=-1, unit="step",
        help="roll back to the checkpoint of this global step, which implies --resume_ckpt: newer ones are moved to "
        "OUTPUT_DIR/checkpoints/abandoned-N, each time; -1: continue from the newest",
    )  # fmt: skip
    resume_ckpt_path: Path | None = option(
        None, **_CKPT,
        help="checkpoint directory to begin training in OUTPUT_DIR with; implies --resume_ckpt. Phase 2 takes the "
        "weights of one of phase 1; one of the same phase is continued, or rolled back to if it is OUTPUT_DIR's own. "
        "The same command again continues from OUTPUT_DIR's newest checkpoint, which must have begun with this one",
    )  # fmt: skip
    new_data: bool = option(False, **_CKPT, help="begin on other data, with --resume_ckpt_path's weights and optimizer")
    allow_changes: tuple[str, ...] = option(
        (), **_CKPT, nargs="+", metavar="NAME",
        help="deciding options that a resumed run may change; the checkpoints record the change",
    )  # fmt: skip
    ckpt_interval_steps: int = option(
        -1, **_CKPT, least=-1, unit="steps",
        help="optimizer steps between checkpoints; 0: none by steps; -1: by --shards_per_ckpt",
    )  # fmt: skip
    ckpt_interval_minutes: float = option(
        0.0, **_CKPT, least=0, unit="minutes", help="minutes between checkpoints; 0: none"
    )
    num_ckpts_to_keep: int = option(
        2, **_CKPT, least=-1,
        help="checkpoints to keep, at least one, beside each phase's last stable one; -1: all; tutorial: 1",
    )  # fmt: skip
    minimal_ckpt: bool = option(
        False, **_CKPT,
        help="leave the optimizer out of the checkpoint that ends the phase: a third of the size, and all that phase 2 "
        "needs; earlier ones keep it, so that an interrupted phase can continue",
    )  # fmt: skip
    device: str = option("auto", **_MACHINE, choices=DEVICES, help="what to train on")
    tensor_parallel_size: int = option(1, **_MACHINE, least=1, unit="workers", help="workers that share one model")
    data_parallel: str = option(
        "allreduce", **_MACHINE, choices=DATA_PARALLEL,
        help="allreduce (recommended) sums the gradients in a fixed order after the last micro-step. ddp, torch's "
        "DistributedDataParallel, sums during the backward pass, for models whose all-reduce takes long; with more "
        "than 2 workers a resumed run then ends with different bytes, as buckets are reordered after the first step",
    )  # fmt: skip
    shard_optimizer: bool = option(
        False, **_MACHINE, help="workers share moments and master weights (ZeRO stage 1): less memory; not on xla"
    )
    compile: bool = option(False, **_MACHINE, help="compile the model with torch.compile; xla always compiles")
    compile_cache: str | None = option(None, **_MACHINE, help="directory of compiled graphs (default: the compiler's)")
    allow_fallbacks: str | None = option(
        None, **_MACHINE, metavar="A,B", help="operations that neuron-native may run on the CPU; others are refused"
    )
    batches_per_execution: int = option(
        1, **_MACHINE, least=1, unit="micro-batches", help="micro-batches in one compiled graph, on xla and neuron"
    )
    trial: bool = option(
        False, **_MACHINE, help="only compile the graphs: no checkpoint, log or metric is written, losses mean nothing"
    )
    graphs: Path | None = option(
        None, **_MACHINE, metavar="FILE", help="JSON list of graphs: --trial writes it; unlisted ones cause a warning"
    )
    collective_timeout_s: float = option(
        600.0, **_MACHINE, names=("--collective_timeout",), least=1, unit="seconds", help="timeout of collectives, in s"
    )
    spot_watch: bool = option(
        False, **_MACHINE,
        help="on EC2: save and stop (exit status 75) on a spot interruption notice, save on a rebalance recommendation",
    )  # fmt: skip
    print_grad_norm: bool = option(False, **_MACHINE, help="show the gradient norm on the console line")
    record_samples: bool = option(
        False, **_MACHINE, help="write each sample's (shard, row) to OUTPUT_DIR/samples-RANK.jsonl"
    )
    log_interval: int = option(1, **_MACHINE, least=1, unit="steps", help="optimizer steps between console lines")

    def __post_init__(self) -> None:
        check(self)
        if self.stop_step == 0:
            raise UserError(
                "--steps_this_run is 0, which trains nothing; allowed: a step of the phase, or -1, the last"
            )
        for name in self.allow_changes:
            if name not in CHANGEABLE:
                raise UserError(f"--allow_changes is {name}; allowed: {', '.join(CHANGEABLE)}")
        fallback_names(self.allow_fallbacks)
        require_agreement(self.optimizer, self.precision)
        require_ddp_alone(
            self.data_parallel, tensor_parallel_size=self.tensor_parallel_size, compile=self.compile,
            shard_optimizer=self.shard_optimizer, grad_reduce_in_bf16=self.grad_reduce_in_bf16,
        )  # fmt: skip
        if self.grad_accum_usteps % self.batches_per_execution:
            raise UserError(
                f"grad_accum_usteps / batches_per_execution = {self.grad_accum_usteps} / {self.batches_per_execution} "
                f"is not a whole number: steps would have different graphs; change one of them"
            )
        if self.budget is None:
            require_warmup(
                self.schedule, warmup_steps=self.warmup_steps, max_steps=self.max_steps, decay_share=self.decay_share
            )

    def lasting(self, max_steps: int) -> Self:
        """The same phase with its number of steps known."""
        stop_step = max_steps if self.stop_step < 0 else min(self.stop_step, max_steps)
        return dataclasses.replace(self, max_steps=max_steps, stop_step=stop_step, budget=None)

    @property
    def wanted_precision(self) -> str:
        """The requested precision, by `precision` or the optimizer's name; auto: the device's default."""
        if self.precision == "auto" and self.optimizer in NAMED_PRECISIONS:
            return NAMED_PRECISIONS[self.optimizer][1][0]
        return self.precision

    @property
    def allowed_fallbacks(self) -> tuple[str, ...]:
        """The operations that `allow_fallbacks` names."""
        return fallback_names(self.allow_fallbacks)

    def global_batch_size(self, data_parallel_size: int) -> int:
        """Samples in one optimizer step of all workers, after the ramp."""
        return self.micro_batch_size * self.grad_accum_usteps * data_parallel_size


#: What a resumed run may change if `allow_changes` names it: all that decides the result, except what would make it
#: another phase or model.
CHANGEABLE = (
    *(name for name, (_, about) in fields_of(TrainConfig).items() if about.decides and not name.startswith("phase")),
    *("global_batch_size", "data", "seq_len", "hidden_dropout_prob", "attention_probs_dropout_prob"),
    *("masked_lm_prob", "final_masked_lm_prob", "whole_word_mask", "sampled_softmax", "next_sentence_weight"),
)
#: BERT's settings that states and identities leave out at these values.
LEFT_OUT = {"sampled_softmax": 0, "next_sentence_weight": 1.0}


def without_left_out(settings: Mapping[str, float]) -> dict[str, float]:
    """Those of `settings` that are not at their value in `LEFT_OUT`."""
    return {name: value for name, value in settings.items() if value != LEFT_OUT[name]}
