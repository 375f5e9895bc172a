"""How long the loop waits for data: 8 workers of this machine read one data set, work A, each step's seconds in
`next(steps)` beside its wall-clock time; the worker that waits longest counts."""

from __future__ import annotations

import json
import os

from benchmarks.results import Result, say
from benchmarks.work import A, launcher, on_cores, pairs_parser, python, scratch, trainer_options

MOST = 1.0
WARM_UP = 2


def main() -> None:
    p = pairs_parser(__doc__, pairs=1, cores=min(8, len(os.sched_getaffinity(0))))
    p.add_argument("--workers", type=int, default=8)
    p.add_argument("--precision", default="auto", help="as the trainer's")
    args = p.parse_args()
    work = A.but(grad_accum_usteps=2)
    found = []
    for _ in range(args.pairs):
        with scratch(work, rows=32768, shards=16) as (directory, data, model), on_cores(args.cores, threads=1):
            options = trainer_options(work, data, model, directory / "out", steps=args.steps, precision=args.precision)
            python(*launcher(args.workers), "-m", "benchmarks.timed", str(directory / "timed"), *options)
            of_workers = [json.loads(path.read_text())[WARM_UP:-1] for path in (directory / "timed").iterdir()]
        assert len(of_workers) == args.workers
        waits = [(sum(step["data"] for step in steps), sum(step["wall"] for step in steps)) for steps in of_workers]
        found.append(max(waits, key=lambda wait: wait[0] / wait[1]))
    shares = sorted(100 * wait / wall for wait, wall in found)
    wait, wall = found[-1]
    steps = args.steps - WARM_UP
    said = (f"{1000 * wait / steps:.2f} ms a step of waiting", f"a step {1000 * wall / steps:.0f} ms")
    what = f"data wait, {args.workers} workers on {args.cores} cores, work A"
    say(Result(what, *said, shares[len(shares) // 2], " %", at_most=MOST, each=tuple(shares)))


if __name__ == "__main__":
    main()
