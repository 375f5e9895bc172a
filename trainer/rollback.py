"""Train a phase: measure its steps if it has a budget, and after a non-finite step roll back to the last checkpoint and
skip the step's batch."""

from __future__ import annotations

import dataclasses
import gc

from common.errors import NonFiniteStep
from trainer.checkpoint.resume_point import checkpoint_directory
from trainer.config import TrainConfig
from trainer.launch.preemption import Interruptions
from trainer.loop import Trainer
from trainer.metrics.rehearsal import resolved
from trainer.run import Run


def train(run: Run) -> bool:
    """Train until `stop_step` (returns True) or until a signal (returns False). Raises `UserError`; `Interrupted` if a
    signal comes while steps are measured."""
    config = run.config
    interruptions = Interruptions(
        config.output_dir,
        is_root=run.is_root,
        watches_spot=config.spot_watch and run.mesh.local_rank == 0 and not config.trial,
        watches_parent=run.mesh.nodes == 1 and not config.trial,
    )
    try:
        return _train(run if config.budget is None else resolved(run, interruptions, Trainer), interruptions)
    finally:
        interruptions.end()


def _train(run: Run, interruptions: Interruptions) -> bool:
    config, skipped = run.config, list[int]()
    while True:
        # A separate function, so that no local keeps the old model alive while the new one is built.
        result = _attempt(run, interruptions, skipped)
        if isinstance(result, bool):
            return result
        reason, batch, before = result
        left_out = sorted({*before, *skipped})
        if config.non_finite == "stop" or len(left_out) >= config.non_finite_limit or batch in left_out:
            raise NonFiniteStep(f"{reason}; {_advice(config, left_out)}")
        run.log(f"{reason}; going back to the last checkpoint, and on without batch {batch}")
        skipped.append(batch)
        run = dataclasses.replace(run, config=_from_newest(config))
        gc.collect()


def _attempt(run: Run, interruptions: Interruptions, skipped: list[int]) -> bool | tuple[str, int, list[int]]:
    """The result of `Trainer.train`, or (message, batch, batches already skipped) after a non-finite step."""
    trainer = Trainer(run, interruptions, skipped)
    try:
        return trainer.train()
    except NonFiniteStep as error:
        trainer.metrics.abandon()
        return str(error), trainer.dataloader.batch_of(error.step), trainer.state.skipped


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
        return f"{where}: go on without this batch with --non_finite skip, or lower lr with --allow_changes lr"
    return (
        f"{len(skipped)} batches have been left out already, and non_finite_limit is {config.non_finite_limit}, so it "
        f"is the run that diverges; {where}: go back to one with --resume_ckpt --resume_step, and on with a lower lr "
        f"or a longer warm-up (--allow_changes lr warmup_steps) or with --precision fp32 (--allow_changes precision)"
    )
