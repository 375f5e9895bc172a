"""Peak memory of training on the CPU, all processes together: `python -m trainer` against Hugging Face's Trainer, same
shards, model, batch and threads. With --beside also that of the whole embedded default, against another checkout's."""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import psutil

from benchmarks.processes import ROOT, on_cores, start
from benchmarks.results import Result, say, short
from benchmarks.work import A, pairs_parser, scratch, trainer_options

#: Claimed: how many times as much memory Trainer takes.
LESS = 1.0
_SAMPLE_EVERY_S = 0.2


class Peak:
    """The most memory, in MB, that a process and its descendants have had at once. What they share is counted once
    (proportional set size)."""

    def __init__(self, pid: int) -> None:
        self.mb = 0.0
        self._process = psutil.Process(pid)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def end(self) -> float:
        self._ended.set()
        self._thread.join()
        return self.mb

    def _watch(self) -> None:
        while not self._ended.wait(_SAMPLE_EVERY_S):
            now = 0
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in (self._process, *self._process.children(recursive=True)):
                    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, ProcessLookupError):
                        now += process.memory_full_info().pss
            self.mb = max(self.mb, now / 1e6)


def peak_mb(*words: str, directory: Path = ROOT) -> float:
    """Run `python words…` in `directory` and return its peak memory; exits if the command fails."""
    with tempfile.TemporaryFile("w+") as log:
        process = start(*words, cwd=directory, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        peak = Peak(process.pid)
        status = process.wait()
        mb = peak.end()
        if status:
            log.seek(0)
            sys.exit(f"{' '.join(words)} failed:\n{log.read()}")
    return mb


def compared(what: str, pairs: list[tuple[float, float]], beside: str, *, at_least: float | None = None) -> Result:
    """`pairs`: our peak and the other's, in MB."""
    mine, theirs = (statistics.median(side) for side in zip(*pairs, strict=True))
    each = tuple(other / own for own, other in pairs)
    said = f"{short(mine)} MB", f"{beside} {short(theirs)} MB"
    return Result.median(what, *said, each, " × less", at_least)


def main() -> None:
    p = pairs_parser(__doc__, steps=4)
    p.add_argument("--beside", type=Path, help="another checkout of this project, which runs with the same packages")
    args = p.parse_args()
    theirs = f"--batch-size={A.micro_batch_size}", f"--grad-accum={A.grad_accum_usteps}", f"--steps={args.steps}"
    with on_cores(args.cores):
        for precision in ("fp32", "autocast"):
            pairs = []
            for _ in range(args.pairs):
                with scratch(A) as (directory, data, model):
                    options = trainer_options(
                        A, data, model, directory / "out", steps=args.steps, precision=precision, ckpt_interval_steps=2
                    )
                    mine = peak_mb("-m", "trainer", *options)
                    words = (str(data), str(model), *theirs, f"--precision={precision}")
                    pairs.append((mine, peak_mb("-m", "benchmarks.references.hugging_face", *words)))
            what = f"peak memory, phase 1, work A, {precision}, with checkpoints"
            say(compared(what, pairs, "Trainer without", at_least=LESS))
        if args.beside:
            other = args.beside.resolve()
            pairs = [(_default_mb(ROOT), _default_mb(other)) for _ in range(args.pairs)]
            say(compared("peak memory of the embedded default", pairs, other.name))


def _default_mb(directory: Path) -> float:
    with tempfile.TemporaryDirectory(prefix="benchmark-") as work:
        return peak_mb("-m", "luigi", "--module", "pipeline", "BertPhase2", "--Run-work-dir", work, directory=directory)


if __name__ == "__main__":
    main()
