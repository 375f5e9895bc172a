"""torch.compile on this machine: the first step's own seconds, compilation included, with an empty cache and with the
one that the whole training before it has left; and sequences/s compared with the same training without it."""

from __future__ import annotations

import argparse
import os

import torch

from benchmarks.processes import on_cores
from benchmarks.results import Result, ratio, say
from benchmarks.work import LEAST_STEPS, A, at_least, our_step_times, scratch, steady


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    p.add_argument("--steps", type=at_least(LEAST_STEPS), default=8, help="optimizer steps of each run")
    p.add_argument("--precision", default="autocast", help="as in the trainer")
    args = p.parse_args()
    given = {"steps": args.steps, "precision": args.precision, "device": args.device}
    with scratch(A) as (directory, data, model), on_cores(min(2, os.cpu_count() or 1)):
        compiled = ("--compile", "--compile_cache", str(directory / "cache"))
        cold = our_step_times(A, data, model, directory / "cold", *compiled, **given)
        warm = our_step_times(A, data, model, directory / "warm", *compiled, **given)
        plain = our_step_times(A, data, model, directory / "plain", **given)
    what = f"torch.compile, work A, {args.device}, {args.precision}"
    said = (f"with an earlier training's cache {warm[0]:.1f} s", f"with an empty one {cold[0]:.1f} s")
    say(Result(f"{what}: the first step alone", *said, cold[0] / warm[0], " ×"))
    compiled_rate, plain_rate = (A.sequences_per_step / steady(times) for times in (warm, plain))
    say(ratio(f"{what}: steps after it", [(compiled_rate, plain_rate)], ours="compiled", beside="not compiled"))


if __name__ == "__main__":
    main()
