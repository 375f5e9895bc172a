"""What trackers hold, read by their own readers, and a real MLflow server."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests

from common.process import free_port
from tests.helpers.chain import wait_until

#: Curve → (step, value) of each of its points, in the tracker's order.
Curves = dict[str, list[tuple[int, float]]]


@dataclass
class Run:
    """A run, as a tracker has it."""

    name: str
    status: str
    parameters: dict[str, Any]
    summary: dict[str, Any]
    curves: Curves


@dataclass
class MlflowServer:
    """MLflow's REST server on this machine, over a database; it can be stopped and started again.

    The application that `mlflow server` serves, without the wrapper it adds, which needs the whole of MLflow.
    """

    directory: Path
    port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        settings = {
            "_MLFLOW_SERVER_FILE_STORE": f"sqlite:///{self.directory / 'mlflow.db'}",
            "_MLFLOW_SERVER_ARTIFACT_ROOT": str(self.directory / "artifacts"),
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
            "MLFLOW_DISABLE_TELEMETRY": "true",
        }
        words = ("--app", "mlflow.server", "run", "--host", "127.0.0.1", "--port", str(self.port))
        with (self.directory / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "flask", *words], cwd=self.directory, stdin=subprocess.DEVNULL, stdout=log,
                stderr=log, start_new_session=True, env={**os.environ, **settings},
            )  # fmt: skip
        wait_until(self._answers)

    def _answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, (self.directory / "server.log").read_text()
        with contextlib.suppress(requests.ConnectionError):
            return requests.get(f"{self.uri}/health", timeout=5).ok
        return False

    def stop(self) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

    def runs(self, project: str) -> list[Run]:
        """Read with MLflow's own client."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from mlflow import MlflowClient

            client = MlflowClient(tracking_uri=self.uri)
            experiment = client.get_experiment_by_name(project)
            found = client.search_runs([experiment.experiment_id]) if experiment is not None else []
            return [
                Run(
                    one.info.run_name, one.info.status, one.data.params, one.data.metrics,
                    {
                        name: [(m.step, m.value) for m in client.get_metric_history(one.info.run_id, name)]
                        for name in one.data.metrics
                    },
                )
                for one in found
            ]  # fmt: skip

    def last_step(self, project: str) -> int:
        return max((step for run in self.runs(project) for step, _ in run.curves.get("loss", ())), default=0)


@pytest.fixture(scope="session")
def mlflow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    """One server for all tests of a process; each test has its own project."""
    for package in ("mlflow", "sqlalchemy", "alembic", "flask"):
        pytest.importorskip(package, reason=f"MLflow's server needs {package}: pip install -e '.[dev]'")
    server = MlflowServer(tmp_path_factory.mktemp("mlflow"), free_port())
    try:
        server.start()
        yield server
    finally:
        server.stop()


def wandb_runs(directory: Path) -> list[Run]:
    """The runs in a training's offline files, read by `wandb leet inspect`: what `wandb sync` sends."""
    return [_wandb_run(path) for path in sorted((directory / "wandb").glob("offline-run-*"))]


def _wandb_run(path: Path) -> Run:
    curves: Curves = defaultdict(list)
    for record in map(json.loads, _inspected(path).splitlines()):
        if record["type"] == "history":
            item = record["history"]["item"]
            for name, value in item.items():
                if not name.startswith("_"):
                    curves[name].append((item["_step"], value))
    whole = json.loads(_inspected(path, "--summary"))
    return Run(whole["name"], whole["state"], whole["config"], whole["summary"], dict(curves))


def _inspected(path: Path, *words: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", "wandb", "leet", "inspect", "--json", *words, str(path)],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True, timeout=120, cwd=path,
    ).stdout  # fmt: skip


def board_curves(directory: Path) -> Curves:
    """The curves in a training's TensorBoard files, as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(directory / "tensorboard"), size_guidance={"scalars": 0})
    board.Reload()
    return {name: [(one.step, one.value) for one in board.Scalars(name)] for name in board.Tags()["scalars"]}
