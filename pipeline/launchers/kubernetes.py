"""Kubernetes: an indexed Job, one pod a node, and a headless Service under whose name pod 0 is found. No operator.

A supervisor in each pod starts its command again in place; the Job replaces pods that are gone.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from common.errors import EXIT_SOFTWARE, UserError
from common.process import MASTER_ADDR_VARIABLE, NODE_RANK_VARIABLE
from pipeline.launchers.base import StageCommand
from pipeline.launchers.jobs import Job, State, Unreachable
from pipeline.launchers.local import start_on_node
from pipeline.launchers.process import LaunchSpec
from pipeline.launchers.restarts import FINAL_STATUSES
from pipeline.launchers.tools import last_line, run_tool
from pipeline.settings import cluster

#: The label that the Job controller gives to pods, and the annotation with their index (Kubernetes 1.28 and newer;
#: podFailurePolicy is stable from 1.31 on).
_JOB_LABEL, _INDEX = "batch.kubernetes.io/job-name", "batch.kubernetes.io/job-completion-index"
#: Exit statuses after which the Job fails and all its pods end. After any other (killed, evicted) the pod is replaced.
_GIVEN_UP = (*FINAL_STATUSES, EXIT_SOFTWARE)
#: Pods that may be replaced in a Job; `supervisor` limits restarts by their progress.
_REPLACEMENTS = 1000
#: Reasons for which a pod waits although it has a node (kubelet's images and container runtime).
_NEVER_START = frozenset(("InvalidImageName", "ErrImageNeverPull"))
_CANNOT_START = _NEVER_START | {
    *("ErrImagePull", "ImagePullBackOff", "ImageInspectError", "RegistryUnavailable", "CreateContainerConfigError"),
    *("CreateContainerError", "RunContainerError", "CrashLoopBackOff"),
}
#: [kubernetes] start_timeout_s of a run that waits for a job submitted by another.
_START_TIMEOUT_S = 180.0
#: Seconds in which an evicted pod may save, and for which a finished Job is kept.
_GRACE_S, _KEPT_S = 120, 24 * 3600


class KubernetesScheduler:
    name = "kubernetes"

    def __init__(self, settings: cluster.Kubernetes | None = None, master_port: int = 0) -> None:
        """`settings` and the port are needed only for `submit`."""
        self._settings, self._master_port = settings, master_port
        #: When pods that cannot start were first seen, on the clock of `time.monotonic`.
        self._failing_since: float | None = None
        self.place = {} if settings is None else {"namespace": settings.namespace}

    def submit(self, work: StageCommand, job: Job) -> str:
        assert self._settings is not None
        text = as_yaml(manifest(work, job.record, self._settings, self._master_port))
        (work.directory / "job.yaml").write_text(text, encoding="utf-8")
        done = _kubectl("apply", "-f", "-", given=text)
        if done.returncode:
            raise UserError(f"kubectl apply refused {work.directory / 'job.yaml'}: {last_line(done)}")
        return f"{self._settings.namespace}/{job.record['name']}"

    def find(self, record: dict[str, Any]) -> str | None:
        job_id = f"{record['namespace']}/{record['name']}"
        return None if self.ask(job_id) is None else job_id

    def ask(self, job_id: str) -> State | None:
        job = _get(job_id, "job", job_id.partition("/")[2])
        if job is None:
            return None
        status: dict[str, Any] = job.get("status", {})
        for condition in status.get("conditions", []):
            if condition["type"] in ("Complete", "Failed") and condition["status"] == "True":
                said = "; ".join(condition[key] for key in ("reason", "message") if condition.get(key))
                return State(condition["type"], said, is_alive=False)
        if "deletionTimestamp" in job["metadata"]:
            return State("Terminating", "", is_alive=True)
        pods = f"{status.get('ready', 0)} of {job['spec']['parallelism']} pods ready"
        complaints = self._complaints(job_id)
        why = [f"{reason}: {message}" if message else reason for reason, message in sorted(complaints.items())]
        return State("Active", "; ".join([pods, *why]), is_alive=True, is_stuck=self._is_stuck(complaints.keys()))

    def _is_stuck(self, reasons: Collection[str]) -> bool:
        """Whether pods have been unable to start for too long; Kubernetes itself retries forever."""
        failing = _CANNOT_START.intersection(reasons)
        if not failing:
            self._failing_since = None
            return False
        self._failing_since = self._failing_since or time.monotonic()
        timeout_s = self._settings.start_timeout_s if self._settings is not None else _START_TIMEOUT_S
        return not failing.isdisjoint(_NEVER_START) or time.monotonic() - self._failing_since >= timeout_s

    @staticmethod
    def _complaints(job_id: str) -> dict[str, str]:
        """Reasons and messages why pods are not running yet: no node has room, an image cannot be pulled, a volume or
        configuration is missing."""
        pods = _get(job_id, "pods", f"--selector={_JOB_LABEL}={job_id.partition('/')[2]}") or {}
        found = dict[str, str]()
        for pod in pods.get("items", []):
            status = pod.get("status", {})
            waiting = [c.get("state", {}).get("waiting", {}) for c in status.get("containerStatuses", [])]
            reasons = [*waiting, *(c for c in status.get("conditions", []) if c.get("status") == "False")]
            found |= {
                r["reason"]: " ".join(str(r.get("message", "")).split())
                for r in reasons
                if r.get("reason") not in (None, "ContainerCreating", "PodCompleted", "ContainersNotReady")
            }
        return found

    def cancel(self, job_id: str) -> None:
        # In the foreground, so that the Job exists until its pods are gone.
        self._delete(job_id, "job", "--cascade=foreground")
        self._delete(job_id, "service")

    def tidy(self, job_id: str) -> None:
        done = _in_namespace(job_id, "delete", "service", job_id.partition("/")[2], "--ignore-not-found")
        if done.returncode:
            print(f"note: the Service {job_id} is left: {last_line(done)}", flush=True)

    @staticmethod
    def _delete(job_id: str, kind: str, *options: str) -> None:
        name = job_id.partition("/")[2]
        done = _in_namespace(job_id, "delete", kind, name, "--ignore-not-found", "--wait=false", *options)
        if done.returncode:
            raise Unreachable(last_line(done))


def manifest(
    work: StageCommand, record: dict[str, Any], settings: cluster.Kubernetes, master_port: int
) -> list[dict[str, Any]]:
    """The Service and the Job. Raises `UserError` if the pods would not see the stage directory."""
    name = record["name"]
    mount, directory, here = Path(settings.mount_path), work.directory.absolute(), Path.cwd()
    if not directory.is_relative_to(mount) or (not work.directory.is_absolute() and not here.is_relative_to(mount)):
        raise UserError(
            f"{directory} is not below [kubernetes] mount_path = {mount}, which is all that the pods share with this "
            f"machine; set [run] work_dir to a directory there"
        )
    labels = {"app.kubernetes.io/name": "bert-pretraining-pipeline", "app.kubernetes.io/instance": name}
    metadata = {"name": name, "namespace": settings.namespace, "labels": labels}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {
            "clusterIP": "None",
            "selector": {_JOB_LABEL: name},
            "publishNotReadyAddresses": True,  # pods look for each other before they are ready
            "ports": [{"name": "rendezvous", "port": master_port}],
        },
    }
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata,
        "spec": {
            "completionMode": "Indexed",
            "completions": work.nodes,
            "parallelism": work.nodes,
            "backoffLimit": _REPLACEMENTS,
            "ttlSecondsAfterFinished": _KEPT_S,
            "podFailurePolicy": {
                "rules": [
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                    {"action": "FailJob", "onExitCodes": {"operator": "In", "values": sorted(_GIVEN_UP)}},
                ]
            },
            "template": {
                "metadata": {"labels": labels},
                "spec": _pod(name, directory, record["token"], here if here.is_relative_to(mount) else mount, settings),
            },
        },
    }
    return [service, job]


def _pod(name: str, directory: Path, token: str, cwd: Path, settings: cluster.Kubernetes) -> dict[str, Any]:
    index = {"fieldRef": {"fieldPath": f"metadata.annotations['{_INDEX}']"}}
    quantities = settings.quantities
    container = {
        "name": "trainer",
        "image": settings.image,
        "command": ["python", "-m", "pipeline.launchers.supervisor", str(directory), token],
        "workingDir": str(cwd),
        "env": [
            {"name": NODE_RANK_VARIABLE, "valueFrom": index},
            {"name": MASTER_ADDR_VARIABLE, "value": f"{name}-0.{name}"},
        ],
        "resources": {"limits": quantities, "requests": quantities},
        # EFA registers locked memory.
        "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
        "volumeMounts": [
            {"name": "shared", "mountPath": settings.mount_path},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
    apart = {"labelSelector": {"matchLabels": {_JOB_LABEL: name}}, "topologyKey": "kubernetes.io/hostname"}
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "subdomain": name,
        "terminationGracePeriodSeconds": _GRACE_S,
        "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}},
        # Nodes with devices are tainted against pods that do not request them.
        "tolerations": [{"key": q, "operator": "Exists", "effect": "NoSchedule"} for q in quantities if "/" in q],
        "containers": [container],
        "volumes": [
            {"name": "shared", "persistentVolumeClaim": {"claimName": settings.volume_claim}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }
    if settings.labels:
        pod["nodeSelector"] = settings.labels
    if settings.service_account:
        pod["serviceAccountName"] = settings.service_account
    return pod


def as_yaml(documents: list[dict[str, Any]]) -> str:
    import yaml

    class Plain(yaml.SafeDumper):
        """Writes no anchors (`&id001`) for objects that occur twice."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

    return yaml.dump_all(documents, Dumper=Plain, sort_keys=False)


class InPod:
    """The supervisor's surroundings in a pod. SIGTERM: the pod is evicted, or the Job was deleted."""

    limit_signal: signal.Signals | None = None
    is_restarted = False  # by the count of starts in job-state.json

    def __init__(self) -> None:
        self.rank = int(os.environ[NODE_RANK_VARIABLE])

    def start(self, nodes: int, *, end_together: bool) -> LaunchSpec:
        return start_on_node(self.rank, os.environ[MASTER_ADDR_VARIABLE])

    def requeue(self) -> str | None:
        """Restart in place: the remaining pods rendezvous again with those that replace the others."""
        return None


def _get(job_id: str, *words: str) -> dict[str, Any] | None:
    """The object from `kubectl get`; None if it does not exist. Raises `Unreachable`."""
    done = _in_namespace(job_id, "get", *words, "--output=json")
    if done.returncode:
        if "NotFound" in done.stderr:
            return None
        raise Unreachable(last_line(done))
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _in_namespace(job_id: str, *words: str) -> subprocess.CompletedProcess[str]:
    return _kubectl(f"--namespace={job_id.partition('/')[0]}", *words)


def _kubectl(*words: str, given: str | None = None) -> subprocess.CompletedProcess[str]:
    absent = "[cluster] launcher = kubernetes needs it; `python -m pipeline manifest` prints what it would apply"
    return run_tool("kubectl", *words, absent=absent, given=given)
