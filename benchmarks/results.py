"""Benchmark results: printed as one line each, and passed to `python -m benchmarks`, which writes the table.

Each machine has one results file with a row per figure, so that benchmarks can be rerun separately.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

#: Names the file that `say` appends to; set by `python -m benchmarks`.
VARIABLE = "BENCHMARK_RESULTS"
LIBRARIES = ("torch", "torch-xla", "transformers", "tokenizers", "numpy")
COLUMNS = ("benchmark", "what", "ours", "beside", "measured", "claimed", "met", "when", "cores others had")


@dataclass(frozen=True)
class Result:
    """A measured figure and its claim."""

    what: str
    #: Both sides, each with its figure and unit.
    ours: str
    beside: str
    value: float
    #: What follows the value: " ×", " %", " s", …
    unit: str
    #: None: nothing is claimed.
    at_least: float | None = None
    at_most: float | None = None
    #: Individual measurements, where there are several.
    each: tuple[float, ...] = ()

    @classmethod
    def median(
        cls, what: str, ours: str, beside: str, each: Sequence[float], unit: str, at_least: float | None = None,
        at_most: float | None = None,
    ) -> Result:  # fmt: skip
        """A figure that was measured several times."""
        return cls(what, ours, beside, statistics.median(each), unit, at_least, at_most, tuple(each))

    @property
    def measured(self) -> str:
        each = f" ({', '.join(map(short, self.each))})" if len(self.each) > 1 else ""
        return f"{short(self.value)}{self.unit}{each}"

    @property
    def claimed(self) -> str:
        bounds = (("at least", self.at_least), ("at most", self.at_most))
        return " and ".join(f"{word} {bound:g}{self.unit}" for word, bound in bounds if bound is not None) or "nothing"

    @property
    def met(self) -> str:
        if self.at_least is None and self.at_most is None:
            return ""
        is_low = self.at_least is not None and not self.value >= self.at_least
        is_high = self.at_most is not None and not self.value <= self.at_most
        return "no" if is_low or is_high else "yes"


def short(value: float) -> str:
    """Three digits."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def say(result: Result) -> None:
    """Print a result; add it to the table, if there is to be one."""
    beside = f"; {result.beside}" if result.beside else ""
    met = f": {'met' if result.met == 'yes' else 'MISSED'}" if result.met else ""
    print(f"{result.what}: {result.ours}{beside}: {result.measured}; claimed: {result.claimed}{met}", flush=True)
    if VARIABLE in os.environ:
        with open(os.environ[VARIABLE], "a") as file:
            file.write(json.dumps(dataclasses.asdict(result)) + "\n")


def ratio(
    what: str, pairs: Sequence[tuple[float, float]], *, ours: str, beside: str, unit: str = "sequences/s",
    at_least: float | None = None, at_most: float | None = None,
) -> Result:  # fmt: skip
    """Compare two figures measured alternately: the medians, and the median of the pairwise ratios."""
    mine, theirs = (statistics.median(side) for side in zip(*pairs, strict=True))
    each = tuple(a / b for a, b in pairs)
    said = f"{ours} {short(mine)} {unit}", f"{beside} {short(theirs)} {unit}"
    return Result.median(what, *said, each, " ×", at_least, at_most)


def read(path: Path) -> list[Result]:
    """Read the results that `say` has appended."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [Result(**{**json.loads(line), "each": tuple(json.loads(line)["each"])}) for line in lines]


def machine() -> tuple[str, str]:
    """A description of this machine, and a name for its file."""
    from trainer.devices import processor

    # A virtual machine may see no more of its CPU than the maker's name.
    info = processor.info()
    features = [name for name in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if name in processor.flags()]
    generation = [f"{field} {info[field]}" for field in ("cpu family", "model") if field in info]
    name = info.get("model name") or platform.processor() or platform.machine()
    said = ", ".join([name, *generation, *features[:1], f"{os.cpu_count()} cores"])
    gpu = _gpu()
    said = f"{said}, {gpu}" if gpu else said
    return said, re.sub(r"[^a-z0-9]+", "-", said.lower()).strip("-")


def _gpu() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def versions() -> str:
    """Versions of Python and the libraries that are measured."""
    found = [f"Python {platform.python_version()}"]
    for name in LIBRARIES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {name}")
    return ", ".join(found)


def write_table(path: Path, said: str, benchmark: str, results: list[Result], *, when: str, others: float) -> None:
    """Replace a benchmark's rows of the same figures in a machine's file; others stay unless of other versions."""
    head = f"{versions()}. Made by `python -m benchmarks`, which docs/benchmarks.md explains."
    former = path.read_text().splitlines() if path.exists() else []
    rows = [line for line in former if line.startswith("| ") and head in former]
    new = []
    for r in results:
        cells = (benchmark, r.what, r.ours, r.beside, r.measured, r.claimed, r.met, when, f"{others:.1f}")
        new.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    titles = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    replaced = [_figure_of(row) for row in (*titles, *new)]
    kept = sorted([*(row for row in rows if _figure_of(row) not in replaced), *new], key=lambda row: _figure_of(row)[0])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([f"# {said}", "", head, "", *titles, *kept, ""]))


def _figure_of(row: str) -> list[str]:
    """Benchmark and what."""
    return row[2:].split(" | ")[:2]
