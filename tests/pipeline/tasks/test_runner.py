"""The runner of a stage, with a stage and a launcher of our own: when it restarts, what it records, what it raises."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.errors import EXIT_INTERRUPTED, EXIT_SOFTWARE, EXIT_USER_ERROR, Interrupted, LockHeld, UserError
from pipeline.console import select
from pipeline.console.events import Events
from pipeline.launchers.base import Detached, StageCommand
from pipeline.launchers.process import ProcessResult
from pipeline.launchers.restarts import MAX_RESTARTS
from pipeline.status.stage_dirs import holder
from pipeline.tasks.runner import CommandFailed, Runner
from stages.directory.attempts import failures, last_failure
from stages.directory.lock import JOB, hold
from stages.directory.manifest import Identity, StartTime, finish, why_incomplete
from tests.helpers.checkpoints import save, snapshot

CRASH = ProcessResult(EXIT_SOFTWARE, None, False, "Traceback (most recent call last):\nKeyError: 3")
HANG = ProcessResult(-9, None, True, "")
REFUSED = ProcessResult(EXIT_USER_ERROR, None, False, "lr = -1 is not allowed")
STOPPED = ProcessResult(EXIT_INTERRUPTED, 15, False, "")
DONE = ProcessResult(0, None, False, "")


class Stage:
    """Complete once its command has succeeded."""

    label, nodes, hang_timeout_s, stored, imports_torch = "example", 1, 20.0, None, False

    def __init__(self, work_dir: Path, *, restarts: bool) -> None:
        self.directory, self.restarts = work_dir / "example-0", restarts
        self.identity = Identity("example", 1)
        self.prepared = 0

    def prepare(self) -> None:
        assert self.identity.fingerprint in (self.directory / "stage.json").read_text()
        self.prepared += 1

    def command(self) -> list[str]:
        return ["-c", "pass"]

    def finish(self, start: StartTime) -> None:
        finish(self.directory, self.identity, [], {}, start=start)

    def making(self, *, attached: bool) -> contextlib.AbstractContextManager[bool]:
        return contextlib.nullcontext(False)

    def why_incomplete(self) -> str | None:
        return why_incomplete(self.directory, self.identity.fingerprint)


class Launcher:
    """Ends each command with the next of the given results, or with an exception; a result may save a checkpoint."""

    def __init__(self, *results: ProcessResult | Exception, checkpoints: bool = False) -> None:
        self._results: Iterator[ProcessResult | Exception] = iter(results)
        self._checkpoints = checkpoints
        self.starts = 0

    def run(self, work: StageCommand) -> ProcessResult:
        self.starts += 1
        result = next(self._results)
        if isinstance(result, Exception):
            raise result
        if self._checkpoints:
            (work.directory / "checkpoints").mkdir(exist_ok=True)
            save(work.directory / "checkpoints", snapshot(self.starts))
        return result


def run(tmp_path: Path, *results: ProcessResult | Exception, restarts: bool = True, **options: Any) -> int:
    """Run the stage to its end; returns how often its command was started."""
    launcher = Launcher(*results, **options)
    stage = Stage(tmp_path, restarts=restarts)
    Runner(stage, launcher).run()
    assert stage.why_incomplete() is None
    assert stage.prepared == (launcher.starts > 0)
    assert (tmp_path / "latest" / "example").resolve() == stage.directory
    return launcher.starts


def test_a_training_is_restarted_as_long_as_it_saves_checkpoints(tmp_path: Path) -> None:
    crashes = [CRASH] * (2 * MAX_RESTARTS)
    assert run(tmp_path, *crashes, DONE, checkpoints=True) == len(crashes) + 1


def test_a_training_that_saves_none_is_given_up_with_its_own_error(tmp_path: Path) -> None:
    with pytest.raises(CommandFailed, match=r"example failed: Traceback[\s\S]*KeyError: 3 \(exit status 70; log: "):
        run(tmp_path, *[CRASH] * (MAX_RESTARTS + 1))
    failure = last_failure(tmp_path / "example-0")
    assert failure is not None
    assert failure.line == "KeyError: 3"
    assert len(failures(tmp_path / "example-0")) == 1
    assert run(tmp_path, DONE) == 1


def test_what_a_person_has_to_fix_is_not_tried_again(tmp_path: Path) -> None:
    with pytest.raises(CommandFailed, match="lr = -1 is not allowed"):
        run(tmp_path, REFUSED)


def test_any_other_stage_is_restarted_once_after_a_hang(tmp_path: Path) -> None:
    assert run(tmp_path, HANG, DONE, restarts=False) == 2


@pytest.mark.parametrize("results", [(CRASH,), (HANG, HANG), (HANG, CRASH)], ids=["crash", "hang twice", "hang, crash"])
def test_any_other_stage_is_given_up_otherwise(tmp_path: Path, results: tuple[ProcessResult, ...]) -> None:
    with pytest.raises(CommandFailed, match="example failed: "):
        run(tmp_path, *results, restarts=False)


@pytest.mark.parametrize("stopped", [STOPPED, Detached("slurm job 17")], ids=["here", "as a job"])
def test_an_interruption_is_no_failure(tmp_path: Path, stopped: ProcessResult | Exception) -> None:
    with pytest.raises(Interrupted):
        run(tmp_path, stopped)
    assert last_failure(tmp_path / "example-0") is None
    assert run(tmp_path, DONE) == 1


def test_a_program_is_told_how_a_stage_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(select, "_chosen", Events())
    ends: list[tuple[ProcessResult | Exception, dict[str, Any]]] = [
        (REFUSED, {"event": "failed", "status": EXIT_USER_ERROR, "error": "lr = -1 is not allowed"}),
        (UserError("no sbatch here"), {"event": "failed", "status": None, "error": "no sbatch here"}),
        (STOPPED, {"event": "interrupted"}),
        (Detached("slurm job 17"), {"event": "interrupted"}),
        (dataclasses.replace(DONE, stopped_by=15), {"event": "interrupted"}),
    ]
    for number, (end, wanted) in enumerate(ends):
        with pytest.raises((UserError, Interrupted)):
            run(tmp_path / str(number), end)
        last = json.loads(capsys.readouterr().out.splitlines()[-1])
        del last["time"]
        assert last == {**wanted, "stage": "example"}


def test_a_job_that_nobody_here_can_ask_about_names_the_file_to_remove(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a work directory that was copied from a cluster."""
    monkeypatch.setenv("PATH", str(tmp_path))
    directory = tmp_path / "example-0"
    directory.mkdir()
    record = {"launcher": "slurm", "token": "t", "name": "x", "log_began": 0, "submitted": "2026-11-26T01:02:03Z"}
    (directory / JOB).write_text(json.dumps({**record, "id": "17"}))
    wanted = f"slurm job 17 may still be running example: .*if it is over, remove {directory / JOB}"
    with pytest.raises(UserError, match=wanted):
        run(tmp_path, DONE)
    assert "unknown (" in str(holder(directory))
    assert str(holder(directory)).endswith("if it is over, remove its job.json")
    (directory / JOB).unlink()
    assert run(tmp_path, DONE) == 1


class Ending:
    """A job that runs and then ends with success."""

    submitted = "2026-11-26T01:02:03Z"

    def __init__(self, words: list[str]) -> None:
        self.record = {"words": words}

    def is_alive(self) -> bool:
        return True

    def wait(self, *, from_start: bool) -> ProcessResult:
        return DONE


@pytest.mark.parametrize(("words", "starts"), [(["-c", "pass"], 0), (["-c", "pass", "--steps_this_run", "200"], 1)])
def test_a_job_of_a_sweeps_rung_is_not_taken_for_the_whole_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], starts: int
) -> None:
    """It trains in the same directory, for some of the steps: the rest follows."""
    monkeypatch.setattr("pipeline.tasks.runner.launchers.find_job", lambda _: Ending(words))
    launcher, stage = Launcher(DONE), Stage(tmp_path, restarts=True)
    Runner(stage, launcher).run()
    assert launcher.starts == starts
    assert stage.why_incomplete() is None


def test_a_held_lock_is_no_failure_of_the_holder(tmp_path: Path) -> None:
    with hold(tmp_path / "example-0"), pytest.raises(LockHeld):
        run(tmp_path)
    assert last_failure(tmp_path / "example-0") is None


def test_a_failure_before_the_command_starts_is_recorded(tmp_path: Path) -> None:
    (tmp_path / "example-0").mkdir()
    (tmp_path / "example-0" / "thesis.txt").touch()
    with pytest.raises(Exception, match="was not made by this stage"):
        run(tmp_path)
    failure = last_failure(tmp_path / "example-0")
    assert failure is not None
    assert "was not made by this stage" in failure.line
    (tmp_path / "example-0" / "thesis.txt").unlink()
    assert run(tmp_path, DONE) == 1


def test_a_complete_stage_starts_nothing(tmp_path: Path) -> None:
    assert run(tmp_path, DONE) == 1
    assert run(tmp_path) == 0


def test_a_stop_that_comes_too_late_for_the_command_completes_its_stage_and_no_other_starts(tmp_path: Path) -> None:
    """SIGTERM while a training writes its last checkpoint, or while it waits for a tracker: it still ends with 0."""
    with pytest.raises(Interrupted):
        run(tmp_path, dataclasses.replace(DONE, stopped_by=15))
    assert last_failure(tmp_path / "example-0") is None
    assert run(tmp_path) == 0, "it is complete"
