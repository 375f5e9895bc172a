"""`make bench` runs all benchmarks; `python -m benchmarks NAME … [OPTIONS]` runs the named ones with further options.

Each prints its claims and measurements, which replace its rows in the table benchmarks/results/<machine>.md; rows of
other benchmarks stay.
"""

from __future__ import annotations

import argparse
import datetime
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.results import VARIABLE, machine, read, write_table
from benchmarks.work import ROOT, others_cores

ALL = (
    "train_cpu", "packed", "xla", "utilization", "data_wait", "startup", "memory", "workers", "gpu", "compile",
    "checkpoint", "mlp", "precision", "scale", "stages.data", "stages.merge", "stages.packing", "faults.recovery",
    "faults.goodput", "faults.store_fetch", "faults.store_shards", "faults.store_training", "quality",
)  # fmt: skip


def main() -> int:
    p = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    p.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(ALL)}; default: all")
    args, options = p.parse_known_args()
    if unknown := set(args.names) - set(ALL):
        p.error(f"unknown: {', '.join(sorted(unknown))}; allowed: {', '.join(ALL)}")
    said, slug = machine()
    table, failed = ROOT / "benchmarks" / "results" / f"{slug}.md", []
    for name in args.names or ALL:
        print(f"== {name}", flush=True)
        with tempfile.TemporaryDirectory(prefix="benchmark-") as directory:
            path = Path(directory) / "results"
            command = [sys.executable, "-m", f"benchmarks.{name}", *options]
            with others_cores() as others:
                done = subprocess.run(command, cwd=ROOT, env={**os.environ, VARIABLE: str(path)}, check=False)
            results = read(path)
        if done.returncode:
            failed.append(name)
        if results:
            when = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
            write_table(table, said, name, results, when=when, others=others())
    if table.exists():
        print(f"\n{table.read_text()}\nwritten: {table.relative_to(ROOT)}")
    if failed:
        print(f"ended with an error: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
