"""Training through steps that are not finite: from the last checkpoint before one it goes on without its batch."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from pathlib import Path

from common.errors import NonFiniteStep
from trainer.checkpoint.resume_point import checkpoint_directory
from trainer.config import TrainConfig
from trainer.devices.base import Device
from trainer.launch.preemption import Interruptions
from trainer.loop import Trainer
from trainer.parallel.mesh import Mesh
from trainer.workloads.base import Workload


def train(config: TrainConfig, workload: Workload, device: Device, mesh: Mesh, say: Callable[[str], None]) -> bool:
    """Train; True when `stop_step` is reached, False when a signal ended it earlier. Raises `UserError`."""
    is_live = not config.trial
    interruptions = Interruptions(
        config.output_dir,
        is_root=mesh.is_root and is_live,
        watches_spot=config.spot_watch and mesh.local_rank == 0 and is_live,
    )
    skipped: list[int] = []
    try:
        while True:
            # A function of its own: nothing may hold the old model while the new one is made.
            result = _attempt(config, workload, device, mesh, say, interruptions, skipped)
            if isinstance(result, bool):
                return result
            reason, batch, before = result
            left_out = sorted({*before, *skipped})
            if config.non_finite == "stop" or len(left_out) >= config.non_finite_limit or batch in left_out:
                raise NonFiniteStep(f"{reason}; {_advice(config, left_out)}")
            say(f"{reason}; going back to the last checkpoint, and on without batch {batch}")
            skipped.append(batch)
            config = _from_newest(config)
            gc.collect()
    finally:
        interruptions.end()


def _attempt(
    config: TrainConfig,
    workload: Workload,
    device: Device,
    mesh: Mesh,
    say: Callable[[str], None],
    interruptions: Interruptions,
    skipped: list[int],
) -> bool | tuple[str, int, list[int]]:
    """What `Trainer.run` returns; or of a step that was not finite what it says, its batch, and those left out."""
    trainer = Trainer(config, workload, device, mesh, say, interruptions=interruptions, skipped=skipped)
    try:
        return trainer.run()
    except NonFiniteStep as error:
        return str(error), error.batch, trainer.state.skipped


def _from_newest(config: TrainConfig) -> TrainConfig:
    """The same run, from its own newest checkpoint, or from where it began."""
    given: Path | None = config.resume_ckpt_path
    if given is not None and given.resolve().parent == checkpoint_directory(config).resolve():
        given = None
    return dataclasses.replace(config, resume=True, resume_step=-1, resume_ckpt_path=given)


def _advice(config: TrainConfig, skipped: list[int]) -> str:
    """What to do about a run that has diverged."""
    where = f"checkpoints of earlier steps are in {checkpoint_directory(config)}"
    if config.non_finite == "stop":
        return f"{where}: go on without this batch with --non_finite skip, or lower lr with --allow_changes lr"
    return (
        f"{len(skipped)} batches have been left out already, and non_finite_limit is {config.non_finite_limit}, so it "
        f"is the run that diverges; {where}: go back to one with --resume_ckpt --resume_step, and on with a lower lr "
        f"or a longer warm-up (--allow_changes lr warmup_steps) or with --precision fp32 (--allow_changes precision)"
    )
