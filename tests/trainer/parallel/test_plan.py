"""What is split, checked against the sizes of real models and by putting the whole together again."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from common.errors import UserError
from tests.helpers.support import ROOT
from trainer.checkpoint.interop.names import parameter_shapes
from trainer.models.bert import BertForPreTraining
from trainer.models.config import PRESETS, ModelConfig
from trainer.parallel.plan import padded_length, padded_shape, share, split_of, stored_shape


@pytest.mark.parametrize("preset", PRESETS)
def test_the_shapes_written_down_are_the_models(preset: str) -> None:
    config = ModelConfig.preset(preset)
    with torch.device("meta"):
        model = BertForPreTraining(config)
    assert list(parameter_shapes(config).items()) == [(n, tuple(p.shape)) for n, p in model.named_parameters()]


def test_exactly_what_the_layers_split_is_split() -> None:
    split = {name: split_of(name) for name in parameter_shapes(ModelConfig(num_hidden_layers=1))}
    layer = "bert.encoder.layer.0."
    columns = {
        f"{layer}{part}.{kind}"
        for part in ("attention.self.query", "attention.self.key", "attention.self.value", "intermediate.dense")
        for kind in ("weight", "bias")
    }
    rows = {f"{layer}attention.output.dense.weight", f"{layer}output.dense.weight"}
    vocabulary = {"bert.embeddings.word_embeddings.weight", "cls.predictions.bias"}
    assert {name for name, s in split.items() if s and s.axis == 0 and not s.padded} == columns
    assert {name for name, s in split.items() if s and s.axis == 1} == rows
    assert {name for name, s in split.items() if s and s.padded} == vocabulary


@pytest.mark.parametrize("length", [1, 7, 8, 9, 30522])
@pytest.mark.parametrize("size", [1, 2, 3, 8, 32])
def test_shares_are_the_whole_in_order(length: int, size: int) -> None:
    whole = list(range(length))
    shares = [whole[share(length, rank, size)] for rank in range(size)]
    assert sum(shares, []) == whole
    assert max(map(len, shares)) == padded_length(length, size) // size
    # Padding is at the very end: only the last ranks have less.
    assert sorted(map(len, shares), reverse=True) == list(map(len, shares))


def test_shapes_with_and_without_padding() -> None:
    name, shape = "bert.embeddings.word_embeddings.weight", (30522, 1024)
    assert padded_shape(name, shape, 8) == (3816, 1024)
    assert [stored_shape(name, shape, rank, 8)[0] for rank in (0, 6, 7)] == [3816, 3816, 30522 - 7 * 3816]
    assert stored_shape("bert.encoder.layer.3.output.dense.weight", (1024, 4096), 1, 8) == (1024, 512)
    assert stored_shape("bert.pooler.dense.weight", (1024, 1024), 1, 8) == (1024, 1024)


def test_a_size_that_does_not_divide_is_one_line() -> None:
    ModelConfig().require_divisible(8)
    with pytest.raises(UserError, match=r"tensor_parallel_size = 3 does not divide num_attention_heads = 16"):
        ModelConfig().require_divisible(3)


def test_the_plan_imports_no_torch() -> None:
    program = "import sys, trainer.parallel.plan; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)
