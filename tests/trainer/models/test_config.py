"""A config.json is a BERT that the model computes, with sizes that make sense, or is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.errors import CheckpointError, UserError
from tests.helpers.support import MODEL
from trainer.checkpoint.interop import hugging_face
from trainer.models.config import ModelConfig
from trainer.workloads.bert import BertOptions, model_of


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("hidden_act", "relu", "hidden_act is relu; only a BERT with hidden_act = gelu can be read or trained"),
        ("position_embedding_type", "relative_key", "only a BERT with position_embedding_type = absolute"),
        ("model_type", "roberta", "model_type is roberta; only a BERT with model_type = bert"),
        ("num_attention_heads", 0, "num_attention_heads is 0; allowed: a whole number 1 or more"),
        ("hidden_size", "768", 'hidden_size is "768"; allowed: a whole number 1 or more'),
        ("num_hidden_layers", True, "num_hidden_layers is true; allowed: a whole number 1 or more"),
        ("intermediate_size", 64.0, "intermediate_size is 64.0; allowed: a whole number 1 or more"),
        ("hidden_dropout_prob", None, "hidden_dropout_prob is null; allowed: 0 ≤ p < 1"),
        ("hidden_dropout_prob", 1, "hidden_dropout_prob is 1; allowed: 0 ≤ p < 1"),
        ("layer_norm_eps", -1, "layer_norm_eps is -1; allowed: a number 0 or more"),
        ("next_sentence", "no", 'next_sentence is "no"; allowed: true or false'),
        ("tie_word_embeddings", False, "only a BERT with tie_word_embeddings = True can be read or trained"),
        ("is_decoder", True, "only a BERT with is_decoder = False can be read or trained"),
        ("pad_token_id", 1, "only a BERT with pad_token_id = 0 can be read or trained"),
    ],
)
def test_what_the_model_does_not_compute_is_refused_with_the_file(
    tmp_path: Path, name: str, value: object, said: str
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**MODEL, name: value}))
    with pytest.raises(UserError) as training:
        model_of(BertOptions(model_config=path))
    assert str(training.value).startswith(f"--model_config {path}: ")
    assert said in str(training.value)
    with pytest.raises(CheckpointError) as reading:
        hugging_face._config(path)
    assert str(reading.value).startswith(f"{path}: ")
    assert said in str(reading.value)


def test_what_it_computes_is_read_alike(tmp_path: Path) -> None:
    """Whole numbers are numbers, too."""
    wanted = ModelConfig(**{**MODEL, "hidden_dropout_prob": 0})
    given = {**wanted.to_hugging_face(), "unused": None}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(given))
    assert model_of(BertOptions(model_config=path)) == hugging_face._config(path) == wanted
