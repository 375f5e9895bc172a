"""Jobs on a real Slurm: four nodes on loopback."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from stages.directory.manifest import why_incomplete
from tests.e2e.test_interruptions import LONG, ours, training_directory
from tests.helpers.chain import Chain, finished_chain, one_core, wait_until
from tests.helpers.slurm import Slurm, missing_programs
from tests.helpers.support import free_port, metrics, tensors

TWO_NODES = ("--Cluster-launcher", "slurm", "--Cluster-nnodes", "2")


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    if missing := missing_programs():
        pytest.skip(f"{', '.join(missing)} is not here: apt-get install slurmctld slurmd munge")
    slurm = Slurm()
    try:
        slurm.start()
        yield slurm
    finally:
        slurm.stop()


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    chain = Chain(tmp_path_factory.mktemp("slurm"), f"[cluster]\nmaster_port = {free_port()}\n")
    chain.run("Precompile", "--phase", "1", "--Cluster-nnodes", "2", "--Cluster-launcher", "local",
              "--Cluster-master-addr", "127.0.0.1")  # fmt: skip
    return chain


def torchruns(directory: Path) -> list[psutil.Process]:
    """The launchers on the nodes; srun has the same words in its command line."""
    return [process for process in ours(directory.name) if process.cmdline()[1:3] == ["-m", "trainer.launch.torchrun"]]


class Runs:
    """luigi with jobs on Slurm."""

    def __init__(self, chain: Chain, slurm: Slurm) -> None:
        self.chain, self.slurm = chain, slurm
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, *words: str, **env: str) -> subprocess.Popen[bytes]:
        process = self.chain.start(*words, **self.slurm.environment, **env)
        self._processes.append(process)
        return process

    def said(self) -> str:
        return (self.chain.directory / "luigi.log").read_text()

    def wait_for(self, text: str) -> re.Match[str]:
        """Wait until luigi has printed `text` (a regular expression); returns the match."""
        wait_until(lambda: re.search(text, self.said()) is not None, timeout_s=60)
        match = re.search(text, self.said())
        assert match is not None
        return match

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        self.slurm.ask("scancel", "--state=PENDING,RUNNING")


@pytest.fixture
def runs(prepared: Chain, slurm: Slurm) -> Iterator[Runs]:
    runs = Runs(prepared, slurm)
    yield runs
    runs.end()


@pytest.mark.slow
def test_a_job_outlives_luigi_and_a_killed_worker_and_ends_with_the_bytes_of_a_run_here(
    runs: Runs, tmp_path: Path
) -> None:
    """Luigi is killed while the job runs; the next one waits for the same job. One worker of node 1 is killed with -9:
    training resumes in the same allocation, without waiting in the queue, from the step that the other worker saved."""
    token = tmp_path / "token"
    token.touch()
    first = runs.start("Pretrain", "--phase", "1", *TWO_NODES, FAILPOINT="micro-step:5.0.1", FAILPOINT_TOKEN=str(token))
    job = runs.wait_for(r"slurm job (\d+): RUNNING \(on n\[\d-\d\]\)")[1]
    first.kill()
    first.wait()
    refused = runs.chain.ask("clean", "--remove", *TWO_NODES, "--Phase1-lr", "0.007", **runs.slurm.environment)
    assert f"in use by slurm job {job}: RUNNING" in refused.stdout
    row = runs.chain.status(*TWO_NODES, **runs.slurm.environment)["pretrain-phase1"]
    assert (row["state"], row["detail"].partition(",")[0].startswith(f"slurm job {job}: ")) == ("running", True), row
    again = runs.start("Pretrain", "--phase", "1", *TWO_NODES)
    assert again.wait(timeout=120) == 0, runs.said()
    said = runs.said()
    assert f"slurm job {job} is running already; waiting for it" in said
    assert " Restarts=0 " in runs.slurm.ask("scontrol", "show", "job", "--oneliner", job)
    assert not token.exists()
    there = runs.chain.latest("pretrain-phase1")
    assert re.search(r"resuming from checkpoint \S*/ckpt_5\b", (there / "stage.log").read_text())
    assert len(list(there.glob("job-*.log"))) == 1, "one job did it all"
    assert not (there / "job.json").exists()
    with one_core():
        runs.chain.run(
            "Pretrain", "--phase", "1", "--Cluster-nproc-per-node", "2", "--Run-work-dir", str(tmp_path / "w")
        )
    here = (tmp_path / "w" / "latest" / "pretrain-phase1").resolve()
    assert here.name == there.name
    wanted, got = (tensors(path / "checkpoints" / "ckpt_8") for path in (here, there))
    for name, tensor in wanted.items():
        assert got[name].tobytes() == tensor.tobytes(), name


@pytest.mark.slow
def test_a_job_goes_on_after_its_time_a_killed_launcher_and_a_lost_node_until_it_is_cancelled(runs: Runs) -> None:
    process = runs.start("Pretrain", "--phase", "1", *TWO_NODES, *LONG, "--Phase1-lr", "0.011")
    directory = training_directory(runs.chain, 0.011)
    job = runs.wait_for(r"slurm job (\d+): RUNNING")[1]

    # The signal that Slurm sends ahead of the time limit: the last step is saved, no step is lost.
    runs.slurm.ask("scancel", "--signal=USR1", "--batch", job)
    resumed = runs.wait_for(r"(?s)PENDING.*resuming from checkpoint \S*ckpt_(\d+)")
    steps_done = int(resumed[1])
    wait_until(lambda: len(metrics(directory)) > steps_done + 3, timeout_s=60)
    assert [record["step"] for record in metrics(directory)][: steps_done + 2] == list(range(1, steps_done + 3))

    # The torchrun of one node, and its worker with it; then a whole node.
    for fails in (lambda: torchruns(directory)[0].kill(), lambda: runs.slurm.kill_node("n2")):
        seen = runs.said().count("resuming from checkpoint")
        fails()
        wait_until(lambda: runs.said().count("resuming from checkpoint") > seen, timeout_s=90)  # noqa: B023
    assert runs.slurm.ask("squeue", "-h", "-o", "%N").strip() in ("n[1,3]", "n[1,4]", "n[3-4]")

    runs.chain.ask("cancel", "pretrain-phase1", *TWO_NODES, *LONG, "--Phase1-lr", "0.011", **runs.slurm.environment)
    assert process.wait(timeout=60) == 75, runs.said()
    assert "pretrain-phase1: interrupted; the same command resumes from here" in runs.said()
    assert not (directory / "job.json").exists()
    wait_until(lambda: not ours(directory.name))
    runs.slurm.start_node("n2")


@pytest.mark.slow
def test_evaluation_is_a_job_too_that_luigi_need_not_wait_for(
    runs: Runs, slurm: Slurm, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    chain = finished_chain(tmp_path_factory).copy(tmp_path / "chain")
    before = (chain.latest("evaluate") / "evaluation.json").read_bytes()
    (chain.latest("evaluate") / "manifest.json").unlink()
    runs = Runs(chain, slurm)
    process = runs.start("Evaluate", "--Cluster-launcher", "slurm")
    runs.wait_for(r"slurm job (\d+): ")
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 75
    assert re.search(r"slurm job \d+ continues; .* `python -m pipeline cancel evaluate` ends it", runs.said())
    wait_until((chain.latest("evaluate") / "manifest.json").exists, timeout_s=60)
    chain.run("Evaluate", "--Cluster-launcher", "slurm")
    assert (chain.latest("evaluate") / "evaluation.json").read_bytes() == before
    wait_until(lambda: not (chain.latest("evaluate") / "job.json").exists())


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--Slurm-partition", "gpu"), r"sbatch refused .*job\.sh: .*Invalid partition"),
        (("--Slurm-sbatch-lines=--mem=lots",), r"sbatch refused .*job\.sh: .*mem"),
        (
            ("--Cluster-nnodes", "8", "--Phase1-micro-batch-size", "2", "--Phase2-micro-batch-size", "1"),
            r"slurm job \d+ can never start as it is: Partition\w+; check nnodes and the section \[slurm\]",
        ),
    ],
)
def test_what_slurm_refuses_is_one_line(runs: Runs, words: tuple[str, ...], line: str) -> None:
    done = runs.chain.run(
        "Pretrain", "--phase", "1", *TWO_NODES, *words, "--Phase1-lr", "0.012", status=30, **runs.slurm.environment
    )
    said = done.stderr.splitlines()
    assert any(re.search(line, text) for text in said[-2:]), done.stderr
    assert "Traceback" not in done.stderr
    assert not list(runs.chain.work.glob("*/job.json"))


def test_a_work_directory_may_have_any_name(prepared: Chain, slurm: Slurm, tmp_path: Path) -> None:
    """Characters that sbatch itself, its script and its file name patterns would interpret."""
    work = tmp_path / "it's 100%j #1 $HOME"
    one_node = ("--Cluster-launcher", "slurm", "--Cluster-nnodes", "1")
    prepared.run("Precompile", "--phase", "1", *one_node, "--Run-work-dir", str(work), **slurm.environment)
    done = (work / "latest" / "precompile-phase1").resolve()
    assert (done / "manifest.json").exists()
    assert re.fullmatch(r"job-\d+\.log", next(done.glob("job-*.log")).name)


@pytest.mark.slow
def test_two_nodes_build_the_data_of_one_although_one_is_killed(runs: Runs, tmp_path: Path) -> None:
    """Node 1 is killed when it has made its shard: all are restarted in the same job and keep what they have."""
    token = tmp_path / "token"
    token.touch()
    kill = {"FAILPOINT": "write-after:bert_training_00001.hdf5", "FAILPOINT_TOKEN": str(token)}
    words = ("--Cluster-launcher", "slurm", "--Cluster-build-nodes", "2", "--Run-work-dir", str(tmp_path / "w"))
    luigi = runs.start("ShardDataset", "--phase", "1", *words, **kill)
    assert luigi.wait(timeout=300) == 0, runs.said()
    assert not token.exists()
    for stage in ("tokenize_corpus", "shard_dataset-phase1"):
        there, here = (tmp_path / "w/latest" / stage).resolve(), runs.chain.latest(stage)
        got, wanted = (json.loads((path / "manifest.json").read_text()) for path in (there, here))
        assert (there.name, got["outputs"], got["counts"]) == (here.name, wanted["outputs"], wanted["counts"])
        assert why_incomplete(there, wanted["fingerprint"], verify=True) is None
        assert "--builders=2" in (there / "stage.log").read_text()
    # Not so of the corpus, which is one piece: node 1 may come when node 0 has made it.
    assert "machine 1 of 2" in (tmp_path / "w/latest/shard_dataset-phase1/stage.log").read_text()
