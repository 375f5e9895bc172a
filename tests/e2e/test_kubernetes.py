"""Jobs on Kubernetes: manifests against its schemas; what luigi and the pods do, with a stand-in for the cluster
(tests/helpers/kubernetes/kubectl.py). None of this has run on a real one."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import psutil
import pytest
import yaml

from tests.e2e.test_interruptions import LONG, ours, training_directory
from tests.helpers.chain import Chain, one_core, wait_until
from tests.helpers.kubernetes import crds
from tests.helpers.kubernetes.cluster import Cluster, workload
from tests.helpers.support import command, free_port, metrics, tensors

SETTINGS = """
[cluster]
launcher = kubernetes
nnodes = 2
master_port = {port}
[kubernetes]
image = trainer:1
namespace = nlp
volume_claim = fsx
mount_path = /
pod_resources = {resources}
node_selector = node.kubernetes.io/instance-type=trn1.32xlarge
service_account = trainer
"""
NEURON = "aws.amazon.com/neuron=16 vpc.amazonaws.com/efa=8"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    chain = Chain(tmp_path_factory.mktemp("kubernetes"))
    here = ("--Cluster-launcher", "local", "--Cluster-nnodes", "2", "--Cluster-master-addr", "127.0.0.1")
    chain.run("Precompile", "--phase", "1", *here)
    return Chain(chain.directory, SETTINGS.format(port=free_port(), resources=NEURON))


def documents(chain: Chain, *words: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(chain.ask("manifest", *words).stdout))


def gang(name: str, queue: str = "") -> tuple[str, ...]:
    return ("--Kubernetes-gang", name, *(("--Kubernetes-queue", queue) if queue else ()))


#: Each way of starting pods together.
GANGS = [gang("kueue", "team"), gang("volcano"), gang("volcano", "team"), gang("jobset"), gang("jobset", "team")]


@pytest.mark.parametrize("version", ["1.31", "1.34"])
@pytest.mark.parametrize(
    "words", [(), ("evaluate",), ("--Kubernetes-pod-resources", "nvidia.com/gpu=8"), *GANGS], ids=" ".join
)
def test_manifests_are_what_kubernetes_allows(prepared: Chain, words: tuple[str, ...], version: str) -> None:
    for document in documents(prepared, *words):
        crds.validate(document, version)


def test_what_survival_rests_on_is_what_kubernetes_documents(prepared: Chain) -> None:
    """Names and values from Kubernetes' documentation of Jobs, pod failure policies and headless services. The stand-in
    for kubectl knows nothing of them."""
    service, job = documents(prepared)
    name, pod = job["metadata"]["name"], job["spec"]["template"]["spec"]
    # Pod 0's name resolves, and before pod 0 is ready: all pods wait for it.
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert pod["subdomain"] == service["metadata"]["name"]
    # A pod that is killed is replaced, and one that is evicted may save first and is no failure.
    assert job["spec"]["backoffLimit"] >= 100
    assert pod["restartPolicy"] == "Never"
    assert pod["terminationGracePeriodSeconds"] == 120
    rules = job["spec"]["podFailurePolicy"]["rules"]
    assert [rule["action"] for rule in rules] == ["Ignore", "FailJob"]
    evicted, given_up = rules
    assert evicted == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    assert given_up["onExitCodes"]["operator"] == "In"
    assert {1, 2, 70} <= set(given_up["onExitCodes"]["values"])
    assert not {75, 130, 137, 143} & set(given_up["onExitCodes"]["values"]), "saved and stopped, or killed"


def test_a_broken_manifest_would_be_noticed(prepared: Chain) -> None:
    _, job = documents(prepared)
    job["spec"]["template"]["spec"]["restartPolicies"] = "Never"
    (jobset,) = documents(prepared, *gang("jobset"))
    (replicated,) = jobset["spec"]["replicatedJobs"]
    replicated["template"]["spec"]["parallel"] = 2
    for document in (job, jobset):
        with pytest.raises(kubernetes_validate.ValidationError):
            crds.validate(document, "1.31")
    _, group, _ = documents(prepared, *gang("volcano"))
    group["spec"]["minMembers"] = 2
    with pytest.raises(jsonschema.ValidationError, match="minMembers"):
        crds.validate(group, "1.31")


def test_kueue_gets_the_plain_objects_with_its_label_and_suspended(prepared: Chain) -> None:
    plain, (service, job) = documents(prepared), documents(prepared, *gang("kueue", "team"))
    assert job["metadata"]["labels"].pop("kueue.x-k8s.io/queue-name") == "team"
    assert job["spec"].pop("suspend") is True
    assert [service, job] == plain


def test_volcano_gets_the_plain_objects_and_a_group_of_all_pods(prepared: Chain) -> None:
    plain, (service, group, job) = documents(prepared), documents(prepared, *gang("volcano"))
    pod = job["spec"]["template"]
    name = job["metadata"]["name"]
    assert pod["spec"].pop("schedulerName") == "volcano"
    assert pod["metadata"].pop("annotations") == {"scheduling.k8s.io/group-name": name}
    assert [service, job] == plain
    assert (group["metadata"]["name"], group["metadata"]["namespace"]) == (name, "nlp")
    assert group["spec"] == {"minMember": 2, "queue": "default"}
    _, queued, _ = documents(prepared, *gang("volcano", "team"))
    assert queued["spec"]["queue"] == "team"


def test_a_jobset_has_the_plain_job_under_its_own_names(prepared: Chain) -> None:
    """Its controller names pods <jobset>-<replicated job>-<job>-<pod>, and the Service after the JobSet."""
    (_, job), (jobset,) = documents(prepared), documents(prepared, *gang("jobset"))
    name, spec = jobset["metadata"]["name"], jobset["spec"]
    (replicated,) = spec["replicatedJobs"]
    inner = replicated["template"]["spec"]
    assert (replicated["name"], replicated["replicas"]) == ("node", 1)
    assert (spec["network"]["subdomain"], spec["network"]["enableDNSHostnames"]) == (name, True)
    assert spec["failurePolicy"] == {"maxRestarts": 0}
    assert len(f"{name}-node-0-4095-xxxxx") <= 63, "a pod's name"
    pod, plain = (found["template"]["spec"] for found in (inner, job["spec"]))
    assert {e["name"]: e.get("value") for e in pod["containers"][0]["env"]}[
        "PET_MASTER_ADDR"
    ] == f"{name}-node-0-0.{name}"
    (apart,) = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert apart["labelSelector"]["matchLabels"] == {"batch.kubernetes.io/job-name": f"{name}-node-0"}
    for each in (pod, plain):
        del each["containers"][0]["env"], each["affinity"]
    kept = job["spec"].pop("ttlSecondsAfterFinished")
    assert (inner, spec["ttlSecondsAfterFinished"]) == (job["spec"], kept)
    assert "suspend" not in spec
    (queued,) = documents(prepared, *gang("jobset", "team"))
    assert queued["spec"].get("suspend") is True
    assert queued["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"


def test_there_is_one_pod_on_each_node_and_pod_0_has_a_name(prepared: Chain) -> None:
    service, job = documents(prepared)
    name, spec = job["metadata"]["name"], job["spec"]
    pod = spec["template"]["spec"]
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (2, 2, "Indexed")
    assert (service["metadata"]["name"], service["spec"]["clusterIP"], pod["subdomain"]) == (name, "None", name)
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", name)
    assert len(f"{name}-4095") <= 63, "a host's name"
    container = pod["containers"][0]
    assert container["resources"]["limits"] == {"aws.amazon.com/neuron": "16", "vpc.amazonaws.com/efa": "8"}
    assert {e["name"]: e.get("value") for e in container["env"]}["PET_MASTER_ADDR"] == f"{name}-0.{name}"
    (apart,) = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert apart["topologyKey"] == "kubernetes.io/hostname"
    _, evaluation = documents(prepared, "evaluate")
    assert evaluation["spec"]["completions"] == 1


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("tokenize_corpus",), "tokenize_corpus is not run on a cluster; allowed: Precompile, Pretrain, Evaluate"),
        (("--Kubernetes-mount-path", "/fsx"), "is not below [kubernetes] mount_path = /fsx"),
        (("--Kubernetes-pod-resources", "gpu"), "pod_resources: gpu is not allowed; write name=value"),
        (("--Kubernetes-gang", "kueue"), "gang = kueue needs queue, the name of one of Kueue's LocalQueues"),
        (("--Kubernetes-queue", "team"), "queue = team goes with gang = kueue, jobset or volcano; empty it"),
        (gang("pbs"), "gang = pbs is not allowed; allowed: none, kueue, jobset, volcano"),
    ],
)
def test_what_cannot_work_is_one_line(prepared: Chain, words: tuple[str, ...], line: str) -> None:
    done = prepared.ask("manifest", *words, status=35)
    assert line in done.stderr
    assert len(done.stderr.splitlines()) == 1


def supervisors(chain: Chain) -> list[psutil.Process]:
    """What runs in the pods."""
    return pods_of(chain.work)


@pytest.fixture
def cluster(prepared: Chain, tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    cluster.write("localqueue", {"metadata": {"name": "team"}})
    with one_core():
        yield cluster
    (cluster.state / "deleted").touch()
    wait_until(lambda: not supervisors(prepared))


@pytest.mark.slow
def test_pods_meet_again_after_a_killed_worker_and_a_killed_pod(
    prepared: Chain, cluster: Cluster, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.touch()
    env = {**cluster.environment, "FAILPOINT": "micro-step:5.0.1", "FAILPOINT_TOKEN": str(token)}
    luigi = prepared.start("Pretrain", "--phase", "1", **env)
    wait_until(lambda: len(supervisors(prepared)) == 2)
    luigi.kill()
    luigi.wait()
    # A pod is lost before its command has begun, or soon after: the Job replaces it.
    supervisors(prepared)[-1].kill()
    done = prepared.run("Pretrain", "--phase", "1", **cluster.environment)
    assert re.search(r"kubernetes job nlp/pretrain-phase1-\S+ is running already; waiting for it", done.stderr)
    assert not token.exists()
    there = prepared.latest("pretrain-phase1")
    assert "resuming from checkpoint" in (there / "stage.log").read_text()
    assert not (cluster.state / "service.json").exists(), "nothing is left but the Job, for a day"
    here = ("--Cluster-launcher", "local", "--Cluster-nnodes", "1", "--Cluster-nproc-per-node", "2")
    prepared.run("Pretrain", "--phase", "1", *here, "--Run-work-dir", str(tmp_path / "w"))
    straight = (tmp_path / "w" / "latest" / "pretrain-phase1").resolve()
    assert straight.name == there.name
    wanted, got = (tensors(path / "checkpoints" / "ckpt_8") for path in (straight, there))
    for name, tensor in wanted.items():
        assert got[name].tobytes() == tensor.tobytes(), name


@pytest.mark.slow
@pytest.mark.parametrize("words", [gang("kueue", "team"), gang("jobset", "team")], ids=lambda words: words[1])
def test_a_preempted_job_waits_in_its_queue_and_goes_on(
    prepared: Chain, cluster: Cluster, words: tuple[str, ...]
) -> None:
    """Queued, admitted, preempted in the middle, admitted again; meanwhile another luigi takes over the waiting."""
    words = ("--phase", "1", *words, "--Phase1-ckpt-interval-steps", "1", "--Phase1-max-steps", "60")
    words = (*words, "--Phase1-lr", "0.017" if "kueue" in words else "0.018", "--Kubernetes-start-timeout-s", "1")
    message = "insufficient unused quota for aws.amazon.com/neuron"
    cluster.write("workloads", workload(("QuotaReserved", "False", "Pending", message)))
    luigi = prepared.start("Pretrain", *words, **cluster.environment)
    log = prepared.directory / "luigi.log"
    wait_until(lambda: f"Suspended (in queue team; Pending: {message})" in log.read_text())
    assert f"Pending: {message}" in prepared.status(*words[2:], **cluster.environment)["pretrain-phase1"]["detail"]
    assert not supervisors(prepared)
    luigi.kill()
    luigi.wait()
    (cluster.state / "admitted").touch()
    luigi = prepared.start("Pretrain", *words, **cluster.environment)
    directory = training_directory(prepared, float(words[words.index("--Phase1-lr") + 1]))
    wait_until(lambda: (directory / "checkpoints" / "ckpt_3").is_dir())
    cluster.write("workloads", workload(("Evicted", "True", "Preempted", "to make room for another")))
    (cluster.state / "admitted").unlink()
    wait_until(lambda: "Suspended (in queue team; Preempted: to make room for another)" in log.read_text())
    wait_until(lambda: not supervisors(prepared))
    assert luigi.poll() is None
    (cluster.state / "admitted").touch()
    assert luigi.wait(timeout=120) == 0
    assert "resuming from checkpoint" in (directory / "stage.log").read_text()
    steps = [row["step"] for row in metrics(directory)]
    assert (steps[-1], sorted(set(steps))) == (60, sorted(steps)), "no step is recorded twice"


@pytest.mark.slow
def test_pods_meet_in_a_jobset(prepared: Chain, cluster: Cluster) -> None:
    words = ("Pretrain", "--phase", "1", *gang("jobset"), "--Phase1-lr", "0.019")
    done = prepared.run(*words, **cluster.environment)
    assert "2 of 2 pods ready" in done.stderr
    assert sorted(path.name for path in cluster.state.glob("*.json")) == [
        "jobset.json",
        "localqueue.json",
        "status.json",
    ]


@pytest.mark.slow
def test_volcano_tells_why_the_group_waits(prepared: Chain, cluster: Cluster) -> None:
    words = ("--Phase1-lr", "0.021", *gang("volcano", "team"))
    message = "2/2 tasks in gang unschedulable: pod group is not ready, 2 Pending, 2 minAvailable"
    cluster.write("pods", {"items": []})
    luigi = prepared.start("Pretrain", "--phase", "1", *words, **cluster.environment)
    log = prepared.directory / "luigi.log"
    wait_until(lambda: "0 of 2 pods ready; PodGroup Pending" in log.read_text())
    group = json.loads((cluster.state / "podgroup.json").read_text())
    unschedulable = {"type": "Unschedulable", "status": "True", "reason": "NotEnoughResources", "message": message}
    cluster.write("podgroup", {**group, "status": {"phase": "Inqueue", "conditions": [unschedulable]}})
    wait_until(lambda: f"PodGroup Inqueue: {message}" in log.read_text())
    prepared.ask("cancel", "pretrain-phase1", *words, **cluster.environment)
    assert luigi.wait(timeout=60) == 75
    assert sorted(path.name for path in cluster.state.glob("*.json")) == ["localqueue.json", "pods.json", "status.json"]


@pytest.mark.parametrize(
    ("prepare", "words", "line"),
    [
        (("refused", "PodGroup"), gang("volcano"), 'kubectl apply refused .*: error: no matches for kind "PodGroup"'),
        (
            None,
            gang("kueue", "other"),
            r"\[kubernetes\] queue = other is not a LocalQueue in namespace nlp; see `kubectl",
        ),
        (
            ("absent", "localqueue"),
            gang("jobset", "team"),
            r'queue = team cannot be looked up: .*resource type "localqueues"; is Kueue installed',
        ),
    ],
    ids=["volcano", "queue", "kueue"],
)
def test_what_the_cluster_lacks_is_one_line_and_nothing_is_left(
    prepared: Chain, cluster: Cluster, prepare: tuple[str, str] | None, words: tuple[str, ...], line: str
) -> None:
    (cluster.state / "localqueue.json").unlink(missing_ok=prepare is None)
    if prepare is not None:
        (cluster.state / prepare[0]).write_text(prepare[1])
    done = prepared.run("Pretrain", "--phase", "1", "--Phase1-lr", "0.022", *words, status=30, **cluster.environment)
    assert re.search(f"ERROR: .*{line}", done.stderr), done.stderr
    assert "Traceback" not in done.stderr
    assert not list(cluster.state.glob("*.json"))
    assert not list(prepared.work.glob("pretrain-phase1-*/job.json"))


@pytest.mark.slow
def test_a_cancelled_job_has_saved_its_last_step(prepared: Chain, cluster: Cluster) -> None:
    words = (*LONG, "--Phase1-lr", "0.013")
    luigi = prepared.start("Pretrain", "--phase", "1", *words, **cluster.environment)
    directory = training_directory(prepared, 0.013)
    prepared.ask("cancel", "pretrain-phase1", *words, **cluster.environment)
    assert luigi.wait(timeout=60) == 75
    last = metrics(directory)[-1]["step"]
    assert (directory / "checkpoints" / f"ckpt_{last}").is_dir()
    assert not (directory / "job.json").exists()


def waiting(reason: str, message: str) -> dict[str, Any]:
    """A pod on its node, as kubectl describes it."""
    return {"status": {"phase": "Pending", "containerStatuses": [{"state": {"waiting": {"reason": reason,
            "message": message}}}]}}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reason", "message", "timeout_s"),
    [
        ("ImagePullBackOff", 'Back-off pulling image "trainer:1"', "3"),
        ("CrashLoopBackOff", "back-off 40s restarting failed container", "3"),
        ("InvalidImageName", 'Failed to apply default image tag "Trainer:1"', "100000"),
    ],
)
def test_pods_that_cannot_start_end_the_stage(
    prepared: Chain, cluster: Cluster, reason: str, message: str, timeout_s: str
) -> None:
    (cluster.state / "pods.json").write_text(json.dumps({"items": [waiting(reason, message)]}))
    words = ("Pretrain", "--phase", "1", "--Phase1-lr", "0.015", "--Kubernetes-start-timeout-s", timeout_s)
    done = prepared.run(*words, status=30, **cluster.environment)
    (line,) = [line for line in done.stderr.splitlines() if "pretrain-phase1 failed: " in line]
    assert "can never start as it is: " in line
    assert f"{reason}: {message}" in line
    assert "Traceback" not in done.stderr
    wait_until(lambda: not (cluster.state / "job.json").exists())


@pytest.mark.slow
def test_pods_that_no_node_has_room_for_wait_and_say_why(prepared: Chain, cluster: Cluster) -> None:
    message = "0/3 nodes are available: 3 Insufficient aws.amazon.com/neuron."
    unscheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    pod = {"status": {"phase": "Pending", "conditions": [unscheduled]}}
    (cluster.state / "pods.json").write_text(json.dumps({"items": [pod]}))
    words = ("Pretrain", "--phase", "1", "--Phase1-lr", "0.016", "--Kubernetes-start-timeout-s", "1")
    luigi = prepared.start(*words, **cluster.environment)
    log = prepared.directory / "luigi.log"
    wait_until(lambda: f"Unschedulable: {message}" in log.read_text())
    assert "Unschedulable" in prepared.status(*words[3:], **cluster.environment)["pretrain-phase1"]["detail"]
    assert luigi.poll() is None
    prepared.ask("cancel", "pretrain-phase1", *words[3:], **cluster.environment)
    assert luigi.wait(timeout=60) == 75


def test_without_kubectl_there_is_one_line(prepared: Chain, tmp_path: Path) -> None:
    done: subprocess.CompletedProcess[str] = command(
        *("-m", "luigi", "--module", "pipeline", "Pretrain", "--phase", "1", "--Phase1-lr", "0.014"),
        env={"LUIGI_CONFIG_PATH": str(prepared.config), "PATH": str(tmp_path)},
    )
    assert done.returncode == 30
    assert "kubectl was not found" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_two_pods_build_the_data_of_one_machine_although_one_is_lost(
    prepared: Chain, cluster: Cluster, tmp_path: Path
) -> None:
    there = tmp_path / "w"
    words = ("--Cluster-build-nodes", "2", "--Run-work-dir", str(there))
    luigi = prepared.start("TokenizeCorpus", *words, **cluster.environment)
    wait_until(lambda: len(lost := pods_of(there)) == 2 and lost[-1].kill() is None, timeout_s=60)
    assert luigi.wait(timeout=300) == 0, (prepared.directory / "luigi.log").read_text()
    (tmp_path / "second").mkdir()
    second = Cluster(tmp_path / "second")  # the stand-in has room for one Job
    prepared.run("ShardDataset", "--phase", "1", *words, **second.environment)
    (second.state / "deleted").touch()
    for stage in ("tokenize_corpus", "shard_dataset-phase1"):
        made, wanted = (
            json.loads((path / "manifest.json").read_text())
            for path in ((there / "latest" / stage).resolve(), prepared.latest(stage))
        )
        assert (made["fingerprint"], made["outputs"]) == (wanted["fingerprint"], wanted["outputs"])
    _, job = documents(prepared, "tokenize_corpus", "--Cluster-build-nodes", "3")
    assert (job["spec"]["completions"], job["spec"]["completionMode"]) == (3, "Indexed")


def pods_of(work: Path) -> list[psutil.Process]:
    """What runs in the pods of this work directory."""
    return [process for process in ours(str(work)) if "pipeline.launchers.supervisor" in process.cmdline()]
