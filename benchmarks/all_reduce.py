"""Summing tensors over workers of one machine, a thread each: through memory they share, and through gloo's sockets."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from pathlib import Path

import torch

from benchmarks.results import ratio, say
from benchmarks.work import launcher, on_cores, pairs_parser, python
from trainer.devices.cpu import CpuDevice
from trainer.parallel.mesh import Mesh

#: MB of fp32 → what has that size.
SIZES_MB = {2: "activations of work A", 22: "gradients of work A", 440: "gradients of BERT-Base"}


def work(pairs: int) -> None:
    """What each worker does; the root prints, for each size, the pairs of sums a second: shared memory, gloo."""
    mesh = Mesh.of_environment(1).connect("gloo", 60)
    device, shared = CpuDevice(mesh.local_world_size), mesh.data_parallel_group
    assert shared.links.shared_memory is not None, mesh.not_shared
    sockets = dataclasses.replace(shared, links=shared.links._replace(shared_memory=None))
    rates: dict[int, list[tuple[float, float]]] = {}
    for megabytes in SIZES_MB:
        tensor = torch.zeros(megabytes * 250_000)
        for group in (shared, sockets):
            device.all_reduce([tensor], group)
        rates[megabytes] = []
        for _ in range(pairs):
            seconds = []
            for group in (shared, sockets):
                mesh.barrier()
                began = time.monotonic()
                device.all_reduce([tensor], group)
                seconds.append(time.monotonic() - began)
            rates[megabytes].append((1 / seconds[0], 1 / seconds[1]))
    mesh.disconnect()
    if mesh.is_root:
        print(json.dumps(rates))


def main() -> None:
    if "TORCHELASTIC_RUN_ID" in os.environ:
        p = argparse.ArgumentParser()
        p.add_argument("pairs", type=int)
        work(p.parse_args().pairs)
        return
    args = pairs_parser(__doc__, pairs=25, steps=None).parse_args()
    with on_cores(args.cores, threads=1):
        said = python(*launcher(args.cores), "-m", f"benchmarks.{Path(__file__).stem}", str(args.pairs))
    for megabytes, pairs in json.loads(said.splitlines()[-1]).items():
        what = f"all-reduce between {args.cores} workers, {megabytes} MB ({SIZES_MB[int(megabytes)]})"
        say(ratio(what, pairs, ours="shared memory", beside="gloo", unit="/s"))


if __name__ == "__main__":
    main()
