"""How costs grow. Measured on this machine: a worker's host memory with the size of the data set, the time to find
where to resume with the steps done, start-up with the number of shards, the hosts' agreement with the number of
workers. By arithmetic: step time and all-reduce share of many machines. docs/scale.md has the tables.

Large data sets are links to one shard, so that they need no disk: what is measured is what a worker holds, not how fast
the disk is.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.processes import on_cores, python
from benchmarks.results import Result, say
from benchmarks.startup import first_step_s
from benchmarks.work import Work, model_config, phase1_lengths, random_rows, trainer_options, write_rows
from stages.directory.manifest import Output
from trainer.data.batch_ramp import BatchSizes
from trainer.data.order import SampleOrder
from trainer.parallel.host_sum import messages, sum_over_hosts

TINY = Work("tiny", 2, 128, 2, 512, 8192, 128, 20, 16, 1)
#: Rows of a shard of 64 MB and of a small one.
LARGE_SHARD, SMALL_SHARD = 150_000, 64
SHARDS = (1, 10, 100, 1_000, 10_000)
PARTS = ("arithmetic", "agreement", "resume", "memory", "start")
STEPS_DONE = (0, 1_000, 10_000, 100_000, 1_000_000)


@contextmanager
def data_set(*, shards: int, rows: int, manifest: bool = True) -> Iterator[tuple[Path, Path]]:
    """Links to one shard, with a manifest that has their rows and hashes, as ShardDataset leaves it; and a model."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        directory = Path(name) / "data"
        write_rows(directory, random_rows(TINY, phase1_lengths(TINY, rows)))
        (first,) = directory.iterdir()
        for shard in range(1, shards):
            os.link(first, directory / f"random_training_{shard}.hdf5")
        if manifest:
            names, output = [path.name for path in directory.iterdir()], Output.of(directory, first)
            outputs = [dataclasses.replace(output, path=name).record() for name in names]
            record = {"outputs": outputs, "counts": {"rows": dict.fromkeys(names, rows)}}
            (directory / "manifest.json").write_text(json.dumps(record))
        yield Path(name), model_config(TINY, Path(name))


def memory(*, shards: int, steps: int) -> tuple[float, dict[str, float]]:
    """GB of a data set of large shards, and MB of a worker's memory after this many steps over it."""
    with data_set(shards=shards, rows=LARGE_SHARD) as (directory, model), on_cores(2):
        total = shards * next((directory / "data").glob("*.hdf5")).stat().st_size
        options = trainer_options(TINY, directory / "data", model, directory / "out", steps=steps)
        printed = python("-c", _WATCHED, *options)
    found: dict[str, float] = json.loads(printed.splitlines()[-1])
    return total / 1e9, found


#: The trainer, and then its process's memory: the peak, and what is not a file's at the end.
_WATCHED = """
import json, re, sys
from trainer.__main__ import main
status = main()
found = dict(re.findall(r"(VmHWM|RssAnon):\\s+(\\d+) kB", open("/proc/self/status").read()))
print(json.dumps({name: int(kilobytes) / 1e3 for name, kilobytes in found.items()}))
sys.exit(status)
"""


def resume_s(steps_done: int) -> float:
    """Seconds to find the samples after `steps_done` of English Wikipedia's phase 1: 60 million rows, 1,500 shards."""
    times = []
    for _ in range(5):
        order = SampleOrder(np.full(1_500, 40_000), seed=1, sizes=[BatchSizes(16_384)])
        began = time.perf_counter()
        order.step(steps_done)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


@dataclass(frozen=True)
class Machine:
    """Several accelerators, one worker on each."""

    name: str
    workers: int
    #: Sequences/s of all of them together, by phase, without any all-reduce between machines.
    sequences_per_s: dict[int, float]
    #: Bytes/s that it sends to others, as published.
    network: float
    #: Bytes/s of each of its workers to the others in it; None: their all-reduce is in `sequences_per_s`.
    inside: float | None = None


#: Network: EFA's 800 and 3,200 Gbit/s; NVLink: 450 GB/s in each direction. Rates: AWS's table of SDK 2.28 for phase 1,
#: of SDK 2.20 for phase 2; on the H100 what benchmarks/gpu.py measured on one.
MACHINES = (
    Machine("trn1.32xlarge", 32, {1: 3_827, 2: 525}, 100e9),
    Machine("8 × H100", 8, {1: 8 * 1_916, 2: 8 * 839}, 400e9, 450e9),
)
NODES = (1, 2, 4, 8, 16, 32, 64)
PARAMETERS, GRADIENT_BYTES = 336_226_108, 4
#: Share of the published rate that a collective is assumed to reach.
REACHED = 0.7
#: Seconds that a message between two hosts is assumed to need, over TCP and through gloo.
MESSAGE_S = 100e-6
SPAWN = multiprocessing.get_context("spawn")
#: Numbers of processes that agree on this machine, and of workers for which messages are counted.
AGREEING, COUNTED = (2, 4, 8, 16), (2, 32, 256, 2_048)
#: Integers that workers add up before a step: four counts of the batch, and four about stopping and saving.
AGREED = 8


def step(machine: Machine, nodes: int, phase: int, global_batch_size: int) -> tuple[float, float]:
    """Seconds of computing and of reducing in one step: the gradients' all-reduce and the hosts' agreement. A ring of n
    sends 2 (n - 1) / n of the bytes (Patarasuk and Yuan 2009), and the workers of a machine share its network. Nothing
    overlaps: it is one call after the last micro-step."""

    def ring(n: int, rate: float) -> float:
        return 2 * (n - 1) / n * PARAMETERS * GRADIENT_BYTES / (REACHED * rate)

    reduce_s = ring(nodes, machine.network)
    if machine.inside is not None:
        reduce_s += ring(machine.workers, machine.inside)
    reduce_s += most_in_a_row(nodes * machine.workers) * MESSAGE_S
    return global_batch_size / (nodes * machine.sequences_per_s[phase]), reduce_s


def most_in_a_row(workers: int) -> int:
    """Messages that each wait for the one before, in a sum over the hosts of all workers."""
    return max(len([*messages(rank, workers)]) for rank in range(workers))


def agreement() -> None:
    """Microseconds of a sum over hosts, by gloo's own ring and by ours, on this machine; and messages in a row."""
    for workers in AGREEING:
        with tempfile.TemporaryDirectory(prefix="benchmark-") as name, on_cores(2):
            found = Path(name) / "found.json"
            words = (workers, f"{name}/store", found)
            processes = [SPAWN.Process(target=_agree, args=(rank, *words)) for rank in range(workers)]
            for process in processes:
                process.start()
            for process in processes:
                process.join()
            ring, ours = (statistics.median(times) for times in json.loads(found.read_text()))
        said = f"{workers} processes on two cores: {ours:.0f} µs, gloo's all_reduce {ring:.0f} µs"
        say(Result("the hosts' agreement on counts and stopping", said, "", ring / ours, " ×"))
    for workers in COUNTED:
        print(f"{workers:,} workers: {most_in_a_row(workers)} messages in a row, in a ring {2 * (workers - 1):,}")


def _agree(rank: int, workers: int, store: str, found: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=workers)
    counts = torch.arange(AGREED)
    ways = (
        functools.partial(dist.all_reduce, counts.clone()),
        functools.partial(sum_over_hosts, counts, rank, workers, None),
    )
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(7):
        for way, its in zip(ways, times, strict=True):
            way()
            began = time.perf_counter()
            for _ in range(100):
                way()
            its.append((time.perf_counter() - began) / 100 * 1e6)
    if rank == 0:
        found.write_text(json.dumps(times))
    dist.destroy_process_group()


def arithmetic() -> None:
    for phase, global_batch_size in ((1, 16_384), (1, 65_536), (2, 32_768)):
        print(f"\nPhase {phase}, {global_batch_size:,} sequences a step: its time, the all-reduce's share\n")
        print("| machines | " + " | ".join(machine.name for machine in MACHINES) + " |")
        print("| --- |" + " --- |" * len(MACHINES))
        for nodes in NODES:
            cells = []
            for machine in MACHINES:
                compute, reduce = step(machine, nodes, phase, global_batch_size)
                rows = global_batch_size / (nodes * machine.workers)
                cells.append(f"{compute + reduce:.2f} s, {reduce / (compute + reduce):.1%}, {rows:g} a worker")
            print(f"| {nodes} | " + " | ".join(cells) + " |")


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("parts", nargs="*", default=PARTS, metavar="PART", help=f"any of {', '.join(PARTS)}; default: all")
    p.add_argument("--steps", type=int, default=60, help="of each run that measures memory")
    args = p.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        p.error(f"unknown: {', '.join(sorted(unknown))}; allowed: {', '.join(PARTS)}")
    if "arithmetic" in args.parts:
        arithmetic()
    if "agreement" in args.parts:
        agreement()
    if "resume" in args.parts:
        found = [1000 * resume_s(steps) for steps in STEPS_DONE]
        said = ", ".join(f"{steps:,}: {ms:.0f} ms" for steps, ms in zip(STEPS_DONE, found, strict=True))
        say(Result("time to find where to resume, by steps done", said, "", found[-1] / found[0], " ×"))
    if "memory" in args.parts:
        runs = [memory(shards=shards, steps=args.steps) for shards in (1, 10, 100, 1_000)]
        said = ", ".join(f"{gb:.3g} GB: {mb['VmHWM']:.0f} ({mb['RssAnon']:.0f})" for gb, mb in runs)
        growth = runs[-1][1]["RssAnon"] / runs[0][1]["RssAnon"]
        say(Result("host memory of a worker, MB at the peak (that is no file's, at the end)", said, "", growth, " ×"))
    if "start" in args.parts:
        for manifest in (True, False):
            times = []
            for shards in SHARDS:
                with data_set(shards=shards, rows=SMALL_SHARD, manifest=manifest) as (directory, model), on_cores(2):
                    times.append(first_step_s(directory / "data", model, directory / "out", work=TINY))
            said = ", ".join(f"{shards:,}: {s:.1f} s" for shards, s in zip(SHARDS, times, strict=True))
            how = "with" if manifest else "without"
            say(Result(f"start-up by number of shards, {how} a manifest", said, "", times[-1] - times[0], " s more"))


if __name__ == "__main__":
    main()
