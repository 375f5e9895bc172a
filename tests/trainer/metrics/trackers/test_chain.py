"""The whole chain with trackers: both phases, the evaluation, and what is sent later."""

from __future__ import annotations

import json
import secrets
from pathlib import Path

import pytest

from tests.helpers.chain import Chain, finished_chain
from tests.trainer.metrics.trackers import readers
from tests.trainer.metrics.trackers.readers import MlflowServer, wandb_runs
from tests.trainer.metrics.trackers.test_trackers import recorded

mlflow_server = readers.mlflow_server
TRACKERS = """
[trackers]
names = mlflow, wandb
project = {project}
mlflow_uri = {uri}
wandb_mode = offline
wait_s = {wait_s}
"""


@pytest.mark.slow
def test_both_phases_and_the_evaluation_reach_trackers_at_once_or_later(
    mlflow_server: MlflowServer, tmp_path: Path
) -> None:
    """W&B's files at once; MLflow's server is down for the whole run, which is sent to it afterwards, twice."""
    pytest.importorskip("wandb", reason="needs the extra wandb")
    project = f"chain-{secrets.token_hex(4)}"
    mlflow_server.stop()
    try:
        chain = Chain(tmp_path, TRACKERS.format(project=project, uri=mlflow_server.uri, wait_s=120))
        done = chain.run("BertPhase2")
        assert "has reached mlflow" in done.stderr
        assert "note: wandb" not in done.stderr
        phases = [chain.latest(f"pretrain-phase{phase}") for phase in (1, 2)]
        evaluated = json.loads((chain.latest("evaluate") / "evaluation.json").read_text())
        results = {f"evaluation/{name}": value for name, value in evaluated.items() if type(value) in (int, float)}
        assert "evaluation/masked_lm_accuracy" in results
        for phase in phases:
            (run,) = wandb_runs(phase)
            assert (run.name, run.status, run.curves) == (phase.name, "finished", recorded(phase))
        assert run.summary.items() >= results.items()
        assert "has reached mlflow" in chain.ask("trackers", status=1).stderr
    finally:
        mlflow_server.start()
    for _ in range(2):
        assert chain.ask("trackers").stdout == "mlflow, wandb: complete\n"
        runs = {run.name: run for run in mlflow_server.runs(project)}
        assert runs.keys() == {phase.name for phase in phases}
        for phase in phases:
            curves = {name: points for name, points in runs[phase.name].curves.items() if name not in results}
            assert (runs[phase.name].status, curves) == ("FINISHED", recorded(phase))
        assert {name: [value for _, value in runs[phases[1].name].curves[name]] for name in results} == {
            name: [value] for name, value in results.items()
        }


def test_what_was_trained_without_a_tracker_is_not_said_to_be_sent(tmp_path_factory: pytest.TempPathFactory) -> None:
    pytest.importorskip("wandb", reason="needs the extra wandb")
    chain = finished_chain(tmp_path_factory)
    asked = chain.ask("trackers", "--Trackers-names", "wandb", "--Trackers-wandb-mode", "offline", status=1)
    assert asked.stdout == ""
    for phase in (1, 2):
        assert f"pretrain-phase{phase}: not sent: it was trained without a tracker" in asked.stderr


def test_there_is_nothing_to_send_without_trackers(tmp_path: Path) -> None:
    said = Chain(tmp_path).ask("trackers", status=35).stderr
    assert said == "error: [trackers] names = tensorboard lists no remote tracker; add mlflow or wandb\n"
