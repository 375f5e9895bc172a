"""The state that a run starts from: initial or, within a phase, a checkpoint's."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import torch

from common.errors import CheckpointError
from common.options import fields_of
from trainer.build import LOADING_AT_ONCE
from trainer.checkpoint.load import load_into
from trainer.checkpoint.resume_point import ResumePoint, checkpoint_directory
from trainer.config import TrainConfig
from trainer.data.order import ORDER_VERSION
from trainer.optim.schedule import DECAY_OPTIONS
from trainer.optim.select import Optimizer, takes_over
from trainer.parallel.tensor import TensorParallel
from trainer.precision import Precision
from trainer.run import Run
from trainer.state import TrainState


def deciding_settings(config: TrainConfig) -> dict[str, Any]:
    """The options that decide the result, defaults included, except those whose resolved value is a field of
    `TrainState`."""
    own = {field.name for field in dataclasses.fields(TrainState)} - {"micro_batch_size"}
    decide = [name for name, (_, about) in fields_of(config).items() if about.decides]
    return {name: getattr(config, name) for name in decide if name not in own}


def resolve_precision(run: Run, start: ResumePoint | None) -> Precision:
    """The precision that the options name; for `auto` the resumed phase's, else the device's default. Raises
    `UserError` if the device does not have it."""
    name = _precision_name(run, start)
    run.device.require_precision(name)
    return Precision(name, run.device.round_stochastically)


def _precision_name(run: Run, start: ResumePoint | None) -> str:
    config = run.config
    if config.wanted_precision != "auto":
        if config.precision == "auto":
            run.log(f"precision {config.wanted_precision}: optimizer {config.optimizer} is made for it")
        return config.wanted_precision
    if start is not None and start.state.phase == config.phase and start.state.known_precision:
        return start.state.known_precision
    # The root's for all: machines may differ.
    name, reason = run.mesh.by_root(run.device.automatic_precision)
    run.log(f"precision {name}: {reason}")
    return name


def _data_of(run: Run, start: ResumePoint | None) -> str:
    """The identity of the data set. A trial trains on some of it only and does not read all, which may take long."""
    if run.config.trial:
        return "" if start is None else start.state.data
    return run.workload.identity(run.config.output_dir)


def initial_state(run: Run, start: ResumePoint | None, precision: Precision, skipped: Sequence[int]) -> TrainState:
    """The state before the first step of a phase that skips the batches `skipped`. Raises `UserError`."""
    config, workload, mesh = run.config, run.workload, run.mesh
    _require_optimizer(config, start)
    return TrainState(
        phase=config.phase,
        step=0,
        global_step=config.phase1_end_step,
        samples_consumed=0,
        epoch=0,
        seed=config.seed,
        global_batch_size=config.global_batch_size(mesh.data_parallel_size),
        data=mesh.by_root(lambda: _data_of(run, start)),
        order_version=ORDER_VERSION,
        optimizer=config.optimizer,
        precision=precision.name,
        model=workload.describe(),
        data_parallel_size=mesh.data_parallel_size,
        tensor_parallel_size=mesh.tensor_parallel_size,
        micro_batch_size=config.micro_batch_size,
        torch_version=torch.__version__,
        settings=deciding_settings(config) | workload.settings(),
        origin="" if start is None else start.origin,
        skipped=sorted(skipped),
    )


def _require_optimizer(config: TrainConfig, start: ResumePoint | None) -> None:
    """Raise `CheckpointError`, before anything is loaded, if the optimizer cannot go on with the state of `start`."""
    if start is None or start.weights_only or takes_over(config.optimizer, start.state.optimizer):
        return
    raise CheckpointError(
        f"{start.checkpoint} holds the state of optimizer {start.state.optimizer}, with which {config.optimizer} "
        f"cannot continue; keep {start.state.optimizer}, or start from the weights alone in a new --output_dir, "
        f"as another phase (--resume_ckpt_path)"
    )


def resume(
    run: Run,
    state: TrainState,
    start: ResumePoint | None,
    optimizer: Optimizer,
    tensor_parallel: TensorParallel,
    elsewhere: Collection[str],
) -> TrainState:
    """The state to continue from, with its moments loaded into `optimizer`, except those `elsewhere`, which other
    workers keep; `state` itself in a new phase.

    Logs the starting point and the changes permitted by `--allow_changes`. Raises `CheckpointError` if any other option
    that decides the result has changed, or the optimizer's state cannot be used.
    """
    if start is None:
        run.log(f"starting phase {state.phase} at step 0 with initial weights")
        return state
    if start.weights_only:
        run.log(f"starting phase {state.phase} at step {state.global_step} with the weights of {start.checkpoint}")
        return state

    def load_optimizer() -> None:
        load_into(optimizer.state(), start, "optimizer", run.workload.vocab_size, tensor_parallel, elsewhere)
        run.device.finish_closures()

    if start.restarts:
        state = state.continuing(start.state, start.checkpoint)
        how = f"with its weights and optimizer, after {state.steps_before:,} steps on other data"
    else:
        state = state.resumed(start.state, start.checkpoint, allowed=run.config.allow_changes)
        how = f"at step {state.global_step}"
        _log_changes(run, state, start)
    if state.step >= run.config.max_steps and start.checkpoint.parent != checkpoint_directory(run.config):
        raise CheckpointError(
            f"{start.checkpoint} is of the last step, {state.step}: nothing is left to train; give more --max_steps or "
            f"--new_data to begin with its weights"
        )
    if state.step < run.config.max_steps:  # a finished phase needs none, and may have none (--minimal_ckpt)
        run.mesh.in_turns(load_optimizer, at_once=LOADING_AT_ONCE)
    optimizer.set_steps_done(state.optimizer_steps)
    run.log(f"{'starting' if start.restarts else 'resuming'} from checkpoint {start.checkpoint} {how}")
    return state


def _log_changes(run: Run, state: TrainState, start: ResumePoint) -> None:
    for change in state.changes[len(start.state.changes) :]:
        run.log(f"from step {change['step']} on: {change['name']} {change['old']} → {change['new']}, as allowed")
    for name in DECAY_OPTIONS:
        old, new = start.state.settings.get(name), state.settings[name]
        if old not in (None, new) and name not in run.config.allow_changes:
            run.log(f"{name} {old} → {new}: the same up to step {state.global_step}")
