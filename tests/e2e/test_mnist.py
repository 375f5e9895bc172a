"""The MLP tutorial through the real commands: MNIST from files and from a web server, one worker and two."""

from __future__ import annotations

import functools
import http.server
import json
import shutil
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from stages.mnist import FILES
from tests.e2e.test_failpoints import outputs, points
from tests.helpers import neuron_machine
from tests.helpers.chain import LUIGI
from tests.helpers.images import write_images
from tests.helpers.support import assert_one_line_error, command, forked
from trainer.options import parse


def luigi(
    work: Path, *words: object, status: int = 0, env: dict[str, str] | None = None, **values: object
) -> subprocess.CompletedProcess[str]:
    """`luigi --module pipeline MnistMlp` with settings of [mnist] as keywords."""
    given = {"Run-work-dir": work, **{f"Mnist-{name.replace('_', '-')}": value for name, value in values.items()}}
    options = [str(word) for name, value in given.items() for word in (f"--{name}", value)]
    done = command(*LUIGI, "MnistMlp", *options, *map(str, words), env=env)
    assert done.returncode == status, done.stdout + done.stderr
    return done


def counts(work: Path, stage: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((work / "latest" / stage / "manifest.json").read_text())["counts"]
    return found


@pytest.mark.slow
def test_real_mnist_reaches_95_percent(shared: Path, tmp_path: Path) -> None:
    """The tutorial's 4 epochs; the files' checksums are those of MNIST."""
    workers = 2
    if not (shared / "data" / "mnist").is_dir():
        pytest.skip(f"MNIST's files are not in {shared / 'data'}")
    url = f"file://{(shared / 'data' / 'mnist').resolve()}"
    done = luigi(tmp_path, "--Cluster-nproc-per-node", workers, url=url)
    said = done.stdout + done.stderr
    evaluated, trained = counts(tmp_path, "evaluate_mlp"), counts(tmp_path, "train_mlp")
    assert evaluated["images"] == 10_000
    assert evaluated["accuracy"] >= 0.95
    assert f"Accuracy: {evaluated['accuracy']}" in said
    assert f"accuracy {evaluated['accuracy']:.2%}" in said
    assert trained["num_workers"] == workers
    assert trained["steps"] == 4 * (60_000 // (32 * workers))
    assert "Train throughput (iter/sec): " in said
    assert f"Final loss is {trained['loss']:.4f}" in said
    again = luigi(tmp_path, "--Cluster-nproc-per-node", workers, url=url)
    assert "The MLP is trained." in again.stderr
    assert "started in" not in again.stderr


SMALL = {"checksums": "none", "epochs": 2, "batch_size": 8, "ckpt_interval_steps": 7, "log_interval": 100}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("images"), training=160)


@pytest.mark.slow
@pytest.mark.usefixtures("torch_xla")
@pytest.mark.parametrize("device", ["xla", "neuron"])
def test_the_chain_trains_and_evaluates_on_an_xla_device(images: Path, tmp_path: Path, device: str) -> None:
    """torch_xla is the real one, on the CPU; neuron is the real device file on a stand-in machine. The accuracy is
    that of the same checkpoint, evaluated on the CPU."""
    env = neuron_machine.machine(tmp_path / "machine") if device == "neuron" else {}
    done = luigi(tmp_path / "work", "--Cluster-device", device, env=env, **{**SMALL, "url": images})
    assert f"device {device}" in done.stderr, done.stderr
    evaluated = counts(tmp_path / "work", "evaluate_mlp")
    latest = tmp_path / "work" / "latest"
    checkpoint = latest / "train_mlp" / counts(tmp_path / "work", "train_mlp")["checkpoint"]
    on_cpu = forked(
        "stages.evaluate_mlp", checkpoint, latest / "download_mnist", "--out", tmp_path / "cpu", "--device", "cpu"
    )
    assert on_cpu.returncode == 0, on_cpu.stdout
    wanted = json.loads((tmp_path / "cpu" / "evaluation.json").read_text())
    assert evaluated["accuracy"] == wanted["accuracy"]
    # fp32 sums in another order; 1e-5 is a hundred times their rounding.
    assert evaluated["loss"] == pytest.approx(wanted["loss"], rel=1e-5)


@pytest.mark.slow
def test_a_killed_chain_ends_with_the_same_bytes(images: Path, tmp_path: Path) -> None:
    """A worker is killed: the chain restarts it. Luigi is killed: the same command resumes."""
    values = {**SMALL, "url": images}
    luigi(tmp_path / "straight", **values)
    token = tmp_path / "token"
    token.touch()
    env = {"FAILPOINT": "step:17.0", "FAILPOINT_TOKEN": str(token)}
    done = luigi(tmp_path / "killed", env=env, **values)
    assert "starting again" in done.stderr
    assert "resuming from checkpoint" in done.stderr
    luigi(tmp_path / "twice", env={"FAILPOINT": "link-before:train_mlp"}, status=-signal.SIGKILL, **values)
    luigi(tmp_path / "twice", **values)
    for stage in ("download_mnist", "train_mlp"):
        wanted = outputs(tmp_path / "straight" / "latest" / stage)
        for name in ("killed", "twice"):
            assert outputs(tmp_path / name / "latest" / stage) == wanted, (stage, name)
    accuracies = [counts(tmp_path / name, "evaluate_mlp")["accuracy"] for name in ("straight", "killed", "twice")]
    assert len(set(accuracies)) == 1


@pytest.mark.slow
def test_workers_and_learning_rate_make_another_model(images: Path, tmp_path: Path) -> None:
    values = {**SMALL, "url": images}
    luigi(tmp_path, **values)
    first = (tmp_path / "latest" / "train_mlp").resolve()
    data = (tmp_path / "latest" / "download_mnist").resolve()
    luigi(tmp_path, "--Cluster-nproc-per-node", 2, "--Cluster-data-parallel", "ddp", **values)
    second = (tmp_path / "latest" / "train_mlp").resolve()
    assert second != first
    assert (tmp_path / "latest" / "download_mnist").resolve() == data
    parameters = [json.loads((path / "manifest.json").read_text())["parameters"] for path in (first, second)]
    assert [(p["global_batch_size"], p["lr"]) for p in parameters] == [(8, 0.05), (16, 0.1)]
    status = command("-m", "pipeline", "status", "--json", "--Run-work-dir", str(tmp_path), "--Mnist-url", str(images))
    states = {row["stage"]: row["state"] for row in json.loads(status.stdout)}
    assert states["download_mnist"] in ("stale", "complete"), states
    clean = command("-m", "pipeline", "clean", "--Run-work-dir", str(tmp_path), "--Mnist-url", str(images),
                    "--Mnist-checksums", "none")  # fmt: skip
    assert "download_mnist" not in clean.stdout, clean.stdout
    assert first.name in clean.stdout


#: Prints the commands of the goal with an overlay, and the directory of its training.
_COMMANDS = """
import json, sys, pipeline
from pipeline.tasks.mnist import MnistMlp
train, evaluate = (MnistMlp(overlay=json.loads(sys.argv[1])).requires()[name] for name in ("train_mlp", "evaluate_mlp"))
json.dump([list(map(str, train.command())), list(map(str, evaluate.command())), str(train.directory)], sys.stdout)
"""


@pytest.mark.parametrize("overlay", [{}, {"mnist": {"lr": "0.01", "batch_size": "4"}}])
def test_the_mlp_has_the_settings_of_its_overlay_and_none_of_berts(
    images: Path, tmp_path: Path, overlay: dict[str, dict[str, str]]
) -> None:
    """Its step is one micro-step, whatever a graph of BERT holds; each stage is given the overlay of the goal."""
    config = tmp_path / "luigi.cfg"
    config.write_text(
        f"[run]\nwork_dir = {tmp_path}/work\n[mnist]\nurl = {images}\nchecksums = none\n"
        f"[cluster]\nnproc_per_node = 2\ntensor_parallel_size = 2\nbatches_per_execution = 2\n"
    )
    done = command("-c", _COMMANDS, json.dumps(overlay), env={"LUIGI_CONFIG_PATH": str(config)})
    assert done.returncode == 0, done.stderr
    training, evaluation, directory = json.loads(done.stdout)
    found = parse(training[training.index("trainer") + 1 :]).config
    given = overlay.get("mnist", {"lr": "0.05", "batch_size": "32"})
    assert (found.lr, found.micro_batch_size) == (float(given["lr"]), int(given["batch_size"]))
    assert (found.batches_per_execution, found.tensor_parallel_size, found.grad_accum_usteps) == (1, 1, 1)
    assert directory in evaluation


def test_files_come_over_http_and_are_checked(images: Path, tmp_path: Path) -> None:
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(images))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_address[1]}/"
        try:
            fetched = forked("stages.mnist", url, "--checksums", "none", "--out", tmp_path / "fetched")
            refused = forked("stages.mnist", url, "--out", tmp_path / "refused")
        finally:
            server.shutdown()
            thread.join()
    assert fetched.returncode == 0, fetched.stdout
    for name in FILES:
        assert (tmp_path / "fetched" / name).read_bytes() == (images / name).read_bytes()
    assert_one_line_error(refused, "train-images-idx3-ubyte.gz", "sha256", "440fcabf")
    assert not list((tmp_path / "refused").glob("*.gz"))


def test_other_files_are_not_taken_for_mnist(images: Path, tmp_path: Path) -> None:
    done = luigi(tmp_path, status=30, url=images)
    name = next(iter(FILES))
    line = next(line for line in done.stderr.splitlines() if line.startswith("error: "))
    assert name in line
    assert "MNIST's has 440fcabf" in line
    assert "checksums = none" in line
    missing = luigi(tmp_path, status=35, url=tmp_path / "nowhere")
    assert "Traceback" not in missing.stderr
    assert "nowhere/train-images-idx3-ubyte.gz; give the folder or address that has MNIST's files" in missing.stderr


@pytest.mark.slow
def test_downloading_killed_at_every_point(images: Path, tmp_path: Path) -> None:
    log = tmp_path / "points"
    words = ("stages.mnist", images, "--checksums", "none", "--out")
    assert forked(*words, tmp_path / "straight", FAILPOINT="none", FAILPOINT_LOG=str(log)).returncode == 0
    names = points(log)
    assert len(names) >= 4 * len(FILES)
    for name in names:
        out = tmp_path / "killed"
        assert forked(*words, out, FAILPOINT=name).returncode == -signal.SIGKILL, name
        done = forked(*words, out)
        assert done.returncode == 0, (name, done.stdout)
        assert outputs(out) == outputs(tmp_path / "straight"), name
        shutil.rmtree(out)
