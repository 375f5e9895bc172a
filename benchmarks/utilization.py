"""What share of this machine's matrix rate training reaches on the CPU: BERT-Base (S=128) in fp32 and, where `auto`
is autocast, BERT-Base and work A in that; and what share of its time is spent outside forward pass, backward
pass and optimizer.

The rate is the best of large `mm`s of the products' type in the same process, before and after training; model FLOPs
are counted by `trainer/workloads/bert.py`. "Outside" is all of a step's wall-clock time that is not in a call of the
three: waiting for data, seeds, losses, logging, the workers' agreement. One checkpoint every 10 minutes (the default)
is added to it, at the most it can cost: as though training stood still until it is durable.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.processes import on_cores, python
from benchmarks.references.timed import INSIDE, MATRIX_RATE
from benchmarks.results import Result, say
from benchmarks.work import BASE, WARM_UP, A, Work, metrics, pairs_parser, scratch, trainer_options
from trainer.devices.cpu import CpuDevice

CHECKPOINT_INTERVAL_S = 600.0
#: torch's name of the type that a precision multiplies in.
PRODUCTS = {"autocast": "bfloat16", "fp32": "float32"}


@dataclass(frozen=True)
class Claim:
    """A training and what is claimed of it, in percent."""

    work: Work
    precision: str
    least_share: float
    most_outside: float | None = None


CLAIMS = (
    Claim(A.but(name="work A"), "autocast", 50.0),
    Claim(BASE, "autocast", 60.0),
    Claim(BASE, "fp32", 75.0, most_outside=2.0),
)


@dataclass(frozen=True)
class Run:
    model_flops_per_s: float
    matrix_flops_per_s: float
    save_s: float
    #: Shares of the steps' wall-clock time, by part.
    parts: dict[str, float]

    @property
    def share(self) -> float:
        """Percent of the matrix rate."""
        return 100 * self.model_flops_per_s / self.matrix_flops_per_s

    @property
    def outside(self) -> float:
        """Percent of the time, checkpoints included."""
        return 100 * (1 - sum(self.parts[name] for name in INSIDE) + self.save_s / CHECKPOINT_INTERVAL_S)


def train(claim: Claim, *, steps: int, cores: int) -> Run:
    os.environ[MATRIX_RATE] = PRODUCTS[claim.precision]
    with scratch(claim.work, rows=1024) as (directory, data, model), on_cores(cores):
        out, timed = directory / "out", directory / "timed"
        options = trainer_options(claim.work, data, model, out, steps=steps, precision=claim.precision)
        python("-m", "benchmarks.references.timed", str(timed), *options)
        *taken, end = json.loads((timed / "0.json").read_text())
        first = metrics(out)[0]
    taken = taken[WARM_UP:]
    # Every step has the same work: padded rows count in full, and masked positions vary by little.
    flops = first["flops_per_s"] * first["step_time_s"]
    wall = sum(step["wall"] for step in taken)
    parts = {name: sum(step.get(name, 0.0) for step in taken) / wall for name in (*INSIDE, "data", "logging")}
    return Run(flops * len(taken) / wall, end["matrix_flops_per_s"], end["save"], parts)


def results(claim: Claim, runs: Sequence[Run], *, cores: int) -> Iterator[Result]:
    """The shares, each with its single runs."""

    def median(name: str) -> float:
        found: float = statistics.median(getattr(run, name) for run in runs)
        return found

    what = f"{claim.work.name}, S={claim.work.seq_len}, {claim.precision}, {cores} cores"
    model, matrix = median("model_flops_per_s"), median("matrix_flops_per_s")
    said = (f"model {model / 1e9:.0f} GFLOP/s", f"mm {matrix / 1e9:.0f} GFLOP/s")
    yield Result(f"{what}: share of the matrix rate", *said, median("share"), " %", at_least=claim.least_share,
                 at_most=100, each=tuple(run.share for run in runs))  # fmt: skip
    said = (
        ", ".join(f"{name} {100 * statistics.median(run.parts[name] for run in runs):.2g} %" for name in runs[0].parts),
        f"a checkpoint {median('save_s'):.1f} s every {CHECKPOINT_INTERVAL_S / 60:g} minutes",
    )
    yield Result(f"{what}: time outside forward, backward, optimizer", *said, median("outside"), " %",
                 at_most=claim.most_outside, each=tuple(run.outside for run in runs))  # fmt: skip


def main() -> None:
    args = pairs_parser(__doc__).parse_args()
    allowed = ("fp32", CpuDevice().automatic_precision()[0])
    runs: dict[Claim, list[Run]] = {claim: [] for claim in CLAIMS if claim.precision in allowed}
    for _ in range(args.pairs):
        for claim, found in runs.items():
            found.append(train(claim, steps=args.steps, cores=args.cores))
    for claim, found in runs.items():
        for result in results(claim, found, cores=args.cores):
            say(result)


if __name__ == "__main__":
    main()
