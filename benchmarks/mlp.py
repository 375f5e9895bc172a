"""The MLP on the CPU: `python -m trainer --workload mnist` against the tutorial's loop with DataLoader, iterations/s of
the last epoch; same data (random images in MNIST's files), model, batch, optimizer and workers, one core and one thread
per worker.
"""

from __future__ import annotations

import argparse
import gzip
import json
import struct
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.processes import launcher, on_cores, python
from benchmarks.results import ratio, say
from benchmarks.work import at_least

#: Workers → the ratio to the tutorial's loop that is claimed.
CLAIMS = {1: 1.7, 2: 1.0}
IMAGES = 60_000


def write_images(directory: Path) -> None:
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (IMAGES, 28, 28), np.uint8), rng.integers(0, 10, IMAGES, np.uint8)
    for name, values in (("train-images-idx3-ubyte.gz", images), ("train-labels-idx1-ubyte.gz", labels)):
        header = struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape)
        (directory / name).write_bytes(gzip.compress(header + values.tobytes(), compresslevel=1))


def our_rate(data: Path, out: Path, *, workers: int, epochs: int) -> float:
    options = (f"--data_dir={data}", f"--output_dir={out}", f"--epochs={epochs}", "--device=cpu")
    python(*launcher(workers), "-m", "trainer", "--workload=mnist", *options)
    rate: float = json.loads((out / "results.json").read_text())["iterations_per_s"]
    return rate


def plain_rate(data: Path, *flags: str, workers: int, epochs: int) -> float:
    printed = python(
        *launcher(workers), "-m", "benchmarks.references.plain_mlp", str(data), f"--epochs={epochs}", *flags
    )
    return float(printed.split()[-1])


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("--pairs", type=at_least(1), default=5, help="runs of each side, alternating")
    p.add_argument("--epochs", type=int, default=2, help="of each run; the last one counts")
    p.add_argument("--workers", type=int, nargs="+", default=list(CLAIMS), choices=CLAIMS)
    args = p.parse_args()
    for workers in args.workers:
        rates = []
        with tempfile.TemporaryDirectory(prefix="benchmark-") as name, on_cores(workers, threads=1):
            data = Path(name)
            write_images(data)
            for pair in range(args.pairs):
                ours = our_rate(data, data / f"out-{pair}", workers=workers, epochs=args.epochs)
                tutorial = plain_rate(data, workers=workers, epochs=args.epochs)
                rates.append((ours, tutorial, plain_rate(data, "--lean", workers=workers, epochs=args.epochs)))
        what = f"the MLP, {workers} worker{'s' if workers > 1 else ''}"
        for side, beside, claim in ((1, "the tutorial's loop", CLAIMS[workers]), (2, "without Pillow", None)):
            pairs = [(rate[0], rate[side]) for rate in rates]
            say(ratio(what, pairs, ours="ours", beside=beside, unit="it/s", at_least=claim))


if __name__ == "__main__":
    main()
