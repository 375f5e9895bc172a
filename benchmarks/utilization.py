"""What share of this machine's matrix rate training BERT-Base (S=128, fp32) reaches on the CPU, and what share of its
time is spent outside forward pass, backward pass and optimizer.

The rate is the best of large `mm`s in the same process, before and after training; model FLOPs are counted by
`trainer/workloads/bert.py`. "Outside" is all of a step's wall-clock time that is not in a call of the three: waiting
for data, seeds, losses, logging, the workers' agreement. One checkpoint every 10 minutes (the default) is added to it,
at the most it can cost: as though training stood still until it is durable.
"""

from __future__ import annotations

import json
import os
import statistics

from benchmarks.processes import on_cores, python
from benchmarks.references.timed import INSIDE, MATRIX_RATE
from benchmarks.results import Result, say
from benchmarks.work import BASE, metrics, pairs_parser, scratch, trainer_options

LEAST_SHARE, MOST_OUTSIDE = 75.0, 2.0
WARM_UP = 2
CHECKPOINT_INTERVAL_S = 600.0


def main() -> None:
    p = pairs_parser(__doc__, pairs=1, steps=7)
    args = p.parse_args()
    os.environ[MATRIX_RATE] = "1"
    rates, peaks, saves, outside, parts = [], [], [], [], []
    for _ in range(args.pairs):
        with scratch(BASE, rows=1024) as (directory, data, model), on_cores(args.cores):
            options = trainer_options(BASE, data, model, directory / "out", steps=args.steps, precision="fp32")
            python("-m", "benchmarks.references.timed", str(directory / "timed"), *options)
            steps = json.loads((directory / "timed" / "0.json").read_text())
            recorded = metrics(directory / "out")
        *taken, end = steps
        taken = taken[WARM_UP:]
        # Every step has the same work: padded rows count in full, and masked positions vary by little.
        flops = recorded[0]["flops_per_s"] * recorded[0]["step_time_s"]
        wall = sum(step["wall"] for step in taken)
        rates.append(flops * len(taken) / wall)
        peaks.append(end["matrix_flops_per_s"])
        saves.append(end["save"])
        part = {name: sum(step.get(name, 0.0) for step in taken) / wall for name in (*INSIDE, "data", "logging")}
        parts.append(part)
        outside.append(100 * (1 - sum(part[name] for name in INSIDE) + end["save"] / CHECKPOINT_INTERVAL_S))
    shares = [100 * rate / peak for rate, peak in zip(rates, peaks, strict=True)]
    rate, peak, save_s = (statistics.median(each) for each in (rates, peaks, saves))
    what = f"BERT-Base, S=128, fp32, {args.cores} cores"
    said = (f"model {rate / 1e9:.0f} GFLOP/s", f"mm {peak / 1e9:.0f} GFLOP/s")
    say(
        Result(f"{what}: share of the matrix rate", *said, statistics.median(shares), " %", at_least=LEAST_SHARE,
               at_most=100, each=tuple(shares))
    )  # fmt: skip
    said = (
        ", ".join(f"{name} {100 * statistics.median(part[name] for part in parts):.2g} %" for name in parts[0]),
        f"a checkpoint {save_s:.1f} s every {CHECKPOINT_INTERVAL_S / 60:g} minutes",
    )
    say(
        Result(f"{what}: time outside forward, backward, optimizer", *said, statistics.median(outside), " %",
               at_most=MOST_OUTSIDE, each=tuple(outside))
    )  # fmt: skip


if __name__ == "__main__":
    main()
