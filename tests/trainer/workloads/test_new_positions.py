"""Position embeddings that phase 1's shorter rows left untrained, through the real command."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from tests.helpers.support import MODEL, assert_same_bytes, forked, tensors, train, write_dataset
from trainer.models.config import ModelConfig
from trainer.models.neighbours import scale_untrained

POSITIONS = "bert.embeddings.position_embeddings.weight"
TRAINED = 32
GIVEN = {
    "batch_size": 4, "grad_accum_usteps": 2, "precision": "fp32", "device": "cpu", "lr": 3e-3, "warmup_steps": 0,
    "max_pred_len": 5, "num_ckpts_to_keep": -1, "ckpt_interval_steps": 0,
}  # fmt: skip
SECOND = {"phase2": True, "resume_ckpt": True, "phase1_end_step": 12, "max_steps": 3, "new_positions": "scaled"}


def run(data: Path, model: Path, out: Path, *, workers: int = 1, **values: object) -> str:
    done = train(workers, data_dir=data, model_config=model, output_dir=out, **GIVEN | values)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def first(data: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Phase 1's last checkpoint, of rows of 32."""
    out = tmp_path_factory.mktemp("first")
    run(data, model, out, max_steps=12, lr=1e-2, initial_attention="neighbours")
    return out / "checkpoints" / "ckpt_12"


@pytest.fixture(scope="module")
def longer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of 64."""
    return write_dataset(tmp_path_factory.mktemp("longer"), [60], seq_len=64)


def waves() -> np.ndarray:
    """(64, 32): what a model with hidden size 32 and 4 heads begins with: in the last 8 directions, sinusoids of
    amplitude 0.03 and frequency π ((i + 0.5) / 4) ** 1.5."""
    found = np.zeros((64, 32))
    for i in range(4):
        angles = np.arange(64) * np.pi * ((i + 0.5) / 4) ** 1.5
        found[:, 24 + 2 * i], found[:, 25 + 2 * i] = 0.03 * np.cos(angles), 0.03 * np.sin(angles)
    return found


def begun(data: Path, model: Path, out: Path, start: Path, **values: object) -> tuple[str, np.ndarray]:
    """The log of a step at rate 0, and the positions that it leaves."""
    given = SECOND | {"resume_ckpt_path": start, "max_steps": 1, "lr": 0} | values
    said = run(data, model, out, **given)
    (*_, file) = sorted((out / "checkpoints" / "ckpt_13").glob("model-*.safetensors"))  # each rank has all positions
    return said, load_file(file)[POSITIONS]


def test_they_grow_by_the_factor_that_fits_the_trained_ones_best(
    longer: Path, model: Path, first: Path, tmp_path: Path
) -> None:
    trained = tensors(first)[POSITIONS]
    factor, untrained = (
        np.linalg.lstsq(waves()[part].reshape(-1, 1), trained[part].reshape(-1), rcond=None)[0].item()
        for part in (slice(TRAINED), slice(TRAINED, None))
    )
    assert abs(factor - 1) > 1e-3  # training changed them; `expected` is a hundred times as exact
    expected = np.concatenate([trained[:TRAINED], factor * waves()[TRAINED:]])
    said, found = begun(longer, model, tmp_path / "out", first)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(found[:TRAINED], trained[:TRAINED])
    assert f"position embeddings from 32 on, untrained so far, grow {factor / untrained:.2f}-fold" in said


def test_the_factor_is_counted_from_what_the_untrained_ones_are() -> None:
    """Embeddings that the text made begin twice as large, positions too."""
    config = ModelConfig(**MODEL)
    positions = torch.from_numpy(waves()).float()
    positions[:TRAINED] *= 6
    positions[TRAINED:] *= 2
    assert "grow 3.00-fold" in scale_untrained(positions, TRAINED, config)
    np.testing.assert_allclose(positions, 6 * waves(), rtol=1e-6, atol=1e-8)


def test_two_ranks_and_a_resumed_run_begin_with_the_same(
    longer: Path, model: Path, first: Path, tmp_path: Path
) -> None:
    _, one = begun(longer, model, tmp_path / "one", first)
    _, two = begun(longer, model, tmp_path / "two", first, workers=2, tensor_parallel_size=2)
    np.testing.assert_array_equal(one, two)
    given = SECOND | {"resume_ckpt_path": first}
    run(longer, model, tmp_path / "straight", **given)
    for last in (2, 3):
        run(longer, model, tmp_path / "cut", **given, steps_this_run=last)
    assert_same_bytes(*(tmp_path / name / "checkpoints" / "ckpt_15" for name in ("cut", "straight")))


def test_nothing_changes_unless_asked_and_where_rows_are_not_longer(
    data: Path, longer: Path, model: Path, first: Path, tmp_path: Path
) -> None:
    for name, shards, choice in (("initial", longer, "initial"), ("same length", data, "scaled")):
        said, found = begun(shards, model, tmp_path / name, first, new_positions=choice)
        np.testing.assert_array_equal(found, tensors(first)[POSITIONS], err_msg=name)
        assert "position embeddings" not in said


def test_positions_that_are_no_waves_are_kept(data: Path, longer: Path, model: Path, tmp_path: Path) -> None:
    run(data, model, tmp_path / "first", max_steps=12)
    start = tmp_path / "first" / "checkpoints" / "ckpt_12"
    said, found = begun(longer, model, tmp_path / "second", start)
    np.testing.assert_array_equal(found, tensors(start)[POSITIONS])
    assert "position embeddings from 32 on are not those that --initial_attention neighbours begins with: kept" in said


def test_a_model_from_elsewhere_is_kept(longer: Path, model: Path, first: Path, tmp_path: Path) -> None:
    """A Hugging Face directory does not say how long its rows were, even if it was made from ours."""
    assert forked("stages.merge", first, tmp_path / "merged").returncode == 0
    done = forked("stages.convert", tmp_path / "merged" / "model", tmp_path / "back", "--step", "12")
    assert done.returncode == 0, done.stdout
    said, found = begun(longer, model, tmp_path / "second", tmp_path / "back" / "checkpoint")
    np.testing.assert_array_equal(found, tensors(first)[POSITIONS])
    assert (
        "the checkpoint does not say how long the rows of its training were: all position embeddings are kept" in said
    )
