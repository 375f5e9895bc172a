"""The whole chain on devices that compile, through the real luigi."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

from tests.helpers.chain import Chain
from tests.helpers.killer import check_end, digest, torment
from tests.helpers.support import metrics
from tests.standins.neuron_native.machine import native_machine


@pytest.mark.slow
@pytest.mark.usefixtures("torch_xla")
def test_both_phases_train_on_xla_and_compile_only_what_precompile_listed(tmp_path: Path) -> None:
    chain = Chain(tmp_path)
    done = chain.run("BertPhase2", "--Cluster-device", "xla")
    assert "warning: graph" not in done.stderr
    assert "model: " in done.stderr
    for phase in (1, 2):
        assert chain.manifest(f"precompile-phase{phase}")["counts"] == {"graphs": 2}
        assert metrics(chain.latest(f"pretrain-phase{phase}"))[-1]["compiled_graphs"] == 2


@pytest.fixture
def native(tmp_path: Path, native_library: Path, monkeypatch: pytest.MonkeyPatch) -> Chain:
    """A chain on a machine with native torch-neuronx."""
    for name, value in native_machine(tmp_path / "machine", native_library).items():
        monkeypatch.setenv(name, value)
    return Chain(tmp_path)


@pytest.mark.slow
def test_the_native_lane_trains_the_graphs_that_precompile_compiled(native: Chain) -> None:
    words = ["--Cluster-device", "neuron", "--Cluster-compile", "true"]
    done = native.run("BertPhase2", *words)
    assert "warning: graph" not in done.stderr
    # The first Precompile tests the device, with the configured model.
    (record,) = (native.work / "self-tests").iterdir()
    tested = json.loads(record.read_text())
    assert tested["passed"]
    assert (tested["not_compiled"], tested["model"]["hidden_size"]) == ("", 32)
    assert done.stderr.count("self-test: passed before on this kind of machine") == 1
    for phase in (1, 2):
        directory = native.latest(f"precompile-phase{phase}")
        graphs = json.loads((directory / "graphs.json").read_text())["graphs"]
        assert metrics(native.latest(f"pretrain-phase{phase}"))[-1]["compiled_graphs"] == len(graphs) == 1
        # A forward and a backward pass, compiled before training and only once.
        assert len(list((directory / "cache" / "node-0" / "neff").glob("MODULE_*/model.neff"))) == 2
    assert "device neuron-native, since torch-neuronx 2.14" in done.stderr
    assert native.manifest("evaluate")["counts"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_random_kills_change_nothing_on_the_native_lane(native: Chain) -> None:
    """Two workers share each matrix, so each has a checkpoint of its own. The data and the compiled graphs are there
    already: the kills hit training and what follows it."""
    words = ["--Cluster-device", "neuron", "--Cluster-nproc-per-node", "2", "--Cluster-self-test", "false"]
    words += ["--Cluster-tensor-parallel-size", "2"]
    native.run("BertPhase2", *words)
    wanted = digest(native)
    made = ("pretrain", "convert", "merge", "evaluate", "report")
    for path in [
        path for path in (*native.work.glob("*-*"), *native.work.glob("latest/*")) if path.name.startswith(made)
    ]:
        path.unlink() if path.is_symlink() else shutil.rmtree(path)
    assert torment(native, random.Random(2), words, longest_s=5.0, most=2) > 0
    assert digest(native) == wanted
    check_end(native)
