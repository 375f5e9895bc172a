"""The model is Hugging Face's BertForPreTraining or BertForMaskedLM: same names, shapes, loss and gradients."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from tests.helpers.support import MODEL, synthetic_rows
from trainer.data.bert_batch import IGNORED, BertBatch
from trainer.models.bert import BertForPreTraining, has_weight_decay
from trainer.models.config import PRESETS, ModelConfig

transformers = pytest.importorskip("transformers")

SEQ_LEN, MAX_PRED_LEN = 32, 5
CONFIG = ModelConfig(**MODEL).without_dropout()


def batch_of(arrays: dict[str, np.ndarray], *, static: bool = False) -> BertBatch:
    tensors = {name: torch.from_numpy(value.astype(np.int64)) for name, value in arrays.items()}
    positions = tensors["masked_lm_positions"]
    index = positions + SEQ_LEN * torch.arange(len(positions))[:, None]
    labels = torch.where(positions > 0, tensors["masked_lm_ids"], IGNORED)
    keep = torch.ones_like(labels, dtype=torch.bool) if static else labels != IGNORED
    return BertBatch(
        tensors["input_ids"],
        tensors["segment_ids"],
        tensors["input_mask"],
        torch.arange(SEQ_LEN)[None],
        index[keep],
        labels[keep],
        SEQ_LEN * torch.arange(len(positions)),
        tensors["next_sentence_labels"],
    )


def hugging_face_like(ours: BertForPreTraining) -> torch.nn.Module:
    """Hugging Face's model with our parameters; fails on a missing or unexpected one."""
    config = ours.config.to_hugging_face()
    theirs = getattr(transformers, config["architectures"][0])(transformers.BertConfig(**config))
    expected = {name for name, _ in theirs.named_parameters()}
    assert {name for name, _ in ours.named_parameters()} == expected
    for name, parameter in theirs.named_parameters():
        parameter.data = dict(ours.named_parameters())[name].detach().clone()
    theirs.tie_weights()
    return theirs.double()


@pytest.fixture
def ours() -> BertForPreTraining:
    model = BertForPreTraining(CONFIG).double()
    model.initialise(seed=1)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # zero biases would hide a mix-up of them
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(2))
    return model


@pytest.mark.parametrize("static", [False, True])
def test_loss_and_gradients_at_masked_positions_equal_the_full_heads(ours: BertForPreTraining, static: bool) -> None:
    arrays = synthetic_rows(6, seq_len=SEQ_LEN, max_pred_len=MAX_PRED_LEN, seed=3)
    batch = batch_of(arrays, static=static)
    masked_lm, next_sentence = ours(batch)
    masked = int((batch.masked_labels != IGNORED).sum())
    (masked_lm / masked + next_sentence / 6).backward()

    assert_like_hugging_face(
        ours, masked_lm / masked + next_sentence / 6, batch, arrays, next_sentence_label=batch.next_sentence_labels
    )


def assert_like_hugging_face(
    ours: BertForPreTraining, loss: torch.Tensor, batch: BertBatch, arrays: dict[str, np.ndarray], **labels: object
) -> None:
    """`loss` of `batch`, made of `arrays`, and the gradients of `ours` are those of Hugging Face's model."""
    theirs = hugging_face_like(ours)
    words = torch.full((6, SEQ_LEN), -100)
    for row in range(6):
        for position, token in zip(arrays["masked_lm_positions"][row], arrays["masked_lm_ids"][row], strict=True):
            if position:
                words[row, int(position)] = int(token)
    expected = theirs(
        input_ids=batch.input_ids,
        attention_mask=batch.sequence_ids,
        token_type_ids=batch.segment_ids,
        labels=words,
        **labels,
    ).loss
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-10)
    gradients = {name: p.grad for name, p in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        # float64 sums in another order: 1e-10 relative, and 1e-12 where a gradient is zero but for rounding.
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("has_labels", [False, True])
def test_without_next_sentence_prediction_it_is_bert_for_masked_lm(
    ours: BertForPreTraining, static: bool, has_labels: bool
) -> None:
    """A batch may have next-sentence labels: the model ignores them."""
    model = BertForPreTraining(dataclasses.replace(CONFIG, next_sentence=False)).double()
    model.load_state_dict({name: value for name, value in ours.state_dict().items() if name in model.state_dict()})
    assert set(ours.state_dict()) - set(model.state_dict()) == {
        f"{name}.{kind}" for name in ("bert.pooler.dense", "cls.seq_relationship") for kind in ("weight", "bias")
    }
    arrays = synthetic_rows(6, seq_len=SEQ_LEN, max_pred_len=MAX_PRED_LEN, seed=3)
    batch = batch_of(arrays, static=static)
    if not has_labels:
        batch = dataclasses.replace(batch, first_index=None, next_sentence_labels=None)
    (masked_lm,) = model(batch)
    loss = masked_lm / int((batch.masked_labels != IGNORED).sum())
    loss.backward()
    assert_like_hugging_face(model, loss, batch, arrays)


def test_initial_weights_depend_on_seed_and_name_alone() -> None:
    small, large = (BertForPreTraining(ModelConfig(**{**MODEL, "num_hidden_layers": n})) for n in (1, 2))
    small.initialise(seed=7)
    large.initialise(seed=7)
    of_large = dict(large.named_parameters())
    for name, parameter in small.named_parameters():
        assert torch.equal(parameter, of_large[name]), name
    large.initialise(seed=8)
    word = "bert.encoder.layer.0.output.dense.weight"
    assert not torch.equal(dict(small.named_parameters())[word], of_large[word])


def test_initial_weights_are_distributed_as_berts() -> None:
    model = BertForPreTraining(ModelConfig.preset("tiny", vocab_size=8192))
    model.initialise(seed=1)
    parameters = dict(model.named_parameters())
    words = parameters["bert.embeddings.word_embeddings.weight"]
    assert words[0].abs().max() == 0
    # A million draws: the standard error of the deviation is 0.02 / sqrt(2e6) = 1.4e-5.
    assert words[1:].std().item() == pytest.approx(0.02, abs=1e-4)
    for name, parameter in parameters.items():
        if name.endswith("bias"):
            assert parameter.abs().max() == 0, name
        elif "LayerNorm" in name:
            assert (parameter == 1).all(), name


def test_decay_applies_to_all_but_biases_and_layer_norms() -> None:
    names = [name for name, _ in BertForPreTraining(CONFIG).named_parameters()]
    undecayed = {name for name in names if not has_weight_decay(name)}
    # The rule of the tutorials' script, spelt as in that script.
    assert undecayed == {name for name in names if any(word in name for word in ("bias", "LayerNorm"))}


def test_sizes_are_the_published_ones() -> None:
    """Turc et al. 2019 (arXiv:1908.08962), table 1; Devlin et al. 2018: layers, and hidden size, a head for each 64."""
    published = {
        "tiny": (2, 128), "mini": (4, 256), "small": (4, 512), "medium": (8, 512), "base": (12, 768),
        "large": (24, 1024),
    }  # fmt: skip
    for name, (layers, hidden) in published.items():
        assert PRESETS[name] == (layers, hidden, hidden // 64, 4 * hidden)
    theirs = transformers.BertConfig()
    for name in (
        "vocab_size", "max_position_embeddings", "type_vocab_size", "hidden_dropout_prob",
        "attention_probs_dropout_prob", "layer_norm_eps", "initializer_range",
    ):  # fmt: skip
        assert getattr(ModelConfig(), name) == getattr(theirs, name)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_hugging_faces_parameter_shapes(name: str) -> None:
    config = ModelConfig.preset(name)
    with torch.device("meta"):
        ours = BertForPreTraining(config)
        theirs = transformers.BertForPreTraining(transformers.BertConfig(**config.to_hugging_face()))
    assert {n: p.shape for n, p in ours.named_parameters()} == {n: p.shape for n, p in theirs.named_parameters()}
