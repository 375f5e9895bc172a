"""`python -m pipeline doctor`: each fault that would end a night's run is found before the run begins, and a sound
machine has none. The faults are real: a full tmpfs, a read-only mount, a server that answers 403. Stand-ins:
Trainium's packages and `neuron-ls` (tests/helpers/neuron_machine.py)."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pipeline.commands.doctor import machine
from pipeline.commands.doctor.finding import Plan
from pipeline.tasks.goal import Goal
from tests.conftest import Disk
from tests.helpers import web
from tests.helpers.chain import Chain
from tests.helpers.neuron_machine import hardware, install_package, install_xla_lane
from tests.helpers.slurm import Slurm, missing_programs
from tests.helpers.stores.s3 import serving
from tests.helpers.stores.seaweedfs import KEYS, seaweedfs
from tests.helpers.support import ROOT, assert_one_line_error, free_port

#: No credentials but those of the test.
NO_AWS = {
    "AWS_EC2_METADATA_DISABLED": "true", "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_CONFIG_FILE": "/nonexistent", "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
}  # fmt: skip
Checks = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    """A text and its settings; nothing has been made from it."""
    return Chain(tmp_path_factory.mktemp("doctor"))


def examined(chain: Chain, *words: str, status: int = 0, **env: str) -> Checks:
    """What the doctor found, by check; for a check with several findings, its first problem."""
    said = json.loads(chain.ask("doctor", "--json", *words, status=status, **env).stdout)
    checks: Checks = {}
    for finding in said["checks"]:
        if checks.get(finding["check"], {}).get("level") != "problem":
            checks[finding["check"]] = finding
    assert said["problems"] == sum(finding["level"] == "problem" for finding in said["checks"])
    assert (status == 1) == bool(said["problems"])
    return checks


def problem(chain: Chain, check: str, *words: str, **env: str) -> str:
    """The text of the only problem, which must be that of this check."""
    checks = examined(chain, *words, status=1, **env)
    wrong = {name: finding["text"] for name, finding in checks.items() if finding["level"] == "problem"}
    assert list(wrong) == [check], wrong
    return str(wrong[check])


def test_a_sound_machine_has_no_problem(chain: Chain) -> None:
    checks = examined(chain)
    assert {"packages", "device", "shared memory", "work directory", "text", "clock", "disk"} <= set(checks)
    assert {finding["level"] for finding in checks.values()} == {"ok"}
    shown = chain.ask("doctor").stdout
    assert "no problem was found" in shown
    for finding in checks.values():
        assert finding["check"] in shown


def test_1_no_space(chain: Chain, disk: Disk) -> None:
    words = ("--Run-work-dir", str(disk.path / "work"))
    assert examined(chain, *words)["disk"]["level"] == "ok"
    wide = ("--Model-hidden-size", "1024", "--Model-intermediate-size", "4096")  # 13 million parameters
    assert "still to be made" in problem(chain, "disk", *words, *wide)
    disk.resize(1 << 10)
    text = problem(chain, "disk", *words)
    assert str(disk.path) in text
    assert "make space" in text


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A directory mounted read-only, which not even root can write to."""
    place = tmp_path / "mounted"
    place.mkdir()
    for words in (["--bind", place, place], ["-o", "remount,bind,ro", place]):
        if subprocess.run(["mount", *words], capture_output=True, check=False).returncode:
            subprocess.run(["umount", "-l", place], capture_output=True, check=False)
            pytest.skip("nothing can be mounted here")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def test_2_a_work_directory_that_cannot_be_written(chain: Chain, read_only: Path) -> None:
    text = problem(chain, "work directory", "--Run-work-dir", str(read_only / "work"))
    assert "Read-only file system" in text
    assert text.endswith("(the command line)")


def test_2_a_file_in_the_place_of_the_work_directory(chain: Chain, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name in ("file", "file/work"):
        assert "is a file" in problem(chain, "work directory", "--Run-work-dir", str(tmp_path / name))


def neuron(folder: Path, **versions: str) -> dict[str, str]:
    """A machine with two NeuronCores and these packages; torch and torch-xla are real."""
    for name, version in versions.items():
        install_package(folder / "site", name, version, "Stand-in.")
    return hardware(folder, cores=[2])


@pytest.mark.slow
def test_3_the_wrong_torch_neuronx(chain: Chain, tmp_path: Path) -> None:
    others = {"neuronx_cc": "2.24.8799.0", "libneuronxla": "2.2.16408.0"}
    env = neuron(tmp_path / "old", torch_neuronx="2.8.0.2.10.1", **others)
    text = problem(chain, "torch-neuronx", "--Cluster-device", "neuron", **env)
    assert "torch-neuronx 2.8.0.2.10.1 is not made for torch 2.9" in text
    env = neuron(tmp_path / "half", torch_neuronx="2.9.0.2.13.26312")
    text = problem(chain, "torch-neuronx", "--Cluster-device", "neuron-xla", **env)
    assert "which is not installed" in text
    install_xla_lane(tmp_path / "right" / "site")
    env = hardware(tmp_path / "right", cores=[2])
    checks = examined(chain, "--Cluster-device", "neuron", "--Cluster-nproc-per-node", "2", **env)
    assert (checks["torch-neuronx"]["level"], checks["device"]["level"]) == ("ok", "ok")
    text = problem(chain, "torch-neuronx", "--Cluster-device", "neuron-native", **env)
    assert "set it to neuron-xla or neuron" in text


def test_3_fewer_cores_than_workers(chain: Chain, tmp_path: Path) -> None:
    install_xla_lane(tmp_path / "site")
    words = ("--Cluster-device", "neuron", "--Cluster-nproc-per-node", "4", "--Phase2-micro-batch-size", "2")
    text = problem(chain, "device", *words, "--Phase1-micro-batch-size", "4", **hardware(tmp_path, cores=[2]))
    assert "4 workers on this machine of 2 NeuronCores; its runtime supports 1, 2" in text


@pytest.mark.parametrize(
    ("lane", "cores", "workers", "visible", "words"),
    [
        # AWS's MLP tutorial: 1, 2, 8 or 32 workers on a trn1.32xlarge.
        ("neuron-xla", 32, 16, None, "16 workers on this machine of 32 NeuronCores; its runtime supports 1, 2, 8, 32"),
        ("neuron-xla", 32, 8, None, ""),
        ("neuron-xla", 32, 32, "0-7", "32 NeuronCores, 8 of them visible; its runtime supports 1, 2, 8"),
        ("neuron-xla", 32, 8, "0-7", ""),
        ("neuron-xla", 32, 8, "all", "NEURON_RT_VISIBLE_CORES=all is not a list of cores"),
        ("neuron-native", 4, 3, None, ""),
        ("neuron-native", 4, 5, None, "4 NeuronCores for 5 workers"),
    ],
)
def test_3_workers_that_the_runtime_does_not_support(
    lane: str, cores: int, workers: int, visible: str | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report on the machine is a stand-in."""
    facts = {"gpus": [], "neuron_lane": lane, "neuron_why": "", "neuron_cores": cores, "neuron_problems": []}
    monkeypatch.setattr(machine, "_trainers_doctor", lambda: facts)
    monkeypatch.delenv("NEURON_RT_VISIBLE_CORES", raising=False)
    if visible is not None:
        monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", visible)
    cluster = SimpleNamespace(launcher="local", device="neuron", nproc_per_node=workers)
    *_, found = machine.device(Plan(cast("Goal", SimpleNamespace(settings=SimpleNamespace(cluster=cluster))), []))
    assert (found.check, found.level) == ("device", "problem" if words else "ok")
    assert words in found.text


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="this machine has a GPU")
def test_3_no_gpu(chain: Chain) -> None:
    assert "torch sees no GPU" in problem(chain, "device", "--Cluster-device", "cuda")
    assert examined(chain, "--Cluster-device", "auto")["device"]["level"] == "ok"


KUBERNETES = ("--Kubernetes-image", "i", "--Kubernetes-volume-claim", "v", "--Kubernetes-mount-path", "/")


@pytest.mark.parametrize(("launcher", "tool"), [("slurm", "sinfo"), ("kubernetes", "kubectl")])
def test_4_no_scheduler(chain: Chain, tmp_path: Path, launcher: str, tool: str) -> None:
    """Its commands are missing or, where they are installed, no scheduler answers them."""
    words = ("--Cluster-launcher", launcher, *KUBERNETES)
    assert f"{tool} was not found" in problem(chain, "scheduler", *words, PATH=str(tmp_path))
    if shutil.which(tool) is not None:
        (tmp_path / "slurm.conf").write_text(f"ClusterName=none\nSlurmctldHost=localhost(127.0.0.1)\n"
                                             f"SlurmctldPort={free_port()}\nMessageTimeout=2\n"
                                             f"SelectType=select/cons_tres\nNodeName=n1\n"
                                             f"PartitionName=p Nodes=ALL\nAuthType=auth/none\n")  # fmt: skip
        env = {"SLURM_CONF": str(tmp_path / "slurm.conf"), "KUBECONFIG": "/nonexistent"}
        assert tool in problem(chain, "scheduler", *words, **env)


def test_4_kubernetes_takes_the_job_where_the_pods_share_the_work_directory(chain: Chain, tmp_path: Path) -> None:
    """With a stand-in for kubectl that says yes to everything and logs what it was asked."""
    program = tmp_path / "kubectl"
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\necho yes\n')
    program.chmod(0o755)
    env, words = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}, ("--Cluster-launcher", "kubernetes", *KUBERNETES)
    checks = examined(chain, *words, "--Kubernetes-gang", "jobset", **env)
    assert (checks["scheduler"]["level"], checks["volume"]["level"]) == ("ok", "ok")
    asked = (tmp_path / "asked").read_text()
    assert "auth can-i create jobsets.jobset.x-k8s.io --namespace=default" in asked
    assert "get persistentvolumeclaim v" in asked
    text = problem(chain, "volume", *words, "--Kubernetes-mount-path", "/elsewhere", **env)
    assert "not below [kubernetes] mount_path = /elsewhere" in text


def test_4_a_real_slurm_takes_the_job_or_says_why_not(chain: Chain) -> None:
    if missing_programs():
        pytest.skip(f"not installed: {', '.join(missing_programs())}")
    slurm = Slurm()
    try:
        slurm.start()
        words = ("--Cluster-launcher", "slurm", "--Cluster-nnodes", "2")
        checks = examined(chain, *words, **slurm.environment)
        assert "Slurm would take a job of 2 nodes" in checks["scheduler"]["text"]
        assert "Invalid partition" in problem(
            chain, "scheduler", *words, "--Slurm-partition", "nowhere", **slurm.environment
        )
    finally:
        slurm.stop()


def store(address: str, bucket: str) -> tuple[str, ...]:
    return ("--Store-url", f"s3://{bucket}/runs", "--Store-s3-endpoint", address)


@pytest.fixture(scope="module")
def weed() -> Iterator[str]:
    with seaweedfs() as address:
        yield address


def keys(access: str = KEYS["accessKey"], secret: str = KEYS["secretKey"]) -> dict[str, str]:
    return {**NO_AWS, "AWS_ACCESS_KEY_ID": access, "AWS_SECRET_ACCESS_KEY": secret}


def make_bucket(address: str, name: str) -> None:
    import boto3

    names = {"aws_access_key_id": KEYS["accessKey"], "aws_secret_access_key": KEYS["secretKey"]}
    boto3.client("s3", endpoint_url=address, region_name="us-east-1", **names).create_bucket(Bucket=name)  # type: ignore[call-overload]


@pytest.mark.slow
def test_5_bad_credentials(chain: Chain, weed: str) -> None:
    """SeaweedFS answers 403 to keys that it does not know."""
    make_bucket(weed, "doctor")
    checks = examined(chain, *store(weed, "doctor"), **keys())
    assert (checks["store"]["level"], checks["credentials"]["level"], checks["clock"]["level"]) == ("ok", "ok", "ok")
    assert "via env" in checks["credentials"]["text"]
    for wrong in (keys(access="other"), keys(secret="other")):
        text = problem(chain, "store", *store(weed, "doctor"), **wrong)
        assert "access is denied" in text
        assert "HTTP 403" in text


def test_5_no_credentials(chain: Chain) -> None:
    with serving() as s3:
        checks = examined(chain, *store(s3.url, "doctor"), status=1, **NO_AWS)
        assert "boto3 finds no AWS credentials for [store]" in checks["credentials"]["text"]


def test_5_a_profile_that_is_not_there(chain: Chain, tmp_path: Path) -> None:
    words = ("--Store-url", "s3://bucket/runs", "--Store-s3-profile", "nobody")
    checks = examined(chain, *words, "--Store-s3-endpoint", f"http://127.0.0.1:{free_port()}", status=1, **NO_AWS)
    assert "(nobody)" in checks["credentials"]["text"]
    assert "[store] s3_profile" in checks["credentials"]["text"]


def test_6_an_unreachable_store(chain: Chain) -> None:
    port = free_port()
    text = problem(chain, "store", *store(f"http://127.0.0.1:{port}", "doctor"), **keys())
    assert f"http://127.0.0.1:{port} does not answer: " in text
    assert "Connection refused" in text


def test_6_a_store_without_conditional_writes(chain: Chain) -> None:
    """Moto's, behind a proxy that drops the conditions, like a server that does not know them."""
    with serving() as s3:
        s3.client.create_bucket(Bucket="unconditional")

        def forget(handler: Any) -> None:
            del handler.headers["If-None-Match"]
            handler.answer(handler.forward())

        words = store(s3.url, "unconditional")
        assert examined(chain, *words, **keys("testing", "testing"))["store"]["level"] == "ok"
        s3.fail(forget, lambda request: "if-none-match" in request.headers, times=100)
        assert "ignores If-None-Match" in problem(chain, "store", *words, **keys("testing", "testing"))


def test_6_a_folder_as_store(chain: Chain, tmp_path: Path, read_only: Path) -> None:
    assert examined(chain, "--Store-url", str(tmp_path / "store"))["store"]["level"] == "ok"
    assert "Read-only file system" in problem(chain, "store", "--Store-url", str(read_only / "store"))


def test_6_a_tracker_that_does_not_answer_is_a_warning(chain: Chain, tmp_path: Path) -> None:
    """Training goes on without it."""
    env = {"WANDB_BASE_URL": "", "WANDB_API_KEY": "", "NETRC": str(tmp_path / "netrc")}
    words = ("--Trackers-names", "tensorboard, mlflow", "--Trackers-mlflow-uri")
    checks = examined(chain, *words, f"http://127.0.0.1:{free_port()}", **env)
    assert (checks["trackers"]["level"], checks["clock"]["level"]) == ("warning", "warning")
    assert "mlflow: http://127.0.0.1:" in checks["trackers"]["text"]
    assert "does not answer" in checks["clock"]["text"]
    with web.serving(b"page") as server:
        address = server.url.rpartition("/")[0]
        checks = examined(chain, *words, address, **env)
        assert checks["trackers"] == {"check": "trackers", "level": "ok", "text": f"mlflow: {address} answers"}
        env["WANDB_BASE_URL"] = address
        checks = examined(chain, "--Trackers-names", "wandb", **env)
        assert "wandb: no key is known here; set WANDB_API_KEY" in checks["trackers"]["text"]
        assert (
            examined(chain, "--Trackers-names", "wandb", **{**env, "WANDB_API_KEY": "k"})["trackers"]["level"] == "ok"
        )
        (tmp_path / "netrc").write_text("machine 127.0.0.1 login user password k\n")
        assert examined(chain, "--Trackers-names", "wandb", **env)["trackers"]["level"] == "ok"


def test_7_a_port_in_use(chain: Chain) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        words = ("--Cluster-nnodes", "2", "--Cluster-master-addr", "127.0.0.1", "--Cluster-master-port")
        assert f"port {port} is in use" in problem(chain, "ports", *words, str(port))
        assert f"port {port} is in use" in problem(chain, "ports", *words, str(port - 1)), "phase 2's"
    assert examined(chain, *words, str(port))["ports"]["level"] == "ok"


def test_7_no_luigid(chain: Chain, tmp_path: Path) -> None:
    port = free_port()
    other = Chain(tmp_path, f"[core]\nlocal_scheduler = false\nscheduler_port = {port}\n")
    assert f"localhost:{port} does not answer" in problem(other, "luigid")
    for url in (f"http://localhost:{port}x", f"localhost:{port}", "ftp://localhost", "http://[::1"):
        other = Chain(tmp_path, f"[core]\nlocal_scheduler = false\nscheduler_url = {url}\n")
        assert f"scheduler_url = {url}; allowed: http://HOST:PORT" in problem(other, "luigid")
    other = Chain(tmp_path, f"[core]\nlocal_scheduler = false\nscheduler_port = {port}\n")
    with socket.create_server(("localhost", port)):
        assert examined(other)["luigid"]["level"] == "ok"


def test_8_a_clock_that_is_off(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compared with the clock of the data server, which is an hour ahead, then two minutes behind."""
    with web.serving(b"data") as server:
        words = ("--Dataset-phase1-url", server.url, "--Dataset-phase2-url", server.url)
        checks = examined(chain, *words)
        assert (checks["clock"]["level"], checks["network"]["level"]) == ("ok", "ok")
        for ahead_s, level in ((3600, "problem"), (-120, "warning")):
            date = formatdate(time.time() + ahead_s, usegmt=True)
            monkeypatch.setattr(web.Handler, "date_time_string", lambda *_, date=date: date)
            checks = examined(chain, *words, status=1 if level == "problem" else 0)
            assert checks["clock"]["level"] == level
            assert ("behind" if ahead_s > 0 else "ahead of") in checks["clock"]["text"]


def test_8_data_that_is_not_there(chain: Chain) -> None:
    with web.serving(b"data") as server:
        server.probe_faults.extend([web.status(404)] * 2)
        words = ("--Dataset-phase1-url", server.url, "--Dataset-phase2-url", server.url)
        assert "HTTP 404" in problem(chain, "network", *words)
    assert "does not answer" in problem(chain, "network", *words)
    words = ("--Dataset-phase1-url", "http://[x", "--Dataset-phase2-url", "http://[x")
    assert "http://[x is not an address" in problem(chain, "network", *words)


def test_9_a_missing_vocabulary(chain: Chain, tmp_path: Path) -> None:
    path = tmp_path / "vocab.txt"
    assert f"cannot read the vocabulary {path}" in problem(chain, "vocabulary", "--Corpus-vocab-file", str(path))
    path.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghij"]))
    words = ("--Corpus-vocab-file", str(path))
    assert "15 entries" in examined(chain, *words)["vocabulary"]["text"]
    assert "has 15 entries, and [model] vocab_size is 10" in problem(
        chain, "vocabulary", *words, "--Model-vocab-size", "10"
    )
    assert examined(chain, *words, "--Model-vocab-size", "16")["vocabulary"]["level"] == "warning"


def test_9_a_missing_text(chain: Chain) -> None:
    assert "matches no file" in problem(chain, "text", "--Corpus-source", "/no/such/*.txt")


def test_9_a_table_without_pyarrow(chain: Chain, tmp_path: Path) -> None:
    path = tmp_path / "texts.parquet"
    path.write_bytes(b"anything")
    words = ("--Corpus-source", str(path))
    assert examined(chain, *words)["text"]["level"] == "ok"
    (tmp_path / "pyarrow.py").write_text("raise ImportError('not here')")
    text = problem(chain, "text", *words, PYTHONPATH=str(tmp_path))
    assert f"{path} is Parquet, which pyarrow reads" in text
    assert "pip install -e '.[parquet]'" in text


def test_a_night_is_examined_with_its_date(chain: Chain, tmp_path: Path) -> None:
    text = (chain.directory / "corpus.txt").read_text()
    (tmp_path / "2026-11-21.txt").write_text(text)
    words = ("--Corpus-source", f"{tmp_path}/{{date}}.txt", "--Run-work-dir", str(tmp_path / "work"))
    assert_one_line_error(chain.ask("doctor", *words, status=35), "give a night's date: --date", status=35)
    assert "2026-11-21.txt" in examined(chain, *words, "--date", "2026-11-21")["text"]["text"]
    refused = chain.ask("doctor", *words, "--date", "2026-11-20", status=35)
    assert_one_line_error(refused, "2026-11-20.txt matches no file", status=35)
    assert_one_line_error(chain.ask("doctor", "--date", "tonight", status=35), "--date tonight is not", status=35)


def test_10_too_small_a_shared_memory(chain: Chain) -> None:
    """In a mount namespace of its own, as in a container."""
    words = [sys.executable, "-m", "pipeline", "doctor", "--json"]
    mount = "mount -t tmpfs -o size=64k tmpfs /dev/shm && exec \"$@\""  # fmt: skip
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespace can be made here")
    env = {**os.environ, "LUIGI_CONFIG_PATH": str(chain.config)}
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", mount, "sh", *words], cwd=ROOT, env=env, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    wrong = [finding for finding in json.loads(done.stdout)["checks"] if finding["level"] == "problem"]
    assert [finding["check"] for finding in wrong] == ["shared memory"]
    assert "--shm-size" in wrong[0]["text"]


def test_a_package_that_is_too_old(chain: Chain, tmp_path: Path) -> None:
    """Metadata of an old tqdm, found before that of the installed one."""
    install_package(tmp_path, "tqdm", "4.1.0", "Stand-in.", module="from tqdm.std import *")
    (tmp_path / "tqdm.py").unlink()
    text = problem(chain, "packages", PYTHONPATH=str(tmp_path))
    assert "tqdm 4.1.0 is installed (needed: >=4.66)" in text


def test_a_wrong_setting_ends_it_before_any_check(chain: Chain) -> None:
    done = chain.ask("doctor", "--Phase1-lr", "fast", status=35)
    assert (done.stdout, done.stderr.count("\n")) == ("", 1)


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_10_gpus_need_more_shared_memory(device: str, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's report of the devices is a stand-in with two GPUs; 64 MB is what a container has by default."""
    facts = {"gpus": ["NVIDIA H100"] * 2, "neuron_cores": None, "versions": {}}
    monkeypatch.setattr(machine, "_trainers_doctor", lambda: facts)
    monkeypatch.setattr(machine, "_SHARED_MEMORY", disk.path)
    cluster = SimpleNamespace(launcher="local", device=device, nproc_per_node=2)
    plan = Plan(cast("Goal", SimpleNamespace(settings=SimpleNamespace(cluster=cluster))), [])
    assert [found.level for found in machine.device(plan)] == ["ok"]
    (found,) = machine.shared_memory(plan)
    assert (found.level, "--shm-size=1g" in found.text) == ("problem", True)


def test_the_clock_test_has_a_server_with_a_clock() -> None:
    """`http.server` sends a Date with each answer, and the clock test above replaces it."""
    with web.serving(b"data") as server:
        host = server.url.split("/")[2]
        connection = http.client.HTTPConnection(host)
        connection.request("HEAD", "/")
        assert connection.getresponse().getheader("Date")
        connection.close()
