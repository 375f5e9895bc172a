"""What luigid, TensorBoard and Prometheus get to see of a run: real servers on loopback, asked over HTTP."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

from tests.chain import LUIGI, Chain, finished_chain, wait_until
from tests.support import ROOT, assert_one_line_error, free_port

CENTRAL = """
[core]
local_scheduler = false
scheduler_host = 127.0.0.1
scheduler_port = {port}
"""


@contextlib.contextmanager
def started(chain: Chain, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """`python words…` with the chain's settings, in the background; it writes to the chain's directory."""
    with (chain.directory / f"{words[-1]}.log").open("wb") as log:
        env = {**os.environ, "LUIGI_CONFIG_PATH": str(chain.config)}
        process = subprocess.Popen([sys.executable, *words], cwd=ROOT, stdout=log, stderr=log, env=env)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(timeout=60)


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    return finished_chain(tmp_path_factory).copy(tmp_path_factory.mktemp("chain"))


def answers(url: str) -> bool:
    with contextlib.suppress(requests.ConnectionError):
        return requests.get(url, timeout=5).ok
    return False


def listens_on(process: subprocess.Popen[bytes]) -> set[str]:
    connections = psutil.Process(process.pid).net_connections(kind="inet")
    return {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN}


class Api:
    """Luigid's HTTP API, as its own pages use it."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def ask(self, method: str, **data: Any) -> Any:
        answer = requests.get(f"{self.url}/api/{method}", params={"data": json.dumps(data)}, timeout=10)
        answer.raise_for_status()
        return answer.json()["response"]

    def pretrain(self) -> dict[str, Any]:
        """The running Pretrain, with its id; empty: none runs."""
        running = self.ask("task_list", status="RUNNING", upstream_status="")
        return next(({**task, "id": name} for name, task in running.items() if task["name"] == "Pretrain"), {})

    def answer_to(self, content: str) -> str:
        """What the running Pretrain answers to a message."""
        task = self.pretrain()
        sent = self.ask("send_scheduler_message", worker=task["workers"][0], task=task["id"], content=content)
        seen: list[str] = []

        def answered() -> bool:
            got = self.ask("get_scheduler_message_response", task_id=task["id"], message_id=sent["message_id"])
            seen.extend([got["response"]] if got["response"] else [])
            return bool(seen)

        wait_until(answered)
        return seen[0]

    def started_tasks(self) -> dict[str, float]:
        """Prometheus' count by family, read by its own parser."""
        families = text_string_to_metric_families(requests.get(f"{self.url}/metrics", timeout=10).text)
        (family,) = (family for family in families if family.name == "luigi_task_started")
        return {s.labels["family"]: s.value for s in family.samples if s.name.endswith("_total")}


def test_a_running_training_is_in_plain_sight(chain: Chain) -> None:
    """Percentage, status line, TensorBoard's address; a message that makes a checkpoint; metrics."""
    port, board_log = free_port(), chain.directory / "0.log"
    api = Api(port)
    chain.config.write_text(chain.config.read_text() + CENTRAL.format(port=port))
    words = ("Pretrain", "--phase", "1", "--Phase1-lr", "0.002", "--Phase1-ckpt-interval-steps", "0")
    with contextlib.ExitStack() as servers:
        luigid = servers.enter_context(started(chain, "-m", "pipeline", "luigid", "--port", str(port)))
        board = servers.enter_context(started(chain, "-m", "pipeline", "tensorboard", "--port", "0"))
        wait_until(lambda: answers(f"{api.url}/api/task_list") and "TensorBoard: http" in board_log.read_text())
        luigi = servers.enter_context(started(chain, *LUIGI, *words, "--Phase1-max-steps", "20000"))
        wait_until(lambda: api.pretrain().get("progress_percentage") and api.pretrain()["tracking_url"])
        told = api.pretrain()
        assert 1 <= told["progress_percentage"] <= 100
        for part in ("steps ", " of 20,000, phase 1, loss ", " steps/s, ", " left"):
            assert part in told["status_message"]
        assert f"TensorBoard: {told['tracking_url']} " in board_log.read_text()

        (directory,) = (path.parent for path in chain.work.glob("pretrain-phase1-*/progress.json"))
        assert not list(directory.glob("checkpoints/ckpt_*"))
        saved = Path(api.answer_to("checkpoint").removeprefix("saved: "))
        assert (saved / "manifest.json").exists()
        assert saved.parent == directory / "checkpoints"
        assert "takes the message 'checkpoint'" in api.answer_to("tea")
        assert luigi.poll() is None

        assert api.started_tasks() == {"Pretrain": 1}
        assert listens_on(luigid) == listens_on(board) == {"127.0.0.1"}
        wait_until(lambda: directory.name in requests.get(f"{told['tracking_url']}data/runs", timeout=10).json())
        again = chain.ask("tensorboard", status=35)
        assert_one_line_error(again, f"runs already, at {told['tracking_url']}", status=35)
        luigi.send_signal(signal.SIGTERM)
        assert luigi.wait(timeout=60) == 75
    assert not (chain.work / "tensorboard" / "address.json").exists()


def test_a_port_in_use_is_one_line(chain: Chain) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = chain.ask("tensorboard", "--port", port, status=35)
    assert_one_line_error(done, f"127.0.0.1:{port}", "another --port", status=35)
