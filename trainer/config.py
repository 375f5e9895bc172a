"""What a training run is, as frozen dataclasses, validated once. Imports no torch: the pipeline reads this too."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from common.errors import UserError
from trainer import registry

#: Published sizes: layers, hidden size, attention heads, intermediate size.
#: tiny … medium: Turc et al. 2019 (arXiv:1908.08962), table 1; base and large: Devlin et al. 2018 (arXiv:1810.04805);
#: debug: what `--debug` of the Neuron tutorial's script makes.
PRESETS: dict[str, tuple[int, int, int, int]] = {
    "debug": (1, 16, 2, 64),
    "tiny": (2, 128, 2, 512),
    "mini": (4, 256, 4, 1024),
    "small": (4, 512, 8, 2048),
    "medium": (8, 512, 8, 2048),
    "base": (12, 768, 12, 3072),
    "large": (24, 1024, 16, 4096),
}


def setting(*, decides: bool) -> dict[str, Any]:
    """Metadata of a configuration's field. `decides`: whether it decides what is trained, so that a resumed run must
    not change it unasked; else it only says how, where, or how often something is written."""
    return {"decides": decides}


_DECIDES, _HOW = setting(decides=True), setting(decides=False)


def deciding(config: Any) -> dict[str, Any]:
    """The values of a configuration's fields that decide what is trained, by name."""
    return {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.metadata["decides"]}


@dataclass(frozen=True)
class ModelConfig:
    """A BERT, in Hugging Face's words; the defaults are those of `bert-large-uncased`."""

    vocab_size: int = field(default=30522, metadata=_DECIDES)
    num_hidden_layers: int = field(default=24, metadata=_DECIDES)
    hidden_size: int = field(default=1024, metadata=_DECIDES)
    num_attention_heads: int = field(default=16, metadata=_DECIDES)
    intermediate_size: int = field(default=4096, metadata=_DECIDES)
    max_position_embeddings: int = field(default=512, metadata=_DECIDES)
    type_vocab_size: int = field(default=2, metadata=_DECIDES)
    hidden_dropout_prob: float = field(default=0.1, metadata=_DECIDES)
    attention_probs_dropout_prob: float = field(default=0.1, metadata=_DECIDES)
    layer_norm_eps: float = field(default=1e-12, metadata=_DECIDES)
    initializer_range: float = field(default=0.02, metadata=_DECIDES)

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_attention_heads:
            raise UserError(
                f"hidden_size {self.hidden_size} / num_attention_heads {self.num_attention_heads} is not a whole "
                f"number; choose a hidden size that its heads divide"
            )
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"{name} = {getattr(self, name)} is not a probability; allowed: 0 ≤ p < 1")

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Self:
        """The model of that published name, with single fields changed. Raises `UserError` for an unknown name."""
        if name not in PRESETS:
            raise UserError(f"model '{name}' is not known; allowed: {', '.join(PRESETS)}")
        layers, hidden, heads, intermediate = PRESETS[name]
        sizes = {
            "num_hidden_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "intermediate_size": intermediate,
        }
        return cls(**{**sizes, **changes})

    @classmethod
    def of_hugging_face(cls, config: dict[str, Any]) -> Self:
        """From the object in a Hugging Face `config.json`; keys this project has no use for are left out."""
        return cls(**{f.name: config[f.name] for f in dataclasses.fields(cls) if f.name in config})

    def to_hugging_face(self) -> dict[str, Any]:
        """The object of a `config.json` that `BertForPreTraining.from_pretrained` reads."""
        return {
            "architectures": ["BertForPreTraining"],
            "model_type": "bert",
            "hidden_act": "gelu",
            "pad_token_id": 0,
            "position_embedding_type": "absolute",
            "tie_word_embeddings": True,
            **dataclasses.asdict(self),
        }

    def without_dropout(self) -> Self:
        return dataclasses.replace(self, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


@dataclass(frozen=True)
class TrainConfig:
    """One phase of training. Steps are optimizer steps; a micro-step is one forward and backward of one worker."""

    output_dir: Path = field(metadata=_HOW)
    #: Where the summary of the run is written, as JSON.
    metrics_file: Path = field(metadata=_HOW)
    #: 1 or 2; phase 2 counts its global steps on from `phase1_end_step`.
    phase: int = field(metadata=_DECIDES)
    #: Global step at which phase 1 ended; 0 in phase 1.
    phase1_end_step: int = field(metadata=_DECIDES)
    #: Sequences in one micro-step of one worker. Dropout is drawn by micro-batch.
    micro_batch_size: int = field(metadata=_DECIDES)
    #: Micro-steps in one optimizer step. What decides is the global batch.
    grad_accum_usteps: int = field(metadata=_HOW)
    #: Optimizer steps in the whole phase: where the learning rate reaches zero.
    max_steps: int = field(metadata=_DECIDES)
    #: Optimizer steps after which this run stops, counted from the start of the phase.
    stop_step: int = field(metadata=_HOW)
    warmup_steps: int = field(metadata=_DECIDES)
    #: linear: warm-up, then down to zero at `max_steps`; constant: no change after the warm-up.
    schedule: str = field(metadata=_DECIDES)
    #: Peak learning rate.
    lr: float = field(metadata=_DECIDES)
    optimizer: str = field(metadata=_DECIDES)
    weight_decay: float = field(metadata=_DECIDES)
    max_grad_norm: float = field(metadata=_DECIDES)
    seed: int = field(metadata=_DECIDES)
    #: fp32, fp64, autocast, bf16-sr, bf16-master (trainer/precision.py), or auto.
    precision: str = field(metadata=_DECIDES)
    #: cpu, cuda, xla, neuron, or auto.
    device: str = field(metadata=_HOW)
    tensor_parallel_size: int = field(metadata=_HOW)
    #: How gradients are summed over workers: allreduce, ours after the last micro-step; ddp, torch's, beside backward.
    data_parallel: str = field(metadata=_HOW)
    #: Optimizer steps between checkpoints; 0: only by time.
    ckpt_interval_steps: int = field(metadata=_HOW)
    #: Minutes between checkpoints; 0: only by steps.
    ckpt_interval_minutes: float = field(metadata=_HOW)
    #: Checkpoints kept, newest first; -1: all.
    num_ckpts_to_keep: int = field(metadata=_HOW)
    #: Optimizer steps between two comparisons of the workers' weights and moments; 0: only before checkpoints.
    replica_check_steps: int = field(metadata=_HOW)
    #: What to do about a step that is not finite: skip its batch, from the checkpoint before it on; or stop.
    non_finite: str = field(metadata=_HOW)
    #: Batches of a phase that may be skipped.
    non_finite_limit: int = field(metadata=_HOW)
    #: Leave the optimizer's state out of the checkpoint that ends the phase.
    minimal_ckpt: bool = field(metadata=_HOW)
    resume: bool = field(metadata=_HOW)
    #: The checkpoint that training in `output_dir` begins with; or one of its own, to roll back to.
    resume_ckpt_path: Path | None = field(metadata=_HOW)
    #: The global step to roll back to; -1: go on from the newest.
    resume_step: int = field(metadata=_HOW)
    #: Names of what the run may change that it resumes, although it decides the result.
    allow_changes: tuple[str, ...] = field(metadata=_HOW)
    #: Show the gradient norm on the console line too.
    print_grad_norm: bool = field(metadata=_HOW)
    #: Optimizer steps between console lines.
    log_interval: int = field(metadata=_HOW)
    #: Write which samples each worker used in each step to samples-<rank>.jsonl.
    record_samples: bool = field(metadata=_HOW)
    #: Whether torch.compile makes kernels of the model, on cpu and cuda.
    compile: bool = field(metadata=_HOW)
    #: Directory that compiled graphs are kept in, by devices that can; None: where the compiler likes.
    compile_cache: str | None = field(metadata=_HOW)
    #: Only have the graphs compiled: nothing is written, no loss believed.
    trial: bool = field(metadata=_HOW)
    #: List of compiled graphs: written by a trial, else what is not in it is told; None: neither.
    graphs: Path | None = field(metadata=_HOW)
    #: Micro-batches in one compiled graph, on devices that compile steps.
    batches_per_execution: int = field(metadata=_HOW)
    #: Seconds without an answer after which a collective operation gives up.
    collective_timeout_s: float = field(metadata=_HOW)
    #: Whether one worker on each machine watches for Amazon's notices that the instance is to be taken away.
    spot_watch: bool = field(metadata=_HOW)

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value < least:
                raise UserError(f"{name} = {value} is too small; allowed: {least} or more")
        chosen = [(name, getattr(self, name), allowed) for name, allowed in _CHOICES.items()]
        for name, value, allowed in [*chosen, *(("allow_changes", name, CHANGEABLE) for name in self.allow_changes)]:
            if value not in allowed:
                raise UserError(f"{name}: {value} is not known; allowed: {', '.join(map(str, allowed))}")
        require_agreement(self.optimizer, self.precision)
        if self.data_parallel == "ddp" and self.tensor_parallel_size > 1:
            raise UserError("data_parallel ddp knows nothing of ranks that share a model; use data_parallel allreduce")
        if self.compile and self.data_parallel == "ddp":
            raise UserError("compile and data_parallel ddp do not go together; choose one of them")
        if self.grad_accum_usteps % self.batches_per_execution:
            raise UserError(
                f"grad_accum_usteps / batches_per_execution = {self.grad_accum_usteps} / {self.batches_per_execution} "
                f"is not a whole number: steps would have different graphs; change one of them"
            )
        if self.warmup_steps > self.max_steps:
            raise UserError(f"warmup_steps {self.warmup_steps} is more than max_steps {self.max_steps}; lower it")

    @property
    def wanted_precision(self) -> str:
        """The precision that is asked for, by `precision` or by the optimizer's name; auto: the device's."""
        if self.precision == "auto" and self.optimizer in NAMED_PRECISIONS:
            return NAMED_PRECISIONS[self.optimizer][1][0]
        return self.precision

    def global_batch_size(self, data_parallel_size: int) -> int:
        """Sequences in one optimizer step of all workers."""
        return self.micro_batch_size * self.grad_accum_usteps * data_parallel_size


#: What a resumed run may change if `allow_changes` names it: all that decides and does not make it another phase or
#: another model.
CHANGEABLE = (
    *(f.name for f in dataclasses.fields(TrainConfig) if f.metadata["decides"] and not f.name.startswith("phase")),
    *("global_batch_size", "data"),
    *(f.name for f in dataclasses.fields(ModelConfig) if "dropout" in f.name),
)

_LEAST = {
    "micro_batch_size": 1,
    "grad_accum_usteps": 1,
    "batches_per_execution": 1,
    "tensor_parallel_size": 1,
    "max_steps": 1,
    "warmup_steps": 0,
    "lr": 0.0,
    "phase1_end_step": 0,
    "ckpt_interval_steps": 0,
    "ckpt_interval_minutes": 0.0,
    "num_ckpts_to_keep": -1,
    "resume_step": -1,
    "replica_check_steps": 0,
    "non_finite_limit": 0,
    "log_interval": 1,
    "weight_decay": 0.0,
    "max_grad_norm": 0.0,
    "collective_timeout_s": 1.0,
}

#: What can be chosen today. Also what the pipeline's settings allow.
_CHOICES: dict[str, tuple[Any, ...]] = {
    "phase": (1, 2),
    "optimizer": tuple(registry.OPTIMIZERS),
    "schedule": ("linear", "constant"),
    "non_finite": ("skip", "stop"),
    "data_parallel": ("allreduce", "ddp"),
    "precision": ("auto", "fp32", "autocast", "bf16-sr", "bf16-master", "fp64"),
    "device": ("auto", *registry.DEVICES),
}

#: The tutorials' names for AdamW that say a precision, too: what each promises, what `auto` means with it, and what
#: else agrees with it.
NAMED_PRECISIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "AdamW_FP32OptimParams": ("fp32 moments and no fp32 copy of bf16 weights", ("bf16-sr", "fp32", "autocast")),
    "AdamW_FP32ParamsCopy": ("bf16 weights with an fp32 copy", ("bf16-master",)),
}


def require_agreement(optimizer: str, precision: str) -> None:
    """Raise `UserError` if the optimizer's name says one precision, and `precision` another."""
    promise, agreeing = NAMED_PRECISIONS.get(optimizer, ("", ()))
    if agreeing and precision not in ("auto", *agreeing):
        raise UserError(
            f"optimizer {optimizer} means {promise}, which is not precision {precision}; allowed with it: auto, "
            f"{', '.join(agreeing)}; or take optimizer AdamW, which goes with every precision"
        )


NON_FINITE: tuple[str, ...] = _CHOICES["non_finite"]
SCHEDULES: tuple[str, ...] = _CHOICES["schedule"]
DATA_PARALLEL: tuple[str, ...] = _CHOICES["data_parallel"]
OPTIMIZERS: tuple[str, ...] = _CHOICES["optimizer"]
PRECISIONS: tuple[str, ...] = _CHOICES["precision"]
DEVICES: tuple[str, ...] = _CHOICES["device"]
