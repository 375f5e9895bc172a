"""Seconds from the SIGKILL of one of several workers to the end of the next step, and the steps done twice.

A training under luigi on this machine's CPU, one worker killed at random again and again. The bytes at the end of such
runs are compared with undisturbed ones by tests/e2e/test_interruptions.py.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from benchmarks.results import Result, say
from benchmarks.work import ROOT

MOST_S = 3.0
CONFIG = """
[run]
work_dir = {directory}/work
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
[cluster]
nproc_per_node = {workers}
"""


class Training:
    """A training under way."""

    def __init__(self, process: subprocess.Popen[bytes], work: Path) -> None:
        self._process, self._work = process, work

    def steps(self) -> list[tuple[int, float]]:
        """(step, seconds since 1970 at its end) of the last steps recorded."""
        try:
            lines = next(self._work.glob("pretrain-phase1-*/metrics.jsonl")).read_bytes()[-4000:].split(b"\n")[1:-1]
        except StopIteration:
            return []
        records = [json.loads(line) for line in lines]
        return [(record["step"], record["time"]) for record in records]

    def await_step(self, *, after: float, count: int = 1, timeout_s: float = 300) -> tuple[int, float]:
        """The first step that ended after a time, once `count` have."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            late = [found for found in self.steps() if found[1] > after]
            if len(late) >= count:
                return late[0]
            if self._process.poll() is not None:
                sys.exit(f"luigi ended with status {self._process.returncode}")
            time.sleep(0.005)
        sys.exit(f"no step in {timeout_s:g} s")

    def workers(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter(["cmdline"]):
            words = " ".join(process.info["cmdline"] or ())
            if f"--output_dir {self._work}/pretrain" in words and "trainer.launch.torchrun" not in words:
                found.append(process)
        return found


@contextmanager
def training(workers: int, *, interval: int) -> Iterator[Training]:
    """Luigi with a small model."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        config = directory / "luigi.cfg"
        config.write_text(
            CONFIG.format(directory=directory, root=ROOT, workers=workers, interval=interval, batch=8 * workers)
        )
        environment = {**os.environ, "LUIGI_CONFIG_PATH": str(config)}
        command = [sys.executable, "-m", "luigi", "--module", "pipeline", "Pretrain", "--phase", "1"]
        with (directory / "log").open("wb") as log:
            process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env=environment)
        try:
            yield Training(process, directory / "work")
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


def main() -> None:
    p = argparse.ArgumentParser(prog="python -m benchmarks.faults.recovery", description=__doc__)
    p.add_argument("--workers", type=int, nargs="+", default=[2, 8], help="trainings with these numbers of workers")
    p.add_argument("--kills", type=int, default=30, help="of each training")
    p.add_argument("--interval", type=int, default=20, help="steps between checkpoints")
    args = p.parse_args()
    for workers in args.workers:
        rng, seconds, again = random.Random(workers), [], []
        with training(workers, interval=args.interval) as run:
            after = 0.0
            for _ in range(args.kills):
                run.await_step(after=after, count=30)
                victim = rng.choice(run.workers())
                before = run.steps()[-1][0]
                killed = time.time()
                victim.kill()
                step, after = run.await_step(after=killed + 0.05)
                seconds.append(after - killed)
                again.append(before - step + 1)
        what = f"SIGKILL of one of {workers} workers to the next step, {os.cpu_count()} cores"
        beside = f"steps done again: {statistics.median(again):g}, at most {max(again)}"
        say(Result(what, "restarted from the last checkpoint", beside, statistics.median(seconds), " s",
                   at_most=MOST_S, each=tuple(sorted(seconds))))  # fmt: skip


if __name__ == "__main__":
    main()
