"""Phase 1 on the CPU: `python -m trainer` against Hugging Face's Trainer, same shards, model, batch and threads."""

from __future__ import annotations

from benchmarks.processes import on_cores
from benchmarks.results import ratio, say
from benchmarks.work import A, our_step_times, pairs_parser, scratch, steady, their_step_times
from trainer.devices.cpu import CpuDevice

#: Our precision, theirs, and the ratio that is claimed. Trainer's default is fp32; ours is auto. For bf16 nothing is
#: claimed where that is slower, so that auto is fp32.
COMPARISONS = [("auto", "fp32", 4.0), ("autocast", "autocast", 3.0), ("fp32", "fp32", 2.0)]


def main() -> None:
    args = pairs_parser(__doc__).parse_args()
    auto, _ = CpuDevice().automatic_precision()
    ours: dict[str, list[float]] = {name: [] for name in {auto, "autocast", "fp32"}}
    theirs: dict[str, list[float]] = {"fp32": [], "autocast": []}
    for _ in range(args.pairs):
        with scratch(A) as (directory, data, model), on_cores(args.cores):
            for name, rates in ours.items():
                times = our_step_times(A, data, model, directory / name, steps=args.steps, precision=name)
                rates.append(A.sequences_per_step / steady(times))
            for name, rates in theirs.items():
                words = (f"--precision={name}",)
                times = their_step_times("references.hugging_face", A, data, model, *words, steps=args.steps)
                rates.append(A.sequences_per_step / steady(times))
    for mine, other, least in COMPARISONS:
        resolved = auto if mine == "auto" else mine
        named = f"{mine} ({resolved})" if mine == "auto" else mine
        claim = None if auto == "fp32" and mine != "fp32" else least
        pairs = list(zip(ours[resolved], theirs[other], strict=True))
        what = f"phase 1, work A, {args.cores} cores"
        say(ratio(what, pairs, ours=named, beside=f"Trainer, {other}", at_least=claim))


if __name__ == "__main__":
    main()
