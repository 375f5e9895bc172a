"""The graphs that torch_xla compiles, from its own report and counters."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.files import read_json, write_json
from trainer.config import TrainConfig
from trainer.devices.base import Device

_HASH = re.compile(r"^Compilation Analysis:   Graph Hash: ([0-9a-f]+)$", re.MULTILINE)
_REPORT, _DUMP = "graphs.txt", "hlo"


class GraphReport:
    """Has `torch_xla` report into files in `directory`; create it before `torch_xla` is imported."""

    def __init__(self, directory: Path, *, with_operations: bool) -> None:
        """`with_operations`: dump every graph as text too, to count operations (XLA's CPU and GPU compilers only)."""
        directory.mkdir(parents=True, exist_ok=True)
        self._report = directory / _REPORT
        self._dump = directory / _DUMP if with_operations else None
        self._report.unlink(missing_ok=True)
        os.environ["PT_XLA_DEBUG_LEVEL"] = "1"  # compilations, not executions
        os.environ["PT_XLA_DEBUG_FILE"] = str(self._report)
        if self._dump is not None:
            flags = os.environ.get("XLA_FLAGS", "")
            os.environ["XLA_FLAGS"] = f"{flags} --xla_dump_to={self._dump} --xla_dump_hlo_as_text".strip()

    def hashes(self) -> list[str]:
        """Hashes of all graphs so far, in the order they were compiled."""
        return _HASH.findall(self._report.read_text()) if self._report.exists() else []

    def listed(self, seconds: list[float]) -> list[dict[str, Any]]:
        """hash, operations (None: not counted) and seconds of each graph; `seconds`: torch_xla's own, in order."""
        hashes = self.hashes()
        operations: list[int | None] = [None] * len(hashes)
        if self._dump is not None:
            texts = sorted(self._dump.glob("module_*.SyncTensorsGraph.*.before_optimizations.txt"))
            operations = [text.read_text().count(" = ") for text in texts]
        return [
            {"hash": name, "operations": count, "seconds": round(s, 3)}
            for name, count, s in zip(hashes, operations, seconds, strict=True)
        ]


class GraphList:
    """The list of graphs that Precompile leaves: a trial run writes it, training is checked against it. It does nothing
    in workers other than the root, and without `--graphs`."""

    def __init__(self, config: TrainConfig, device: Device, log: Callable[[str], None], *, is_root: bool) -> None:
        self._path = config.graphs if is_root else None
        self._trial, self._device, self._log = config.trial, device, log
        record = (self._path and read_json(self._path)) or {"graphs": []}
        try:
            self._listed = {graph["hash"] for graph in record["graphs"]}
        except (KeyError, TypeError):
            raise UserError(
                f"--graphs {self._path} is no list of graphs that --trial wrote; give another file"
            ) from None
        self._checked = 0

    def check(self) -> None:
        """Warn about graphs compiled during training that the trial run should have compiled."""
        if self._path is None or self._trial or self._device.compiled_graphs() == self._checked:
            return
        new = self._device.graph_hashes()[self._checked :]
        self._checked += len(new)
        for name in new:
            if name not in self._listed:
                self._log(f"warning: graph {name} is not in {self._path}: it was compiled in the middle of training")

    def close(self) -> None:
        """Check a last time; after a trial run, write the list. Raises `DiskError`."""
        self.check()
        if self._path is not None and self._trial:
            write_json(self._path, {"graphs": self._device.graphs()})
