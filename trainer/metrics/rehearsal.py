"""Measures the time of a step before a phase that is trained for a given time, by training and keeping nothing of it.

The rehearsal is a trial run with the same model, batches and graphs. It leaves no file, and training builds everything
anew from the same seeds, so it ends with the same bytes as an unmeasured training of as many steps.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import time
from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from common.errors import Interrupted
from common.files import PROGRESS, disk_errors, failpoint, replace_json
from trainer.checkpoint.gather import OptimizerShares
from trainer.checkpoint.resume_point import given_state, require_other_phase
from trainer.checkpoint.snapshot import HostCopy
from trainer.config import TrainConfig
from trainer.launch.preemption import Requests
from trainer.metrics.budget import (
    UNBOUNDED_STEPS,
    Pace,
    fix,
    identity,
    recorded_steps,
    require_enough,
    steps_within,
)
from trainer.registry import stable_steps
from trainer.run import Run
from trainer.state import TrainState
from trainer.workloads.base import Workload

#: Steps before the clock starts, in which graphs are compiled and memory is allocated, and the fewest steps timed.
_WARMUP_STEPS, _LEAST_TIMED = 3, 5
#: Share of the budget to spend on the timed steps, and its limit in seconds.
_SHARE, _MOST_S = 0.01, 60.0
#: Seconds between two signs of life.
_WRITE_INTERVAL_S = 1.0


class Rehearsed(Protocol):
    """What a rehearsal needs from `trainer.loop.Trainer`."""

    state: TrainState
    tensors: tuple[dict[str, Tensor], dict[str, Tensor]]

    def train(self) -> bool: ...


MakeTrainer = Callable[[Run, Requests], Rehearsed]


def resolved(run: Run, requests: Requests, make_trainer: MakeTrainer) -> Run:
    """`run` with the number of steps that its budget holds: the recorded one, else measured now and recorded.

    Raises `Interrupted` if `requests` stop the measuring; `AgreedError` if too few steps fit; `UserError`.
    """
    config, mesh, log = run.config, run.mesh, run.log
    assert config.budget is not None
    workers = mesh.data_parallel_size
    batch = config.global_batch_size(workers)
    training = identity(config, run.workload.describe(), run.workload.settings(), {"global_batch_size": batch})
    steps = mesh.by_root(lambda: recorded_steps(config, training))
    if steps is not None:
        log(f"budget {config.budget}: {steps} steps, as measured when the phase began")
    else:
        mesh.by_root(lambda: require_other_phase(config))
        log(f"budget {config.budget}: measuring the time of a step")
        pace = mesh.broadcast_object(_measure(run, requests, make_trainer))
        if pace is None:
            raise Interrupted("the time of a step was not measured yet; the same command will measure it")
        steps = steps_within(config.budget, pace, config, batch, compares=mesh.world_size > 1)
        require_enough(config, pace, steps)
        log(f"budget {config.budget}: {steps} steps of {pace.step_s:.4g} s, after {pace.spent_s:.1f} s of measuring")
        failpoint("budget:measured")
        mesh.by_root(lambda: fix(config, training, pace, steps))
    return dataclasses.replace(run, config=config.lasting(steps))


def _measure(run: Run, requests: Requests, make_trainer: MakeTrainer) -> Pace | None:
    """The pace in the root worker; None if it was stopped, and in the others. Collective."""
    began = time.monotonic()
    config = run.config
    assert config.budget is not None
    rehearsal = dataclasses.replace(
        config, precision=_precision(run),
        trial=True, phase=1, phase1_end_step=0, resume=False, resume_step=-1, resume_ckpt_path=None,
        new_data=False, stop_step=-1, batch_ramp_steps=0, ckpt_interval_steps=0, ckpt_interval_minutes=0, graphs=None,
        record_samples=False,
    ).lasting(UNBOUNDED_STEPS)  # fmt: skip
    progress = config.output_dir / PROGRESS
    said = {"label": f"phase {config.phase}, measuring", "done": None, "total": None, "unit": "steps", "per_s": None}
    clock = _Clock(requests, min(_MOST_S, _SHARE * config.budget), run, lambda: replace_json(progress, said))
    workload = _averaged(run.workload, rehearsal)
    trainer = make_trainer(dataclasses.replace(run, config=rehearsal, workload=workload, log=lambda line: None), clock)
    built_s = time.monotonic() - began
    trainer.train()
    clock.end()
    if run.is_root:
        with disk_errors(progress):
            progress.unlink(missing_ok=True)
    check_s, copy_s = _pauses(run, trainer)
    del trainer
    gc.collect()  # before the next one is built
    if clock.step_s is None:
        return None
    # The trainer is built once more.
    return Pace(clock.step_s, check_s, copy_s, time.monotonic() - began + built_s)


def _precision(run: Run) -> str:
    """That of the training: `auto` means what the checkpoint was trained in that it continues on new data."""
    config = run.config
    if not config.new_data or config.wanted_precision != "auto":
        return config.precision
    state = run.mesh.by_root(lambda: given_state(config))
    if state is None or state.phase != config.phase:
        return config.precision
    return state.known_precision or config.precision


def _averaged(workload: Workload, rehearsal: TrainConfig) -> Workload:
    """`workload` with the mean masking rate of its phase: the fewer positions are masked, the faster a step is."""
    if workload.masking is None:
        return workload
    steps = rehearsal.max_steps
    stable = stable_steps(rehearsal.schedule, max_steps=steps, decay_share=rehearsal.decay_share)
    averaged = copy.copy(workload)
    rate = workload.masking.rate.averaged((steps - stable) / steps)
    averaged.masking = dataclasses.replace(workload.masking, rate=rate)
    return averaged


def _pauses(run: Run, trainer: Rehearsed) -> tuple[float, float]:
    """Seconds for which checking the state and copying it pause training."""
    model, optimizer = trainer.tensors
    check_s = _timed(lambda: run.device.summaries([*model.values(), *optimizer.values()]))
    shares = OptimizerShares(run.mesh, optimizer, are_shared=run.config.shard_optimizer)
    if run.mesh.data_parallel_rank:
        return check_s, _timed(shares.send)
    host_copy = HostCopy(model, shares.everything(), run.device.host_memory)
    host_copy.touch()
    return check_s, _timed(lambda: host_copy.take(trainer.state, run.device.copy_to_host, shares.receive))


def _timed(work: Callable[[], object]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


class _Clock:
    """The requests of a run during its rehearsal. It times the steps in the root worker, and asks to stop when enough
    are timed; requests to save are left for the training. Only what all workers do waits for the device: there, a graph
    that the root alone launches would wait for the others."""

    def __init__(self, requests: Requests, seconds: float, run: Run, sign_of_life: Callable[[], None]) -> None:
        """`seconds`: how long to time steps, but at least `_LEAST_TIMED` of them."""
        self._requests, self._seconds, self._run, self._sign_of_life = requests, seconds, run, sign_of_life
        self._steps, self._began, self._wrote, self._is_enough = -1, 0.0, 0.0, False
        #: Seconds of a step, in the root worker; None: not enough are timed.
        self.step_s: float | None = None

    def begin(self) -> None:
        self._requests.begin()

    @property
    def must_stop(self) -> bool:
        return self._requests.must_stop or self._is_enough

    def take_save(self) -> bool:
        """Called once before each step, the first one included."""
        self._steps += 1
        if self._steps == _WARMUP_STEPS:
            self._run.device.finish_closures()
            self._began = time.monotonic()
        if not self._run.is_root:
            return False
        now, timed = time.monotonic(), self._steps - _WARMUP_STEPS
        self._is_enough = timed >= _LEAST_TIMED and now - self._began >= self._seconds
        if now - self._wrote >= _WRITE_INTERVAL_S:
            self._wrote = now
            with contextlib.suppress(OSError):
                self._sign_of_life()
        return False

    def end(self) -> None:
        """Called when training has stopped, for which it has waited for the device."""
        if self._is_enough:
            self.step_s = (time.monotonic() - self._began) / (self._steps - _WARMUP_STEPS)
