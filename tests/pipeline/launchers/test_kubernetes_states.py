"""What is reported about a job on Kubernetes, given what kubectl says about it and about the objects around it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.errors import UserError
from pipeline.launchers import find_job, jobs
from pipeline.launchers.base import StageCommand
from pipeline.launchers.jobs import STATE, Job, State
from pipeline.launchers.kubernetes import KubernetesScheduler
from pipeline.settings.cluster import Kubernetes
from stages.directory.lock import JOB
from tests.helpers.kubernetes.cluster import Cluster, workload

NAME = "pretrain-phase1-0-t"
QUEUED = {"kueue.x-k8s.io/queue-name": "team"}
#: A condition that Volcano leaves on a group even after it has started.
UNSCHEDULABLE = {"type": "Unschedulable", "status": "True", "reason": "NotEnoughResources", "message": "no room"}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    cluster = Cluster(tmp_path)
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    return cluster


def submitted(cluster: Cluster, kind: str = "Job", *, suspend: bool = False, **status: Any) -> None:
    spec: dict[str, Any] = {"parallelism": 2, "template": {"spec": {}}}
    if kind == "JobSet":
        spec = {"replicatedJobs": [{"name": "node", "template": {"spec": spec}}]}
    metadata = {"name": NAME, "uid": "uid-1", "labels": QUEUED}
    cluster.write(kind.lower(), {"kind": kind, "metadata": metadata, "spec": {**spec, "suspend": suspend}})
    (cluster.state / "status.json").write_text(json.dumps(status))


def ask(gang: str, *, scheduler: KubernetesScheduler | None = None) -> State:
    state = (scheduler or KubernetesScheduler(gang=gang)).ask(f"nlp/{NAME}")
    assert state is not None
    return state


def waiting(reason: str) -> dict[str, Any]:
    return {"items": [{"status": {"containerStatuses": [{"state": {"waiting": {"reason": reason}}}]}}]}


@pytest.mark.parametrize(("gang", "kind"), [("kueue", "Job"), ("jobset", "JobSet")])
@pytest.mark.parametrize(
    ("conditions", "told"),
    [
        ([], ""),
        ([("QuotaReserved", "False", "Pending", "no quota for\n neuron")], "; Pending: no quota for neuron"),
        ([("QuotaReserved", "True", "QuotaReserved", "yes"), ("Evicted", "False", "Preempted", "once")], ""),
        (
            [("Evicted", "True", "Preempted", "for another"), ("QuotaReserved", "False", "Inadmissible", "stopped")],
            "; Inadmissible: stopped; Preempted: for another",
        ),
    ],
)
def test_a_queued_job_is_alive_and_tells_why_it_waits(
    cluster: Cluster, gang: str, kind: str, conditions: list[tuple[str, str, str, str]], told: str
) -> None:
    submitted(cluster, kind, suspend=True)
    cluster.write("workloads", workload(*conditions))
    assert ask(gang) == State("Suspended", f"in queue team{told}", is_alive=True)


def test_a_user_who_may_not_read_kueues_workloads_sees_the_queue(cluster: Cluster) -> None:
    submitted(cluster, suspend=True)
    (cluster.state / "forbidden").write_text("workload")
    assert ask("kueue") == State("Suspended", "in queue team", is_alive=True)


@pytest.mark.parametrize(("gang", "kind"), [("none", "Job"), ("volcano", "Job"), ("jobset", "JobSet")])
def test_pods_that_cannot_start_are_stuck_whatever_submitted_them(cluster: Cluster, gang: str, kind: str) -> None:
    submitted(cluster, kind)
    cluster.write("podgroup", {"status": {"phase": "Running"}})
    cluster.write("pods", waiting("ImageInspectError"))
    assert ask(gang) == State("Active", "0 of 2 pods ready; ImageInspectError", is_alive=True)
    cluster.write("pods", waiting("InvalidImageName"))
    assert ask(gang).is_stuck
    (cluster.state / "pods.json").unlink()
    submitted(cluster, kind, pods=2)
    assert ask(gang) == State("Active", "2 of 2 pods ready", is_alive=True)


def test_time_in_the_queue_does_not_count_for_a_pod_that_cannot_start(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The 180 s count from the first look at such a pod: a preempted job's next pod gets all of them again."""
    now, scheduler = [0.0], KubernetesScheduler(gang="kueue")
    monkeypatch.setattr("pipeline.launchers.kubernetes.time", SimpleNamespace(monotonic=lambda: now[0]))
    cluster.write("pods", waiting("ImagePullBackOff"))
    stuck = []
    for seconds, suspend in ((1, False), (100, True), (200, False), (300, False), (380, False)):
        now[0] = seconds
        submitted(cluster, suspend=suspend)
        stuck.append(ask("kueue", scheduler=scheduler).is_stuck)
    assert stuck == [False, False, False, False, True]


@pytest.mark.parametrize("condition", ["Completed", "Failed"])
def test_a_jobset_ends_with_its_own_conditions(cluster: Cluster, condition: str) -> None:
    suspended = {"type": "Suspended", "status": "False", "reason": "ResumeJobs"}
    ended = {"type": condition, "status": "True", "reason": "R", "message": "m"}
    submitted(cluster, "JobSet", conditions=[suspended, ended])
    assert ask("jobset") == State(condition, "R; m", is_alive=False)


@pytest.mark.parametrize(
    ("group", "told"),
    [
        ({"phase": "Pending"}, "; PodGroup Pending"),
        ({"phase": "Inqueue", "conditions": [UNSCHEDULABLE]}, "; PodGroup Inqueue: no room"),
        ({"phase": "Running", "conditions": [UNSCHEDULABLE]}, ""),
    ],
)
def test_volcanos_group_tells_why_pods_are_not_ready(cluster: Cluster, group: dict[str, Any], told: str) -> None:
    submitted(cluster, pods=1)
    cluster.write("podgroup", {"status": group})
    assert ask("volcano") == State("Active", f"1 of 2 pods ready{told}", is_alive=True)
    submitted(cluster, pods=2)
    assert ask("volcano") == State("Active", "2 of 2 pods ready", is_alive=True)


@pytest.mark.parametrize(
    ("gang", "kind", "beside"),
    [("none", "job", ["service"]), ("volcano", "job", ["podgroup", "service"]), ("jobset", "jobset", [])],
)
def test_what_was_submitted_is_found_and_deleted_with_what_is_around_it(
    cluster: Cluster, tmp_path: Path, gang: str, kind: str, beside: list[str]
) -> None:
    """From job.json alone, which did not name a gang before there were gangs."""
    submitted(cluster, "JobSet" if kind == "jobset" else "Job", pods=2)
    for other in beside:
        cluster.write(other, {"status": {"phase": "Running"}})
    record = {
        "launcher": "kubernetes", "namespace": "nlp", "name": NAME, "token": "t", "log_began": 0, "gang": gang,
        "submitted": "2026-11-26T01:02:03Z",
    }  # fmt: skip
    (tmp_path / JOB).write_text(json.dumps({k: v for k, v in record.items() if v != "none"}))
    job = find_job(tmp_path)
    assert job is not None
    assert str(job.state()) == "Active (2 of 2 pods ready)"
    job.forget()
    assert {path.stem for path in cluster.state.glob("*.json")} == {kind, "status"}, "the job is kept for a day"
    job.cancel()
    assert {path.stem for path in cluster.state.glob("*.json")} == {"status"}
    assert not job.is_alive()


@pytest.mark.parametrize(("timeout_s", "stuck"), [(None, True), (1800, False)])
def test_whoever_finds_a_job_waits_as_long_for_its_image_as_its_submitter(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, timeout_s: int | None, stuck: bool
) -> None:
    """As long as 180 s where the record does not tell."""
    submitted(cluster)
    cluster.write("pods", waiting("ImagePullBackOff"))
    record = {
        "launcher": "kubernetes", "namespace": "nlp", "name": NAME, "token": "t", "log_began": 0,
        "submitted": "2026-11-26T01:02:03Z", **({} if timeout_s is None else {"start_timeout_s": timeout_s}),
    }  # fmt: skip
    (tmp_path / JOB).write_text(json.dumps(record))
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("pipeline.launchers.kubernetes.time", clock)
    now, states = [0.0], []
    job = find_job(tmp_path)
    assert job is not None
    for now[0] in (1000.0, 1170.0, 1190.0):
        state = job.state()
        assert state is not None
        states.append(state.is_stuck)
    assert states == [False, False, stuck]


def test_a_job_is_not_submitted_to_a_queue_that_kueue_does_not_have(cluster: Cluster, tmp_path: Path) -> None:
    values = {name: "" for name, _ in Kubernetes.get_params()} | {
        "namespace": "nlp",
        "mount_path": "/",
        "queue": "team",
    }
    scheduler = KubernetesScheduler(Kubernetes(**{**values, "gang": "kueue", "start_timeout_s": 1.0}), 2020)
    work = StageCommand("pretrain-phase1", tmp_path, -1, "0" * 64, [], 1, True, None)
    try:
        with pytest.raises(UserError, match="queue = team is not a LocalQueue in namespace nlp"):
            Job.submit(work, scheduler)
        assert not (tmp_path / JOB).exists()
    finally:
        (cluster.state / "deleted").touch()


class Queued:
    """A scheduler whose job was preempted: the job waits, and the result of its last pod is still there."""

    name, place = "kubernetes", dict[str, str]()

    def __init__(self, clock: SimpleNamespace, seconds: float) -> None:
        self.asked: list[float] = []
        self._clock, self._seconds = clock, seconds

    def ask(self, job_id: str) -> State:
        self.asked.append(self._clock.monotonic())
        return State("Suspended", "in queue team", is_alive=self.asked[-1] < self._seconds)

    def find(self, record: dict[str, Any]) -> None: ...
    def tidy(self, job_id: str) -> None: ...
    def cancel(self, job_id: str) -> None: ...
    def submit(self, work: Any, job: Job) -> str:
        raise NotImplementedError


def test_a_job_that_waits_for_hours_is_asked_every_15_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
    monkeypatch.setattr(jobs, "time", clock)
    result = {"status": 75, "stopped_by": 15, "hung": False, "error": "stopped", "is_final": False}
    (tmp_path / STATE).write_text(json.dumps({"token": "t", "result": result}))
    record = {"token": "t", "id": "nlp/x", "name": "x", "log_began": 0}
    (tmp_path / JOB).write_text(json.dumps(record))
    scheduler = Queued(clock, seconds=1000 + 3600)
    assert Job(tmp_path, record, scheduler).wait(from_start=True).status == 75
    assert 3600 / 15 <= len(scheduler.asked) < 3600 / 15 + 20
