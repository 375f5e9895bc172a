"""`python -m stages.precompile`: what can be compiled before training starts, is compiled here."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from stages.command import run
from stages.manifest import Identity, Output, StageDirectory
from trainer.config import DEVICES
from trainer.files import write_json


def precompile(work: StageDirectory, *, device: str) -> None:
    """List the graphs of a phase in graphs.json. On the CPU and on GPUs every operation runs as it comes: no graphs."""
    print(f"device {device}: operations run one by one here, there is nothing to compile", file=sys.stderr)
    graphs = work.path / "graphs.json"
    write_json(graphs, {"device": device, "graphs": []})
    work.finish([Output.of(work.path, graphs)], {"graphs": 0})


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m stages.precompile", description=__doc__)
    p.add_argument("--out", type=Path, required=True, help="stage directory to fill")
    p.add_argument("--device", choices=DEVICES, default="cpu", help="what the phase will be trained on")
    return p


def main() -> None:
    args = parser().parse_args()
    with StageDirectory.begin(args.out, lambda: Identity("precompile", 1, parameters={"device": args.device})) as work:
        precompile(work, device=args.device)


if __name__ == "__main__":
    run(main)
