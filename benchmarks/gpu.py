"""BERT-Large in bf16 on one GPU: sequences/s of phase 1, and of phase 2 packed with Wikipedia's lengths (half of the
tokens of unpacked rows would be padding), compared with Hugging Face's Trainer on the same sequences, with what is
claimed for an H100 or H200, and with what the GPU's matrix rate allows.

`--device cpu` runs the same commands on a small model, to show that they work; it claims nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
from pathlib import Path

import torch

from benchmarks.processes import on_cores
from benchmarks.results import Result, ratio, say
from benchmarks.work import (
    LEAST_STEPS,
    WARM_UP,
    Work,
    at_least,
    half_padding_lengths,
    model_config,
    our_step_times,
    packed,
    phase1_lengths,
    random_rows,
    steady,
    their_step_times,
    write_rows,
)

#: For each phase: sequences/s that are claimed for a GPU, how many times Trainer's, and the FLOP of a sequence
#: (docs/benchmarks.md).
CLAIMS: dict[int, tuple[float, float, float]] = {1: (1800.0, 1.8, 234.6e9), 2: (800.0, 3.0, 488e9)}
LARGE = Work("BERT-Large", 24, 1024, 16, 4096, 30522, 128, 20, 256, 4)
SMALL = Work("small", 2, 32, 4, 64, 200, 32, 5, 4, 2)
#: Side of the square matrices whose product shows what a GPU can do, and how often it is run.
MATRIX = (8192, 20)


def works(device: str, micro_batch_sizes: list[int]) -> dict[int, Work]:
    if device == "cpu":
        return {1: SMALL, 2: SMALL.but(seq_len=64, max_pred_len=10)}
    first, second = micro_batch_sizes
    phase2 = LARGE.but(seq_len=512, max_pred_len=80, micro_batch_size=second)
    return {1: LARGE.but(micro_batch_size=first), 2: phase2}


def matrix_flops_per_s() -> float:
    """FLOP/s of products of large bf16 matrices of random numbers: the median by the GPU's clock."""
    side, runs = MATRIX
    a, b = (torch.randn(side, side, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    times = []
    for _ in range(WARM_UP + runs):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        torch.mm(a, b)
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended) / 1e3)
    return 2 * side**3 / steady(times)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    p.add_argument("--pairs", type=at_least(1), default=3, help="runs of each side, alternating")
    p.add_argument("--steps", type=at_least(LEAST_STEPS), default=8, help="optimizer steps of each run")
    p.add_argument("--precision", default="auto", help="as in the trainer; auto is bf16 where the GPU has it")
    p.add_argument("--compile", action="store_true", help="ours with torch.compile")
    p.add_argument("--micro-batch-sizes", type=int, nargs=2, default=[256, 128], help="rows, of phase 1 and of phase 2")
    p.add_argument("--phases", type=int, nargs="+", choices=(1, 2), default=[1, 2])
    p.add_argument("--alone", action="store_true", help="without Trainer")
    args = p.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("left out: torch sees no GPU; run this where there is one, or with --device cpu to try the command")
        return
    matrix_rate = matrix_flops_per_s() if args.device == "cuda" else None
    for phase, work in works(args.device, args.micro_batch_sizes).items():
        if phase in args.phases:
            measure(phase, work, args, matrix_rate)


def measure(phase: int, work: Work, args: argparse.Namespace, matrix_rate: float | None) -> None:
    """Both sides of a phase. `matrix_rate`: FLOP/s; None on a CPU, for which nothing is claimed."""
    count = 8 * work.sequences_per_step
    arrays = random_rows(work, (half_padding_lengths if phase == 2 else phase1_lengths)(work, count))
    rows = packed(arrays, work) if phase == 2 else arrays
    a_row = count / len(rows["input_ids"])
    # Trainer computes the masked-LM head at every token, for which our micro-batches are too large.
    their_work = work.but(micro_batch_size=work.micro_batch_size // 2, grad_accum_usteps=2 * work.grad_accum_usteps)
    cores = contextlib.nullcontext() if args.device == "cuda" else on_cores(1)
    ours, pairs = [], []
    with tempfile.TemporaryDirectory(prefix="benchmark-") as scratch, cores:
        directory = Path(scratch)
        model, data = model_config(work, directory), write_rows(directory / "data", rows)
        apart = write_rows(directory / "apart", arrays) if phase == 2 else data
        compiled = ("--compile", f"--compile_cache={directory / 'cache'}") if args.compile else ()
        for pair in range(args.pairs):
            times = our_step_times(
                work, data, model, directory / f"out-{pair}", *compiled, steps=args.steps, precision=args.precision,
                device=args.device,
            )  # fmt: skip
            ours.append(a_row * work.sequences_per_step / steady(times))
            if not args.alone:
                words = ("--precision=autocast", f"--device={args.device}")
                theirs = their_step_times("references.hugging_face", their_work, apart, model, *words, steps=args.steps)
                pairs.append((ours[-1], work.sequences_per_step / steady(theirs)))
    named = [f"{work.name}, phase {phase}", args.device, args.precision]
    what = ", ".join(named + ["packed"] * (phase == 2) + ["torch.compile"] * args.compile)
    claim, times_theirs, flop = CLAIMS[phase]
    rate = statistics.median(ours)
    limit = matrix_rate / flop if matrix_rate else None
    beside = f"its matrix rate allows {limit:.0f} ({100 * rate / limit:.0f} %)" if limit else ""
    said = f"{rate:.0f} sequences/s", beside
    say(Result.median(what, *said, ours, " sequences/s", at_least=claim if limit else None))
    if pairs:
        say(ratio(what, pairs, ours="ours", beside="Trainer, autocast", at_least=times_theirs if limit else None))


if __name__ == "__main__":
    main()
