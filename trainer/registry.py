"""The devices, optimizers and trackers that a name can stand for, and other values of options.

Imports no torch: the pipeline's settings read the names.

To add one, write its file and add its line here (CONTRIBUTING.md).
"""

from __future__ import annotations

import importlib
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
#: Values of `--schedule`, `--non_finite`, `--data_parallel`, `--precision` and `--initial_attention`.
SCHEDULES = ("linear", "cosine", "constant", "wsd")
NON_FINITE = ("skip", "stop")
DATA_PARALLEL = ("allreduce", "ddp")
PRECISIONS = ("auto", "fp32", "autocast", "autocast-sr", "bf16-sr", "bf16-master", "fp64")
INITIAL_ATTENTION = ("random", "neighbours")
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


def load(reference: str) -> Any:
    """The class that `module:name` names; its module, and torch with it, is imported only now."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)
