"""Train a phase: measure its steps if it has a budget, send its numbers to trackers alongside, and after a non-finite
step roll back to the last checkpoint and skip the step's batch."""

from __future__ import annotations

import dataclasses
import gc

from common.errors import DiskError, NonFiniteStep
from trainer.checkpoint.resume_point import checkpoint_directory
from trainer.config import TrainConfig
from trainer.launch.preemption import Interruptions
from trainer.loop import Trainer
from trainer.metrics.companions import Companions
from trainer.metrics.rehearsal import resolved
from trainer.metrics.trackers.options import TrackerOptions
from trainer.run import Run
from trainer.state import TrainState

#: Seconds that a run which was asked to stop waits for trackers, at most.
_STOPPED_WAIT_S = 5.0
#: What trackers are told about a run besides what decides its result.
_LAYOUT = ("micro_batch_size", "data_parallel_size", "tensor_parallel_size", "torch_version")


def train(run: Run, trackers: TrackerOptions | None = None) -> bool:
    """Train until `stop_step` (returns True) or until a signal (returns False). Raises `UserError`; `Interrupted` if a
    signal comes while steps are measured."""
    config, options = run.config, trackers or TrackerOptions()
    companions = Companions(config.output_dir, options, run.log)
    interruptions = Interruptions(
        config.output_dir,
        is_root=run.is_root,
        watches_spot=config.spot_watch and run.mesh.local_rank == 0 and not config.trial,
        watches_parent=run.mesh.nodes == 1 and not config.trial,
    )
    try:
        run = run if config.budget is None else resolved(run, interruptions, Trainer)
        is_done = _train(run, interruptions, companions)
        wait_s = options.wait_s if is_done else min(_STOPPED_WAIT_S, options.wait_s)
        # The root waits for trackers, longer perhaps than a collective of the others may take.
        run.mesh.patiently(lambda: companions.end(wait_s))
        return is_done
    finally:
        companions.end(0.0)
        interruptions.end()


def _train(run: Run, interruptions: Interruptions, companions: Companions) -> bool:
    config, skipped = run.config, list[int]()
    while True:
        # A separate function, so that no local keeps the old model alive while the new one is built.
        result = _attempt(run, interruptions, skipped, companions)
        if isinstance(result, bool):
            return result
        reason, batch, before = result
        left_out = sorted({*before, *skipped})
        if config.non_finite == "stop" or len(left_out) >= config.non_finite_limit:
            raise NonFiniteStep(f"{reason}; {_advice(config, left_out)}")
        run.log(f"{reason}; going back to the last checkpoint and continuing without batch {batch}")
        skipped.append(batch)
        run = dataclasses.replace(run, config=_from_newest(config))
        gc.collect()


def _attempt(
    run: Run, interruptions: Interruptions, skipped: list[int], companions: Companions
) -> bool | tuple[str, int, list[int]]:
    """The result of `Trainer.train`, or (message, batch, batches already skipped) after a non-finite step."""
    trainer = Trainer(run, interruptions, skipped)
    if run.is_root and not skipped:  # otherwise they have begun
        _accompany(run, trainer.state, companions)
    try:
        return trainer.train()
    except NonFiniteStep as error:
        trainer.metrics.abandon()
        return str(error), trainer.dataloader.batch_of(error.step), trainer.state.skipped


def _accompany(run: Run, state: TrainState, companions: Companions) -> None:
    """Start what sends the numbers of the training to trackers, now that the records end at `state`."""
    layout = {name: getattr(state, name) for name in _LAYOUT}
    try:
        companions.begin(
            {**state.deciding, **layout, "device": run.device.describe()},
            last_step=run.config.phase1_end_step + run.config.stop_step,
        )
    except DiskError as error:
        run.log(f"note: trackers get nothing in this run: {error}")


def _from_newest(config: TrainConfig) -> TrainConfig:
    """The same run, resumed from its own newest checkpoint, else from its original start."""
    given = config.resume_ckpt_path
    if given is not None and given.resolve().parent == checkpoint_directory(config).resolve():
        given = None
    return dataclasses.replace(config, resume=True, resume_step=-1, resume_ckpt_path=given)


def _advice(config: TrainConfig, skipped: list[int]) -> str:
    """Advice for a run that has diverged."""
    where = f"checkpoints of earlier steps are in {checkpoint_directory(config)}"
    if config.non_finite == "stop":
        return f"{where}: continue without this batch with --non_finite skip, or lower lr with --allow_changes lr"
    return (
        f"{len(skipped)} batches have been left out already, and non_finite_limit is {config.non_finite_limit}, so the "
        f"run itself diverges; {where}: go back to one with --resume_ckpt --resume_step, and continue with a lower lr "
        f"or a longer warm-up (--allow_changes lr warmup_steps) or with --precision fp32 (--allow_changes precision)"
    )
