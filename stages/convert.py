"""`python -m stages.convert IN OUT --to native`: a checkpoint from any device and layout, whole and on the CPU."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from stages.command import run
from stages.manifest import Identity, Output, StageDirectory
from trainer.checkpoint.format import MANIFEST, read_tensors, tensor_file
from trainer.checkpoint.manager import Snapshot, require_valid, write_snapshot
from trainer.files import TEMPORARY_SUFFIX, rename_durably, sha256_of
from trainer.state import TrainState

CHECKPOINT = "checkpoint"


def read_snapshot(path: Path) -> Snapshot:
    """A native checkpoint as one whole state. Raises `CheckpointError` if it is damaged or not there."""
    require_valid(path)
    optimizer = path / tensor_file("optimizer", 0, 1)
    return Snapshot(
        TrainState.read(path),
        model=dict(read_tensors(path / tensor_file("model", 0, 1))),
        optimizer=dict(read_tensors(optimizer)) if optimizer.exists() else {},
    )


def convert(work: StageDirectory, source: Path) -> dict[str, Any]:
    """Write the checkpoint `source` to `checkpoint/` of the stage directory; returns the counts."""
    snapshot = read_snapshot(source)
    target = work.path / CHECKPOINT
    temporary = work.path / (CHECKPOINT + TEMPORARY_SUFFIX)
    temporary.mkdir()
    write_snapshot(temporary, snapshot)
    rename_durably(temporary, target)
    counts = {
        "phase": snapshot.state.phase,
        "global_step": snapshot.state.global_step,
        "parameters": sum(tensor.numel() for tensor in snapshot.model.values()),
        "with_optimizer": bool(snapshot.optimizer),
    }
    work.finish([Output.of(work.path, path) for path in sorted(target.iterdir())], counts)
    return counts


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m stages.convert", description=__doc__)
    p.add_argument("source", type=Path, metavar="IN", help="a checkpoint directory, ckpt_<step>")
    p.add_argument("out", type=Path, metavar="OUT", help=f"stage directory to fill; the result is OUT/{CHECKPOINT}")
    p.add_argument("--to", choices=("native",), default="native", help="format to write")
    return p


def main() -> None:
    args = parser().parse_args()
    require_valid(args.source)
    inputs = {"checkpoint": sha256_of(args.source / MANIFEST)}
    with StageDirectory.begin(args.out, lambda: Identity("convert_checkpoint", 1, inputs=inputs)) as work:
        counts = convert(work, args.source)
    print(f"step {counts['global_step']}, {counts['parameters']:,} parameters: {args.out / CHECKPOINT}")


if __name__ == "__main__":
    run(main)
