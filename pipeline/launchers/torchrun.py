"""The command line that starts the trainer, through torchrun where there are several workers."""

from __future__ import annotations

from typing import Any

from pipeline.settings.cluster import Cluster


def trainer_command(cluster: Cluster, options: dict[str, Any], flags: list[str], *, port_offset: int) -> list[str]:
    """`-m trainer` with these options, on all workers of `cluster`. `port_offset` is added to its master_port."""
    arguments = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    switches = {"--compile": cluster.compile, "--spot_watch": cluster.spot_watch}
    trainer = ["-m", "trainer", *arguments, *flags, *(name for name, on in switches.items() if on)]
    if cluster.nnodes > 1:
        # The launcher passes the node's rank and the master's address in the environment.
        rendezvous = [
            f"--nnodes={cluster.nnodes}",
            f"--master_port={cluster.master_port + port_offset}",
            f"--rdzv_conf=timeout={cluster.join_timeout_s:g}",
        ]
    elif cluster.nproc_per_node > 1:
        # Standalone picks a free port, so that two runs on one machine do not meet.
        rendezvous = ["--standalone", "--local-addr=127.0.0.1"]
    else:
        return trainer
    workers = f"--nproc_per_node={cluster.nproc_per_node}"
    return ["-m", "trainer.launch.torchrun", *rendezvous, "--max-restarts=0", workers, *trainer]
