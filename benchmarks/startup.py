"""Seconds from `python -m trainer` to its first step, on the CPU, with everything it reads in the page cache, beside
those of `import torch` alone."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from benchmarks.processes import on_cores, python, start
from benchmarks.results import ratio, say
from benchmarks.work import A, Work, metrics, pairs_parser, scratch, trainer_options

#: Claimed: how many times as long as `import torch` a start takes at most.
MOST = 1.25


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


def import_torch_s() -> float:
    began = time.monotonic()
    python("-c", "import torch")
    return time.monotonic() - began


def main() -> None:
    args = pairs_parser(__doc__, pairs=5, steps=None).parse_args()
    pairs = []
    with scratch(A) as (directory, data, model), on_cores(args.cores):
        first_step_s(data, model, directory / "warm-up")
        for run in range(args.pairs):
            pairs.append((first_step_s(data, model, directory / f"{run}"), import_torch_s()))
    say(ratio("start-up to the first step, work A, CPU", pairs, ours="python -m trainer", beside="import torch alone",
              unit="s", at_most=MOST))  # fmt: skip


if __name__ == "__main__":
    main()
