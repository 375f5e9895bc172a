"""What a worker prints when its collective has failed."""

from __future__ import annotations

import pytest
from torch.distributed import DistBackendError

from common.errors import AgreedError
from trainer.launch import failure
from trainer.parallel.mesh import Mesh


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            DistBackendError("NCCL error in: NCCLUtils.cpp:94\nLast error:\nError: failed to extend /dev/shm/nccl-x"),
            "worker 1 has lost another worker, or NCCL has failed here, and stops: NCCL error in: NCCLUtils.cpp:94\n"
            "Last error:\nError: failed to extend /dev/shm/nccl-x\n",
        ),
        (
            RuntimeError("[gloo/transport/tcp/pair.cc:538] Connection closed by peer\nmore"),
            "worker 1 lost the connection to another worker and stops: [gloo/transport/tcp/pair.cc:538] Connection "
            "closed by peer\n",
        ),
    ],
)
def test_the_cause_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, said: str
) -> None:
    """NCCL gives the cause of its own failures, such as a full /dev/shm, in the last lines."""
    ended: list[int] = []
    monkeypatch.setattr(failure, "_PATIENCE_S", 0.0)
    monkeypatch.setattr(failure.os, "_exit", ended.append)
    monkeypatch.setattr(failure.signal, "signal", lambda *_: None)
    failure.end(error, Mesh(rank=1, world_size=2))
    assert capsys.readouterr().err == said
    assert ended == [70]


@pytest.mark.parametrize(("rank", "said", "waited"), [(0, "error: the disk is full\n", []), (1, "", [2.0])])
def test_others_leave_the_root_time_to_say_what_all_agreed_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: int, said: str, waited: list[float]
) -> None:
    """torchrun ends the root as soon as it has seen another worker fail."""
    ended: list[int] = []
    slept: list[float] = []
    monkeypatch.setattr(failure.os, "_exit", ended.append)
    monkeypatch.setattr(failure.time, "sleep", slept.append)
    monkeypatch.setattr(failure.signal, "signal", lambda *_: None)
    failure.end(AgreedError("the disk is full"), Mesh(rank=rank, world_size=2))
    assert (capsys.readouterr().err, slept, ended) == (said, waited, [1])
