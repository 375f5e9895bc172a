"""Seconds from the SIGKILL of one of several workers to the end of the next step, and the work done twice: the time
from the end of the last step that was kept to the kill, in steps.

A training run under luigi on this machine's CPU, one worker killed at random again and again. The final bytes of such
runs are compared with those of undisturbed ones by tests/e2e/test_interruptions.py.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from benchmarks.faults.training import Training, latest_steps, luigi_training
from benchmarks.processes import ROOT
from benchmarks.results import Result, say

MOST_S, MOST_STEPS = 3.0, 1
#: Seconds in which a step must end.
PATIENCE_S = 300
#: By how much the clock may move during a training: steps are recorded with the time of day.
MOST_MOVED_S = 0.1
#: Steps between a recovery and the next kill.
BETWEEN = 30
CONFIG = """
[corpus]
source = "{root}/docs/*.md"
vocab_size = 2000
[model]
preset = debug
[phase1]
global_batch_size = {batch}
micro_batch_size = 4
max_steps = 1000000
ckpt_interval_steps = {interval}
[phase2]
global_batch_size = {batch}
micro_batch_size = 4
[cluster]
nproc_per_node = {workers}
"""


def await_step(training: Training, *, after: float, count: int = 1) -> tuple[int, float]:
    """The first step that ended after a given time, once `count` steps have."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        late = [found for found in latest_steps(training) if found[1] > after]
        if len(late) >= count:
            return late[0]
        if training.has_ended:
            sys.exit(f"luigi has ended:\n{training.said}")
        time.sleep(0.01)
    sys.exit(f"no step in {PATIENCE_S} s:\n{training.said}")


def workers(training: Training) -> list[psutil.Process]:
    found = ((process, " ".join(process.cmdline())) for process in training.processes())
    return [process for process, words in found if " -m trainer " in words and "trainer.launch" not in words]


def results(count: int, interval: int, seconds: Sequence[float], again: Sequence[float]) -> Iterator[Result]:
    """The claims, from the seconds of each kill to the next step and the steps' worth of work that was done again."""
    what = f"SIGKILL of one of {count} workers to the next step, {os.cpu_count()} cores"
    beside = "restarted from the step that another worker has saved"
    said = f"checkpoints every {interval} steps"
    yield Result.median(what, said, beside, sorted(seconds), " s", at_most=MOST_S)
    yield Result(f"{what}: steps' worth of work done again", "the most of all kills",
                 f"median {statistics.median(again):.2g}", max(again), " steps", at_most=MOST_STEPS,
                 each=tuple(sorted(again)))  # fmt: skip


def main() -> None:
    p = argparse.ArgumentParser(prog="python -m benchmarks.faults.recovery", description=__doc__)
    p.add_argument("--workers", type=int, nargs="+", default=[2, 8], help="trainings with these numbers of workers")
    p.add_argument("--kills", type=int, default=30, help="of each training")
    p.add_argument("--interval", type=int, default=200, help="steps between checkpoints")
    args = p.parse_args()
    for count in args.workers:
        rng, seconds, again = random.Random(count), [], []
        clock = time.time() - time.monotonic()
        with tempfile.TemporaryDirectory() as directory:
            settings = CONFIG.format(root=ROOT, workers=count, interval=args.interval, batch=8 * count)
            training = luigi_training(Path(directory), settings)
            training.keep_running()
            try:
                after = 0.0
                for _ in range(args.kills):
                    await_step(training, after=after, count=BETWEEN)
                    victim = rng.choice(workers(training))
                    killed = time.time()
                    victim.kill()
                    _, after = await_step(training, after=killed + 0.2)  # one may end while the signal is being sent
                    seconds.append(after - killed)
                    kept = [ended for _, ended in latest_steps(training) if ended < after]
                    step_s = statistics.median(b - a for a, b in itertools.pairwise(kept))
                    again.append(max(0.0, killed - kept[-1]) / step_s)
            finally:
                training.end()
        if abs(moved := time.time() - time.monotonic() - clock) > MOST_MOVED_S:
            sys.exit(f"error: the clock was set by {moved:.1f} s meanwhile, so the times are wrong; run it again")
        for result in results(count, args.interval, seconds, again):
            say(result)


if __name__ == "__main__":
    main()
