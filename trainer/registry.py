"""The devices, optimizers and trackers that a name can stand for, and other values of options.

Imports no torch: the pipeline's settings read the names.

To add one, write its file and add its line here (CONTRIBUTING.md).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from common.errors import UserError

#: Subclasses of `trainer.devices.base.Device`. `neuron` is the one whose packages are installed (devices/select.py).
DEVICES = {
    "cpu": "trainer.devices.cpu:CpuDevice",
    "cuda": "trainer.devices.cuda:CudaDevice",
    "xla": "trainer.devices.xla:XlaDevice",
    "neuron-xla": "trainer.devices.neuron_xla:NeuronXlaDevice",
    "neuron-native": "trainer.devices.neuron_native:NeuronNativeDevice",
}


@dataclass(frozen=True)
class Compilation:
    """What the settings and Precompile need to know of a device's compiler; by default it has none of its own."""

    #: Optimizer steps of Precompile's trial if the device always compiles; 0: it does not. All graphs of this project
    #: occur within two.
    trial_steps: int = 0
    #: Whether whole steps are compiled, with the update: `Device.compiles_steps`.
    whole_steps: bool = False
    #: Whether `--compile` makes one graph of the model: `Compiler.whole_graph`.
    whole_model: bool = False
    #: Whether torch's DistributedDataParallel works on it: gloo's collectives cannot be part of a recorded graph.
    has_ddp: bool = True
    #: What compiles the graphs of a trial, if the trial does not, such as `neuron_compile.ParallelCompile`.
    program: str | None = None
    #: The variable with the user's flags for the compiler, on which its caches depend.
    flags: str | None = None
    #: Whether Precompile first checks what the device computes.
    is_tested: bool = False


#: By the names in `DEVICES`; those that are missing have the defaults. The first value is the tutorial's.
COMPILATION = {
    "neuron-xla": Compilation(
        trial_steps=10, whole_steps=True, program="trainer.devices.neuron_compile:ParallelCompile",
        flags="NEURON_CC_FLAGS", is_tested=True,
    ),
    "neuron-native": Compilation(trial_steps=3, whole_model=True, flags="NEURON_CC_FLAGS", is_tested=True),
    "xla": Compilation(trial_steps=3, whole_steps=True, has_ddp=False),
}  # fmt: skip

#: Implementations of `trainer.optim.select.Optimizer`. Two of them are the tutorials' names, which imply a precision.
OPTIMIZERS = {
    "AdamW": "trainer.optim.adamw:AdamW",
    "AdamW_FP32OptimParams": "trainer.optim.adamw:AdamW",
    "AdamW_FP32ParamsCopy": "trainer.optim.adamw:AdamW",
    "LAMB": "trainer.optim.lamb:Lamb",
    "Muon": "trainer.optim.muon:Muon",
    "SGD": "trainer.optim.sgd:SGD",
}
#: Those without state, so without a file of it in checkpoints.
STATELESS_OPTIMIZERS = frozenset(("SGD",))
#: Implementations of `trainer.metrics.trackers.base.Tracker`. All but the first, which the training itself writes, are
#: a `RemoteTracker`, and their names are also those of the packages and of the extras that install them.
TENSORBOARD = "tensorboard"
TRACKERS = {
    TENSORBOARD: "trainer.metrics.trackers.tensorboard:EventFile",
    "mlflow": "trainer.metrics.trackers.mlflow:MlflowTracker",
    "wandb": "trainer.metrics.trackers.wandb:WandbTracker",
}
#: Values of `--schedule`, `--non_finite`, `--data_parallel`, `--precision`, `--initial_attention` and
#: `--new_positions`.
SCHEDULES = ("linear", "cosine", "constant", "wsd")
NON_FINITE = ("skip", "stop")
DATA_PARALLEL = ("allreduce", "ddp")
PRECISIONS = ("auto", "fp32", "autocast", "autocast-sr", "bf16-sr", "bf16-master", "fp64")
INITIAL_ATTENTION = ("random", "neighbours")
NEW_POSITIONS = ("initial", "scaled")
#: Schedules with a stable part: up to its end nothing depends on the number of steps or on how the run ends.
STABLE_SCHEDULES = ("constant", "wsd")

#: The tutorials' names for AdamW that also choose a precision: what each promises, what `auto` means with it, and which
#: others are compatible.
NAMED_PRECISIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "AdamW_FP32OptimParams": (
        "fp32 moments and no fp32 copy of bf16 weights",
        ("bf16-sr", "fp32", "autocast", "autocast-sr"),
    ),
    "AdamW_FP32ParamsCopy": ("bf16 weights with an fp32 copy", ("bf16-master",)),
}


def require_agreement(optimizer: str, precision: str) -> None:
    """Raise `UserError` if the optimizer's name means one precision, and `precision` is another."""
    promise, agreeing = NAMED_PRECISIONS.get(optimizer, ("", ()))
    if agreeing and precision not in ("auto", *agreeing):
        raise UserError(
            f"optimizer {optimizer} means {promise}, which is not precision {precision}; allowed with it: auto, "
            f"{', '.join(agreeing)}; or take optimizer AdamW, which goes with every precision"
        )


#: How a message writes an option and its value: the trainer's command line, or the settings.
Written = Callable[[str, object], str]


def on_command_line(name: str, value: object) -> str:
    """--compile, --data_parallel ddp."""
    return f"--{name}" if value is True else f"--{name} {value}"


def require_ddp_alone(
    data_parallel: str, *, tensor_parallel_size: int, compile: bool, shard_optimizer: bool, grad_reduce_in_bf16: bool,
    written: Written = on_command_line,
) -> None:  # fmt: skip
    """Raise `UserError` if torch's DistributedDataParallel is to train with what only `allreduce` can."""
    others = {
        "tensor_parallel_size": tensor_parallel_size if tensor_parallel_size > 1 else None, "compile": compile,
        "shard_optimizer": shard_optimizer, "grad_reduce_in_bf16": grad_reduce_in_bf16,
    }  # fmt: skip
    given = [written(name, value) for name, value in others.items() if value]
    if data_parallel == "ddp" and given:
        raise UserError(
            f"{written('data_parallel', 'ddp')} does not go with {' or '.join(given)}; use allreduce, or leave the "
            f"rest at its default"
        )


def require_device(
    device: str, *, data_parallel: str, tensor_parallel_size: int, compile: bool, shard_optimizer: bool,
    written: Written = on_command_line,
) -> None:  # fmt: skip
    """Raise `UserError` if the device cannot train so. `auto` and `neuron`, which a machine resolves, pass."""
    how, named = compilation_of(device), written("device", device)
    if data_parallel == "ddp" and not how.has_ddp:
        raise UserError(
            f"{written('data_parallel', 'ddp')} does not go with {named}, which has no collective operation that DDP "
            f"can call while a graph is recorded; use allreduce, or another device"
        )
    if compile and how.whole_steps:
        raise UserError(f"{written('compile', True)} does not go with {named}, which always compiles; leave it off")
    if shard_optimizer and how.whole_steps:
        raise UserError(
            f"{written('shard_optimizer', True)} does not go with {named}, which compiles the update: it would be a "
            f"different graph on every worker; leave it off, or share the model itself with tensor_parallel_size"
        )
    if compile and how.whole_model and tensor_parallel_size > 1:
        raise UserError(
            f"{written('compile', True)} makes one graph of the model on {named}, which the sums over "
            f"{written('tensor_parallel_size', tensor_parallel_size)} workers would break; leave compile off, or "
            f"tensor_parallel_size at 1"
        )


def fallback_names(text: str | None, written: Written = on_command_line) -> tuple[str, ...]:
    """The operations that `allow_fallbacks` names. Raises `UserError` for an empty name."""
    names = () if text is None else tuple(map(str.strip, text.split(",")))
    if "" in names:
        raise UserError(
            f"{written('allow_fallbacks', repr(text))} has an empty name; allowed: names with commas between them, "
            f"such as aten::gelu,aten::sort"
        )
    return names


def stable_steps(schedule: str, *, max_steps: int, decay_share: float) -> int:
    """Steps up to the end of the stable part, warm-up included: the same in all runs that are stable as long and differ
    only in `DECAY_OPTIONS` (trainer/optim/schedule.py). 0 for a schedule that depends on its end from the start."""
    if schedule not in STABLE_SCHEDULES:
        return 0
    return max_steps - (round(decay_share * max_steps) if schedule == "wsd" else 0)


def longest_warmup(schedule: str, *, max_steps: int, decay_share: float) -> int:
    """The most warm-up steps: after more, the learning rate of `wsd` would drop abruptly into its decay."""
    if schedule == "wsd":
        return stable_steps(schedule, max_steps=max_steps, decay_share=decay_share)
    return max_steps


def require_warmup(schedule: str, *, warmup_steps: int, max_steps: int, decay_share: float) -> None:
    """Raise `UserError` if the warm-up is longer than `longest_warmup`."""
    most = longest_warmup(schedule, max_steps=max_steps, decay_share=decay_share)
    if warmup_steps > most:
        before = f"the {most} steps before the decay of schedule = wsd, with decay_share = {decay_share} and "
        raise UserError(
            f"warmup_steps = {warmup_steps} is more than {before if schedule == 'wsd' else ''}max_steps = {max_steps}; "
            f"lower it"
        )


def compilation_of(device: str) -> Compilation:
    """How a device of the registry compiles; a name that only its machine resolves has the defaults."""
    return COMPILATION.get(device, Compilation())


def load(reference: str) -> Any:
    """The class that `module:name` names; its module, and torch with it, is imported only now."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)
