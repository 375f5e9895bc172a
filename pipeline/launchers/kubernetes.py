"""Kubernetes: submits an indexed Job, alone or with what `[kubernetes] gang` puts around it, and reports its state.

A supervisor in each pod restarts its command in place; the Job replaces pods that are gone.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Collection, Iterable
from typing import Any

from common.errors import UserError
from common.process import MASTER_ADDR_VARIABLE, NODE_RANK_VARIABLE
from pipeline.launchers.base import StageCommand
from pipeline.launchers.jobs import OBJECTS, Job, State, Unreachable
from pipeline.launchers.kubernetes_manifest import (
    GANGS,
    JOB_LABEL,
    LOCAL_QUEUE,
    POD_GROUP,
    QUEUE_LABEL,
    as_yaml,
    manifest,
)
from pipeline.launchers.local import start_on_node
from pipeline.launchers.process import LaunchSpec
from pipeline.launchers.tools import last_line, run_tool
from pipeline.settings import cluster

#: Reasons for which a pod waits although it has a node (kubelet's images and container runtime).
_NEVER_START = frozenset(("InvalidImageName", "ErrImageNeverPull"))
_CANNOT_START = _NEVER_START | {
    *("ErrImagePull", "ImagePullBackOff", "ImageInspectError", "RegistryUnavailable", "CreateContainerConfigError"),
    *("CreateContainerError", "RunContainerError", "CrashLoopBackOff"),
}
#: [kubernetes] start_timeout_s of a job whose record does not tell it.
START_TIMEOUT_S = 180.0
#: Kueue's record of a Job or JobSet, and the label with that object's UID.
_WORKLOAD, _WORKLOAD_OF = "workloads.kueue.x-k8s.io", "kueue.x-k8s.io/job-uid"
#: Conditions of a Workload that say why it has no quota, with the status at which they do.
_WHY_QUEUED = (("Evicted", "True"), ("QuotaReserved", "False"))


class KubernetesScheduler:
    name = "kubernetes"

    def __init__(
        self,
        settings: cluster.Kubernetes | None = None,
        master_port: int = 0,
        *,
        gang: str = "none",
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        """`settings` and the port are needed only for `submit`; without them the others are those of the submitted
        job."""
        self._settings, self._master_port = settings, master_port
        if settings is not None:
            gang, start_timeout_s = settings.gang, settings.start_timeout_s
        self._gang, self._start_timeout_s = GANGS[gang], start_timeout_s
        #: When pods that cannot start were first seen, on the clock of `time.monotonic`.
        self._failing_since: float | None = None
        self.place: dict[str, Any] = {}
        if settings is not None:
            self.place = {"namespace": settings.namespace, "gang": gang, "start_timeout_s": start_timeout_s}

    def submit(self, work: StageCommand, job: Job) -> str:
        assert self._settings is not None
        if self._settings.is_kueues:
            _require_queue(self._settings.namespace, self._settings.queue)
        text = as_yaml(manifest(work, job.record, self._settings, self._master_port))
        (work.directory / OBJECTS).write_text(text, encoding="utf-8")
        done = _kubectl("apply", "-f", "-", given=text)
        if done.returncode:
            # Of several objects, those that were accepted exist: without its PodGroup a Job would wait forever.
            _kubectl("delete", "-f", "-", "--ignore-not-found", "--wait=false", given=text)
            raise UserError(f"kubectl apply refused {work.directory / OBJECTS}: {last_line(done)}")
        return f"{self._settings.namespace}/{job.record['name']}"

    def find(self, record: dict[str, Any]) -> str | None:
        job_id = f"{record['namespace']}/{record['name']}"
        return None if self.ask(job_id) is None else job_id

    def ask(self, job_id: str) -> State | None:
        found = _get(job_id, self._gang.kind, _name(job_id))
        if found is None:
            return None
        for condition in found.get("status", {}).get("conditions", []):
            if condition["type"] in ("Complete", "Completed", "Failed") and condition["status"] == "True":
                said = "; ".join(condition[key] for key in ("reason", "message") if condition.get(key))
                return State(condition["type"], said, is_alive=False)
        if "deletionTimestamp" in found["metadata"]:
            return State("Terminating", "", is_alive=True)
        if found["spec"].get("suspend"):  # not admitted yet, or preempted: its pods are gone, and it will continue
            self._failing_since = None
            return State("Suspended", "; ".join(_why_queued(job_id, found["metadata"])), is_alive=True)
        return self._state_of_pods(job_id, _job_spec(found)["parallelism"])

    def _state_of_pods(self, job_id: str, wanted: int) -> State:
        selector = f"--selector={JOB_LABEL}={_name(job_id)}{self._gang.job_suffix}"
        pods = (_get(job_id, "pods", selector) or {}).get("items", [])
        ready = sum(_holds(pod.get("status", {}), "Ready") for pod in pods)
        complaints = _complaints(pods)
        if ready < wanted and POD_GROUP in self._gang.beside:
            complaints |= _volcanos_complaint(job_id)
        state = "; ".join([f"{ready} of {wanted} pods ready", *_texts(complaints)])
        return State("Active", state, is_alive=True, is_stuck=self._is_stuck(complaints.keys()))

    def _is_stuck(self, reasons: Collection[str]) -> bool:
        """Whether pods have been unable to start for too long; Kubernetes itself retries forever."""
        failing = _CANNOT_START.intersection(reasons)
        if not failing:
            self._failing_since = None
            return False
        self._failing_since = self._failing_since or time.monotonic()
        has_waited = time.monotonic() - self._failing_since >= self._start_timeout_s
        return has_waited or not failing.isdisjoint(_NEVER_START)

    def cancel(self, job_id: str) -> None:
        # In the foreground, so that the object exists until its pods are gone.
        done = [_delete(job_id, self._gang.kind, "--wait=false", "--cascade=foreground")]
        done += [_delete(job_id, kind, "--wait=false") for kind in self._gang.beside]
        for failed in filter(lambda one: one.returncode, done):
            raise Unreachable(last_line(failed))

    def tidy(self, job_id: str) -> None:
        for kind in self._gang.beside:
            done = _delete(job_id, kind)
            if done.returncode:
                print(f"note: {kind} {job_id} was not deleted: {last_line(done)}", flush=True)


def _job_spec(found: dict[str, Any]) -> dict[str, Any]:
    """The spec of a Job, or of a JobSet's only Job."""
    spec: dict[str, Any] = found["spec"]
    for replicated in spec.get("replicatedJobs", []):
        spec = replicated["template"]["spec"]
    return spec


def _holds(status: dict[str, Any], condition: str) -> bool:
    return any(c["type"] == condition and c["status"] == "True" for c in status.get("conditions", []))


def _complaints(pods: Iterable[dict[str, Any]]) -> dict[str, str]:
    """Reasons and messages why pods are not running yet: no node has room, an image cannot be pulled, a volume or
    configuration is missing."""
    found = dict[str, str]()
    for pod in pods:
        status = pod.get("status", {})
        waiting = [c.get("state", {}).get("waiting", {}) for c in status.get("containerStatuses", [])]
        reasons = [*waiting, *(c for c in status.get("conditions", []) if c.get("status") == "False")]
        found |= {
            r["reason"]: r.get("message", "")
            for r in reasons
            if r.get("reason") not in (None, "ContainerCreating", "PodCompleted", "ContainersNotReady")
        }
    return found


def _volcanos_complaint(job_id: str) -> dict[str, str]:
    """Why Volcano does not start the pods: its queue is full, or not all of them fit at once."""
    status = (_get(job_id, POD_GROUP, _name(job_id)) or {}).get("status", {})
    phase = status.get("phase", "Pending")
    if phase == "Running":
        return {}
    said = [c.get("message", "") for c in status.get("conditions", []) if c.get("type") == "Unschedulable"]
    return {f"PodGroup {phase}": said[-1] if said else ""}


def _why_queued(job_id: str, metadata: dict[str, Any]) -> list[str]:
    """The queue of a suspended object, and Kueue's reasons where this user may read them."""
    queue = metadata.get("labels", {}).get(QUEUE_LABEL)
    if queue is None:
        return []
    try:
        workloads = _get(job_id, _WORKLOAD, f"--selector={_WORKLOAD_OF}={metadata['uid']}") or {}
    except Unreachable:
        workloads = {}
    conditions = [
        c for workload in workloads.get("items", []) for c in workload.get("status", {}).get("conditions", [])
    ]
    reasons = {c["reason"]: c.get("message", "") for c in conditions if (c["type"], c["status"]) in _WHY_QUEUED}
    return [f"in queue {queue}", *_texts(reasons)]


def _texts(reasons: dict[str, str]) -> list[str]:
    """One line for each reason with its message."""
    messages = {reason: " ".join(str(message).split()) for reason, message in sorted(reasons.items())}
    return [f"{reason}: {message}" if message else reason for reason, message in messages.items()]


def _require_queue(namespace: str, queue: str) -> None:
    """Raises `UserError` unless Kueue has the queue: without it the suspended job would wait forever."""
    at = f"[kubernetes] queue = {queue}"
    try:
        found = _get(f"{namespace}/{queue}", LOCAL_QUEUE, queue)
    except Unreachable as error:
        raise UserError(
            f"{at} cannot be looked up: {error}; is Kueue installed, and may you get LocalQueues?"
        ) from None
    if found is None:
        raise UserError(
            f"{at} is not a LocalQueue in namespace {namespace}; see `kubectl get {LOCAL_QUEUE} -n {namespace}`"
        )


class InPod:
    """The supervisor's surroundings in a pod. SIGTERM: the pod is evicted, or the Job was deleted."""

    limit_signal: signal.Signals | None = None
    is_restarted = False  # the count of starts in job-state.json shows it

    def __init__(self) -> None:
        self.rank = int(os.environ[NODE_RANK_VARIABLE])

    def start(self, nodes: int, *, end_together: bool) -> LaunchSpec:
        return start_on_node(self.rank, os.environ[MASTER_ADDR_VARIABLE])

    def keeps_nodes(self) -> bool:
        """A lost pod is replaced by its Job, and the others wait for it."""
        return True

    def requeue(self) -> str | None:
        """Restart in place: the remaining pods rendezvous again with those that replace the others."""
        return None


def _name(job_id: str) -> str:
    return job_id.partition("/")[2]


def _get(job_id: str, *words: str) -> dict[str, Any] | None:
    """The object from `kubectl get`; None if it does not exist. Raises `Unreachable`."""
    done = _in_namespace(job_id, "get", *words, "--output=json")
    if done.returncode:
        if "NotFound" in done.stderr:
            return None
        raise Unreachable(last_line(done))
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _delete(job_id: str, kind: str, *options: str) -> subprocess.CompletedProcess[str]:
    return _in_namespace(job_id, "delete", kind, _name(job_id), "--ignore-not-found", *options)


def _in_namespace(job_id: str, *words: str) -> subprocess.CompletedProcess[str]:
    return _kubectl(f"--namespace={job_id.partition('/')[0]}", *words)


def _kubectl(*words: str, given: str | None = None) -> subprocess.CompletedProcess[str]:
    absent = "[cluster] launcher = kubernetes needs it; `python -m pipeline manifest` prints what it would apply"
    return run_tool("kubectl", *words, absent=absent, given=given)
