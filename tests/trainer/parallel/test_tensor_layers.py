"""Two ranks that share a model compute one rank's losses and gradients, in float64, layer by layer of one step."""

from __future__ import annotations

import os

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.helpers.support import MODEL, all_end, synthetic_rows
from trainer.data.bert_batch import IGNORED, BertBatch
from trainer.devices.cpu import CpuDevice
from trainer.devices.cpu_operations import CpuOperations
from trainer.models.bert import BertForPreTraining, has_weight_decay
from trainer.models.config import ModelConfig
from trainer.optim.parameters import FlatParameters
from trainer.optim.sharing import SharedModel
from trainer.parallel.mesh import Mesh
from trainer.parallel.plan import split_axis, split_of
from trainer.parallel.shares import put_share
from trainer.parallel.tensor import TensorParallel, own_words
from trainer.precision import Precision

ROWS, S = 6, 32
#: No size divides the vocabulary: the last rank's share of it is padded.
CONFIG = ModelConfig(**{**MODEL, "vocab_size": 203}).without_dropout()


def batch() -> BertBatch:
    arrays = synthetic_rows(ROWS, seq_len=S, max_pred_len=5, seed=0)
    rows, columns = np.nonzero(arrays["masked_lm_positions"])
    tensors = {name: torch.from_numpy(value.astype(np.int64)) for name, value in arrays.items()}
    return BertBatch(
        tensors["input_ids"], tensors["segment_ids"], tensors["input_mask"], torch.arange(S)[None],
        torch.from_numpy(rows) * S + tensors["masked_lm_positions"][rows, columns],
        tensors["masked_lm_ids"][rows, columns], S * torch.arange(ROWS), tensors["next_sentence_labels"],
    )  # fmt: skip


def computed(
    ranks: TensorParallel | None, shared: SharedModel | None = None
) -> tuple[BertForPreTraining, FlatParameters, list[float]]:
    model = BertForPreTraining(CONFIG, CpuOperations(), ranks).double()
    model.initialise(seed=1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("output.dense.bias"):  # zeros would hide how often they are added
                parameter.copy_(torch.linspace(-0.3, 0.3, len(parameter)))
    parameters = FlatParameters(model, has_weight_decay, 0, Precision("fp64"), shared)
    losses = model(batch())
    sum(losses).backward()
    return model, parameters, [loss.item() for loss in losses]


def _compare(rank: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    mesh = Mesh(rank=rank, local_rank=rank, world_size=2, local_world_size=2, tensor_parallel_size=2)
    mesh, device = mesh.connect("gloo", 300), CpuDevice()

    def all_reduce(tensors: list[Tensor], sums: bool) -> None:
        device.all_reduce(tensors, mesh.tensor_parallel_group, sums=sums)

    ranks = TensorParallel(rank, 2, all_reduce, device.random_region)
    shared = SharedModel(ranks.rank, ranks.size, split_axis, ranks.reduce_in_place, ranks.region)
    model, parameters, losses = computed(ranks, shared)
    whole, _, expected = computed(None)
    np.testing.assert_allclose(losses, expected, rtol=1e-12)
    wanted = dict(whole.named_parameters())
    norm = torch.nn.utils.get_total_norm([p.grad for p in wanted.values() if p.grad is not None])
    np.testing.assert_allclose(parameters.clip(None).item(), norm.item(), rtol=1e-12)
    # The norms of the weights, as LAMB asks for them.
    mine = dict(model.named_parameters())
    norms = torch.stack([parameter.detach().norm() for parameter in mine.values()])
    of_whole = torch.stack([wanted[name].detach().norm() for name in mine])
    torch.testing.assert_close(shared.whole_norms(list(mine), norms), of_whole, rtol=1e-12, atol=0)
    for name, parameter in mine.items():
        gradient, weights = torch.empty_like(parameter), torch.empty_like(parameter)
        put_share(gradient, name, wanted[name].grad, ranks)
        put_share(weights, name, wanted[name].detach(), ranks)
        assert torch.equal(parameter, weights), name
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-10, atol=1e-13, msg=name)
        if (split := split_of(name)) and split.padded and rank:
            assert not parameter[101:].any(), f"{name}: 102 rows on each rank are one more than there are"
    mesh.disconnect()


def test_two_ranks_compute_what_one_does() -> None:
    all_end(_compare, 2)


def _loss_of_bf16_logits(rank: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    mesh = Mesh(rank=rank, local_rank=rank, world_size=2, local_world_size=2, tensor_parallel_size=2)
    mesh, device, given = mesh.connect("gloo", 300), CpuDevice(), batch()

    def all_reduce(tensors: list[Tensor], sums: bool) -> None:
        device.all_reduce(tensors, mesh.tensor_parallel_group, sums=sums)

    ranks = TensorParallel(rank, 2, all_reduce, device.random_region)
    model = BertForPreTraining(CONFIG, CpuOperations(), ranks).bfloat16()
    model.initialise(seed=1)
    weight = model.bert.embeddings.word_embeddings.weight
    with torch.no_grad():
        masked, _ = model._encoded(given)
        logits = model.cls.predictions(masked, weight, model.cls.predictions.bias)
        loss = model._masked_lm_loss(masked, given.masked_labels)
    assert logits.dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    first, own = rank * len(weight), own_words(CONFIG.vocab_size, ranks)
    whole = torch.zeros(len(logits), CONFIG.vocab_size)
    whole[:, first : first + own] = logits[:, :own]
    all_reduce([whole], True)
    exact = F.cross_entropy(whole.double(), given.masked_labels, ignore_index=IGNORED, reduction="sum")
    np.testing.assert_allclose(loss.item(), exact.item(), rtol=1e-5)
    mesh.disconnect()


def test_the_loss_over_split_bf16_logits_is_computed_in_fp32() -> None:
    all_end(_loss_of_bf16_logits, 2)
