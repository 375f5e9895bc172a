"""torch.compile on this machine: seconds to the end of the first step with an empty cache and with the one that
Precompile leaves, and sequences/s beside the same training without it."""

from __future__ import annotations

import argparse

import torch

from benchmarks.work import A, our_step_times, scratch, steady


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    p.add_argument("--steps", type=int, default=8, help="optimizer steps of each run")
    p.add_argument("--precision", default="autocast", help="as the trainer's")
    args = p.parse_args()
    given = {"steps": args.steps, "precision": args.precision, "device": args.device}
    with scratch(A) as (directory, data, model):
        compiled = ("--compile", "--compile_cache", str(directory / "cache"))
        cold = our_step_times(A, data, model, directory / "cold", *compiled, **given)
        warm = our_step_times(A, data, model, directory / "warm", *compiled, **given)
        plain = our_step_times(A, data, model, directory / "plain", **given)
    print(
        f"first step: {cold[0]:.1f} s with an empty cache, {warm[0]:.1f} s with a full one ({cold[0] / warm[0]:.1f} ×)"
    )
    rates = [A.sequences_per_step / steady(times) for times in (warm, plain)]
    print(f"then: {rates[0]:.1f} sequences/s compiled, {rates[1]:.1f} without ({rates[0] / rates[1]:.2f} ×)")


if __name__ == "__main__":
    main()
