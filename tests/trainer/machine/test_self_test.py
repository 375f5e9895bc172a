"""The self-test accepts a device that computes what the CPU does, and finds each of eight faults."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from common.errors import UserError
from tests.helpers.support import (
    SELF_TEST_MODULES,
    Workers,
    assert_one_line_error,
    command,
    fork_server,
    options,
    write_model_config,
)
from trainer.config import TrainConfig
from trainer.machine import kind
from trainer.machine.arithmetic import check_fallbacks
from trainer.machine.sample import sample_rows
from trainer.machine.self_test import CHECKS, FILE, _device_options, run_checks
from trainer.machine.subject import Finding, Subject
from trainer.parallel.mesh import Mesh


@pytest.fixture(scope="module", autouse=True)
def server() -> Iterator[None]:
    with fork_server(*SELF_TEST_MODULES):
        yield


def self_test(folder: Path, fault: str, workers: int = 1, **values: object) -> tuple[int, set[str], str]:
    """(exit status, the checks that failed, output) of the self-test of a device of `tests.helpers.faulty.devices`."""
    given = {"seq_len": 32, "max_pred_len": 5, "batch_size": 4, "device": "cpu", "precision": "fp32", **values}
    words = options(model_config=write_model_config(folder), output_dir=folder / "out", **given)
    done = Workers(workers, "tests.helpers.faulty.devices", [fault, "--self-test", *words], {}).wait()
    assert done.returncode in (0, 1), done.stdout
    record = json.loads((folder / "out" / FILE).read_text())
    assert record["checks"].keys() == CHECKS.keys()
    failed = {name for name, check in record["checks"].items() if not check["passed"]}
    assert record["passed"] == (not failed)
    for name in failed:
        assert f"{name:<21} FAILED" in done.stdout
    assert [path.name for path in (folder / "out").iterdir()] == [FILE]
    return done.returncode, failed, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "values"),
    [
        (1, {"optimizer": "Muon"}),
        (2, {"resume_ckpt_path": "elsewhere/ckpt_1", "new_data": True}),  # as a night's training is started
        (2, {"grad_reduce_in_bf16": True}),
        (2, {"tensor_parallel_size": 2}),
        (2, {"shard_optimizer": True}),
    ],
)
def test_a_sound_device_passes(tmp_path: Path, workers: int, values: dict[str, Any]) -> None:
    status, failed, output = self_test(tmp_path, "Sound", workers, **values)
    assert (status, failed) == (0, set()), output
    assert output.splitlines()[-1].startswith("self-test passed: ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "workers", "found"),
    [
        ("WrongGradients", 1, {"operations", "gradients"}),
        ("DroppedAllReduce", 2, {"collectives", "gradients", "updates", "resume"}),
        ("RepeatedDropoutMask", 1, {"dropout independence"}),
        ("StaleGraph", 1, {"dropout independence", "compiled graphs"}),
        ("NarrowedIntegers", 1, {"integers"}),
        ("WrongMask", 1, {"operations", "attention mask", "gradients", "updates"}),
        ("SwappedShards", 2, {"collectives", "gradients", "updates"}),
        ("LostUpdate", 1, {"updates"}),
    ],
)
def test_each_fault_is_found(tmp_path: Path, fault: str, workers: int, found: set[str]) -> None:
    """The first failed check names the cause; the others follow from it."""
    status, failed, output = self_test(tmp_path, fault, workers)
    assert (status, failed) == (1, found), output
    assert output.splitlines()[-1].startswith("self-test FAILED: ")


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["autocast-sr", "bf16-sr"])
def test_rounding_at_random_is_no_failure_and_hides_no_wrong_mask(tmp_path: Path, precision: str) -> None:
    status, failed, output = self_test(tmp_path, "RoundedAtRandom", precision=precision)
    assert (status, failed) == (0, set()), output
    _, failed, output = self_test(tmp_path, "RoundedAtRandomWithWrongMask", precision=precision)
    assert "attention mask" in failed, output


@pytest.mark.slow
def test_a_stop_signal_is_no_failure(tmp_path: Path) -> None:
    """Not even while the self-test trains, when signals are requests to save."""
    given = {"seq_len": 32, "max_pred_len": 5, "batch_size": 4, "device": "cpu", "precision": "fp32"}
    words = options(model_config=write_model_config(tmp_path), output_dir=tmp_path / "out", **given)
    done = Workers(1, "tests.helpers.faulty.devices", ["StoppedWhileItTrains", "--self-test", *words], {}).wait()
    assert done.returncode == 75, done.stdout
    assert "stopped as asked; the self-test was not completed" in done.stdout
    assert "FAILED" not in done.stdout
    assert not list((tmp_path / "out").iterdir())


def test_operations_that_the_options_allow_on_the_cpu_are_no_failure() -> None:
    device = SimpleNamespace(fallbacks=lambda: {"aten::gelu", "aten::sort"})

    def passed(allowed: str) -> bool:
        config = dataclasses.replace(TrainConfig(), allow_fallbacks=allowed)
        assert _device_options(config).allow_fallbacks is None  # they are judged here, and end no other check
        (finding,) = check_fallbacks(cast("Subject", SimpleNamespace(device=device, config=config)))
        return finding.passed

    assert passed("aten::sort,aten::gelu")
    assert passed(" aten::sort , aten::gelu")
    assert not passed("aten::gelu")


@pytest.mark.parametrize("given", ["", "aten::gelu,", "aten::gelu, ,aten::sort"])
def test_operations_have_names(given: str) -> None:
    with pytest.raises(UserError, match=f"--allow_fallbacks '{given}' has .*; allowed: .*aten::gelu,aten::sort"):
        TrainConfig(allow_fallbacks=given)


def test_what_a_check_found_before_an_error_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(subject: Subject) -> Iterator[Finding]:
        yield Finding("a gradient", 0.5, 0.1)
        raise RuntimeError("no answer")

    monkeypatch.setattr("trainer.machine.self_test.CHECKS", {"gradients": broken})
    outcome = run_checks(cast("Subject", SimpleNamespace(mesh=Mesh())), lambda line: None)["gradients"]
    assert [(found.what, found.measured) for found in outcome.findings] == [
        ("a gradient", 0.5),
        ("RuntimeError: no answer", math.inf),
    ]
    assert not outcome.passed


def test_rows_that_are_too_short_are_refused(tmp_path: Path) -> None:
    """As every other option is, before anything runs; rows of 8 tokens have room for what they need."""
    refused = command("-m", "trainer", "--self-test", "--seq_len", "7", "--output_dir", str(tmp_path / "out"))
    assert_one_line_error(refused, "--seq_len is 7", "8 or more")
    assert not (tmp_path / "out").exists()
    rows = sample_rows(100, vocab_size=100, seq_len=8, max_pred_len=5, seed=0)
    assert (rows["input_mask"].sum(axis=1) == 8).all()


def test_another_workload_is_refused() -> None:
    assert_one_line_error(
        command("-m", "trainer", "--self-test", "--workload", "mnist"),
        "--self-test trains BERT",
        "leave --workload out",
    )


@pytest.mark.parametrize(
    ("words", "trains_bert"),
    [
        (["--data_dir", "mnist"], True),
        (["--workload", "bert", "--data_dir=mnist"], True),
        (["--output_dir", "mnist", "--workload=bert"], True),
        (["--workload", "mnist"], False),
        (["--data_dir=x", "--workload=mnist"], False),
    ],
)
def test_only_a_run_that_trains_no_bert_goes_without(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], trains_bert: bool
) -> None:
    kind.test_once(tmp_path, "cpu", ["-m", "trainer", *words], nodes=2)
    assert ("self-test: not run across several machines" in capsys.readouterr().err) == trains_bert
