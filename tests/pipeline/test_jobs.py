"""How the end of a scheduler's job is judged, and what a store may do to a running one."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from common.errors import EXIT_SOFTWARE
from common.secrets import Secret
from pipeline.launchers.jobs import STATE, Job
from pipeline.launchers.jobs import State as JobState
from pipeline.launchers.process import ProcessResult
from pipeline.settings.sections import Store
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
