"""Initial attention to neighbours, as Hugging Face's model computes it and as it affects training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.helpers.support import synthetic_rows
from trainer.data.shards import ShardSet, write_shard
from trainer.models.bert import OUTPUT_BIAS, WORD_EMBEDDINGS, BertForPreTraining
from trainer.models.config import ModelConfig
from trainer.models.neighbours import position_directions
from trainer.parallel.tensor import TensorParallel
from trainer.registry import INITIAL_ATTENTION
from trainer.workloads.bert import BertWorkload

transformers = pytest.importorskip("transformers")

VOCABULARY, WORDS, MASK = 512, 64, 4
#: From a token to the one that a head attends to, in the order of heads.
OFFSETS = [sign * distance for distance in range(1, 9) for sign in (-1, 1)]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> ShardSet:
    directory = tmp_path_factory.mktemp("shards")
    rows = synthetic_rows(8, seq_len=32, max_pred_len=5, seed=1)
    write_shard(directory / "part_training_0.hdf5", rows)
    return ShardSet.open(directory)


def initialised(
    config: ModelConfig,
    shards: ShardSet,
    attention: str,
    ranks: TensorParallel | None = None,
    words: Path | None = None,
) -> BertForPreTraining:
    model = BertForPreTraining(config, ranks=ranks)
    BertWorkload(config, shards, word_embeddings=words, initial_attention=attention).initialise(model, 5)
    return model


def hugging_face(config: ModelConfig, shards: ShardSet, attention: str, words: Path | None = None) -> torch.nn.Module:
    """Hugging Face's model with our initial weights."""
    ours = initialised(config, shards, attention, words=words)
    theirs = transformers.BertForPreTraining._from_config(
        transformers.BertConfig(**config.to_hugging_face()), attn_implementation="eager"
    )
    missing, unexpected = theirs.load_state_dict(dict(ours.named_parameters()), strict=False)
    assert not unexpected
    assert all(name.startswith("cls.predictions.decoder") for name in missing)
    theirs.tie_weights()
    return theirs


def share_at(attention: torch.Tensor, offset: int) -> float:
    """The mean share of the tokens `offset` after their own. `attention`: (rows, S, S)."""
    return attention.diagonal(offset, dim1=1, dim2=2).mean().item()


def masked_ids(rows: int, length: int) -> torch.Tensor:
    ids = torch.randint(5, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(1))
    ids[:, 3::7] = MASK
    return ids


@pytest.mark.parametrize("preset", ["tiny", "mini", "small"])
@pytest.mark.parametrize("length", [128, 512])
def test_each_head_of_the_first_layer_attends_to_its_neighbour(shards: ShardSet, preset: str, length: int) -> None:
    """More than to any other token, anywhere in the row; random heads give each token about 1 / length."""
    config = ModelConfig.preset(preset, vocab_size=VOCABULARY).without_dropout()
    model = hugging_face(config, shards, "neighbours")
    with torch.no_grad():
        attention = model(masked_ids(2, length), output_attentions=True).attentions[0]
    for head, offset in zip(range(attention.shape[1]), OFFSETS, strict=False):
        assert share_at(attention[:, head], offset) > 25 / length, head
        places = torch.arange(max(0, -offset), length - max(0, offset))
        assert (attention[:, head, places].argmax(-1) == places + offset).float().mean() > 0.99, head


@pytest.mark.parametrize("preset", ["mini", "small"])
def test_heads_of_the_next_two_layers_attend_to_neighbours_too(shards: ShardSet, preset: str) -> None:
    """Less than the first layer's, since what is added to the hidden state before dilutes the positions; all but those
    that look for the same neighbour."""
    config = ModelConfig.preset(preset, vocab_size=VOCABULARY).without_dropout()
    model = hugging_face(config, shards, "neighbours")
    with torch.no_grad():
        _, second, third, last = model(masked_ids(2, 128), output_attentions=True).attentions
    heads = second.shape[1]
    for head, offset in zip(range(2, heads), OFFSETS[heads:], strict=False):
        assert share_at(second[:, head], offset) > 10 / 128, head
    for head, offset in zip(range(heads), OFFSETS, strict=False):
        assert share_at(third[:, head], offset) > 5 / 128, head
        assert share_at(last[:, head], offset) < 2 / 128, head


@pytest.mark.parametrize("preset", ["tiny", "mini", "small"])
@pytest.mark.parametrize("side", [-1, 1])
def test_two_heads_of_the_second_layer_attend_to_tokens_with_the_same_neighbour(
    shards: ShardSet, preset: str, side: int
) -> None:
    """Half as much again as to the tokens around those, which differ in nothing else. A masked token's neighbour on one
    `side` also stands 30 tokens before, beside another word."""
    config = ModelConfig.preset(preset, vocab_size=VOCABULARY).without_dropout()
    model = hugging_face(config, shards, "neighbours")
    ids = torch.randint(5, VOCABULARY, (16, 128), generator=torch.Generator().manual_seed(1))
    masked = torch.arange(40, 126, 9)
    ids[:, masked], ids[:, masked + side] = MASK, ids[:, masked + side - 30]
    with torch.no_grad():
        second = model(ids, output_attentions=True).attentions[1]
    found = [second[:, 0 if side == -1 else 1, masked, masked - 30 + step].mean() for step in (0, -2, 2)]
    assert found[0] > 1.5 * max(found[1:]), found


@pytest.mark.parametrize(("heads", "layers"), [(1, 1), (1, 3), (3, 2), (4, 1)])
def test_any_number_of_heads_and_layers(shards: ShardSet, heads: int, layers: int) -> None:
    """Heads with an odd number among them, and fewer layers than those that begin in a way of their own."""
    config = ModelConfig(VOCABULARY, layers, 192, heads, intermediate_size=192).without_dropout()
    model = hugging_face(config, shards, "neighbours")
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    ids = masked_ids(2, 128)
    with torch.no_grad():
        attention = model(ids, output_attentions=True).attentions
    for head, offset in zip(range(heads), OFFSETS, strict=False):
        assert share_at(attention[0][:, head], offset) > 25 / 128, head
    if layers > 1 and heads > 2:  # the head after those that look for the same neighbour
        assert share_at(attention[1][:, 2], OFFSETS[heads]) > 10 / 128


def test_heads_attend_to_neighbours_with_word_embeddings_from_the_text_too(shards: ShardSet, tmp_path: Path) -> None:
    """All embeddings are twice as large; words have nothing in the positions' directions."""
    config = ModelConfig.preset("mini", vocab_size=VOCABULARY).without_dropout()
    vectors = 0.02 * torch.randn(VOCABULARY - 8, 256, generator=torch.Generator().manual_seed(7))
    words = tmp_path / "embeddings.safetensors"
    save_file({WORD_EMBEDDINGS: vectors, OUTPUT_BIAS: torch.full((VOCABULARY - 8,), -6.0)}, words)
    plain = hugging_face(config, shards, "neighbours").bert.embeddings
    model = hugging_face(config, shards, "neighbours", words)
    given = model.bert.embeddings
    positions = position_directions(config)
    vectors[:, positions] = 0
    assert torch.equal(given.word_embeddings.weight[: VOCABULARY - 8], 2 * vectors)
    assert torch.equal(given.position_embeddings.weight, 2 * plain.position_embeddings.weight)
    assert not given.token_type_embeddings.weight[:, positions].any()
    with torch.no_grad():
        attention = model(masked_ids(2, 128), output_attentions=True).attentions[0]
    for head, offset in zip(range(4), OFFSETS, strict=False):
        assert share_at(attention[:, head], offset) > 25 / 128, head


def test_what_an_induction_head_adds_is_the_word_that_it_attends_to(shards: ShardSet) -> None:
    """Half of the part of it that a head reads: for a normal 64 × 224 matrix V, x and VᵀVx have a cosine of about
    √(64 / (64 + 224))."""
    model = hugging_face(ModelConfig.preset("mini", vocab_size=VOCABULARY), shards, "neighbours")
    attention = model.bert.encoder.layer[1].attention
    words = torch.nn.functional.layer_norm(torch.randn(64, 256, generator=torch.Generator().manual_seed(2)), (256,))
    words[:, 256 - 32 :] = 0  # the positions' directions
    for head in (slice(0, 64), slice(64, 128)):
        with torch.no_grad():
            read = words @ attention.self.value.weight[head].T
            added = read @ attention.output.dense.weight[:, head].T
        similarity = torch.nn.functional.cosine_similarity(added[:, None], words, dim=-1)
        same = similarity.diagonal()
        assert abs(same.mean() - (64 / (64 + 224)) ** 0.5) < 0.05  # of 64 words the mean's deviation is 0.01
        assert (similarity.abs().sum() - same.abs().sum()) / (64 * 63) < 0.1  # 0.8 / √224 of unrelated vectors
        assert ((added * words).sum() / read.square().sum()).item() == pytest.approx(0.5, rel=1e-4)


def test_what_the_first_two_heads_write_leaves_the_positions_as_they_are(shards: ShardSet) -> None:
    """And the heads that look for the same neighbour do not read the positions."""
    config = ModelConfig.preset("mini", vocab_size=VOCABULARY)
    first, second = (hugging_face(config, shards, "neighbours").bert.encoder.layer[layer].attention for layer in (0, 1))
    positions, heads = position_directions(config), slice(0, 128)
    assert first.output.dense.weight[:, heads].any()
    assert not first.output.dense.weight[positions, heads].any()
    assert not second.self.query.weight[heads, positions].any()
    assert not second.self.key.weight[heads, positions].any()


def test_the_masked_lm_head_passes_on_what_the_encoder_found(shards: ShardSet) -> None:
    config = ModelConfig.preset("mini", vocab_size=VOCABULARY)
    hidden = torch.nn.functional.layer_norm(torch.randn(64, 256, generator=torch.Generator().manual_seed(2)), (256,))
    words = slice(0, 256 - 32)  # the other directions are the positions'
    similarity = []
    for attention in INITIAL_ATTENTION:
        with torch.no_grad():
            out = hugging_face(config, shards, attention).cls.predictions.transform(hidden)
        similarity.append(torch.nn.functional.cosine_similarity(out[:, words], hidden[:, words]).mean())
    assert similarity[1] > 0.95 > 0.2 > abs(similarity[0])


@pytest.mark.slow
def test_a_word_that_its_neighbour_tells_is_learned_much_sooner(shards: ShardSet) -> None:
    """Rows of pairs whose second word is a function of the first and is masked half of the time."""
    generator = torch.Generator().manual_seed(3)
    second = torch.randperm(WORDS, generator=generator) + 5
    losses = []
    for attention in INITIAL_ATTENTION:
        config = ModelConfig.preset("tiny", vocab_size=VOCABULARY).without_dropout()
        model = hugging_face(config, shards, attention)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        generator.manual_seed(4)
        for _ in range(60):
            first = torch.randint(5, 5 + WORDS, (16, 32), generator=generator)
            ids = torch.stack([first, second[first - 5]], -1).flatten(1)
            hidden = torch.rand(first.shape, generator=generator) < 0.5
            labels = torch.full_like(ids, -100)
            labels[:, 1::2] = ids[:, 1::2].where(hidden, -100)
            logits = model(ids.where(labels == -100, MASK)).prediction_logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert losses[1] < losses[0] / 2, losses


def test_tensor_parallel_ranks_begin_with_shares_of_the_same_weights(shards: ShardSet) -> None:
    config = ModelConfig.preset("mini", vocab_size=VOCABULARY)
    models = [
        initialised(config, shards, "neighbours", ranks) for ranks in (None, *map(TensorParallel, (0, 1), (2, 2)))
    ]
    whole, *halves = ({name: p.detach() for name, p in model.named_parameters()} for model in models)
    for name, expected in whole.items():
        first, second = (half[name] for half in halves)
        if first.shape == expected.shape:
            assert torch.equal(first, expected), name
        else:
            dim = next(i for i in range(expected.ndim) if first.shape[i] != expected.shape[i])
            assert torch.equal(torch.cat([first, second], dim), expected), name
