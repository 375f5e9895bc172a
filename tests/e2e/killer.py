"""Kills random processes of whole runs at random moments: `python -m tests.e2e.killer --kills 200`.

Each round starts `luigi --module pipeline BertPhase2` on a small corpus and SIGKILLs luigi, a launcher, a stage's
process or a worker after a random time, again and again, until the chain has finished in spite of it; the model must
have the bytes of an uninterrupted run. Exit status 0 if it always had.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from tests.chain import LUIGI, Chain
from tests.support import ROOT

MODEL = "model/model.safetensors"


def digest(chain: Chain) -> str:
    return hashlib.sha256((chain.latest("merge_shards") / MODEL).read_bytes()).hexdigest()


def begin(chain: Chain, workers: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, *LUIGI, "BertPhase2", "--Cluster-nproc-per-node", str(workers)],
        cwd=ROOT,
        env={**os.environ, "LUIGI_CONFIG_PATH": str(chain.config)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def torment(chain: Chain, rng: random.Random, workers: int, longest_s: float, most: int) -> int:
    """Start the chain and kill a random process of it, until it ends well or `most` kills are spent; returns the
    kills. After the last it is left alone."""
    kills = 0
    process = begin(chain, workers)
    while True:
        try:
            process.wait(timeout=rng.uniform(0.1, longest_s) if kills < most else 300)
        except subprocess.TimeoutExpired:
            assert kills < most, "the chain did not end within 300 s when left alone"
            try:
                root = psutil.Process(process.pid)
                victim = rng.choice([root, *root.children(recursive=True)])
                victim.kill()
                kills += 1
            except psutil.NoSuchProcess:
                pass
            continue
        if process.returncode == 0:
            return kills
        assert process.returncode in (-9, 30, 75), f"luigi ended with {process.returncode}"
        process = begin(chain, workers)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--kills", type=int, default=200, help="processes to kill, at least")
    p.add_argument("--workers", type=int, default=1, help="workers of the training")
    p.add_argument("--longest", type=float, default=6.0, help="seconds between two kills, at most")
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args()
    rng = random.Random(args.seed)
    kills = rounds = 0
    with tempfile.TemporaryDirectory(prefix="killer-") as name:
        chain = Chain(Path(name))
        assert torment(chain, rng, args.workers, 300, 0) == 0
        wanted = digest(chain)
        began = time.monotonic()
        while kills < args.kills:
            shutil.rmtree(chain.work)
            kills += torment(chain, rng, args.workers, args.longest, args.kills - kills)
            rounds += 1
            assert digest(chain) == wanted, "the model has other bytes"
            print(f"{kills} kills, {rounds} whole chains, same bytes, {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
