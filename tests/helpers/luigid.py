"""A real luigid on loopback, and the requests that its pages make."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import requests
from prometheus_client.parser import text_string_to_metric_families

from tests.helpers.chain import Chain, wait_until
from tests.helpers.support import ROOT, free_port

CENTRAL = """
[core]
local_scheduler = false
scheduler_host = 127.0.0.1
scheduler_port = {port}
"""


@contextlib.contextmanager
def started(chain: Chain, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """`python words…` with the chain's settings, in the background; its output goes to the chain's directory."""
    with (chain.directory / f"{words[-1]}.log").open("wb") as log:
        env = {**os.environ, "LUIGI_CONFIG_PATH": str(chain.config)}
        process = subprocess.Popen([sys.executable, *words], cwd=ROOT, stdout=log, stderr=log, env=env)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(timeout=60)


def answers(url: str) -> bool:
    with contextlib.suppress(requests.ConnectionError):
        return requests.get(url, timeout=5).ok
    return False


class Api:
    """Luigid's HTTP API, as its own pages use it."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def ask(self, method: str, **data: Any) -> Any:
        answer = requests.get(f"{self.url}/api/{method}", params={"data": json.dumps(data)}, timeout=10)
        answer.raise_for_status()
        return answer.json()["response"]

    def pretrain(self) -> dict[str, Any]:
        """The running Pretrain, with its id; empty if none runs."""
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
        """Prometheus' counts by family, read with its own parser."""
        families = text_string_to_metric_families(requests.get(f"{self.url}/metrics", timeout=10).text)
        (family,) = (family for family in families if family.name == "luigi_task_started")
        return {s.labels["family"]: s.value for s in family.samples if s.name.endswith("_total")}


@contextlib.contextmanager
def luigid(chain: Chain) -> Iterator[tuple[Api, subprocess.Popen[bytes]]]:
    """Started with the chain's settings, which from now on name it as the scheduler."""
    port = free_port()
    chain.config.write_text(chain.config.read_text() + CENTRAL.format(port=port))
    with started(chain, "-m", "pipeline", "luigid", "--port", str(port)) as process:
        wait_until(lambda: answers(f"http://127.0.0.1:{port}/api/task_list"))
        yield Api(port), process
