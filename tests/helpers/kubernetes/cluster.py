"""A cluster for tests: the stand-in for kubectl (tests/helpers/kubernetes/kubectl.py), and what Kueue says."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any


class Cluster:
    """The stand-in, first in PATH."""

    def __init__(self, directory: Path) -> None:
        self.state = directory / "state"
        self.state.mkdir()
        program = directory / "kubectl"
        stand_in = shlex.join([sys.executable, str(Path(__file__).with_name("kubectl.py"))])
        program.write_text(f'#!/bin/sh\nexec {stand_in} "$@"\n')
        program.chmod(0o755)
        self.environment = {"PATH": f"{directory}:{os.environ['PATH']}", "KUBECTL_STATE": str(self.state)}

    def write(self, kind: str, found: dict[str, Any]) -> None:
        """Let `kubectl get` find this."""
        path = self.state / f"{kind}.json"
        path.with_suffix(".new").write_text(json.dumps(found))
        path.with_suffix(".new").replace(path)


def workload(*conditions: tuple[str, str, str, str]) -> dict[str, Any]:
    """The list of Kueue's one Workload with conditions of (type, status, reason, message)."""
    names = ("type", "status", "reason", "message")
    return {"items": [{"status": {"conditions": [dict(zip(names, each, strict=True)) for each in conditions]}}]}
