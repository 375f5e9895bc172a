"""BERT-Large in bf16 on one GPU: sequences/s of phase 1, and of phase 2 packed with Wikipedia's lengths (half of the
tokens of unpacked rows would be padding), compared with what is claimed for an H100 or H200 and with their limit.

`--device cpu` runs the same commands on a small model, to show that they work; it claims nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from pathlib import Path

import torch

from benchmarks.processes import on_cores
from benchmarks.results import Result, say
from benchmarks.work import (
    LEAST_STEPS,
    Work,
    at_least,
    half_padding_lengths,
    model_config,
    our_step_times,
    packed,
    phase1_lengths,
    random_rows,
    steady,
    write_rows,
)

#: Sequences/s that are claimed for a GPU, and its limits (docs/benchmarks.md). Default micro-batches are larger than
#: those of configs/gpu-bert-large.cfg, 128 and 16 rows.
CLAIMS = {1: (1800.0, 3283.0), 2: (970.0, 1580.0)}
LARGE = Work("BERT-Large", 24, 1024, 16, 4096, 30522, 128, 20, 256, 4)
SMALL = Work("small", 2, 32, 4, 64, 200, 32, 5, 4, 2)


def works(device: str, micro_batch_sizes: list[int]) -> dict[int, Work]:
    if device == "cpu":
        return {1: SMALL, 2: SMALL.but(seq_len=64, max_pred_len=10)}
    first, second = micro_batch_sizes
    phase2 = LARGE.but(seq_len=512, max_pred_len=80, micro_batch_size=second)
    return {1: LARGE.but(micro_batch_size=first), 2: phase2}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    p.add_argument("--steps", type=at_least(LEAST_STEPS), default=12, help="optimizer steps of each phase")
    p.add_argument("--precision", default="auto", help="as in the trainer; auto is bf16 where the GPU has it")
    p.add_argument("--compile", action="store_true", help="with torch.compile")
    p.add_argument("--micro-batch-sizes", type=int, nargs=2, default=[256, 64], help="rows, of phase 1 and of phase 2")
    args = p.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("left out: torch sees no GPU; run this where there is one, or with --device cpu to try the command")
        return
    for phase, work in works(args.device, args.micro_batch_sizes).items():
        count = 8 * work.sequences_per_step
        lengths = (half_padding_lengths if phase == 2 else phase1_lengths)(work, count)
        arrays = random_rows(work, lengths)
        rows = packed(arrays, work) if phase == 2 else arrays
        a_row = count / len(rows["input_ids"])
        cores = contextlib.nullcontext() if args.device == "cuda" else on_cores(1)
        with tempfile.TemporaryDirectory(prefix="benchmark-") as scratch, cores:
            directory = Path(scratch)
            more = ("--compile",) if args.compile else ()
            times = our_step_times(
                work, write_rows(directory / "data", rows), model_config(work, directory), directory / "out", *more,
                steps=args.steps, precision=args.precision, device=args.device,
            )  # fmt: skip
        rate = a_row * work.sequences_per_step / steady(times)
        claim, limit = CLAIMS[phase] if args.device == "cuda" else (None, None)
        what = f"{work.name}, phase {phase}, {args.device}, {args.precision}{', packed' if phase == 2 else ''}"
        beside = f"limit {limit:.0f} sequences/s ({100 * rate / limit:.0f} %)" if limit else ""
        say(Result(what, f"{rate:.0f} sequences/s", beside, rate, " sequences/s", at_least=claim))


if __name__ == "__main__":
    main()
