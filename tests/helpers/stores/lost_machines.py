"""Loses machines at random moments: `python -m tests.helpers.stores.lost_machines --losses 50`.

Each loss SIGKILLs luigi in the middle of a whole chain, with everything it has started, and removes its work directory.
The next run starts with an empty one, and the store. The model must have the bytes of an undisturbed run without a
store, a training must resume from the newest checkpoint that was pushed, and at the end each of its steps must be
recorded once. Half of the losses are with two data-parallel workers, half with two tensor-parallel ones. Exit status 0
if all of this always held.
"""

from __future__ import annotations

import argparse
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from common.files import read_json
from tests.helpers.chain import Chain
from tests.helpers.killer import begin, digest, said
from tests.helpers.support import metrics

#: Fewer steps would finish between two losses.
_STEPS = ("--Phase1-max-steps", "40", "--Phase2-max-steps", "20", "--Phase1-ckpt-interval-steps", "4")


def pushed(store: Path) -> dict[str, int]:
    """The newest checkpoint of each training that is under way, by phase."""
    found = {}
    for path in (store / "leases").glob("pretrain-phase*.json"):
        checkpoints = (read_json(path) or {"content": {}})["content"].get("checkpoints")
        if checkpoints:
            found[path.name[: len("pretrain-phase1")]] = int(checkpoints[-1]["name"].removeprefix("ckpt_"))
    return found


def torment(chain: Chain, store: Path, rng: random.Random, words: Sequence[str], longest_s: float, most: int) -> int:
    """Run the chain with `words` and lose its machine until it succeeds or `most` losses are spent; then leave it
    alone. Returns the number of losses."""
    losses, expected = 0, dict[str, int]()
    process = begin(chain, words)
    while True:
        try:
            process.wait(timeout=rng.uniform(0.5, longest_s) if losses < most else 600)
        except subprocess.TimeoutExpired:
            assert losses < most, "the chain did not end within 600 s when left alone"
            require_continued(chain, expected)
            chain.lose(process)
            shutil.rmtree(chain.work, ignore_errors=True)
            losses += 1
            expected = pushed(store)
            process = begin(chain, words)
            continue
        assert process.returncode == 0, said(chain).read_text()
        require_continued(chain, expected)
        return losses


def require_continued(chain: Chain, expected: dict[str, int]) -> None:
    """Each training that the last run has begun started from the newest checkpoint pushed before."""
    text = said(chain).read_text()
    for label, step in expected.items():
        began = text.partition(f"{label}: started")[2]
        if "starting phase" in began or "resuming from checkpoint" in began:
            assert f"{label}: resumes from ckpt_{step}, fetched" in text or f"{label}: fetched from" in text, text


def check_end(chain: Chain, words: Sequence[str]) -> None:
    """The last run reported its end, and the records of both trainings are whole, wherever the steps were trained."""
    assert "BERT is pretrained." in said(chain).read_text()
    for phase in (1, 2):
        chain.run("Pretrain", "--phase", str(phase), *words)  # fetched, if this machine did not need it
        directory = chain.latest(f"pretrain-phase{phase}")
        manifest = read_json(directory / "manifest.json")
        assert manifest is not None
        steps = [record["step"] for record in metrics(directory)]
        last = manifest["counts"]["global_step"]
        assert steps == list(range(last - manifest["counts"]["steps"] + 1, last + 1))


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--losses", type=int, default=50, help="machines to lose, at least")
    p.add_argument("--longest", type=float, default=20.0, help="seconds between two losses, at most")
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args()
    rng = random.Random(args.seed)
    losses = rounds = 0
    with tempfile.TemporaryDirectory(prefix="lost-machines-") as name:
        for tensor_parallel in (1, 2):
            layout = ["--Cluster-nproc-per-node", "2", "--Cluster-tensor-parallel-size", str(tensor_parallel)]
            words = [*layout, *_STEPS]
            undisturbed = Path(name) / f"undisturbed-{tensor_parallel}"
            undisturbed.mkdir()
            chain = Chain(undisturbed)
            chain.run("BertPhase2", *words)
            wanted = digest(chain)
            began, goal = time.monotonic(), args.losses * tensor_parallel // 2
            while losses < goal:
                directory = Path(name) / f"round-{rounds}"
                directory.mkdir()
                store = directory / "store"
                chain = Chain(directory, f"\n[store]\nurl = {store}\nlease_s = 2\n")
                losses += torment(chain, store, rng, words, args.longest, goal - losses)
                rounds += 1
                assert digest(chain) == wanted, "the model has other bytes"
                check_end(chain, words)
                shutil.rmtree(directory)
                print(
                    f"{losses} losses, {rounds} whole chains, same bytes, {time.monotonic() - began:.0f} s", flush=True
                )


if __name__ == "__main__":
    main()
