"""Seconds from `python -m trainer` to its first step, on the CPU, with everything it reads in the page cache."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.processes import on_cores, python, start
from benchmarks.results import Result, say
from benchmarks.work import A, Work, metrics, pairs_parser, scratch, trainer_options

MOST = 6.0


def first_step_s(data: Path, model: Path, out: Path, *, work: Work = A) -> float:
    """Seconds from the start of the command to the start of the first step: its log time minus its duration."""
    words = ("-m", "trainer", *trainer_options(work, data, model, out, steps=1, warmup_steps=0))
    began = time.monotonic()
    process = start(*words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("LOG "):
            seconds = time.monotonic() - began
    if process.wait():
        sys.exit("".join(lines))
    step_s: float = metrics(out)[0]["step_time_s"]
    return seconds - step_s


def main() -> None:
    args = pairs_parser(__doc__, pairs=5, steps=None).parse_args()
    found, bare = [], []
    with scratch(A) as (directory, data, model), on_cores(args.cores):
        first_step_s(data, model, directory / "warm-up")
        for run in range(args.pairs):
            found.append(first_step_s(data, model, directory / f"{run}"))
            began = time.monotonic()
            python("-c", "import torch")
            bare.append(time.monotonic() - began)
    seconds, import_s = statistics.median(found), statistics.median(bare)
    said = (f"python -m trainer {seconds:.1f} s", f"import torch alone {import_s:.1f} s")
    say(Result("start-up to the first step, work A, CPU", *said, seconds, " s", at_most=MOST, each=tuple(found)))


if __name__ == "__main__":
    main()
