"""What asks a run to save from outside: notices from EC2's metadata service, a file, a signal in mid-step."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.chain import wait_until
from tests.helpers.faulty.metadata import REBALANCE, SPOT, Metadata, metadata_service
from tests.helpers.support import (
    Workers,
    assert_same_bytes,
    free_port,
    metrics,
    options,
    train,
    write_dataset,
    write_model_config,
)
from trainer.launch import preemption
from trainer.launch.agreement import Agreement
from trainer.launch.preemption import Interruptions
from trainer.parallel.mesh import Mesh

#: Seconds within which a checkpoint must be durable after a notice; Amazon takes the instance away after 120.
DURABLE_S = 60
#: What is said of a service that accepts a connection but does not answer.
SILENCE = "Read timed out. (read timeout=2.0)"


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    with metadata_service() as service:
        yield service


@pytest.fixture
def values(tmp_path: Path) -> dict[str, Any]:
    """A run that ends only when it is stopped, and has no reason of its own to save."""
    return {
        "data_dir": write_dataset(tmp_path / "data", [40, 40]), "model_config": write_model_config(tmp_path),
        "output_dir": tmp_path / "out", "max_pred_len": 5, "device": "cpu", "precision": "fp32", "batch_size": 4,
        "grad_accum_usteps": 2, "max_steps": 1_000_000, "warmup_steps": 5, "ckpt_interval_steps": 0,
        "num_ckpts_to_keep": -1,
    }  # fmt: skip


@contextlib.contextmanager
def training(workers: int = 1, *, env: dict[str, str] | None = None, **values: Any) -> Iterator[Workers]:
    running = Workers(workers, "trainer", options(**values), env or {})
    try:
        yield running
    finally:
        running.end()


def checkpoints(out: Path) -> list[int]:
    """Steps of the checkpoints that are durable: only those have their final name."""
    return sorted(int(path.name[5:]) for path in (out / "checkpoints").glob("ckpt_*") if path.name[5:].isdigit())


def recorded(out: Path) -> int:
    return len((out / "metrics.jsonl").read_text().splitlines()) if (out / "metrics.jsonl").exists() else 0


@pytest.mark.slow
def test_notices_make_it_save_and_the_last_one_ends_it(metadata: Metadata, values: dict[str, Any]) -> None:
    """Two workers, one of which watches. On a recommendation to move, the run saves once and continues. On the notice
    that the instance goes away, it saves its last step and stops with 75, all within a minute."""
    out = values["output_dir"]
    env = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": metadata.url}
    metadata.notices[REBALANCE] = json.dumps({"noticeTime": "2026-11-21T08:00:00Z"})
    with training(2, env=env, spot_watch=True, **values) as running:
        wait_until(lambda: len(checkpoints(out)) == 1 and metadata.asked_for(SPOT, 404) > 0, timeout_s=DURABLE_S)
        seen = recorded(out)
        wait_until(lambda: recorded(out) > seen)
        metadata.forget()
        metadata.notices[SPOT] = json.dumps({"action": "terminate", "time": "2026-11-21T08:22:00Z"})
        noticed = time.monotonic()
        done = running.wait()
        assert time.monotonic() - noticed < DURABLE_S
    assert done.returncode == 75, done.stdout
    assert '"action": "terminate"' in done.stdout
    assert "the state is saved" in done.stdout
    steps = [record["step"] for record in metrics(out)]
    assert steps == list(range(1, len(steps) + 1))
    first, last = checkpoints(out)
    assert first < last == steps[-1]
    assert metadata.asked_for("/latest/api/token", 200) == 2, "one token at first, one when it was forgotten"


def unanswered(said: str) -> list[str]:
    return [line for line in said.splitlines() if "no answer from the instance metadata" in line]


@pytest.mark.parametrize("service", ["closed", "silent", "another cloud"])
def test_a_service_without_an_answer_disturbs_nothing(values: dict[str, Any], metadata: Metadata, service: str) -> None:
    """Nobody listens there; somebody listens and never answers; or every path is 404."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = {"closed": free_port(), "silent": silent.getsockname()[1]}.get(service)
        url = metadata.url if port is None else f"http://127.0.0.1:{port}"
        done = train(env={"AWS_EC2_METADATA_SERVICE_ENDPOINT": url}, spot_watch=True, **{**values, "max_steps": 20})
    assert done.returncode == 0, done.stdout
    assert checkpoints(values["output_dir"]) == [20]
    reports = unanswered(done.stdout)
    if service == "silent":  # given up after 2 s, before which a training this short may end
        assert all(SILENCE in report for report in reports)
    else:
        assert len(reports) == (service == "closed")
    assert "Traceback" not in done.stdout


def test_a_service_that_never_answers_is_reported_while_training_goes_on(values: dict[str, Any]) -> None:
    out = values["output_dir"]
    with socket.create_server(("127.0.0.1", 0)) as silent:
        env = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}"}
        with training(env=env, spot_watch=True, **values) as running:
            wait_until(lambda: recorded(out) > 0)
            # It is asked when training begins, and the attempt is given up after 2 s.
            wait_until(lambda: unanswered(running.said()) != [], timeout_s=20)
            seen = recorded(out)
            wait_until(lambda: recorded(out) > seen)
            running.processes[0].signal_group(signal.SIGTERM)
            done = running.wait()
    assert done.returncode == 75, done.stdout
    (report,) = unanswered(done.stdout)
    assert SILENCE in report
    assert checkpoints(out) == [recorded(out)]
    assert "Traceback" not in done.stdout


def test_nobody_watches_unless_told_to(metadata: Metadata, values: dict[str, Any]) -> None:
    metadata.notices[SPOT] = json.dumps({"action": "terminate", "time": "2026-11-21T08:22:00Z"})
    env = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": metadata.url}
    assert train(env=env, **{**values, "max_steps": 20}).returncode == 0
    assert metadata.asked == []


def test_a_file_asks_for_a_checkpoint(values: dict[str, Any]) -> None:
    """The file is removed, the run continues, and what was saved is whole: another run resumes from it."""
    out = values["output_dir"]
    with training(**values):
        wait_until(lambda: recorded(out) > 2)
        (out / "save_now").touch()
        wait_until(lambda: len(checkpoints(out)) == 1)
        assert not (out / "save_now").exists()
        seen = recorded(out)
        wait_until(lambda: recorded(out) > seen)
    (step,) = checkpoints(out)
    done = train(resume_ckpt=True, **{**values, "steps_this_run": step + 3})
    assert done.returncode == 0, done.stdout
    assert f"resuming from checkpoint {out / 'checkpoints' / f'ckpt_{step}'}" in done.stdout


@pytest.mark.parametrize(("workers", "size"), [(1, 1), (2, 1), (2, 2)])
def test_a_stop_within_a_step_does_not_wait_for_its_end(
    values: dict[str, Any], tmp_path: Path, workers: int, size: int
) -> None:
    """The step is abandoned, the state it started from is saved, and the resumed run ends with the same bytes. Only
    one worker, the last, is asked to stop, in its second micro-step of eight."""
    values |= {"max_steps": 3, "grad_accum_usteps": 8, "warmup_steps": 1, "tensor_parallel_size": size}
    env = {"FAILPOINT": f"micro-step:0.1.{workers - 1}", "FAILPOINT_ACTION": "terminate"}
    log = tmp_path / "points"
    done = train(workers, env={**env, "FAILPOINT_LOG": str(log)}, **values)
    assert done.returncode == 75, done.stdout
    assert checkpoints(values["output_dir"]) == [0]
    assert not any(f"micro-step:0.{late}." in log.read_text() for late in range(3, 8)), "it went on with the step"
    assert train(workers, resume_ckpt=True, **values).returncode == 0
    straight = {**values, "output_dir": tmp_path / "straight"}
    assert train(workers, **straight).returncode == 0
    stopped, whole = (v["output_dir"] / "checkpoints" / "ckpt_3" for v in (values, straight))
    assert_same_bytes(stopped, whole)


def test_a_notice_counts_although_nobody_reads_what_is_said_of_it(
    metadata: Metadata, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pipe of stdout was closed; a watcher that has ended all the same is replaced."""
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", metadata.url)
    monkeypatch.setattr(preemption, "heeded_signals", lambda: ())  # the signals of the tests stay as they are
    interruptions = Interruptions(tmp_path, is_root=True, watches_spot=True)
    ended = interruptions._watch
    assert ended is not None
    ended.over.set()
    interruptions.begin()
    ended.join()
    metadata.notices[SPOT] = json.dumps({"action": "terminate", "time": "2026-11-21T08:22:00Z"})
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as unread:
        monkeypatch.setattr(sys, "stdout", unread)
        interruptions.begin()
        wait_until(lambda: interruptions.must_stop, timeout_s=10, every_s=0.01)
        interruptions.end()
        assert interruptions._watch is not None
        interruptions._watch.join()
        monkeypatch.undo()


def test_a_request_that_cannot_be_removed_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is saved for it, at every step, and training goes on; requests from elsewhere still count."""
    monkeypatch.setattr(preemption, "_FILE_POLL_S", 0.0)
    (tmp_path / "save_now").mkdir()
    interruptions = Interruptions(tmp_path, is_root=True, watches_spot=False)
    assert [interruptions.take_save() for _ in range(3)] == [False] * 3
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{tmp_path / 'save_now'} asks for a checkpoint, but cannot be removed: ")
    interruptions.ask(stop=False)
    assert interruptions.take_save()
    (tmp_path / "save_now").rmdir()
    (tmp_path / "save_now").touch()
    assert interruptions.take_save()


class CountingMesh(Mesh):
    """A single worker that counts how often all agree."""

    def sum_on_host(self, values: Sequence[int]) -> list[int]:
        self.__dict__["agreed"] = self.__dict__.get("agreed", 0) + 1
        return list(values)


def test_a_stop_is_asked_for_about_every_five_seconds_in_steps_of_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("trainer.launch.agreement.time", SimpleNamespace(monotonic=lambda: now[0]))
    mesh = CountingMesh()
    quiet: Any = SimpleNamespace(must_stop=False, take_save=lambda: False)
    agreement = Agreement(mesh, quiet)

    def asked_in_a_step(micro_steps: int, seconds: float) -> list[int]:
        """Before which micro-steps of one optimizer step all workers agree on stopping."""
        agreement.before_step([1], not_finite=False, save=False)
        asked = []
        for ustep in range(micro_steps):
            before = mesh.__dict__["agreed"]
            assert not agreement.stops_before(ustep)
            if mesh.__dict__["agreed"] > before:
                asked.append(ustep)
            now[0] += seconds
        return asked

    asked_in_a_step(64, 1.0)
    assert asked_in_a_step(64, 1.0) == list(range(5, 64, 5))
    asked_in_a_step(8, 10.0)
    assert asked_in_a_step(8, 10.0) == list(range(1, 8))
    asked_in_a_step(1000, 0.01)
    assert asked_in_a_step(1000, 0.01) == [500]
