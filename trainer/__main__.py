"""`python -m trainer …`, or `torchrun --nproc_per_node=N -m trainer …` for N workers; `--doctor` reports what the
machine has, `--self-test` whether it computes correctly.

Exit status: 0 all requested steps are done; 75 stopped by a signal with the state saved, continue with the same command
and --resume_ckpt; 1 refused with one line; 2 unknown options; 70 a bug, with its traceback; 71 the workers' copies of
the weights differed.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from common.console import print_line
from common.errors import EXIT_INTERRUPTED, AgreedError, Interrupted, UserError
from common.lock import hold, is_held_for_us
from common.process import die_with_starter, stop_early_on_signals
from trainer.launch.environment import use_compile_cache

if TYPE_CHECKING:
    from trainer.config import TrainConfig
    from trainer.devices.base import Device
    from trainer.metrics.trackers.options import TrackerOptions
    from trainer.parallel.mesh import Mesh
    from trainer.workloads.base import Workload


def main() -> int:
    """Train with the options of the command line; returns the exit status."""
    die_with_starter()
    stop_early_on_signals()
    try:
        use_compile_cache(sys.argv[1:])
    except UserError as error:
        sys.exit(f"error: {error}")
    # Imported late because it takes 2 s: an orphaned or stopped worker has ended by then.
    from trainer.launch.failure import end
    from trainer.launch.spawn import spawn
    from trainer.options import parse, to_config
    from trainer.parallel.mesh import Mesh

    mesh = Mesh()
    try:
        mesh = Mesh.of_environment(1)
        given = parse()
        if given.run.doctor:
            from trainer.machine.doctor import examine

            return examine(print)
        if given.run.spawn is not None:
            spawn(given.run.spawn, sys.argv[1:])
        mesh = Mesh.of_environment(given.config.tensor_parallel_size)
        if given.run.self_test:
            from trainer.machine.self_test import self_test

            return self_test(given, mesh)
        given.trackers.require_installed()
        return _train(*to_config(given, mesh), given.trackers, mesh)
    except Interrupted as error:
        if mesh.is_root:
            print_line(f"stopped as asked; {error}")
        return EXIT_INTERRUPTED
    except Exception as error:
        return end(error, mesh)


@contextlib.contextmanager
def _locked(config: TrainConfig, mesh: Mesh) -> Iterator[None]:
    """The root holds the lock of the output directory. Raises `AgreedError` on all workers if another process does, or
    if a file that is written at the end has no place."""
    problem = None
    with contextlib.ExitStack() as stack:
        if mesh.is_root:
            try:
                if not config.trial and not is_held_for_us(config.output_dir):  # a trial does not write there
                    stack.enter_context(hold(config.output_dir))
                _require_place(config)
            except UserError as error:
                problem = str(error)
        problem = mesh.broadcast_object(problem)
        if problem is not None:
            raise AgreedError(problem)
        yield


def _require_place(config: TrainConfig) -> None:
    option, path = ("graphs", config.graphs) if config.trial else ("metrics_file", config.metrics_file)
    if path is not None and (path.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK)):
        raise UserError(f"--{option} {path} cannot be written; give a file in a folder that is there and yours")


def _train(config: TrainConfig, workload: Workload, trackers: TrackerOptions, mesh: Mesh) -> int:
    from trainer.devices.select import select
    from trainer.options import device_options

    device = select(config.device, mesh, device_options(config, workload, mesh))
    mesh = mesh.connect(
        device.backend, config.collective_timeout_s, init_method=device.init_method,
        alone=config.data_parallel == "ddp",
    )  # fmt: skip
    with _locked(config, mesh):
        return _run(config, workload, trackers, device, mesh)


def _run(config: TrainConfig, workload: Workload, trackers: TrackerOptions, device: Device, mesh: Mesh) -> int:
    from trainer.checkpoint.resume_point import how_to_go_on
    from trainer.rollback import train
    from trainer.run import Run

    device.start(mesh)
    log = print_line if mesh.is_root else _ignore
    log(f"device {device.describe()}; {mesh.world_size} worker(s)")
    log(
        f"{config.optimizer} at {config.lr:g}, {config.schedule} schedule, batches of "
        f"{config.global_batch_size(mesh.data_parallel_size)} in {config.grad_accum_usteps} micro-steps a worker"
    )
    stopped = "the state is saved"
    if not is_held_for_us(config.output_dir):  # else luigi says how to go on
        stopped = f"{stopped}: {how_to_go_on(config)}"
    try:
        done = train(Run(config, workload, device, mesh, log, trackers.chosen), trackers)
    except Interrupted as error:
        done, stopped = False, str(error)
    mesh.disconnect()
    if not done:
        log(f"stopped as asked; {stopped}")
    return 0 if done else EXIT_INTERRUPTED


def _ignore(line: str) -> None:
    pass


if __name__ == "__main__":
    sys.exit(main())
