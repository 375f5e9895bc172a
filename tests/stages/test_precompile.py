"""Precompile: on XLA's CPU for real; for Neuron around a stand-in of its compiler."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from tests.support import (
    assert_one_line_error,
    command,
    losses,
    options,
    tensors,
    train,
    write_dataset,
    write_model_config,
)

#: What this stand-in of neuron_parallel_compile does is what the trainer and the stage see of the real one: it sets
#: the variable under which graphs are extracted, runs the command, and leaves modules in the compiler's cache.
STAND_IN = """#!/bin/sh
export NEURON_EXTRACT_GRAPHS_ONLY=1
"$@" || exit $?
module="$CACHE/neuronxcc-2.0/MODULE_123+abc"
mkdir -p "$module"
touch "$module/model.hlo_module.pb.gz"
[ -n "$UNCOMPILED" ] || touch "$module/model.neff"
"""


@pytest.fixture
def work(tmp_path: Path) -> dict[str, object]:
    data, model = write_dataset(tmp_path / "data", [40]), write_model_config(tmp_path)
    return {
        "data_dir": data, "model_config": model, "batch_size": 4, "grad_accum_usteps": 2, "max_steps": 6,
        "warmup_steps": 1, "max_pred_len": 5, "precision": "fp32",
    }  # fmt: skip


def precompile(out: Path, device: str, *trial: str, env: dict[str, str] | None = None):  # type: ignore[no-untyped-def]
    return command("-m", "stages.precompile", "--out", str(out), "--device", device, "--", *trial, env=env)


def test_the_graphs_of_xla_are_those_that_training_meets(work: dict[str, object], tmp_path: Path) -> None:
    pytest.importorskip("torch_xla")
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

    # What does not change graphs may change; what is not in the list is told.
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


def test_where_nothing_is_compiled_that_is_said(tmp_path: Path) -> None:
    done = precompile(tmp_path / "out", "cpu")
    assert done.returncode == 0
    assert "device cpu: operations run one by one here, there is nothing to compile" in done.stderr
    assert json.loads((tmp_path / "out" / "graphs.json").read_text()) == {"graphs": []}


def test_a_trial_writes_nothing_and_believes_no_loss(work: dict[str, object], tmp_path: Path) -> None:
    """As under Neuron's extraction, whose results are garbage: here a learning rate that ends in NaN."""
    out = tmp_path / "out"
    for workers, env in ((1, {"NEURON_EXTRACT_GRAPHS_ONLY": "1"}), (2, {"NEURON_EXTRACT_GRAPHS_ONLY": "1"})):
        done = train(workers, **{**work, "lr": 1e38, "grad_accum_usteps": 2 // workers}, device="cpu", output_dir=out,
                     env=env)  # fmt: skip
        assert done.returncode == 0, done.stdout
        assert "LOG" not in done.stdout
        assert not out.exists()
    diverged = train(**{**work, "lr": 1e38}, device="cpu", output_dir=out)
    assert diverged.returncode == 1


def neuron_env(tmp_path: Path, **more: str) -> dict[str, str]:
    program = tmp_path / "bin" / "neuron_parallel_compile"
    program.parent.mkdir()
    program.write_text(STAND_IN)
    program.chmod(0o755)
    return {"PATH": f"{program.parent}:{os.environ['PATH']}", "CACHE": str(tmp_path / "out" / "cache"), **more}


def test_neurons_compiler_runs_the_command_and_its_cache_is_the_stages(work: dict[str, object], tmp_path: Path) -> None:
    """The trial itself runs on the CPU here: `--device` of the training command says so."""
    out = tmp_path / "out"
    trial = ["-m", "trainer", *options(**work, device="cpu")]
    done = precompile(out, "neuron", *trial, env=neuron_env(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    (graph,) = json.loads((out / "graphs.json").read_text())["graphs"]
    assert graph["hash"] == "123+abc"
    assert (out / "cache" / "neuronxcc-2.0" / "MODULE_123+abc" / "model.neff").exists()
    assert not (out / "trial").exists()


def test_a_graph_that_did_not_compile_is_one_line(work: dict[str, object], tmp_path: Path) -> None:
    trial = ["-m", "trainer", *options(**work, device="cpu")]
    done = precompile(tmp_path / "out", "neuron", *trial, env=neuron_env(tmp_path, UNCOMPILED="1"))
    assert_one_line_error(done, "MODULE_123+abc was not compiled", "model.log")


def test_a_trial_that_fails_is_one_line_more(work: dict[str, object], tmp_path: Path) -> None:
    done = precompile(tmp_path / "out", "xla", "-m", "trainer", *options(**{**work, "lr": "many"}, device="xla"))
    assert done.returncode == 1
    assert "error: the trial ended with exit status 2" in done.stderr


def test_what_is_missing_is_one_line(tmp_path: Path) -> None:
    assert_one_line_error(precompile(tmp_path / "a", "xla"), "device xla needs the training command")
    done = precompile(tmp_path / "b", "neuron", "-m", "trainer")
    assert_one_line_error(done, "neuron_parallel_compile is not here", "docs/trainium.md")


def test_torch_compiles_once_and_its_code_is_found_again(work: dict[str, object], tmp_path: Path) -> None:
    """The curve is that of single operations, and training compiles nothing that the trial has not."""
    given = {**work, "device": "cpu", "compile": True, "disable_dropout": True, "ckpt_interval_steps": 2}
    given["model_config"] = write_model_config(tmp_path, num_hidden_layers=1)
    out = tmp_path / "compiled"
    words = options(**given)
    done = command(
        "-m", "stages.precompile", "--out", str(out), "--device", "cpu", "--compile", "--", "-m", "trainer", *words
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [graph["operations"] > 20 for graph in json.loads((out / "graphs.json").read_text())["graphs"]] == [True]
    cached = {"compile_cache": out / "cache", "graphs": out / "graphs.json"}
    files = len(list((out / "cache").rglob("*.so")))
    assert files > 0
    trained = train(**given, **cached, output_dir=tmp_path / "a")
    assert trained.returncode == 0, trained.stdout
    assert "warning" not in trained.stdout
    assert len(list((out / "cache").rglob("*.so"))) == files
    eager = train(**{**given, "compile": False}, output_dir=tmp_path / "b")
    assert eager.returncode == 0
    # Fused kernels round otherwise; six steps carry that on.
    np.testing.assert_allclose(losses(tmp_path / "a"), losses(tmp_path / "b"), rtol=1e-4)


def test_a_killed_compiled_run_ends_with_the_same_bytes(work: dict[str, object], tmp_path: Path) -> None:
    given = {**work, "device": "cpu", "compile": True, "ckpt_interval_steps": 2, "compile_cache": tmp_path / "cache"}
    given["model_config"] = write_model_config(tmp_path, num_hidden_layers=1)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert train(**given, output_dir=whole).returncode == 0
    assert train(**given, output_dir=killed, env={"FAILPOINT": "step:3.0"}).returncode == -9
    assert train(**given, output_dir=killed, resume_ckpt=True).returncode == 0
    ours, theirs = (tensors(directory / "checkpoints" / "ckpt_6") for directory in (killed, whole))
    assert all(ours[name].tobytes() == tensor.tobytes() for name, tensor in theirs.items())


@pytest.mark.parametrize(
    ("values", "fragment"),
    [({"device": "xla"}, "compile is for cpu and cuda"), ({"data_parallel": "ddp"}, "do not go together")],
)
def test_what_does_not_go_with_compile_is_one_line(
    work: dict[str, object], tmp_path: Path, values: dict[str, str], fragment: str
) -> None:
    given = {**work, "device": "cpu", **values}
    assert_one_line_error(train(**given, compile=True, output_dir=tmp_path / "out"), fragment)
