"""`make bench` runs all benchmarks; `python -m benchmarks NAME … [OPTIONS]` runs the named ones with further options.

Each prints its claims and measurements. In the table benchmarks/results/<machine>.md they replace the former rows of
the same figures; other rows stay.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import signal
import sys
import tempfile
from pathlib import Path

import psutil

from benchmarks.processes import ROOT, others_cores, start
from benchmarks.results import VARIABLE, machine, read, write_table
from common.process import heeded_signals

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h

ALL = (
    "train_cpu", "packed", "xla", "utilization", "data_wait", "startup", "memory", "workers", "gpu", "compile",
    "checkpoint", "mlp", "precision", "scale", "stages.data", "stages.merge", "stages.packing", "faults.recovery",
    "faults.goodput", "faults.store_fetch", "faults.store_shards", "faults.store_training", "quality",
)  # fmt: skip


def adopt_orphans() -> None:
    """Have Linux make this process the parent of those whose parent has died, so that `run` can wait for them, too."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_CHILD_SUBREAPER, 1)


def run(*words: str, results: Path) -> int:
    """Run a benchmark to its end, and end all that it leaves: only the time of processes that were waited for is known.

    Returns its status. If a stop signal ends this process, it is ended, too.
    """
    process = start(*words, environment={VARIABLE: str(results)})
    try:
        return process.wait()
    except SystemExit:
        process.terminate()
        raise
    finally:
        process.wait()  # it cleans up
        while left := psutil.Process().children():
            for orphan in left:
                orphan.kill()
                orphan.wait()


def main() -> int:
    p = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    p.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(ALL)}; default: all")
    args, options = p.parse_known_args()
    if unknown := set(args.names) - set(ALL):
        p.error(f"unknown: {', '.join(sorted(unknown))}; allowed: {', '.join(ALL)}")
    for signum in heeded_signals():
        signal.signal(signum, lambda signum, _: sys.exit(128 + signum))
    adopt_orphans()
    said, slug = machine()
    table, failed = ROOT / "benchmarks" / "results" / f"{slug}.md", []
    for name in args.names or ALL:
        print(f"== {name}", flush=True)
        with tempfile.TemporaryDirectory(prefix="benchmark-") as directory:
            path = Path(directory) / "results"
            with others_cores() as others:
                status = run("-m", f"benchmarks.{name}", *options, results=path)
            results = read(path)
        if status:
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
