"""How long the loop waits for data: 8 workers on this machine read one data set, work A. Each step's seconds in
`next(steps)` are compared with its wall-clock time; the worker that waits longest counts.

A block of rows that are shuffled together spans all of these shards. With `--gzip` they are as NVIDIA's script writes
them, so that a shard is decoded before any of its rows is read.
"""

from __future__ import annotations

import json
import os
import statistics
from pathlib import Path

import h5py
import numpy as np

from benchmarks.processes import launcher, on_cores, python
from benchmarks.results import Result, say
from benchmarks.work import A, pairs_parser, scratch, trainer_options

MOST = 1.0
WARM_UP = 2


def gzip_shards(directory: Path) -> None:
    """Rewrite the shards as other tools write them: chunked, gzip'd, int32 and int8."""
    for path in directory.iterdir():
        with h5py.File(path) as file:
            arrays = {key: file[key][()] for key in file}
        with h5py.File(path, "w") as file:
            for key, values in arrays.items():
                wide = np.int32 if values.itemsize > 1 else np.int8
                file.create_dataset(key, data=values.astype(wide), compression="gzip")


def main() -> None:
    p = pairs_parser(__doc__, pairs=1, cores=min(8, len(os.sched_getaffinity(0))))
    p.add_argument("--workers", type=int, default=8)
    p.add_argument("--precision", default="auto", help="as in the trainer")
    p.add_argument("--gzip", action="store_true", help="gzip'd shards")
    p.add_argument("--rows", type=int, default=32768, help="of the data set")
    p.add_argument("--shards", type=int, default=16)
    args = p.parse_args()
    work = A.but(grad_accum_usteps=2)
    found = []
    for _ in range(args.pairs):
        cores = on_cores(args.cores, threads=1)
        with scratch(work, rows=args.rows, shards=args.shards) as (directory, data, model), cores:
            if args.gzip:
                gzip_shards(data)
            options = trainer_options(work, data, model, directory / "out", steps=args.steps, precision=args.precision)
            python(*launcher(args.workers), "-m", "benchmarks.references.timed", str(directory / "timed"), *options)
            of_workers = [json.loads(path.read_text())[WARM_UP:-1] for path in (directory / "timed").iterdir()]
        assert len(of_workers) == args.workers
        waits = [(sum(step["data"] for step in steps), sum(step["wall"] for step in steps)) for steps in of_workers]
        found.append(max(waits, key=lambda wait: wait[0] / wait[1]))
    shares = tuple(100 * wait / wall for wait, wall in found)
    wait, wall = (statistics.median(each) for each in zip(*found, strict=True))
    steps = args.steps - WARM_UP
    said = (f"{1000 * wait / steps:.2f} ms a step of waiting", f"a step {1000 * wall / steps:.0f} ms")
    form = ", gzip'd shards" if args.gzip else ""
    what = f"data wait, {args.workers} workers on {args.cores} cores, work A{form}"
    say(Result.median(what, *said, shares, " %", at_most=MOST))


if __name__ == "__main__":
    main()
