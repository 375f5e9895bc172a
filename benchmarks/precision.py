"""What each precision costs in quality: the mini model on the built-in text, the same samples and dropout in each, and
the mean loss of the last steps compared with that of fp32."""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from benchmarks.processes import python
from benchmarks.results import Result, say

MODES = ("fp32", "autocast", "bf16-sr", "bf16-master")
#: Means are over this many last steps.
LAST = 50
#: The ratio to fp32 is claimed to be no farther than this from 1.
CLAIM = 0.02


def prepare(directory: Path) -> Path:
    """Phase 1's shards of the built-in text."""
    python("-m", "stages.tokenize", "--source", "builtin", "--out", str(directory / "tokens"))
    shape = ("--seq-len", "128", "--max-pred-len", "20")
    python("-m", "stages.shard", "--tokens", str(directory / "tokens"), *shape, "--out", str(directory / "shards"))
    return directory / "shards"


def losses(args: argparse.Namespace, mode: str, shards: Path, out: Path) -> list[float]:
    """The loss of each step of a run."""
    options = {
        "data_dir": shards, "output_dir": out, "model": args.model, "vocab_size": 8192, "precision": mode,
        "device": args.device, "optimizer": args.optimizer, "lr": args.lr, "max_steps": args.steps, "warmup_steps": 50,
        "batch_size": 16, "grad_accum_usteps": 2, "ckpt_interval_steps": 0, "seed": args.seed,
    }  # fmt: skip
    python("-m", "trainer", *(word for key, value in options.items() for word in (f"--{key}", str(value))))
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("--steps", type=int, default=300, help="optimizer steps of each run, of 32 sequences")
    p.add_argument("--model", default="mini", help="a published size")
    p.add_argument("--optimizer", default="AdamW", help="AdamW or LAMB")
    p.add_argument("--lr", type=float, default=1e-3, help="peak learning rate")
    p.add_argument("--device", default="cpu", help="as in the trainer")
    p.add_argument("--seed", type=int, default=12349, help="as in the trainer")
    args = p.parse_args()
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        shards = prepare(Path(name))
        means: dict[str, float] = {}
        for mode in MODES:
            curve = losses(args, mode, shards, Path(name) / mode)
            means[mode] = statistics.mean(curve[-LAST:])
            said = (f"{mode} {means[mode]:.4f}, first {curve[0]:.4f}", f"{MODES[0]} {means[MODES[0]]:.4f}")
            farther = 100 * abs(means[mode] / means[MODES[0]] - 1)
            if mode != MODES[0]:
                what = (
                    f"{args.model}, {args.optimizer}, mean loss of the last {LAST} of {args.steps} steps: off fp32's by"
                )
                say(Result(what, *said, farther, " %", at_most=100 * CLAIM))


if __name__ == "__main__":
    main()
