"""Kills random processes of whole runs at random moments: `python -m tests.helpers.killer --kills 200`.

Each round starts `luigi --module pipeline BertPhase2` on a small corpus and SIGKILLs luigi, a launcher, a stage's
process or a worker after a random time, again and again, until the chain has finished in spite of it. The model must
have the bytes of an uninterrupted run, the last run must end with status 0 and its summary, and `report` must work.
Exit status 0 if all of this always held.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from tests.helpers.chain import LUIGI, Chain
from tests.helpers.support import ROOT, metrics

MODEL = "model/model.safetensors"


def digest(chain: Chain) -> str:
    return hashlib.sha256((chain.latest("merge_shards") / MODEL).read_bytes()).hexdigest()


def begin(chain: Chain, words: Sequence[str]) -> subprocess.Popen[bytes]:
    with said(chain).open("wb") as log:
        return subprocess.Popen(
            [sys.executable, *LUIGI, "BertPhase2", *words],
            cwd=ROOT,
            env={**os.environ, "LUIGI_CONFIG_PATH": str(chain.config)},
            stdout=log,
            stderr=log,
        )


def said(chain: Chain) -> Path:
    """The log of the last run."""
    return chain.directory / "last-run.log"


def check_end(chain: Chain) -> None:
    """The run that finished the chain has said so, its numbers are those of whole phases, and `report` works."""
    text = said(chain).read_text()
    assert "Traceback" not in text, text
    assert "BERT is pretrained." in text, text
    assert "not recorded" not in text, text
    for phase in (1, 2):
        directory = chain.latest(f"pretrain-phase{phase}")
        counts = json.loads((directory / "manifest.json").read_text())["counts"]
        steps = metrics(directory)
        assert len(steps) == counts["steps"]
        assert counts["first_loss"] == steps[0]["loss"]
        mean = sum(step["throughput"] for step in steps) / len(steps)
        assert abs(counts["throughput_average"] / mean - 1) < 1e-9, (counts, mean)
        assert 60 * counts["train_time_minutes"] > 0.9 * sum(step["step_time_s"] for step in steps)
    chain.ask("report")


def torment(chain: Chain, rng: random.Random, words: Sequence[str], longest_s: float, most: int) -> int:
    """Start the chain with `words` and kill random processes of it until it succeeds or `most` kills are spent; then
    leave it alone. Returns the number of kills."""
    kills = 0
    process = begin(chain, words)
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
        assert process.returncode in (-9, 30, 75), f"luigi ended with {process.returncode}: {said(chain).read_text()}"
        process = begin(chain, words)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--kills", type=int, default=200, help="processes to kill, at least")
    p.add_argument("--workers", type=int, default=1, help="workers of the training")
    p.add_argument("--longest", type=float, default=6.0, help="seconds between two kills, at most")
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args()
    rng = random.Random(args.seed)
    words = ["--Cluster-nproc-per-node", str(args.workers)]
    kills = rounds = 0
    with tempfile.TemporaryDirectory(prefix="killer-") as name:
        chain = Chain(Path(name))
        assert torment(chain, rng, words, 300, 0) == 0
        wanted = digest(chain)
        began = time.monotonic()
        while kills < args.kills:
            shutil.rmtree(chain.work)
            kills += torment(chain, rng, words, args.longest, args.kills - kills)
            rounds += 1
            assert digest(chain) == wanted, "the model has other bytes"
            check_end(chain)
            print(f"{kills} kills, {rounds} whole chains, same bytes, {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
