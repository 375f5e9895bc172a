"""Jobs on Kubernetes: manifests against its schemas; what luigi and the pods do, with a stand-in for the cluster
(tests/helpers/kubectl.py). None of it has seen a real one."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import psutil
import pytest
import yaml

from tests.e2e.test_interruptions import LONG, ours, training_directory
from tests.helpers.chain import Chain, one_core, wait_until
from tests.helpers.support import ROOT, command, free_port, metrics, tensors

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


@pytest.mark.parametrize("version", ["1.31", "1.34"])
@pytest.mark.parametrize("words", [(), ("evaluate",), ("--Kubernetes-pod-resources", "nvidia.com/gpu=8")], ids=str)
def test_manifests_are_what_kubernetes_allows(prepared: Chain, words: tuple[str, ...], version: str) -> None:
    for document in documents(prepared, *words):
        kubernetes_validate.validate(document, version, strict=True)


def test_a_broken_manifest_would_be_noticed(prepared: Chain) -> None:
    _, job = documents(prepared)
    job["spec"]["template"]["spec"]["restartPolicies"] = "Never"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, "1.31", strict=True)


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
    ],
)
def test_what_cannot_work_is_one_line(prepared: Chain, words: tuple[str, ...], line: str) -> None:
    done = prepared.ask("manifest", *words, status=35)
    assert line in done.stderr
    assert len(done.stderr.splitlines()) == 1


def supervisors(chain: Chain) -> list[psutil.Process]:
    """What runs in the pods."""
    return [process for process in ours(str(chain.work)) if "pipeline.launchers.supervisor" in process.cmdline()]


class Cluster:
    """The stand-in, first in PATH."""

    def __init__(self, directory: Path) -> None:
        self.state = directory / "state"
        self.state.mkdir()
        program = directory / "kubectl"
        program.write_text(
            f'#!/bin/sh\nexec {shlex.join([sys.executable, str(ROOT / "tests" / "helpers" / "kubectl.py")])} "$@"\n'
        )
        program.chmod(0o755)
        self.environment = {"PATH": f"{directory}:{os.environ['PATH']}", "KUBECTL_STATE": str(self.state)}


@pytest.fixture
def cluster(prepared: Chain, tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    with one_core():
        yield cluster
    (cluster.state / "deleted").touch()
    wait_until(lambda: not supervisors(prepared), timeout_s=30)


def test_pods_meet_again_after_a_killed_worker_and_a_killed_pod(
    prepared: Chain, cluster: Cluster, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.touch()
    env = {**cluster.environment, "FAILPOINT": "micro-step:5.0.1", "FAILPOINT_TOKEN": str(token)}
    luigi = prepared.start("Pretrain", "--phase", "1", **env)
    wait_until(lambda: len(supervisors(prepared)) == 2, timeout_s=30)
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
    wait_until(lambda: not (cluster.state / "job.json").exists(), timeout_s=30)


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
    assert "kubectl is not here" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
