"""`make bench`: every benchmark in turn; each prints its own claim and what was measured."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.work import ROOT

ALL = ("train_cpu", "precision", "compile", "checkpoint", "data", "merge", "mlp")


def main() -> None:
    for name in ALL:
        print(f"== {name}", flush=True)
        subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
