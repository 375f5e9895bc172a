"""What runs in a scheduler's job: how often it gets itself restarted, and what it leaves behind. The scheduler is
a stand-in that only records what it is asked."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from common.files import parse_utc, utc
from pipeline.launchers.process import LaunchSpec
from pipeline.launchers.supervisor import Supervisor
from stages.directory import attempts

#: Exits with the status that its first argument gives, after one more checkpoint if there is a second argument.
PROGRAM = """
import os, sys
from pathlib import Path
from trainer.checkpoint.directory import encode_manifest
words = sys.argv[1:]
if len(words) > 1:
    step = len(os.listdir(words[1] + "/checkpoints")) + 1
    checkpoint = Path(words[1], "checkpoints", f"ckpt_{step}")
    checkpoint.mkdir()
    (checkpoint / "manifest.json").write_bytes(encode_manifest(step, []))
print("error: it broke", flush=True)
sys.exit(int(words[0]))
"""
#: The scheduler tells it to stop, along with the whole job.
PREEMPTED = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
os.kill(os.getppid(), signal.SIGTERM)
time.sleep(60)
"""


class StandIn:
    limit_signal: signal.Signals | None = signal.SIGUSR1
    rank = 0
    is_restarted = False

    def __init__(self) -> None:
        self.requeued = 0

    def start(self, nodes: int, *, end_together: bool) -> LaunchSpec:
        return LaunchSpec(is_shown=False)

    def keeps_nodes(self) -> bool:
        return False

    def requeue(self) -> str | None:
        self.requeued += 1
        raise Requeued


class Requeued(Exception):
    """The scheduler ends the job here, and starts it again."""


@pytest.fixture(autouse=True)
def handlers() -> Any:
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGUSR1, signal.SIGTERM)}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


def job(directory: Path, *words: object, resumes: bool = True) -> None:
    (directory / "checkpoints").mkdir(exist_ok=True, parents=True)
    record = {"token": "t", "words": ["-c", PROGRAM, *map(str, words)], "fingerprint": "f", "nodes": 2,
              "resumes": resumes, "hang_timeout_s": None}  # fmt: skip
    (directory / "job.json").write_text(json.dumps(record))


def run(directory: Path, scheduler: StandIn) -> int | None:
    """The job's exit status, or None if it is started again."""
    try:
        return Supervisor(directory, "t", scheduler).run()
    except Requeued:
        return None


def result(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "job-state.json").read_text())["result"]
    return found


def test_three_restarts_without_a_new_checkpoint_are_enough(tmp_path: Path) -> None:
    job(tmp_path, 70)
    scheduler = StandIn()
    assert [run(tmp_path, scheduler) for _ in range(4)] == [None, None, None, 70]
    assert scheduler.requeued == 3
    assert result(tmp_path)["is_final"]
    assert result(tmp_path)["error"] == "it broke (after 3 restarts without a new checkpoint)"


def test_a_job_that_gets_further_is_always_started_again(tmp_path: Path) -> None:
    job(tmp_path, 70, tmp_path)
    scheduler = StandIn()
    assert [run(tmp_path, scheduler) for _ in range(8)] == [None] * 8


def test_restarts_of_the_scheduler_count_too(tmp_path: Path) -> None:
    """When a node fails, nothing in the job can report it."""
    job(tmp_path, 70)
    assert run(tmp_path, StandIn()) is None
    for _ in range(2):
        state = json.loads((tmp_path / "job-state.json").read_text())
        state["starts"] += 1
        state["restarts"]["count"] += 1
        state["restarts"]["step"] = 0
        (tmp_path / "job-state.json").write_text(json.dumps(state))
    assert run(tmp_path, StandIn()) == 70
    assert result(tmp_path)["is_final"]


class OnNode1(StandIn):
    """On Kubernetes, where each node's command is restarted in its own pod, and node 0 keeps the record."""

    rank = 1

    def requeue(self) -> str | None:
        return None


def test_the_record_of_node_0_is_no_restart_of_another(tmp_path: Path) -> None:
    job(tmp_path, 70)
    record = {"token": "t", "starts": 1, "restarts": {"step": 0, "count": 0}}
    (tmp_path / "job-state.json").write_text(json.dumps(record))
    assert run(tmp_path, OnNode1()) == 70
    assert (tmp_path / "stage.log").read_text().count("\nerror: it broke\n") == 1 + 3


def test_a_job_may_be_preempted_any_number_of_times(tmp_path: Path) -> None:
    """Also before its first checkpoint, as during a long compilation; afterwards it may still fail three times."""
    job(tmp_path)
    record = json.loads((tmp_path / "job.json").read_text())
    (tmp_path / "job.json").write_text(json.dumps({**record, "words": ["-c", PREEMPTED]}))
    for _ in range(6):
        assert run(tmp_path, StandIn()) == 75
        assert (result(tmp_path)["stopped_by"], result(tmp_path)["is_final"]) == (signal.SIGTERM, False)
    job(tmp_path, 70)
    assert [run(tmp_path, StandIn()) for _ in range(4)] == [None, None, None, 70]


class StoppedWhileItStarts(StandIn):
    def start(self, nodes: int, **given: Any) -> LaunchSpec:
        os.kill(os.getpid(), signal.SIGTERM)
        return super().start(nodes, **given)


def test_a_signal_while_a_command_is_started_stops_it(tmp_path: Path) -> None:
    job(tmp_path)
    record = json.loads((tmp_path / "job.json").read_text())
    (tmp_path / "job.json").write_text(json.dumps({**record, "words": ["-c", "import time; time.sleep(60)"]}))
    began = time.monotonic()
    assert run(tmp_path, StoppedWhileItStarts()) == 128 + signal.SIGTERM
    assert result(tmp_path)["stopped_by"] == signal.SIGTERM
    assert time.monotonic() - began < 30


def test_a_spot_notice_to_a_worker_puts_the_job_back(tmp_path: Path) -> None:
    """The worker ends with 75 although nobody asked the job to stop."""
    job(tmp_path, 75)
    assert run(tmp_path, StandIn()) is None


@pytest.mark.parametrize("status", [1, 2, 69])
def test_what_a_person_has_to_put_right_is_not_tried_again(tmp_path: Path, status: int) -> None:
    job(tmp_path, status)
    assert run(tmp_path, StandIn()) == status
    assert (result(tmp_path)["status"], result(tmp_path)["error"]) == (status, "it broke")


def test_the_time_in_the_queue_is_recorded(tmp_path: Path) -> None:
    """From the submission or the requeue to the start of the command; nothing where it is restarted at once."""
    job(tmp_path, 70)
    record = json.loads((tmp_path / "job.json").read_text())
    submitted = utc(time.time() - 100)
    (tmp_path / "job.json").write_text(json.dumps({**record, "submitted": submitted}))
    assert [run(tmp_path, StandIn()) for _ in range(2)] == [None, None]
    first, second = attempts.read(tmp_path, running=False, complete=False)
    ((what, began, until),) = first.waits
    assert (what, began) == ("waiting in a queue", parse_utc(submitted).timestamp())
    assert 100 <= until - began < 110
    assert until <= first.started
    assert len(second.waits) == 1
    ((what, began, until),) = second.waits
    assert first.ended - 1 <= began <= until <= second.started  # times are in whole seconds
    job(tmp_path / "here", 70)
    assert [run(tmp_path / "here", Sound()) for _ in range(2)] == [None, None]
    assert [len(one.waits) for one in attempts.read(tmp_path / "here", running=False, complete=False)] == [0, 0, 1]


class Sound(StandIn):
    """All nodes are there."""

    def keeps_nodes(self) -> bool:
        return True


def test_a_crash_keeps_its_nodes_once_at_each_step(tmp_path: Path) -> None:
    job(tmp_path, 70)
    scheduler = Sound()
    assert [run(tmp_path, scheduler) for _ in range(3)] == [None, None, 70]
    assert scheduler.requeued == 2
    starts = json.loads((tmp_path / "job-state.json").read_text())["starts"]
    assert starts == 4  # three restarts, the first of them without a requeue


@pytest.mark.parametrize("status", [75, "hung"])
def test_a_spot_notice_or_a_hang_gives_the_nodes_back(tmp_path: Path, status: int | str) -> None:
    job(tmp_path, 75 if status == 75 else 70)
    if status == "hung":
        record = json.loads((tmp_path / "job.json").read_text())
        words = ["-c", "import time; time.sleep(60)"]
        (tmp_path / "job.json").write_text(json.dumps({**record, "words": words, "hang_timeout_s": 0.5}))
    scheduler = Sound()
    assert run(tmp_path, scheduler) is None
    assert scheduler.requeued == 1
    assert json.loads((tmp_path / "job-state.json").read_text())["starts"] == 1


def test_what_starts_from_nothing_is_not_tried_again(tmp_path: Path) -> None:
    job(tmp_path, 70, resumes=False)
    assert run(tmp_path, StandIn()) == 70


def test_a_refused_requeue_is_said_and_can_be_handed_in_again(tmp_path: Path) -> None:
    class Refusing(StandIn):
        def requeue(self) -> str:
            return "Requested operation is presently disabled"

    job(tmp_path, 70)
    assert run(tmp_path, Refusing()) == 70
    assert result(tmp_path)["error"] == "it broke (not requeued: Requested operation is presently disabled)"
    assert not result(tmp_path)["is_final"]


def test_a_job_of_an_earlier_submission_does_nothing(tmp_path: Path) -> None:
    """Luigi died between submitting a job and noting its id, and another luigi has submitted another job."""
    job(tmp_path, 70)
    assert Supervisor(tmp_path, "another token", StandIn()).run() == 0
    assert not (tmp_path / "job-state.json").exists()
    assert not (tmp_path / "stage.log").exists()


def test_a_complete_stage_needs_nobody_to_see_its_end(tmp_path: Path) -> None:
    job(tmp_path, 0)
    (tmp_path / "manifest.json").write_text("{}")
    assert run(tmp_path, StandIn()) == 0
    assert not (tmp_path / "job.json").exists()
