"""Training on the CPU: `python -m trainer` against Hugging Face's Trainer, same shards, model, batch and threads."""

from __future__ import annotations

import statistics

from benchmarks.work import (
    A,
    hugging_face_step_times,
    our_step_times,
    pairs_parser,
    scratch,
    steady,
)

#: (our precision, theirs), and the ratio that is claimed.
COMPARISONS = [("fp32", "fp32", 1.35)]


def main() -> None:
    args = pairs_parser(__doc__).parse_args()
    print(f"{'ours':>10} {'seq/s':>8}   {'Trainer':>10} {'seq/s':>8}   ratio, and pair by pair")
    for ours, theirs, claim in COMPARISONS:
        rates = []
        for _ in range(args.pairs):
            with scratch(A) as (directory, data, model):
                a = our_step_times(A, data, model, directory / "ours", steps=args.steps, precision=ours)
                b = hugging_face_step_times(A, data, model, directory / "theirs", steps=args.steps, precision=theirs)
            rates.append((A.sequences_per_step / steady(a), A.sequences_per_step / steady(b)))
        ratios = [a / b for a, b in rates]
        ours_rate, theirs_rate = (statistics.median(side) for side in zip(*rates, strict=True))
        each = " ".join(f"{ratio:.2f}" for ratio in ratios)
        print(f"{ours:>10} {ours_rate:8.1f}   {theirs:>10} {theirs_rate:8.1f}   ", end="")
        print(f"{statistics.median(ratios):.2f} ({each}; claimed: {claim} or more)")


if __name__ == "__main__":
    main()
