"""The command line that starts the trainer, through torchrun where there are several workers."""

from __future__ import annotations

from typing import Any

from pipeline.settings.cluster import Cluster


def trainer_command(cluster: Cluster, options: dict[str, Any], *, port_offset: int) -> list[str]:
    """`-m trainer` with these options, by name, on all workers of `cluster`: True turns a switch on, False leaves
    it out. `port_offset` is added to the cluster's master_port."""
    trainer = ["-m", "trainer"]
    for name, value in options.items():
        if value is not False:
            trainer += [name] if value is True else [name, str(value)]
    if cluster.nnodes > 1:
        # The launcher passes the node's rank and the master's address in the environment.
        rendezvous = [
            f"--nnodes={cluster.nnodes}",
            f"--master_port={cluster.master_port + port_offset}",
            f"--rdzv_conf=timeout={cluster.join_timeout_s:g}",
        ]
    elif cluster.nproc_per_node > 1:
        # Standalone picks a free port, so that two runs on one machine do not collide.
        rendezvous = ["--standalone", "--local-addr=127.0.0.1"]
    else:
        return trainer
    workers = f"--nproc_per_node={cluster.nproc_per_node}"
    return ["-m", "trainer.launch.torchrun", *rendezvous, "--max-restarts=0", workers, *trainer]
