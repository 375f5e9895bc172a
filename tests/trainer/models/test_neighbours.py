"""Initial attention to neighbours, as Hugging Face's model computes it and as it affects training."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.support import synthetic_rows
from trainer.data.shards import ShardSet, write_shard
from trainer.models.bert import BertForPreTraining
from trainer.models.config import ModelConfig
from trainer.parallel.tensor import TensorParallel
from trainer.registry import INITIAL_ATTENTION
from trainer.workloads.bert import BertWorkload

transformers = pytest.importorskip("transformers")

VOCABULARY, WORDS, MASK = 512, 64, 4


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> ShardSet:
    directory = tmp_path_factory.mktemp("shards")
    rows = synthetic_rows(8, seq_len=32, max_pred_len=5, seed=1)
    write_shard(directory / "part_training_0.hdf5", rows)
    return ShardSet.open(directory)


def initialised(
    config: ModelConfig, shards: ShardSet, attention: str, ranks: TensorParallel | None = None
) -> BertForPreTraining:
    model = BertForPreTraining(config, ranks=ranks)
    BertWorkload(config, shards, initial_attention=attention).initialise(model, 5)
    return model


def hugging_face(config: ModelConfig, shards: ShardSet, attention: str) -> torch.nn.Module:
    """Hugging Face's model with our initial weights."""
    ours = initialised(config, shards, attention)
    theirs = transformers.BertForPreTraining._from_config(
        transformers.BertConfig(**config.to_hugging_face()), attn_implementation="eager"
    )
    missing, unexpected = theirs.load_state_dict(dict(ours.named_parameters()), strict=False)
    assert not unexpected
    assert all(name.startswith("cls.predictions.decoder") for name in missing)
    theirs.tie_weights()
    return theirs


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
    for head, offset in zip(range(attention.shape[1]), (-1, 1, -2, 2, -3, 3, -4, 4), strict=False):
        shares = attention[:, head].diagonal(offset, dim1=1, dim2=2)
        assert shares.mean() > 25 / length, (head, shares.mean())
        places = torch.arange(max(0, -offset), length - max(0, offset))
        assert (attention[:, head, places].argmax(-1) == places + offset).float().mean() > 0.99, head


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
