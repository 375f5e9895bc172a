"""What luigid, TensorBoard and Prometheus get to see of a run: real servers on loopback, queried over HTTP."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
from pathlib import Path

import psutil
import pytest
import requests

from tests.helpers.chain import LUIGI, Chain, finished_chain, wait_until
from tests.helpers.luigid import luigid, started
from tests.helpers.support import assert_one_line_error


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    return finished_chain(tmp_path_factory).copy(tmp_path_factory.mktemp("chain"))


def listens_on(process: subprocess.Popen[bytes]) -> set[str]:
    connections = psutil.Process(process.pid).net_connections(kind="inet")
    return {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN}


@pytest.mark.slow
def test_a_running_training_is_in_plain_sight(chain: Chain) -> None:
    """Percentage, status line, TensorBoard's address; a message that makes a checkpoint; metrics."""
    board_log = chain.directory / "0.log"
    words = ("Pretrain", "--phase", "1", "--Phase1-lr", "0.002", "--Phase1-ckpt-interval-steps", "0")
    with contextlib.ExitStack() as servers:
        api, central = servers.enter_context(luigid(chain))
        board = servers.enter_context(started(chain, "-m", "pipeline", "tensorboard", "--port", "0"))
        wait_until(lambda: "TensorBoard: http" in board_log.read_text())
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
        assert listens_on(central) == listens_on(board) == {"127.0.0.1"}
        wait_until(lambda: directory.name in requests.get(f"{told['tracking_url']}data/runs", timeout=10).json())
        again = chain.ask("tensorboard", status=35)
        assert_one_line_error(again, f"is already running, at {told['tracking_url']}", status=35)
        luigi.send_signal(signal.SIGTERM)
        assert luigi.wait(timeout=60) == 75
    assert not (chain.work / "tensorboard" / "address.json").exists()


def test_a_port_in_use_is_one_line(chain: Chain) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = chain.ask("tensorboard", "--port", port, status=35)
    assert_one_line_error(done, f"127.0.0.1:{port}", "another --port", status=35)
