"""Goodput under faults: the time that the steps reached are worth, divided by the time since the start.

Every --period seconds the next of --faults hits the training run. kill: a process gets SIGKILL, chosen at random among
all of them: the workers, what started them, the command itself, which is restarted at once (with Trainer and torchft,
what is left is killed first). stop: one gets SIGSTOP, and SIGCONT a third of the period later. full-disk: no byte is
free for that long (needs root). lost-machine: all processes die at once. lost-disk: the same, and everything that the
run has written is lost; ours has a store in another folder. The same schedule hits torchrun with Hugging Face's Trainer
and its checkpoints, and torchft, with the same model, batch, precision and cores. A side is left out if it is not
installed, and given up if it makes no steps. A step is worth the median step time before the first fault; that takes at
least eight steps.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import random
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.faults.schedule import FAULTS, Fault, Undo, disk_for
from benchmarks.faults.training import Steps, Training, latest_steps, luigi_training
from benchmarks.processes import on_cores
from benchmarks.results import Result, say
from benchmarks.work import A, scratch

#: What is claimed, of kills alone: our share, in percent, and how many times Trainer's.
LEAST, LEAST_RATIO = 90.0, 1.5
#: The choices of --sides, and the package that each needs.
SIDES = {"ours": "luigi", "trainer": "Trainer under torchrun", "torchft": "torchft"}
NEEDED = {"ours": "luigi", "trainer": "accelerate", "torchft": "torchft"}
#: Steps before the first fault.
WARM_UP = 8
#: Seconds without a step after which a side is given up.
NO_STEP_S = 300.0
#: More steps than there is time for.
MOST_STEPS = 1_000_000


class CannotTrain(Exception):
    """A side makes no steps."""


def is_installed(side: str) -> bool:
    """Whether a side's package is there, and torchft's lighthouse, which is a command."""
    if side == "torchft" and shutil.which("torchft_lighthouse", path=Path(sys.executable).parent) is None:
        return False
    return importlib.util.find_spec(NEEDED[side]) is not None


def ours(directory: Path, data: Path, *, workers: int, interval: int, store: str) -> Training:
    return luigi_training(
        directory,
        f"log_interval = 1\n[dataset]\nphase1_url = {data}\nphase2_url = {data}\n"
        f"[model]\nvocab_size = {A.vocab_size}\nnum_hidden_layers = {A.layers}\nhidden_size = {A.hidden}\n"
        f"num_attention_heads = {A.heads}\nintermediate_size = {A.intermediate}\n"
        f"hidden_dropout_prob = 0.1\nattention_probs_dropout_prob = 0.1\n[precision]\nmode = fp32\n"
        f"[phase1]\nseq_len = {A.seq_len}\nmax_pred_len = {A.max_pred_len}\nmax_steps = {MOST_STEPS}\n"
        f"global_batch_size = {A.sequences_per_step}\nmicro_batch_size = {A.micro_batch_size}\n"
        f"ckpt_interval_steps = {interval}\nword_embeddings = random\ninitial_attention = random\n"
        f"optimizer = AdamW\nlr = 1e-4\n[cluster]\nnproc_per_node = {workers}\n[store]\nurl = {store}\n",
    )


def recorded(file: Path) -> Callable[[int | None], Steps]:
    """Reads lines "step seconds", of which the last may be unfinished."""

    def steps(tail: int | None) -> Steps:
        if not file.exists():
            return []
        lines = file.read_text().split("\n")[:-1]
        return [(int(step), float(at)) for step, at in (line.split() for line in lines)]

    return steps


def theirs(directory: Path, data: Path, model: Path, *, workers: int, interval: int) -> Training:
    out = directory / "theirs"
    words = [
        *("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={workers}", "--max-restarts=1000"),
        *("-m", "benchmarks.references.hugging_face_restarts", str(data), str(model), f"--out={out}"),
        *(f"--batch-size={A.micro_batch_size}", f"--grad-accum={A.grad_accum_usteps // workers}"),
        *(f"--steps={MOST_STEPS}", f"--save-steps={interval}"),
    ]
    return Training(words, {}, directory / "theirs.log", recorded(out / "steps"), out)


def torchft(directory: Path, data: Path, model: Path, *, workers: int, interval: int) -> Training:
    out = directory / "torchft"
    words = [
        *("-m", "benchmarks.references.torchft_restarts", str(data), str(model), f"--out={out}"),
        *(f"--groups={workers}", f"--batch-size={A.micro_batch_size}", f"--grad-accum={A.grad_accum_usteps}"),
        *(f"--steps={MOST_STEPS}", f"--save-steps={interval}"),
    ]
    return Training(words, {}, directory / "torchft.log", recorded(out / "steps"), out)


def goodput(
    training: Training, faults: Sequence[Fault], *, seconds: float, period: float, seed: int
) -> tuple[float, int, int]:
    """(goodput, steps reached, faults). Raises `CannotTrain`."""
    rng, count, step_s = random.Random(seed), 0, 0.0
    undo: Undo | None = None
    known: Steps = []
    began = look = seen = time.monotonic()
    following = began + period
    patience = max(NO_STEP_S, period)  # a process may be stopped for a third of the period
    try:
        while (now := time.monotonic()) - began < seconds:
            training.keep_running()
            time.sleep(0.1)
            if undo is not None and now >= following - 2 * period / 3:
                undo()
                undo = None
            if now >= look:
                steps, look = latest_steps(training), now + patience / 30
                if steps and steps != known:
                    known, seen = steps, now
                if now - seen > patience:
                    raise CannotTrain(f"no step in {patience:g} s:\n{training.said}")
            if now >= following and (step_s := step_s or _step_time(training)):
                undo = faults[count % len(faults)](training, rng)
                count, following = count + 1, max(following, now - 1) + period
        ended = time.monotonic()
    finally:
        if undo is not None:
            undo()
        training.end()
    if not step_s:
        raise CannotTrain(f"fewer than {WARM_UP} steps in {seconds:.0f} s; give more --minutes:\n{training.said}")
    reached = max((step for step, _ in training.steps(None)), default=0)
    return reached * step_s / (ended - began), reached, count


def _step_time(training: Training) -> float:
    """The median step time so far, in seconds; 0 before there are enough steps."""
    ends = [at for _, at in sorted(training.steps(None))]
    return statistics.median(b - a for a, b in itertools.pairwise(ends)) if len(ends) >= WARM_UP else 0.0


def say_shares(shares: dict[str, float], what: str, least: float | None = LEAST) -> None:
    """Print our goodput, and how it compares with each of the others. `least`: what is claimed of ours, if anything."""
    mine, luigi = shares["ours"], f"luigi {shares['ours']:.1%}"
    others = {side: f"{SIDES[side]} {share:.1%}" for side, share in shares.items() if side != "ours"}
    say(Result(what, luigi, ", ".join(others.values()), 100 * mine, " %", at_least=least))
    for side, beside in others.items():
        say(Result(f"{what}, beside {SIDES[side]}", luigi, beside, mine / shares[side], " ×",
                   at_least=LEAST_RATIO if side == "trainer" else None))  # fmt: skip


def main() -> None:
    p = argparse.ArgumentParser(prog="python -m benchmarks.faults.goodput", description=__doc__)
    p.add_argument("--minutes", type=float, default=20, help="of each side")
    p.add_argument("--period", type=float, default=60, help="seconds between two faults")
    p.add_argument("--faults", nargs="+", choices=FAULTS, default=["kill"], help="one after the other")
    p.add_argument("--workers", type=int, default=2)
    p.add_argument("--interval", type=int, default=4, help="steps between checkpoints, on all sides")
    p.add_argument("--sides", nargs="+", choices=SIDES, default=[*SIDES], help="which of them to run")
    args = p.parse_args()
    if args.workers < 1 or A.grad_accum_usteps % args.workers:
        p.error(f"--workers is {args.workers}; it must divide the {A.grad_accum_usteps} micro-steps of a step")
    shares, failed = {}, []
    is_filled = "full-disk" in args.faults
    with scratch(A, shards=2) as (scratched, data, model), on_cores(args.workers, threads=1):
        given = {"workers": args.workers, "interval": args.interval}
        store = str(scratched / "store") if "lost-disk" in args.faults else ""
        made: dict[str, Callable[[Path], Training]] = {
            "ours": lambda disk: ours(disk, data, **given, store=store),
            "trainer": lambda disk: theirs(disk, data, model, **given),
            "torchft": lambda disk: torchft(disk, data, model, **given),
        }
        for side in args.sides:
            if not is_installed(side):
                print(f"{SIDES[side]}: left out, as it is not installed", flush=True)
                continue
            try:
                with disk_for(scratched, is_filled=is_filled) as disk:
                    training, every = made[side](disk), [FAULTS[name] for name in args.faults]
                    share, steps, count = goodput(
                        training, every, seconds=60 * args.minutes, period=args.period, seed=0
                    )
            except CannotTrain as error:
                failed.append(f"error: {SIDES[side]}: {error}")
                continue
            shares[side] = share
            said = f"{count} faults, the command started {training.starts} times"
            print(f"{SIDES[side]}: goodput {share:.1%}, {steps} steps, {said}", flush=True)
    if "ours" in shares:
        what = "a process killed" if args.faults == ["kill"] else f"{', '.join(args.faults)} in turn,"
        times = f"{what} every {args.period:g} s for {args.minutes:g} min"
        # Some of the others last a third of the period, or as long as a lease.
        least = LEAST if args.faults == ["kill"] else None
        say_shares(shares, f"goodput, {times}, {args.workers} workers", least)
    if failed:
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    main()
