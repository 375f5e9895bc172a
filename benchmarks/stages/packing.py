"""What packing costs and gains: 16 million sequences with the lengths of Wikipedia at S=512, packed all together."""

from __future__ import annotations

import argparse
import resource
import time

import numpy as np

from benchmarks.results import Result, say
from stages.examples.form import PACKED_SEQUENCES, Form
from stages.examples.packing import pack

CLAIMED_SHARE, CLAIMED_S = 0.97, 60


def lengths_like_wikipedia(sequences: int) -> np.ndarray[tuple[int], np.dtype[np.uint16]]:
    """A third full, the rest uniform: half of all tokens are padding, as in NVIDIA's shards for S=512."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(5, 512, sequences, np.uint16)
    full = rng.random(sequences, np.float32) < 0.33
    lengths[full] = 512
    return lengths


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("--sequences", type=int, default=16_000_000)
    args = p.parse_args()
    form = Form(512, 80, sequences_per_row=PACKED_SEQUENCES)
    lengths = lengths_like_wikipedia(args.sequences)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    began = time.monotonic()
    rows = len(pack(lengths, form.masked_positions(np.arange(form.seq_len + 1)), form.row))
    seconds = time.monotonic() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    tokens = int(lengths.sum(dtype=np.int64))
    share, apart = tokens / (512 * rows), tokens / (512 * args.sequences)
    what = f"packing {args.sequences:,} sequences with the lengths of Wikipedia at S=512"
    said = (
        f"{rows:,} rows, {args.sequences / rows:.2f} sequences in each",
        f"one a row {100 * apart:.1f} % real tokens",
    )
    say(Result(f"{what}: real tokens", *said, 100 * share, " %", at_least=100 * CLAIMED_SHARE))
    memory = f"{peak - before:.0f} MB of memory more than before"
    say(Result(f"{what}: time", f"{seconds:.1f} s", memory, seconds, " s", at_most=CLAIMED_S))


if __name__ == "__main__":
    main()
