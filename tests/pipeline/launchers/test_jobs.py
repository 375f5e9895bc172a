"""How the end of a scheduler's job is judged, and what a store may do to a running one."""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from common.errors import EXIT_INTERRUPTED, EXIT_SOFTWARE, LockHeld, UserError
from common.process import heeded_signals
from common.secrets import Secret
from pipeline.commands import cancel
from pipeline.launchers import find_job, jobs
from pipeline.launchers.base import StageCommand
from pipeline.launchers.jobs import STATE, Job, Unreachable
from pipeline.launchers.jobs import State as JobState
from pipeline.launchers.process import ProcessResult
from pipeline.launchers.slurm import SlurmScheduler, batch_script
from pipeline.settings.sections import Store
from pipeline.status.stage_dirs import holder
from pipeline.store.shared import SharedStage, SharedStore
from stages.directory.lock import JOB, hold
from stages.directory.manifest import Identity, Output, StageDirectory, claim
from stages.store.complete import push_stage
from stages.store.open import open_store
from stages.store.options import StoreOptions
from tests.helpers.chain import Chain, finished_chain
from tests.helpers.support import command


class Ended:
    """A scheduler whose only job has ended."""

    name, place = "slurm", dict[str, str]()

    def __init__(self, *, is_cancelled: bool) -> None:
        self._state = JobState("CANCELLED" if is_cancelled else "COMPLETED", "", False, is_cancelled)

    def ask(self, job_id: str) -> JobState:
        return self._state

    def find(self, record: dict[str, Any]) -> None: ...
    def tidy(self, job_id: str) -> None: ...
    def cancel(self, job_id: str) -> None: ...
    def submit(self, work: Any, job: Job) -> str:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("cancelled", "status", "complete", "how"),
    [
        (False, 0, False, "complete"),
        (False, EXIT_SOFTWARE, False, "failed"),
        (True, EXIT_SOFTWARE, False, "interrupted"),
        (True, 0, False, "interrupted"),  # srun, which scancel ended
        (True, 0, True, "complete"),
    ],
)
def test_how_a_job_has_ended(tmp_path: Path, cancelled: bool, status: int, complete: bool, how: str) -> None:
    record = {"token": "t", "id": "17", "name": "x", "log_began": 0}
    (tmp_path / JOB).write_text(json.dumps(record))
    result = dataclasses.asdict(ProcessResult(status, None, False, ""))
    (tmp_path / STATE).write_text(json.dumps({"token": "t", "result": result}))
    if complete:
        (tmp_path / "manifest.json").touch()
    assert Job(tmp_path, record, Ended(is_cancelled=cancelled)).wait(from_start=True).how == how


class Stuck(Ended):
    """A scheduler whose job can never start; it does not answer when that is to be cancelled."""

    def __init__(self) -> None:
        self._state = JobState("PENDING", "BadConstraints", True, is_stuck=True)

    def cancel(self, job_id: str) -> None:
        raise Unreachable("slurm_load_jobs error: Socket timed out")


@pytest.mark.parametrize(
    ("answers", "said"),
    [(False, "could not be cancelled: slurm_load_jobs error"), (True, "was cancelled, but is still there after 0 s")],
)
def test_a_job_that_was_not_cancelled_keeps_its_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: bool, said: str
) -> None:
    """Without it, the next run would submit a second job for the same directory."""
    scheduler = Stuck()
    if answers:
        monkeypatch.setattr(scheduler, "cancel", lambda _: None)
    record = {"token": "t", "id": "17", "name": "x", "log_began": 0}
    (tmp_path / JOB).write_text(json.dumps(record))
    monkeypatch.setattr(cancel, "Stage", SimpleNamespace)
    monkeypatch.setattr(cancel, "find", lambda *_: SimpleNamespace(directory=tmp_path, label="example"))
    monkeypatch.setattr(cancel, "find_job", lambda _: Job(tmp_path, record, scheduler))
    monkeypatch.setattr(cancel, "_END_S", 0)
    with pytest.raises(UserError, match=said):
        cancel.run(argparse.Namespace(task="example", phase=None))
    assert (tmp_path / JOB).exists()


class Failed(Ended):
    """Kubernetes, which has failed a job because of another node than the first."""

    name = "kubernetes"

    def __init__(self) -> None:
        self._state = JobState("Failed", "PodFailurePolicy: pod 1 exited with 70", False)


def ended(directory: Path, scheduler: Ended, result: ProcessResult | None) -> ProcessResult:
    """How a job has ended whose supervisor has written `result`."""
    record = {"token": "t", "id": "17", "name": "x", "log_began": 0}
    (directory / JOB).write_text(json.dumps(record))
    if result is not None:
        (directory / STATE).write_text(json.dumps({"token": "t", "result": dataclasses.asdict(result)}))
    return Job(directory, record, scheduler).wait(from_start=True)


def test_a_failure_of_another_node_is_no_interruption(tmp_path: Path) -> None:
    """Kubernetes then tells the first node to stop, which alone writes a result."""
    result = ended(tmp_path, Failed(), ProcessResult(EXIT_INTERRUPTED, signal.SIGTERM, False, "stopped"))
    assert result.how == "failed"
    assert "kubernetes job 17 failed: PodFailurePolicy: pod 1 exited with 70" in result.error
    assert result.is_final, "its supervisor has given up"


def test_a_job_that_is_told_to_stop_and_is_complete_stops_nothing_else(tmp_path: Path) -> None:
    """Slurm's signal before the time limit, during the last checkpoint: this process was not asked to stop."""
    result = ended(tmp_path, Ended(is_cancelled=False), ProcessResult(0, signal.SIGUSR1, False, ""))
    assert (result.how, result.stopped_by) == ("complete", None)


def test_a_job_that_can_never_start_says_why_although_it_cannot_be_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(jobs, "_SURE_S", 0.0)
    result = ended(tmp_path, Stuck(), None)
    assert "slurm job 17 can never start as it is: BadConstraints; " in result.error
    assert "note: slurm job 17 was not cancelled: slurm_load_jobs error: Socket timed out" in capsys.readouterr().err


@pytest.fixture
def chain(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Chain:
    return finished_chain(tmp_path_factory).copy(tmp_path)


def test_a_training_that_ended_early_is_not_complete_whatever_its_exit_status(chain: Chain) -> None:
    directory = chain.latest("pretrain-phase1")
    (directory / "manifest.json").unlink()
    results = json.loads((directory / "results.json").read_text())
    program = (
        "from pipeline.tasks.bert import Pretrain\n"
        "from stages.directory.manifest import StartTime\n"
        "Pretrain(phase=1).finish(StartTime.now())\n"
    )
    for steps, line in ((5, "pretrain-phase1 ended with exit status 0 at step 5 of 8"), (8, None)):
        (directory / "results.json").write_text(json.dumps({**results, "steps": steps}))
        done = command("-c", program, env={"LUIGI_CONFIG_PATH": str(chain.config)})
        assert (directory / "manifest.json").exists() == (line is None)
        assert line is None or line in done.stderr


def test_nothing_is_fetched_into_the_directory_of_a_job_that_runs(tmp_path: Path) -> None:
    """Luigi comes back to a job, and another machine has made the same stage in the meantime."""
    identity, options = Identity("pretrain", 1, 1), StoreOptions(url=Secret.address(str(tmp_path / "store")))
    other, here = tmp_path / "other/pretrain-phase1", tmp_path / "here/pretrain-phase1"
    with StageDirectory.begin(other, lambda: identity) as work:
        (other / "weights").write_bytes(b"trained")
        work.finish([Output.of(other, other / "weights")], {})
    push_stage(open_store(options), other, "pretrain-phase1")
    store = SharedStore(cast("Store", SimpleNamespace(push="all", pull="all")), options)
    stage = SharedStage("pretrain-phase1", identity.fingerprint, here, "models", resumes=True, siblings=())
    with hold(here):
        claim(here, identity)
        with store.making(stage, attached=True) as was_fetched:
            assert not was_fetched
            assert not (here / "weights").exists()
        with store.making(stage, attached=False) as was_fetched:
            assert was_fetched
            assert (here / "weights").exists()


RECORD: dict[str, Any] = {
    "launcher": "kubernetes", "namespace": "nlp", "gang": "jobset", "token": "0123abcd", "name": "pretrain-0-0123abcd",
    "id": "nlp/pretrain-0-0123abcd", "log_began": 0, "submitted": "2026-11-26T01:02:03Z",
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("launcher", value) for value in (None, "x", ["slurm"])),
        *((name, value) for name in ("token", "name", "id", "namespace") for value in (None, 17, "", "a\0b", [1])),
        *(("log_began", value) for value in (None, "0", -1, 0.5, 10**400)),
        *(("submitted", value) for value in (None, 17, "yesterday", {"a": 1})),
        *(("gang", value) for value in (None, 17, "x", [1])),
        *(("start_timeout_s", value) for value in (None, "x", [1])),
    ],
)
def test_a_damaged_record_of_a_job_is_one_line_and_no_second_job_is_submitted(
    tmp_path: Path, name: str, value: Any
) -> None:
    for record in (RECORD, {**RECORD, "launcher": "slurm"}):
        (tmp_path / JOB).write_text(json.dumps(record))
        found = find_job(tmp_path)
        assert found is not None
        assert (found.id, found.submitted) == (RECORD["id"], RECORD["submitted"])
    for damaged in ({}, {**RECORD, name: value}, {key: RECORD[key] for key in RECORD if key != name}):
        (tmp_path / JOB).write_text(json.dumps(damaged))
        if name in ("id", "gang", "start_timeout_s") and name not in damaged and damaged:
            continue  # the submitting process has died; a job of before there were gangs, or that is Slurm's
        with pytest.raises(UserError, match=f"^{tmp_path / JOB} is damaged: .*; look for one in its scheduler, and"):
            find_job(tmp_path)
        assert str(holder(tmp_path)).startswith(f"{tmp_path / JOB} is damaged: "), "`status` says so; `clean` leaves it"


@pytest.mark.parametrize("content", ["", '{"launcher": "sl', "[]"])
def test_a_record_that_cannot_be_read_may_be_of_a_job_that_runs(tmp_path: Path, content: str) -> None:
    """It is written durably, in one step: whatever has damaged it came later."""
    assert find_job(tmp_path) is None
    (tmp_path / JOB).write_text(content)
    with pytest.raises(UserError, match=f"^{tmp_path / JOB} is damaged: .*; look for one in its scheduler, and"):
        find_job(tmp_path)
    assert str(holder(tmp_path)).startswith(f"{tmp_path / JOB} is damaged: ")
    with pytest.raises(LockHeld, match=r"job.json is damaged: a job on other machines may be at work in"):
        hold(tmp_path).__enter__()


def test_slurm_is_told_to_warn_a_job_before_its_end_and_to_requeue_it(tmp_path: Path) -> None:
    """The batch script alone gets the signal (B:), which is the one that the supervisor heeds."""
    settings: Any = SimpleNamespace(partition="", account="", time_limit="10", signal_s=120, extra_lines=())
    work = StageCommand("pretrain-phase1", tmp_path, -1, "0" * 64, [], 1, True, None)
    job = Job(tmp_path, {"name": "a", "token": "b"}, SlurmScheduler())
    lines = batch_script(work, job, settings).splitlines()
    assert {"#SBATCH --signal=B:USR1@120", "#SBATCH --requeue", "#SBATCH --time=10"} <= set(lines)
    assert signal.SIGUSR1 in heeded_signals()
