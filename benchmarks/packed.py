"""Packed rows on the CPU. Phase 2 (S=512, real lengths): `python -m trainer` on packed rows against Hugging Face's
Trainer on the same sequences, each in a row of its own. Phase 1 (S=128): the trainer on packed rows against itself on
single ones, where rows are 90 % full as usual, and where documents are short. Same model, threads, and, up to the
rounding of rows, global batch.

A rate is rows per second, from the median step, times the mean number of sequences per row in the whole data set: so it
does not depend on which rows the few steps met.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.processes import on_cores
from benchmarks.results import ratio, say
from benchmarks.work import (
    A2,
    A,
    Work,
    half_padding_lengths,
    model_config,
    nvidia_lengths,
    our_step_times,
    packed,
    pairs_parser,
    phase1_lengths,
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


@dataclass(frozen=True)
class Case:
    """Sequences of these lengths, packed by us and not by the other side. `other_step_times`: (data, model, output) →
    the other side's."""

    work: Work
    name: str
    lengths: Any
    beside: str
    other_step_times: Callable[[Path, Path, Path], list[float]]
    at_least: float | None = None


def compare(case: Case, *, pairs: int, cores: int, steps: int, precision: str) -> None:
    rows = random_rows(case.work, case.lengths)
    in_rows = packed(rows, case.work)
    a_row = len(case.lengths) / len(in_rows["input_ids"])
    usteps = round(case.work.grad_accum_usteps / a_row)  # so that a micro-batch has about as many rows
    batch = round(case.work.sequences_per_step / a_row / usteps)
    ours = case.work.but(micro_batch_size=batch, grad_accum_usteps=usteps)
    rates = []
    with tempfile.TemporaryDirectory(prefix="benchmark-") as scratch:
        directory = Path(scratch)
        model = model_config(case.work, directory)
        together = write_rows(directory / "packed", in_rows)
        apart = write_rows(directory / "apart", rows)
        for pair in range(pairs):
            out = directory / f"out-{pair}"
            with on_cores(cores):
                mine = our_step_times(ours, together, model, out, steps=steps, precision=precision)
                theirs = case.other_step_times(apart, model, directory / f"apart-{pair}")
            rates.append(
                (a_row * ours.sequences_per_step / steady(mine), case.work.sequences_per_step / steady(theirs))
            )
    what = f"{case.name} (mean {case.lengths.mean():.0f} tokens, {a_row:.2f} sequences a row)"
    say(ratio(what, rates, ours=f"packed, {precision}", beside=case.beside, at_least=case.at_least))


def cases(steps: int, precision: str) -> Iterator[Case]:
    def trainer(apart: Path, model: Path, out: Path) -> list[float]:
        return their_step_times("references.hugging_face", A2, apart, model, steps=steps)

    def ourselves(apart: Path, model: Path, out: Path) -> list[float]:
        return our_step_times(A, apart, model, out, steps=steps, precision=precision)

    least = LEAST if precision == "autocast" else None
    for name, lengths_of in LENGTHS.items():
        lengths = lengths_of(A2, ROWS)
        if lengths is None:
            print(f"{name}: left out, as they were not found (BERT_SHARED_DIR)")
        else:
            yield Case(A2, f"phase 2, work A, {name}", lengths, "Trainer, fp32", trainer, least)
    beside = f"one a row, {precision}"
    yield Case(A, "phase 1, work A, 90 % full rows", phase1_lengths(A, ROWS), beside, ourselves)
    yield Case(A, "phase 1, work A, short documents", half_padding_lengths(A, ROWS), beside, ourselves)


def main() -> None:
    p = pairs_parser(__doc__, steps=8)
    p.add_argument("--precision", default="auto", help="ours; Trainer's is fp32, its default")
    args = p.parse_args()
    precision = CpuDevice().automatic_precision()[0] if args.precision == "auto" else args.precision
    for case in cases(args.steps, precision):
        compare(case, pairs=args.pairs, cores=args.cores, steps=args.steps, precision=precision)


if __name__ == "__main__":
    main()
