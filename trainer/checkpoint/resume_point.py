"""Select the checkpoint that a run resumes from and the ones that it sets aside.

Naming a checkpoint of the same phase in the output directory, by step or by path, rolls back to it: newer ones are set
aside. A checkpoint from elsewhere, or of the previous phase, is the origin of the output directory's training: running
the same command again resumes from that training's newest checkpoint, and fails if its origin is another one. Nothing
is set aside until the checkpoint has been loaded completely.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from common.errors import CheckpointError, UserError
from common.files import sha256_of
from trainer.checkpoint.directory import CHECKPOINTS, MANIFEST, checkpoint_path, checkpoint_step, why_invalid
from trainer.checkpoint.format import tensor_file
from trainer.checkpoint.manager import CheckpointManager, require_valid
from trainer.config import TrainConfig
from trainer.parallel.mesh import Mesh
from trainer.state import TrainState


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint to start from, and what to take from it."""

    checkpoint: Path
    state: TrainState
    weights_only: bool
    #: Weights and the optimizer's state, but no position: the phase begins at step 0, on other data.
    restarts: bool = False
    #: sha256 of the manifest of the checkpoint that the output directory's training started from; None: unknown.
    origin: str | None = None


def agree_on_start(
    config: TrainConfig, manager: CheckpointManager, mesh: Mesh, log: Callable[[str], None]
) -> ResumePoint | None:
    """The checkpoint to start from, the same on all workers; None for initial weights.

    The root chooses; if any worker cannot read its shard, all try the next checkpoint. Raises `UserError`.
    """
    found = _starts(config, manager)
    while True:
        start = mesh.by_root(lambda: next(found))
        if start is None:
            return None
        check = functools.partial(_why_unusable, start, mesh)
        problems = list(enumerate(mesh.all_gather_object(mesh.patiently(check))))
        bad = [f"worker {worker} cannot use it: {reason}" for worker, reason in problems if reason is not None]
        if not bad:
            return start
        log(f"skipping checkpoint {start.checkpoint}: {bad[0]}")


def left_behind(config: TrainConfig, manager: CheckpointManager, start: ResumePoint | None) -> list[Path]:
    """The output directory's checkpoints that do not belong to the branch from `start`, newest first."""
    if start is None or start.checkpoint.parent != manager.directory:
        return [path for _, path in manager.paths()]
    is_finished = not start.weights_only and start.state.step >= config.stop_step
    if is_finished and _named(config, manager.directory)[1] == -1:
        return []  # nothing will be trained
    return [path for step, path in manager.paths() if step > start.state.global_step]


def how_to_go_on(config: TrainConfig) -> str:
    """How to resume after an interruption, for the log."""
    _, step = _named(config, checkpoint_directory(config))
    if step == -1:
        return "the same command with --resume_ckpt continues"
    option = "--resume_ckpt_path" if config.resume_step == -1 else "--resume_step"
    return f"the same command with --resume_ckpt and without {option} continues; with it, it rolls back to {step} again"


def require_other_phase(config: TrainConfig) -> None:
    """Raise `UserError` if a phase with a budget is to continue another training of the same phase."""
    state = None if config.new_data else given_state(config)
    if state is not None and state.phase == config.phase:
        raise UserError(
            f"--budget is for a whole phase, and {config.resume_ckpt_path} is of step {state.step} of this phase; give "
            f"--max_steps, or --new_data to begin at step 0 with its weights"
        )


def given_state(config: TrainConfig) -> TrainState | None:
    """The state in the external checkpoint that the options name; None if they name none. Raises `UserError`."""
    given, _ = _named(config, checkpoint_directory(config))
    if given is None:
        return None
    _refuse_scripts(config, given)
    require_valid(given)
    return TrainState.read(given)


def checkpoint_directory(config: TrainConfig) -> Path:
    return config.output_dir / CHECKPOINTS


def _named(config: TrainConfig, directory: Path) -> tuple[Path | None, int]:
    """The external checkpoint to start from, else None, and the global step to roll back to, else -1.

    Raises `UserError` if the options contradict each other.
    """
    given = config.resume_ckpt_path
    own_step = None if given is None else checkpoint_step(given)
    if given is None or own_step is None or given.resolve().parent != directory.resolve():
        return given, config.resume_step
    if config.resume_step not in (-1, own_step):
        raise UserError(
            f"--resume_ckpt_path {given} and --resume_step {config.resume_step} differ; leave one of them out"
        )
    if config.resume_step == -1 and config.phase == 2 and own_step == config.phase1_end_step:
        return None, -1  # phase 2 starts from it anyway
    return None, own_step


def _starts(config: TrainConfig, manager: CheckpointManager) -> Iterator[ResumePoint | None]:
    """Yield candidates to start from, best first; a final None means initial weights. Raises `UserError`."""
    if config.new_data and _named(config, manager.directory)[0] is None:
        raise UserError(
            "--new_data needs a checkpoint of another --output_dir to take weights and optimizer from; name one with "
            "--resume_ckpt_path"
        )
    if not config.resume:
        if not config.trial:  # a trial, such as the rehearsal of a budget, leaves what is there as it is
            _require_nothing_there(config, manager)
        yield None
    given, step = _named(config, manager.directory)
    if step != -1:
        yield _rolled_back(config, manager, step, given)
        raise CheckpointError(
            f"not every worker can use the checkpoint of step {step}; put that right, or name another"
        )
    later, rejected = None, None
    for path in manager.valid():
        state = TrainState.read(path)
        if state.phase > config.phase:
            later = later or path
        elif state.phase == config.phase:
            if later is not None and state.step < config.stop_step:
                raise UserError(
                    f"{later} is of phase {config.phase + 1}, which has already begun; to roll back to {path} give "
                    f"--resume_step {state.global_step}"
                )
            _require_origin(path, state, given)
            yield ResumePoint(path, state, weights_only=False, origin=state.origin)
            rejected = path
    unreadable = [path for path in manager.unreadable if (checkpoint_step(path) or 0) > config.phase1_end_step]
    if later is not None or rejected is not None or unreadable:
        reason = (
            f"{later} is of phase {config.phase + 1}" if later else f"{rejected or unreadable[0]} cannot be read now"
        )
        raise CheckpointError(
            f"{manager.directory} has no checkpoint that phase {config.phase} can resume from, but {reason}; put that "
            f"right, or give another --output_dir"
        )
    yield from _beginnings(config, manager, given)


def _require_nothing_there(config: TrainConfig, manager: CheckpointManager) -> None:
    """Raise `UserError` if the output directory holds checkpoints, ours or the tutorial script's."""
    _refuse_scripts(config, None)
    if manager.paths():
        raise UserError(
            f"{manager.directory} holds checkpoints up to step {manager.paths()[0][0]}; add --resume_ckpt to resume "
            f"from there, or give another --output_dir"
        )


def _beginnings(config: TrainConfig, manager: CheckpointManager, given: Path | None) -> Iterator[ResumePoint | None]:
    """Yield the starting points of a phase that has no checkpoint of its own yet."""
    _refuse_scripts(config, given)
    if given is not None:
        require_valid(given)
        for path in manager.valid():
            raise _of_another_training(path, given)
        yield _beginning(config, given)
        raise CheckpointError(f"not every worker can use checkpoint {given}; put that right, or give another one")
    if config.phase == 2:
        path = checkpoint_path(manager.directory, config.phase1_end_step)
        if manager.why_invalid(path) is None:
            yield _beginning(config, path)
        raise CheckpointError(
            f"phase 2 starts from phase 1's checkpoint of step {config.phase1_end_step}, and {manager.directory} has "
            f"no intact one; give it with --resume_ckpt_path, or its step with --phase1_end_step"
        )
    yield None


def _refuse_scripts(config: TrainConfig, given: Path | None) -> None:
    """Raise `CheckpointError`, with instructions, if the checkpoint to resume is the tutorial script's
    `ckpt_<step>.pt`: the given path or, without one, a file in the output directory."""
    found = sorted(config.output_dir.glob("ckpt_*.pt"), key=lambda path: path.stat().st_mtime)
    end = config.output_dir / f"ckpt_{config.phase1_end_step}.pt"
    if given is not None:
        found = [given] if given.is_file() else []
    elif config.phase == 2 and end in found:
        found = [end]
    if not found:
        return
    what, converted = f"{found[-1]} is a checkpoint of the tutorial's script", config.output_dir / "converted"
    if config.phase == 1:
        raise CheckpointError(
            f"{what}, and only the script can continue its phase 1; here phase 2 can start from it; to train phase 1 "
            f"anew, give another --output_dir"
        )
    raise CheckpointError(
        f"{what}; convert it first: python -m stages.convert {found[-1]} {converted}; then add --resume_ckpt_path "
        f"{converted / 'checkpoint'}"
    )


def _beginning(config: TrainConfig, path: Path) -> ResumePoint:
    """Start training from the checkpoint `path`. Raises `CheckpointError`."""
    state = TrainState.read(path)
    if config.phase == 2 and state.phase == 1 and state.global_step != config.phase1_end_step:
        raise CheckpointError(
            f"{path} is of step {state.global_step}, but phase 1 is said to end at step {config.phase1_end_step}; "
            f"give --phase1_end_step {state.global_step}, or another checkpoint"
        )
    if config.new_data and state.phase != config.phase:
        raise CheckpointError(
            f"--new_data continues weights and optimizer within a phase, but {path} is of phase {state.phase} and this "
            f"run is phase {config.phase}; leave --new_data out, or give a checkpoint of phase {config.phase}"
        )
    same_phase = state.phase == config.phase
    return ResumePoint(
        path, state, weights_only=not same_phase, restarts=same_phase and config.new_data, origin=_origin_of(path)
    )


def _rolled_back(config: TrainConfig, manager: CheckpointManager, step: int, given: Path | None) -> ResumePoint:
    """The output directory's checkpoint of `step`, or its training's origin if that is of `step`.

    Raises `CheckpointError`.
    """
    path = checkpoint_path(manager.directory, step)
    if not path.exists():
        if given is not None and not config.new_data:
            require_valid(given)
            if TrainState.read(given).global_step == step:
                for own in manager.valid():
                    _require_origin(own, TrainState.read(own), given)
                return _beginning(config, given)
        steps = ", ".join(str(at) for at, _ in manager.paths()) or "none"
        raise CheckpointError(f"{manager.directory} has no checkpoint of step {step}; available: {steps}")
    reason = manager.why_invalid(path)
    if reason is not None:
        raise CheckpointError(f"checkpoint {path} cannot be used: {reason}; name another one")
    state = TrainState.read(path)
    if state.phase == config.phase:
        _require_origin(path, state, given)
        return ResumePoint(path, state, weights_only=False, origin=state.origin)
    if state.phase > config.phase:
        raise CheckpointError(f"{path} is of phase {state.phase}; add --phase2 to resume from it, or name another one")
    return _beginning(config, path)


def _require_origin(path: Path, state: TrainState, given: Path | None) -> None:
    """Raise `CheckpointError` if the output directory's checkpoint `path` does not originate from `given`."""
    if given is not None and state.origin not in (None, _origin_of(given)):
        raise _of_another_training(path, given)


def _of_another_training(path: Path, given: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} is from a training that did not begin with {given}; leave --resume_ckpt_path out to resume from "
        f"{path.name}, or give another --output_dir"
    )


def _origin_of(path: Path) -> str:
    """The identity of the checkpoint `path`: its manifest's sha256. Raises `CheckpointError`."""
    try:
        return sha256_of(path / MANIFEST)
    except OSError as error:
        raise CheckpointError(
            f"cannot read {path / MANIFEST}: {error.strerror}; give a ckpt_<step> directory"
        ) from error


def _why_unusable(start: ResumePoint, mesh: Mesh) -> str | None:
    """Why this worker cannot load its shard of a checkpoint that the root has fully verified; None if it can."""
    if mesh.is_root:
        return None
    size, rank = start.state.tensor_parallel_size, mesh.tensor_parallel_rank
    needed = {tensor_file(kind, rank if size > 1 else 0, size) for kind in ("model", "optimizer")}
    return why_invalid(start.checkpoint, verify=needed.__contains__)
