"""Phase 1 on XLA's CPU backend, fp32: `python -m trainer --device xla` against a plain torch-xla loop with the full
masked-LM head; same shards, model, batch and cores."""

from __future__ import annotations

import importlib.util

from benchmarks.processes import on_cores
from benchmarks.results import Result, ratio, say
from benchmarks.work import A, our_step_times, pairs_parser, scratch, steady, their_step_times

LEAST = 1.4


def main() -> None:
    args = pairs_parser(__doc__, steps=10).parse_args()
    if importlib.util.find_spec("torch_xla") is None:
        print("left out: torch-xla is not installed")
        return
    rates, firsts = [], []
    for _ in range(args.pairs):
        with scratch(A) as (directory, data, model), on_cores(args.cores):
            ours = our_step_times(A, data, model, directory / "ours", steps=args.steps, precision="fp32", device="xla")
            theirs = their_step_times("references.plain_xla", A, data, model, steps=args.steps)
        rates.append((A.sequences_per_step / steady(ours), A.sequences_per_step / steady(theirs)))
        firsts.append((ours[0], theirs[0]))
    say(ratio("phase 1, work A, XLA:CPU, fp32", rates, ours="ours", beside="plain loop, full head", at_least=LEAST))
    ours_s, theirs_s = firsts[-1]
    said = (f"ours {ours_s:.1f} s", f"plain loop {theirs_s:.1f} s")
    say(Result("its first step, compilation included", *said, ours_s / theirs_s, " ×"))


if __name__ == "__main__":
    main()
