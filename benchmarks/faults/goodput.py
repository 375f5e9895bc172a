"""Goodput while processes are killed: the time that the steps reached are worth, over the time since the start.

Every --period seconds a process of the training is killed with SIGKILL, at random of all of them: the workers, what
started them, the command itself, which is started again at once. The same schedule beside torchrun with Hugging Face's
Trainer and its checkpoints. A step is worth what it takes undisturbed, measured at the start on each side.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from benchmarks.results import Result, say
from benchmarks.work import ROOT, A, scratch

LEAST, LEAST_RATIO = 0.9, 1.5
#: More steps than there is time for.
MOST_STEPS = 1_000_000


class Side:
    """A training that is started again whenever its command has ended."""

    def __init__(self, words: list[str], environment: dict[str, str], log: Path, steps: Callable[[], dict[int, float]]):
        """`steps`: step → seconds since 1970 at its last end."""
        self._words, self._environment, self._log, self.steps = words, environment, log, steps
        self.process: subprocess.Popen[bytes] | None = None

    def keep_running(self) -> None:
        if self.process is None or self.process.poll() is not None:
            with self._log.open("ab") as file:
                self.process = subprocess.Popen(
                    [sys.executable, *self._words], cwd=ROOT, stdout=file, stderr=file,
                    env={**os.environ, "USE_TORCH_XLA": "0", **self._environment},
                )  # fmt: skip

    def all(self) -> list[psutil.Process]:
        assert self.process is not None
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self.process.pid)
            return [root, *root.children(recursive=True)]
        return []

    def end(self) -> None:
        every = self.all()
        for process in every:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        assert self.process is not None
        self.process.wait()
        psutil.wait_procs(every, timeout=30)


def ours(directory: Path, data: Path, model: Path, *, workers: int, interval: int) -> Side:
    config = directory / "ours.cfg"
    config.write_text(
        f"[run]\nwork_dir = {directory}/work\nlog_interval = 1\n[dataset]\nphase1_url = {data}\n"
        f"[model]\nvocab_size = {A.vocab_size}\nnum_hidden_layers = {A.layers}\nhidden_size = {A.hidden}\n"
        f"num_attention_heads = {A.heads}\nintermediate_size = {A.intermediate}\n"
        f"[phase1]\nseq_len = {A.seq_len}\nmax_pred_len = {A.max_pred_len}\nmax_steps = {MOST_STEPS}\n"
        f"global_batch_size = {A.sequences_per_step}\nmicro_batch_size = {A.micro_batch_size}\n"
        f"ckpt_interval_steps = {interval}\nword_embeddings = random\ninitial_attention = random\n"
        f"optimizer = AdamW\nlr = 1e-4\n[cluster]\nnproc_per_node = {workers}\n"
    )

    def steps() -> dict[int, float]:
        found = {}
        for path in (directory / "work").glob("pretrain-phase1-*/metrics.jsonl"):
            for line in path.read_text().splitlines():
                with contextlib.suppress(ValueError):  # the last one is being written
                    record = json.loads(line)
                    found[record["step"]] = record["time"]
        return found

    words = ["-m", "luigi", "--module", "pipeline", "Pretrain", "--phase", "1"]
    return Side(words, {"LUIGI_CONFIG_PATH": str(config)}, directory / "ours.log", steps)


def theirs(directory: Path, data: Path, model: Path, *, workers: int, interval: int) -> Side:
    out = directory / "theirs"

    def steps() -> dict[int, float]:
        with contextlib.suppress(FileNotFoundError):
            lines = (out / "steps").read_text().split("\n")[:-1]
            return {int(step): float(at) for step, at in (line.split() for line in lines)}
        return {}

    words = [
        *("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={workers}", "--max-restarts=1000"),
        *("-m", "benchmarks.references.hugging_face_restarts", str(data), str(model), f"--out={out}"),
        *(f"--batch-size={A.micro_batch_size}", f"--grad-accum={A.grad_accum_usteps // workers}"),
        *(f"--steps={MOST_STEPS}", f"--save-steps={interval}"),
    ]
    return Side(words, {}, directory / "theirs.log", steps)


def goodput(side: Side, *, seconds: float, period: float, seed: int) -> tuple[float, int, int]:
    """(goodput, steps reached, kills)."""
    rng, kills = random.Random(seed), 0
    began = time.time()
    following = began + period
    while time.time() - began < seconds:
        side.keep_running()
        time.sleep(0.05)
        if time.time() >= following:
            following += period
            victims = side.all()
            if victims:
                with contextlib.suppress(psutil.NoSuchProcess):
                    rng.choice(victims).kill()
                    kills += 1
    ended = time.time()
    side.end()
    found = side.steps()
    if not found:
        sys.exit(f"no step was done:\n{side._log.read_text()[-2000:]}")
    ends = [found[step] for step in sorted(found)]
    # Of steps that follow each other; the gap over a restart is none, and medians do not see the few that are.
    step_s = statistics.median(b - a for a, b in zip(ends[:-1], ends[1:], strict=True))
    return max(found) * step_s / (ended - began), max(found), kills


def main() -> None:
    p = argparse.ArgumentParser(prog="python -m benchmarks.faults.goodput", description=__doc__)
    p.add_argument("--minutes", type=float, default=20, help="of each side")
    p.add_argument("--period", type=float, default=60, help="seconds between two kills")
    p.add_argument("--workers", type=int, default=2)
    p.add_argument("--interval", type=int, default=20, help="steps between checkpoints, on both sides")
    args = p.parse_args()
    shares = []
    with scratch(A, shards=2) as (directory, data, model):
        for name, make in (("ours", ours), ("Trainer under torchrun", theirs)):
            side = make(directory, data, model, workers=args.workers, interval=args.interval)
            share, steps, kills = goodput(side, seconds=60 * args.minutes, period=args.period, seed=0)
            shares.append(share)
            print(f"{name}: goodput {share:.1%}, {steps} steps, {kills} processes killed", flush=True)
    what = f"goodput, a process killed every {args.period:g} s for {args.minutes:g} min, {args.workers} workers"
    mine, other = shares
    said = (f"luigi {mine:.1%}", f"Trainer under torchrun {other:.1%}")
    say(Result(what, *said, 100 * mine, " %", at_least=100 * LEAST))
    say(Result("the same, beside Trainer's", *said, mine / other, " ×", at_least=LEAST_RATIO))


if __name__ == "__main__":
    main()
