"""What is applied to Kubernetes: an indexed Job, one pod per node, and what lets its pods find each other and start
together.

`[kubernetes] gang` chooses the objects. `none`: the Job, and a headless Service under whose name pod 0 is found.
`kueue`: the same, suspended until Kueue admits it. `volcano`: the same with a PodGroup, scheduled by Volcano.
`jobset`: a JobSet of that Job alone, which makes the Service itself, and is suspended for Kueue if there is a `queue`.

Field names: batch/v1, jobset.x-k8s.io/v1alpha2, scheduling.volcano.sh/v1beta1, and the labels that Kueue documents.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import EXIT_SOFTWARE, UserError
from common.process import MASTER_ADDR_VARIABLE, NODE_RANK_VARIABLE
from pipeline.launchers.base import StageCommand
from pipeline.launchers.restarts import FINAL_STATUSES
from pipeline.settings import cluster

#: The label that the Job controller gives to pods, and the annotation with their index (Kubernetes 1.28 and newer;
#: podFailurePolicy is stable from 1.31 on).
JOB_LABEL, _INDEX = "batch.kubernetes.io/job-name", "batch.kubernetes.io/job-completion-index"
#: The label that gives a Job or JobSet to one of Kueue's queues.
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
#: What kubectl calls the other objects.
LOCAL_QUEUE, POD_GROUP = "localqueues.kueue.x-k8s.io", "podgroups.scheduling.volcano.sh"
#: Exit statuses after which the Job fails and all its pods end. After any other (killed, evicted) the pod is replaced.
_GIVEN_UP = (*FINAL_STATUSES, EXIT_SOFTWARE)
#: Pods that may be replaced in a Job; `supervisor` limits restarts by their progress.
_REPLACEMENTS = 1000
#: Seconds in which an evicted pod may save, and for which a finished Job is kept.
_GRACE_S, _KEPT_S = 120, 24 * 3600


@dataclass(frozen=True)
class Gang:
    """Where the objects of one value of `[kubernetes] gang` are found."""

    #: What kubectl calls the object that is submitted, waited for and deleted.
    kind: str = "job"
    #: Objects of the same name that are not deleted with it.
    beside: tuple[str, ...] = ("service",)
    #: What follows the submitted object's name in the name of the Job that owns the pods.
    job_suffix: str = ""


GANGS = {
    "none": Gang(),
    "kueue": Gang(),
    "volcano": Gang(beside=("service", POD_GROUP)),
    # A JobSet names its Jobs <jobset>-<replicatedJob>-<index>.
    "jobset": Gang("jobsets.jobset.x-k8s.io", (), "-node-0"),
}


def manifest(
    work: StageCommand, record: dict[str, Any], settings: cluster.Kubernetes, master_port: int
) -> list[dict[str, Any]]:
    """All objects of a job, the one that is waited for last. Raises `UserError` if the pods would not see the stage
    directory."""
    name = record["name"]
    mount, directory, here = Path(settings.mount_path), work.directory.absolute(), Path.cwd()
    if not directory.is_relative_to(mount) or (not work.directory.is_absolute() and not here.is_relative_to(mount)):
        raise UserError(
            f"{directory} is not below [kubernetes] mount_path = {mount}, which is all that the pods share with this "
            f"machine; set [run] work_dir to a directory there"
        )
    labels = {"app.kubernetes.io/name": "bert-pretraining-pipeline", "app.kubernetes.io/instance": name}
    metadata = {"name": name, "namespace": settings.namespace, "labels": labels}
    queued = {**metadata, "labels": {**labels, QUEUE_LABEL: settings.queue}} if settings.is_kueues else metadata
    suspended = {"suspend": True} if settings.is_kueues else {}  # until Kueue admits it
    template = {
        "metadata": {"labels": labels},
        "spec": _pod(name, directory, record["token"], here if here.is_relative_to(mount) else mount, settings),
    }
    if settings.gang == "volcano":
        template["metadata"] |= {"annotations": {"scheduling.k8s.io/group-name": name}}
        template["spec"] |= {"schedulerName": "volcano"}
    job = _job_spec(work.nodes, template)
    if settings.gang == "jobset":
        return [_jobset(queued, suspended, job)]
    objects: list[dict[str, Any]] = [_service(metadata, master_port)]
    if settings.gang == "volcano":
        group = {"minMember": work.nodes, "queue": settings.queue or "default"}
        objects.append(
            {"apiVersion": "scheduling.volcano.sh/v1beta1", "kind": "PodGroup", "metadata": metadata, "spec": group}
        )
    return [*objects, {"apiVersion": "batch/v1", "kind": "Job", "metadata": queued, "spec": {**suspended, **job}}]


def _service(metadata: dict[str, Any], master_port: int) -> dict[str, Any]:
    spec = {
        "clusterIP": "None",
        "selector": {JOB_LABEL: metadata["name"]},
        "publishNotReadyAddresses": True,  # pods look for each other before they are ready
        "ports": [{"name": "rendezvous", "port": master_port}],
    }
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec}


def _job_spec(nodes: int, template: dict[str, Any]) -> dict[str, Any]:
    return {
        "completionMode": "Indexed",
        "completions": nodes,
        "parallelism": nodes,
        "backoffLimit": _REPLACEMENTS,
        "ttlSecondsAfterFinished": _KEPT_S,
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {"action": "FailJob", "onExitCodes": {"operator": "In", "values": sorted(_GIVEN_UP)}},
            ]
        },
        "template": template,
    }


def _jobset(metadata: dict[str, Any], suspended: dict[str, Any], job: dict[str, Any]) -> dict[str, Any]:
    """A JobSet of one Job. It is never restarted as a whole: the Job replaces pods, and their supervisors resume."""
    spec = {
        **suspended,
        "ttlSecondsAfterFinished": job.pop("ttlSecondsAfterFinished"),
        "network": {
            "enableDNSHostnames": True,
            "subdomain": metadata["name"],
            "publishNotReadyAddresses": True,  # pods look for each other before they are ready
        },
        "failurePolicy": {"maxRestarts": 0},
        "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": job}}],
    }
    return {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": metadata, "spec": spec}


def _pod(name: str, directory: Path, token: str, cwd: Path, settings: cluster.Kubernetes) -> dict[str, Any]:
    index = {"fieldRef": {"fieldPath": f"metadata.annotations['{_INDEX}']"}}
    quantities, job = settings.quantities, name + GANGS[settings.gang].job_suffix
    container = {
        "name": "trainer",
        "image": settings.image,
        "command": ["python", "-m", "pipeline.launchers.supervisor", str(directory), token],
        "workingDir": str(cwd),
        "env": [
            {"name": NODE_RANK_VARIABLE, "valueFrom": index},
            {"name": MASTER_ADDR_VARIABLE, "value": f"{job}-0.{name}"},
        ],
        "resources": {"limits": quantities, "requests": quantities},
        # EFA registers locked memory.
        "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
        "volumeMounts": [
            {"name": "shared", "mountPath": settings.mount_path},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
    apart = {"labelSelector": {"matchLabels": {JOB_LABEL: job}}, "topologyKey": "kubernetes.io/hostname"}
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
