"""`python -m trainer …`, or `torchrun --nproc_per_node=N -m trainer …` for N workers; `--doctor`: what is here.

Exit status: 0 the steps asked for are done; 75 stopped by a signal, state saved, the same command with --resume_ckpt
goes on; 1 refused with one line; 2 unknown options; 70 a mistake of ours, with its traceback.
"""

from __future__ import annotations

import os
import sys
import traceback

from trainer.errors import EXIT_INTERRUPTED, EXIT_SOFTWARE, EXIT_USER_ERROR, UserError
from trainer.process import die_with_starter, stop_early_on_signals


def main() -> int:
    """Train as the command line says; returns the exit status."""
    die_with_starter()
    stop_early_on_signals()
    # Only now, 2 s of imports: an orphan or a stopped worker is gone by then.
    from trainer.options import device_options, parse, to_config
    from trainer.parallel.mesh import Mesh
    from trainer.spawn import spawn

    mesh = Mesh()
    try:
        args = parse()
        if args.doctor:
            from trainer.doctor import examine

            return examine(print)
        if args.spawn is not None:
            spawn(args.spawn, sys.argv[1:])
        mesh = Mesh.of_environment(args.tensor_parallel_size)
        config, workload = to_config(args, mesh)
        from trainer.devices.select import select
        from trainer.loop import Trainer
        from trainer.resume_point import how_to_go_on

        device = select(config.device, mesh, device_options(config, workload, mesh))
        mesh = mesh.connect(device.backend, config.collective_timeout_s, alone=config.data_parallel == "ddp")
        device.start(mesh)
        say = _say if mesh.is_root else _say_nothing
        say(f"device {device.describe()}; {mesh.world_size} worker(s)")
        if mesh.not_shared:
            say(f"workers here cannot share memory ({mesh.not_shared}): their sums go through sockets, and take longer")
        say(f"config {config}; workload {args.workload}: {workload.describe()}")
        done = Trainer(config, workload, device, mesh, say).run()
        mesh.disconnect()
    except UserError as error:
        who = "" if mesh.world_size == 1 else f"worker {mesh.rank}: "
        sys.stderr.write(f"error: {who}{error}\n")  # in one piece: other workers may be saying something, too
        return EXIT_USER_ERROR
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        # Without waiting for threads: other workers may be in a collective operation that will never end.
        os._exit(EXIT_SOFTWARE)
    if not done:
        say(f"stopped as asked; the state is saved: {how_to_go_on(config)}")
    return 0 if done else EXIT_INTERRUPTED


def _say(line: str) -> None:
    print(line, flush=True)


def _say_nothing(line: str) -> None:
    pass


if __name__ == "__main__":
    sys.exit(main())
