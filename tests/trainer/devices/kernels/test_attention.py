"""Attention without padding, by the kernels themselves: compiled on a GPU, interpreted elsewhere."""

from __future__ import annotations

import itertools
import math
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

pytest.importorskip("triton", reason="needs Triton, which is for Linux")

from trainer.devices.kernels import attention

module: Any = sys.modules["trainer.devices.kernels.attention"]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: Empty ones at the beginning, between others and at the end; shorter and longer than a block, and as long.
LENGTHS = (0, 1, 64, 0, 63, 65, 150, 0)
HEADS = 2
#: The rounding of a type, relative to the number.
UNITS = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def sequences(lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Where they begin, and the length of each token's sequence."""
    bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=DEVICE)
    return bounds, bounds.diff().repeat_interleave(bounds.diff()).int()


def drawn(tokens: int, columns: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, columns, generator=random).to(DEVICE, dtype)


def exact(qkv: Tensor, lengths: tuple[int, ...], keep: Tensor | None = None, share: float = 0.0) -> Tensor:
    """In float64, by the definition, one sequence after another. `keep` (A, T, keys): the weights that are kept."""
    outs, begin = [], 0
    for length in lengths:
        q, k, v = (
            x.unflatten(1, (HEADS, -1)).transpose(0, 1) for x in qkv[begin : begin + length].double().chunk(3, dim=1)
        )
        weights = torch.softmax(q @ k.transpose(1, 2) / math.sqrt(q.shape[-1]), dim=-1)
        if keep is not None:
            weights = weights * keep[:, begin : begin + length, :length] / (1 - share)
        outs.append((weights @ v).transpose(0, 1).flatten(1))
        begin += length
    return torch.cat(outs)


def decisions(kept: Tensor) -> Tensor:
    """The words (A, words, T) as bool (A, T, keys)."""
    bits = (kept[:, :, None, :] >> torch.arange(32, device=kept.device)[:, None]) & 1
    return bits.flatten(1, 2).transpose(1, 2).bool()


@pytest.mark.parametrize(
    ("head_size", "dtype"),
    [
        (16, torch.bfloat16),
        (20, torch.float16),
        pytest.param(64, torch.bfloat16, marks=pytest.mark.slow),
        (128, torch.float16),
    ],
)
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_values_and_gradients_are_those_of_float64_but_for_rounding(
    head_size: int, dtype: torch.dtype, dropout_p: float
) -> None:
    """With the same weights dropped, in the backward pass too. Weights, result and the scores' gradients are each
    rounded once: a few units, relative to the whole tensor."""
    bounds, of_tokens = sequences(LENGTHS)
    tokens, width = len(of_tokens), HEADS * head_size
    qkv, bias = drawn(tokens, 3 * width, dtype).requires_grad_(), torch.zeros(3 * width, device=DEVICE).requires_grad_()
    gradient = drawn(tokens, width, dtype, seed=1)
    out, _, kept = module._attention(qkv, bias, bounds, of_tokens, max(LENGTHS), HEADS, dropout_p)
    ours = [out, *torch.autograd.grad(out, (qkv, bias), gradient)]
    wide = qkv.detach().double().requires_grad_()
    true = exact(wide, LENGTHS, decisions(kept) if dropout_p else None, round(256 * dropout_p) / 256)
    (d_qkv,) = torch.autograd.grad(true, wide, gradient.double())
    for one, other in zip(ours, (true, d_qkv, d_qkv.sum(0)), strict=True):
        assert (one.double() - other).norm() <= 2 * UNITS[dtype] * other.norm()
    # Of keys and values alone, which are much smaller than those of the queries or much larger.
    for one, other in zip(ours[1].chunk(3, dim=1), d_qkv.chunk(3, dim=1), strict=True):
        assert (one.double() - other).norm() <= 2 * UNITS[dtype] * other.norm()


def test_it_is_torchs_own_attention() -> None:
    bounds, of_tokens = sequences((130,))
    qkv = drawn(130, 3 * HEADS * 16, torch.float16)
    q, k, v = (x.unflatten(1, (HEADS, -1)).transpose(0, 1)[None].double() for x in qkv.chunk(3, dim=1))
    theirs = F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).flatten(1)
    ours = attention(qkv, qkv[0].float(), bounds, of_tokens, 130, HEADS, 0.0)
    assert (ours.double() - theirs).norm() <= 2 * UNITS[torch.float16] * theirs.norm()


def test_large_scores_do_not_overflow() -> None:
    bounds, of_tokens = sequences((70,))
    qkv = 60 * drawn(70, 3 * HEADS * 16, torch.float16)
    out = attention(qkv, qkv[0].float(), bounds, of_tokens, 70, HEADS, 0.0)
    assert torch.isfinite(out).all()
    true = exact(qkv, (70,))
    assert (out.double() - true).norm() <= 2 * UNITS[torch.float16] * true.norm()


def draw(p: float, lengths: tuple[int, ...], seed: int) -> Tensor:
    bounds, of_tokens = sequences(lengths)
    qkv = torch.zeros(len(of_tokens), 3 * HEADS * 16, dtype=torch.float16, device=DEVICE)
    torch.manual_seed(seed)
    return decisions(module._attention(qkv, qkv[0].float(), bounds, of_tokens, max(lengths), HEADS, p)[2])


@pytest.mark.parametrize("p", [0.1, *(pytest.param(p, marks=pytest.mark.slow) for p in (0.5, 3 / 256))])
def test_a_share_is_dropped_and_no_head_query_or_key_is_favoured(p: float) -> None:
    """Within five standard deviations of so many independent draws."""
    kept = draw(p, (256, 256), seed=3).double().cpu()
    share = 1 - round(256 * p) / 256
    for dimensions in ((0, 1, 2), (1, 2), (0, 2), (0, 1)):
        shares = kept.mean(dimensions)
        n = kept.numel() / shares.numel()
        assert (shares - share).abs().max() <= 5 * math.sqrt(share * (1 - share) / n)


@pytest.mark.slow
def test_decisions_are_independent_of_each_other() -> None:
    """Of neighbours and of those in the next words, along keys and queries; of other heads, and of other calls."""
    kept = draw(0.5, (256, 256), seed=4).double().cpu() - 0.5
    others = draw(0.5, (256, 256), seed=5).double().cpu() - 0.5
    pairs = [(kept, others), (kept[0], kept[1])]
    for lag in (1, 2, 3, 4, 5, 6, 7, 8, 16, 31, 32, 33, 64):
        pairs += [(kept[:, :, lag:], kept[:, :, :-lag]), (kept[:, lag:], kept[:, :-lag])]
    for one, other in pairs:
        assert abs(4 * (one * other).mean().item()) <= 5 / math.sqrt(one.numel())


def test_the_seed_decides_what_is_dropped_and_the_backward_pass_draws_nothing() -> None:
    """Otherwise a resumed run would end with other bytes: each micro-step is seeded once."""
    bounds, of_tokens = sequences((40, 9))
    found = []
    for seed in (1, 1, 2):
        qkv = drawn(49, 3 * HEADS * 16, torch.float16).requires_grad_()
        torch.manual_seed(seed)
        out = attention(qkv, qkv.detach()[0].float(), bounds, of_tokens, 40, HEADS, 0.4)
        after = torch.rand(1, device=DEVICE)
        torch.manual_seed(seed)
        attention(qkv, qkv.detach()[0].float(), bounds, of_tokens, 40, HEADS, 0.4)
        out.sum().backward()
        assert torch.equal(torch.rand(1, device=DEVICE), after)
        found.append([out, qkv.grad])
    assert all(map(torch.equal, found[0], found[1]))
    assert not torch.equal(found[0][0], found[2][0])


@pytest.mark.slow
def test_every_call_has_the_same_bits() -> None:
    bounds, of_tokens = sequences(LENGTHS)
    qkv, bias = drawn(len(of_tokens), 3 * HEADS * 16, torch.float16).requires_grad_(), torch.zeros(3 * HEADS * 16)
    bias = bias.to(DEVICE).requires_grad_()
    found = []
    for _ in range(10 if DEVICE == "cuda" else 2):
        torch.manual_seed(1)
        out = attention(qkv, bias, bounds, of_tokens, max(LENGTHS), HEADS, 0.1)
        found.append([out, *torch.autograd.grad(out, (qkv, bias), torch.ones_like(out))])
    assert all(all(map(torch.equal, found[0], again)) for again in found[1:])


@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_torch_takes_it_for_a_sound_operator(dropout_p: float) -> None:
    bounds, of_tokens = sequences((3, 0, 5))
    qkv, bias = drawn(8, 3 * HEADS * 16, torch.float16).requires_grad_(), torch.zeros(3 * HEADS * 16, device=DEVICE)
    given = (qkv, bias.requires_grad_(), bounds, of_tokens, 5, HEADS, dropout_p)
    torch.library.opcheck(module._attention, given)
    with torch.no_grad():
        out = module._attention(*given)
        torch.library.opcheck(module._gradients, (out[0], qkv.detach(), bounds, *out, 5, dropout_p))


@pytest.mark.filterwarnings("ignore")  # torch's own warnings while it traces
def test_one_graph_has_it_as_one_operator_whatever_the_lengths() -> None:
    """With the same number of sequences, some of them empty."""
    torch._dynamo.reset()
    traced: list[Any] = []

    def backend(graph: torch.fx.GraphModule, examples: list[Tensor]) -> Any:
        traced.append(graph)
        return graph.forward

    def call(qkv: Tensor, bias: Tensor, bounds: Tensor, of_tokens: Tensor) -> Tensor:
        return attention(qkv, bias, bounds, of_tokens, 7, HEADS, 0.0)

    compiled = torch.compile(call, backend=backend, fullgraph=True, dynamic=False)
    qkv, bias = drawn(15, 3 * HEADS * 16, torch.float16), torch.zeros(3 * HEADS * 16, device=DEVICE)
    for lengths in ((0, 4, 3, 0, 1, 7), (1, 2, 3, 4, 5, 0)):
        given = (qkv, bias, *sequences(lengths))
        assert torch.equal(compiled(*given), call(*given))
    assert len(traced) == 1
    called = [node.target for node in traced[0].graph.nodes if node.op == "call_function"]
    assert called.count(torch.ops.bert_pretraining.attention.default) == 1


def test_heads_are_taken_in_the_types_of_products() -> None:
    takes = module.takes_heads
    assert takes(torch.bfloat16, 64)
    assert takes(torch.float16, 128)
    assert not takes(torch.bfloat16, 129)
    assert not takes(torch.float32, 64)
