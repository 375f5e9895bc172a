"""Precompile: on XLA's CPU for real; for Neuron, on the stand-in machine of `tests.helpers.neuron_machine`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.chain import wait_until
from tests.helpers.images import write_images
from tests.helpers.neuron_machine import DEFAULT_CACHE, machine
from tests.helpers.support import (
    ROOT,
    assert_one_line_error,
    command,
    metrics,
    options,
    require_torch_xla,
    tensors,
    train,
    write_dataset,
    write_model_config,
)


@pytest.fixture
def work(tmp_path: Path) -> dict[str, object]:
    data, model = write_dataset(tmp_path / "data", [40]), write_model_config(tmp_path, num_hidden_layers=1)
    return {
        "data_dir": data, "model_config": model, "batch_size": 4, "grad_accum_usteps": 2, "max_steps": 6,
        "warmup_steps": 1, "max_pred_len": 5, "precision": "fp32",
    }  # fmt: skip


@pytest.fixture
def small(tmp_path: Path) -> dict[str, object]:
    """Work whose graphs compile quickly."""
    images = write_images(tmp_path / "images", training=80)
    return {"workload": "mnist", "data_dir": images, "batch_size": 8, "epochs": 1, "device": "neuron"}


def precompile(out: Path, device: str, *trial: str, env: dict[str, str] | None = None):  # type: ignore[no-untyped-def]
    return command("-m", "stages.precompile", "--out", str(out), "--device", device, "--", *trial, env=env)


@pytest.mark.slow
@pytest.mark.usefixtures("torch_xla")
def test_the_graphs_of_xla_are_those_that_training_meets(work: dict[str, object], tmp_path: Path) -> None:
    out = tmp_path / "compiled"
    done = precompile(out, "xla", "-m", "trainer", *options(**work, device="xla"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(path.name for path in out.iterdir()) == ["graphs.json", "lock", "manifest.json", "stage.json"]
    graphs = json.loads((out / "graphs.json").read_text())["graphs"]
    assert len(graphs) == 2
    for graph in graphs:
        assert graph["operations"] > 500
        assert graph["seconds"] > 0
        assert f"graph {graph['hash']}: " in done.stderr

    # Settings that do not change graphs may change; a graph that is not in the list is reported.
    other = {**work, "lr": 1e-2, "weight_decay": 0.2, "max_grad_norm": 0.5, "max_steps": 4, "seed": 3}
    trained = train(**other, device="xla", graphs=out / "graphs.json", output_dir=tmp_path / "same")
    assert trained.returncode == 0
    assert "warning" not in trained.stdout, trained.stdout
    graphs.pop()
    (out / "graphs.json").write_text(json.dumps({"graphs": graphs}))
    trained = train(**work, device="xla", graphs=out / "graphs.json", output_dir=tmp_path / "other")
    warnings = [line for line in trained.stdout.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == 1
    assert "is not in" in warnings[0]


@pytest.mark.slow
@pytest.mark.parametrize("data_parallel", ["allreduce", "ddp"])
def test_a_batch_that_grows_meets_no_graph_that_the_trial_has_not_met(
    work: dict[str, object], tmp_path: Path, data_parallel: str
) -> None:
    """A step of the ramp has one micro-step, later ones have two, as torch's DDP has other graphs; the ramp is longer
    than the trial."""
    require_torch_xla()
    env, out = machine(tmp_path / "machine"), tmp_path / "compiled"
    given = {**work, "device": "neuron", "data_parallel": data_parallel, "batch_ramp_steps": 11, "max_steps": 13}
    words = options(**given)
    done = command(
        "-m", "stages.precompile", "--out", str(out), "--device", "neuron", "--no-self-test", "--", "-m", "trainer",
        *words, env=env,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    held = options(graphs=out / "graphs.json", compile_cache=out / "cache", output_dir=tmp_path / "trained")
    trained = command("-m", "trainer", *words, *held, env=env)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    assert [line["samples"] for line in metrics(tmp_path / "trained")] == [*range(4, 48, 4), 52, 60]
    assert "warning" not in trained.stdout, trained.stdout


def test_where_nothing_is_compiled_that_is_said(tmp_path: Path) -> None:
    done = precompile(tmp_path / "out", "cpu")
    assert done.returncode == 0
    assert "device cpu: operations run one by one here, there is nothing to compile" in done.stderr
    assert json.loads((tmp_path / "out" / "graphs.json").read_text()) == {"graphs": []}


def test_a_trial_writes_nothing_and_believes_no_loss(work: dict[str, object], tmp_path: Path) -> None:
    """As under Neuron's extraction, whose results are garbage: here with a learning rate that leads to NaN."""
    out = tmp_path / "out"
    for workers, env in ((1, {"NEURON_EXTRACT_GRAPHS_ONLY": "1"}), (2, {"NEURON_EXTRACT_GRAPHS_ONLY": "1"})):
        done = train(workers, **{**work, "lr": 1e38, "grad_accum_usteps": 2 // workers}, device="cpu", output_dir=out,
                     env=env)  # fmt: skip
        assert done.returncode == 0, done.stdout
        assert "LOG" not in done.stdout
        assert not out.exists()
    diverged = train(**{**work, "lr": 1e38}, device="cpu", output_dir=out)
    assert diverged.returncode == 1


@pytest.mark.slow
def test_neurons_graphs_are_those_that_training_meets(small: dict[str, object], tmp_path: Path) -> None:
    """The device's real module, on a stand-in machine. The user's flags are kept; the user's cache is not used."""
    require_torch_xla()
    out, env = tmp_path / "out", {**machine(tmp_path / "machine"), "NEURON_CC_FLAGS": "-O1 --cache_dir=/nowhere"}
    given = options(**small)
    done = precompile(out, "neuron", "-m", "trainer", *given, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((out / "graphs.json").read_text())
    assert [graph["operations"] for graph in record["graphs"]] == [None, None]
    assert [module["hash"] for module in record["modules"]] == ["0+abc", "1+abc"]
    module = out / "cache" / "node-0" / "neuronxcc-2.0" / "MODULE_0+abc"
    assert (module / "model.neff").exists()
    flags = (module / "compile_flags.json").read_text().split()
    assert "-O1" in flags
    assert [flag for flag in flags if "cache_dir" in flag] == [f"--cache_dir={out / 'cache' / 'node-0'}"]
    assert not (out / "trial").exists()
    assert not (tmp_path / "machine" / DEFAULT_CACHE).exists()

    # A trainer that was killed while compiling has left a lock.
    (module / "model.hlo_module.pb.lock").touch()
    cached = options(graphs=out / "graphs.json", compile_cache=out / "cache", output_dir=tmp_path / "trained")
    trained = command("-m", "trainer", *given, *cached, env=env)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    assert "warning" not in trained.stdout
    assert "removed" in trained.stdout
    (out / "graphs.json").write_text(json.dumps({"graphs": record["graphs"][:1]}))
    cached[-1] = str(tmp_path / "again")
    trained = command("-m", "trainer", *given, *cached, env=env)
    warnings = [line for line in trained.stdout.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == 1, trained.stdout
    assert record["graphs"][1]["hash"] in warnings[0]


@pytest.mark.slow
def test_two_nodes_compile_into_caches_of_their_own(small: dict[str, object], tmp_path: Path) -> None:
    """The first is complete only when the second has compiled, too. (Here each has a trial of its own, one after the
    other: the stand-in's cores cannot meet.)"""
    require_torch_xla()
    out, env = tmp_path / "out", machine(tmp_path / "machine")
    words = [sys.executable, "-m", "stages.precompile", "--out", str(out), "--device", "neuron", "--nodes", "2", "--"]
    words += ["-m", "trainer", *options(**small)]
    first = subprocess.Popen(
        words, cwd=ROOT, env={**os.environ, **env, "PET_NODE_RANK": "0"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        wait_until((out / "node-0.json").exists)
        assert not (out / "manifest.json").exists()
        second = command(*words[1:], env={**env, "PET_NODE_RANK": "1"})
        assert second.returncode == 0, second.stdout + second.stderr
        said, _ = first.communicate(timeout=120)
    finally:
        first.kill()
    assert first.returncode == 0, said
    assert (out / "manifest.json").exists()
    first_modules, second_modules = (
        sorted(path.relative_to(out / "cache" / node) for path in (out / "cache" / node).rglob("model.neff"))
        for node in ("node-0", "node-1")
    )
    assert len(first_modules) == 2
    assert first_modules == second_modules


@pytest.mark.slow
def test_a_graph_that_did_not_compile_is_one_line_and_compiled_later(small: dict[str, object], tmp_path: Path) -> None:
    """Even if the compiler was killed and has left its lock in the stage's cache."""
    require_torch_xla()
    out, env = tmp_path / "out", machine(tmp_path / "machine")
    trial = ("-m", "trainer", *options(**small))
    failed = precompile(out, "neuron", *trial, env={**env, "UNCOMPILED": "MODULE_1+abc"})
    assert_one_line_error(failed, "MODULE_1+abc was not compiled", "model.log")
    lock = out / "cache" / "node-0" / "neuronxcc-2.0" / "MODULE_1+abc" / "model.hlo_module.pb.lock"
    lock.touch()
    done = precompile(out, "neuron", *trial, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"removed {lock}" in done.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("torch_xla")
def test_a_trial_that_fails_is_one_line_more(work: dict[str, object], tmp_path: Path) -> None:
    wrong = options(**work, device="xla", tensor_parallel_size=2)
    done = precompile(tmp_path / "out", "xla", "-m", "trainer", *wrong)
    assert done.returncode == 1
    assert "error: the trial ended with exit status 1" in done.stderr


def test_a_bad_word_of_the_training_command_is_refused_before_the_trial(
    work: dict[str, object], tmp_path: Path
) -> None:
    done = precompile(tmp_path / "out", "xla", "-m", "trainer", *options(**{**work, "lr": "many"}, device="xla"))
    assert_one_line_error(done, "--lr is many")
    launcher = ("-m", "trainer.launch.torchrun", "--nproc_per_node=gpu")
    done = precompile(tmp_path / "out", "xla", *launcher, "-m", "trainer", *options(**work, device="xla"))
    assert_one_line_error(done, "--nproc_per_node", "'gpu'", "a number")
    assert not (tmp_path / "out").exists()


def test_what_is_missing_is_one_line(work: dict[str, object], tmp_path: Path) -> None:
    assert_one_line_error(precompile(tmp_path / "a", "xla"), "device xla needs a training command")
    done = precompile(tmp_path / "b", "neuron", "-m", "trainer", *options(**work))
    assert_one_line_error(done, "device neuron needs torch-neuronx", "docs/trainium.md")


@pytest.mark.slow
def test_torch_compiles_once_and_a_killed_run_finds_its_code(work: dict[str, object], tmp_path: Path) -> None:
    """Training compiles nothing that the trial has not, and ends with the same bytes whether it was killed or not.
    (tests/trainer/devices/test_inductor.py compares compiled gradients with others.)"""
    given = {**work, "device": "cpu", "compile": True, "ckpt_interval_steps": 2}
    out = tmp_path / "compiled"
    words = options(**given)
    done = command(
        "-m", "stages.precompile", "--out", str(out), "--device", "cpu", "--compile", "--", "-m", "trainer", *words
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [graph["operations"] > 20 for graph in json.loads((out / "graphs.json").read_text())["graphs"]] == [True]
    files = sorted((out / "cache").rglob("*.so"))
    assert files
    cached = {**given, "compile_cache": out / "cache", "graphs": out / "graphs.json"}
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert train(**cached, output_dir=killed, env={"FAILPOINT": "step:3.0"}).returncode == -9
    for directory in (whole, killed):
        trained = train(**cached, output_dir=directory, resume_ckpt=directory == killed)
        assert trained.returncode == 0, trained.stdout
        assert "warning" not in trained.stdout
    assert sorted((out / "cache").rglob("*.so")) == files
    ours, theirs = (tensors(directory / "checkpoints" / "ckpt_6") for directory in (killed, whole))
    assert all(ours[name].tobytes() == tensor.tobytes() for name, tensor in theirs.items())


@pytest.mark.parametrize(
    ("values", "fragment"),
    [({"device": "xla"}, "device xla, which always compiles"), ({"data_parallel": "ddp"}, "ddp does not go with")],
)
def test_what_does_not_go_with_compile_is_one_line(
    work: dict[str, object], tmp_path: Path, values: dict[str, str], fragment: str
) -> None:
    given = {**work, "device": "cpu", **values}
    assert_one_line_error(train(**given, compile=True, output_dir=tmp_path / "out"), fragment)
