"""Two machines started by hand: two luigis on loopback, each as a node of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.errors import UserError
from tests.helpers.chain import Chain, one_core
from tests.helpers.support import command, free_port, tensors
from trainer.launch.rendezvous import choose_interface


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    chain = Chain(tmp_path_factory.mktemp("nodes"))
    chain.run("ShardDataset", "--phase", "1")
    return chain


class Nodes:
    """Starts `luigi Pretrain --phase 1` as one node or the other."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self._port = free_port()
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, rank: int, *words: str, **env: str) -> subprocess.Popen[bytes]:
        settings = ("--Cluster-nnodes", "2", "--Cluster-master-addr", "127.0.0.1",
                    "--Cluster-master-port", str(self._port), "--Cluster-node-rank", str(rank))  # fmt: skip
        process = self.chain.start("Pretrain", "--phase", "1", *settings, *words, log=f"node{rank}.log", **env)
        self._processes.append(process)
        return process

    def said(self, rank: int) -> str:
        return (self.chain.directory / f"node{rank}.log").read_text()

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


@pytest.fixture
def nodes(prepared: Chain) -> Iterator[Nodes]:
    nodes = Nodes(prepared)
    with one_core():
        yield nodes
    nodes.kill()


@pytest.mark.slow
def test_two_nodes_go_on_from_a_killed_worker_and_end_with_the_bytes_of_one(nodes: Nodes, tmp_path: Path) -> None:
    """Node 1 starts first and waits; a worker there is killed with -9: both nodes restart together."""
    token = tmp_path / "token"
    token.touch()
    late = nodes.start(1, FAILPOINT="micro-step:5.0.1", FAILPOINT_TOKEN=str(token))
    first = nodes.start(0)
    for rank, process in ((0, first), (1, late)):
        assert process.wait(timeout=120) == 0, nodes.said(rank)
        assert "starting again" in nodes.said(rank)
    assert not token.exists()
    assert "worker(s)" in nodes.said(0)
    assert "worker(s)" not in nodes.said(1)
    there = nodes.chain.latest("pretrain-phase1")
    nodes.chain.run("Pretrain", "--phase", "1", "--Cluster-nproc-per-node", "2", "--Run-work-dir", str(tmp_path / "w"))
    here = (tmp_path / "w" / "latest" / "pretrain-phase1").resolve()
    assert here.name == there.name, "how many machines is not what is trained"
    wanted, got = (tensors(path / "checkpoints" / "ckpt_8") for path in (here, there))
    for name, tensor in wanted.items():
        assert got[name].tobytes() == tensor.tobytes(), name


@pytest.mark.parametrize(
    ("rank", "fragments"),
    [
        (0, ["node 1 did not reach 127.0.0.1:", "within 2 s; start the same command there with its node_rank"]),
        (1, ["node 0 has not worked on ", "for 2 s", "start the same command there with node_rank = 0"]),
    ],
)
def test_a_node_that_never_comes_is_one_line(nodes: Nodes, rank: int, fragments: list[str]) -> None:
    process = nodes.start(rank, "--Phase1-lr", f"0.00{rank + 2}", "--Cluster-join-timeout-s", "2")
    assert process.wait(timeout=60) == 30
    said = nodes.said(rank)
    for fragment in fragments:
        assert fragment in said.splitlines()[-1], said
    assert "Traceback" not in said
    assert "starting again" not in said


@pytest.mark.slow
def test_nodes_with_different_commands_are_refused(tmp_path: Path) -> None:
    port = free_port()

    def torchrun(rank: int, steps: int) -> list[str]:
        meeting = [f"--node_rank={rank}", "--nnodes=2", "--master_addr=127.0.0.1", f"--master_port={port}"]
        return [
            "-m",
            "trainer.launch.torchrun",
            *meeting,
            "--nproc_per_node=1",
            "-m",
            "trainer",
            f"--max_steps={steps}",
        ]

    other = subprocess.Popen([sys.executable, *torchrun(1, 5)], stderr=subprocess.PIPE, text=True)
    first = command(*torchrun(0, 6))
    _, said = other.communicate(timeout=60)
    for status, text in ((first.returncode, first.stderr), (other.returncode, said)):
        assert status == 1, text
        assert text.startswith("error: node 0 and node 1 were started with different commands; give all nodes"), text
        assert len(text.splitlines()) == 1


def test_nodes_talk_over_the_interface_that_leads_to_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loopback interface is `lo` on Linux. What the user has set stays; an unreachable address gives one line."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    assert choose_interface("127.0.0.1", 2020) == "lo"
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == ("lo", "eth7")
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name)
    choose_interface("127.0.0.1", 2020)
    assert os.environ["NCCL_SOCKET_IFNAME"] == "=lo", "NCCL takes a bare name for the beginning of names"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    with pytest.raises(UserError, match=r"127\.0\.1\.1 here, which other nodes cannot reach; give its address on the"):
        choose_interface("127.0.1.1", 2020)
    with pytest.raises(UserError, match=r"node 0's address no-host\.invalid cannot be reached: .*check master_addr"):
        choose_interface("no-host.invalid", 2020, patience_s=0)
