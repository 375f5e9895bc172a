"""Phase 2 on the CPU (S=512, real lengths): `python -m trainer` on packed rows against Hugging Face's Trainer on the
same sequences, each in a row of its own; same model, threads, and, up to the rounding of rows, global batch.

A rate is rows per second, from the median step, times the mean number of sequences per row in the whole data set: so it
does not depend on which rows the few steps met.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.processes import on_cores
from benchmarks.results import ratio, say
from benchmarks.work import (
    A2,
    half_padding_lengths,
    model_config,
    nvidia_lengths,
    our_step_times,
    packed,
    pairs_parser,
    random_rows,
    steady,
    their_step_times,
    write_rows,
)
from trainer.devices.cpu import CpuDevice

#: For bf16 autocast.
LEAST = 8
ROWS = 4096
LENGTHS = {"lengths of NVIDIA's shards": nvidia_lengths, "half of it padding": half_padding_lengths}


def main() -> None:
    p = pairs_parser(__doc__, steps=8)
    p.add_argument("--precision", default="auto", help="ours; theirs is fp32, its default")
    args = p.parse_args()
    precision = CpuDevice().automatic_precision()[0] if args.precision == "auto" else args.precision
    least = LEAST if precision == "autocast" else None
    for name, lengths_of in LENGTHS.items():
        lengths = lengths_of(A2, ROWS)
        if lengths is None:
            print(f"{name}: left out, as they were not found (BERT_SHARED_DIR)")
            continue
        rows = random_rows(A2, lengths)
        in_rows = packed(rows, A2)
        a_row = len(lengths) / len(in_rows["input_ids"])
        usteps = 2
        ours = A2.but(micro_batch_size=round(A2.sequences_per_step / a_row / usteps), grad_accum_usteps=usteps)
        pairs = []
        with tempfile.TemporaryDirectory(prefix="benchmark-") as scratch:
            directory = Path(scratch)
            model = model_config(A2, directory)
            together = write_rows(directory / "packed", in_rows)
            apart = write_rows(directory / "apart", rows)
            for pair in range(args.pairs):
                out = directory / f"out-{pair}"
                with on_cores(args.cores):
                    mine = our_step_times(ours, together, model, out, steps=args.steps, precision=precision)
                    theirs = their_step_times("references.hugging_face", A2, apart, model, steps=args.steps)
                pairs.append((a_row * ours.sequences_per_step / steady(mine), A2.sequences_per_step / steady(theirs)))
        what = f"phase 2, work A, {name} (mean {lengths.mean():.0f} tokens, {a_row:.2f} sequences a row)"
        say(ratio(what, pairs, ours=f"packed, {precision}", beside="Trainer, fp32", at_least=least))


if __name__ == "__main__":
    main()
