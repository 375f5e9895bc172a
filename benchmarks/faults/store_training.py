"""What pushing checkpoints costs the training run that it accompanies: the same steps with a store and without.

Both save the same checkpoints, at the rate in bytes of BERT-Large's every 10 minutes unless told otherwise. Luigi, the
training run and the pushing process share --cores cores, on which training computes all the time; hardly any machine
with an accelerator is that busy. An S3 server (moto's) stands for another machine: it has the other cores. Runs with
and without a store alternate; each goes first in turn. The time is that of the steps after the first three, from the
trainer's own records. Also reported, as other programs disturb it less: the pushing process's share of the cores' time.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import re
import shutil
import statistics
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.faults.stores import KINDS, Place, place
from benchmarks.processes import ROOT, on_cores, start
from benchmarks.results import Result, say
from benchmarks.work import A, at_least, metrics, phase1_lengths, random_rows, write_rows

MOST_PERCENT = 1.0
WARM_UP = 3
#: BERT-Large, fp32, two moments, every 10 minutes.
LARGE_MB_PER_S = 4026 / 600
CONFIG = f"""
[run]
log_interval = 1
[dataset]
phase1_url = {{data}}
phase2_url = {{data}}
[model]
vocab_size = {A.vocab_size}
num_hidden_layers = {A.layers}
hidden_size = {A.hidden}
num_attention_heads = {A.heads}
intermediate_size = {A.intermediate}
[phase1]
seq_len = {A.seq_len}
max_pred_len = {A.max_pred_len}
global_batch_size = {A.sequences_per_step}
micro_batch_size = {A.micro_batch_size}
warmup_steps = 1
word_embeddings = random
initial_attention = random
optimizer = AdamW
lr = 1e-4
"""


@dataclass(frozen=True)
class Work:
    """A training run, in work directories that begin as copies of one whose data is ready."""

    directory: Path
    steps: int
    interval: int

    def run(self, store: Place | None) -> tuple[float, int, float]:
        """Returns the seconds of the steps after the first ones, how many checkpoints were pushed meanwhile, and the
        processor seconds of the pushing process."""
        work = self.directory / "run"
        for old in (work, *self.directory.glob("store*")):
            shutil.rmtree(old, ignore_errors=True)
        shutil.copytree(self.directory / "ready", work, symlinks=True)
        config = self.directory / "run.cfg"
        # An empty store: what a store already has is not trained.
        section = dataclasses.replace(store, url=f"{store.url}-{uuid.uuid4().hex}").section if store else ""
        config.write_text((self.directory / "luigi.cfg").read_text() + section)
        steps = ("--Phase1-max-steps", str(self.steps), "--Phase1-ckpt-interval-steps", str(self.interval))
        pushing_s = luigi(config, work, "Pretrain", "--phase", "1", *steps)
        (out,) = work.glob("pretrain-phase1-*")
        times = [record["time"] for record in metrics(out)]
        said = (out / "store.log").read_text() if store else ""
        return times[-1] - times[WARM_UP - 1], len(re.findall(r"ckpt_\d+ is in the store", said)), pushing_s


def luigi(config: Path, work: Path, *words: str) -> float:
    """Run it to its end. Returns the processor seconds of the process that pushes during training."""
    command = ("-m", "luigi", "--module", "pipeline", *words, "--Run-work-dir", str(work))
    environment = {"LUIGI_CONFIG_PATH": str(config)}
    pushing_s, log = 0.0, config.with_suffix(".log")
    with log.open("wb") as file:
        process = start(*command, environment=environment, stdout=file, stderr=file)
        while process.poll() is None:
            time.sleep(0.2)
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(process.pid).children():
                    if "accompany" in child.cmdline():
                        used = child.cpu_times()
                        pushing_s = max(pushing_s, used.user + used.system)
    if process.returncode:
        sys.exit(log.read_text())
    return pushing_s


def prepared(directory: Path, seconds: float, mb_per_s: float) -> tuple[Work, str]:
    """A training run of about this many seconds, with checkpoints at this rate; and the rate in words."""
    data = write_rows(directory / "data", random_rows(A, phase1_lengths(A, 4096)))
    config = directory / "luigi.cfg"
    config.write_text(CONFIG.format(data=data))
    luigi(config, directory / "ready", "Precompile", "--phase", "1", "--Phase1-max-steps", "10")
    shutil.copytree(directory / "ready", directory / "run", symlinks=True)
    step_s = Work(directory, 10, 0).run(None)[0] / (10 - WARM_UP)
    (checkpoint,) = (directory / "run").glob("pretrain-phase1-*/checkpoints/ckpt_10")
    megabytes = sum(path.stat().st_size for path in checkpoint.iterdir()) / 1e6
    work = Work(directory, WARM_UP + round(seconds / step_s), max(1, round(megabytes / mb_per_s / step_s)))
    return work, f"{megabytes:.0f} MB every {work.interval * step_s:.1f} s"


def compare(kind: str, directory: Path, args: argparse.Namespace) -> None:
    others = sorted(os.sched_getaffinity(0))[: -args.cores]
    if kind == "s3" and not others:
        sys.exit("error: an S3 server needs a core in addition to those of --cores")
    each, shares, pushed = [], [], []
    with place(kind, directory, cores=others) as store, on_cores(args.cores):
        work, said = prepared(directory, args.seconds, args.megabytes_per_second)
        for pair in range(args.pairs):
            sides: tuple[Place | None, ...] = (store, None) if pair % 2 else (None, store)
            found = {side is store: work.run(side) for side in sides}
            each.append(100 * (found[True][0] / found[False][0] - 1))
            pushed.append(found[True][1])
            shares.append(100 * found[True][2] / found[True][0] / args.cores)
            print(f"  {found[True][0]:.2f} s with, {found[False][0]:.2f} s without, {pushed[-1]} pushed", flush=True)
    what = f"training beside pushes to the store ({kind}), {said}, {args.cores} core(s) for all: longer"
    share = f"processor time of what pushes {statistics.median(shares):.2g} % of the cores'"
    saved = (work.steps - 1) // work.interval
    ours = f"{statistics.median(pushed):g} of {saved} checkpoints pushed meanwhile"
    say(Result.median(what, f"{ours}; {share}", "without a store", each, " %", at_most=MOST_PERCENT))


def main() -> None:
    p = argparse.ArgumentParser(prog="python -m benchmarks.faults.store_training", description=__doc__)
    p.add_argument("--stores", nargs="+", default=list(KINDS), choices=KINDS)
    p.add_argument("--pairs", type=at_least(1), default=3, help="runs of each side, alternating")
    p.add_argument("--seconds", type=float, default=300.0, help="of each training run")
    p.add_argument("--megabytes-per-second", type=float, default=LARGE_MB_PER_S, help="of checkpoints")
    p.add_argument("--cores", type=int, default=1, help="for all but an S3 server")
    args = p.parse_args()
    for kind in args.stores:
        with tempfile.TemporaryDirectory(prefix="benchmark-", dir=ROOT) as name:
            compare(kind, Path(name), args)


if __name__ == "__main__":
    main()
