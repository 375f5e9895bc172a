"""The CPU's attention compared with softmax written out in float64, for rows and for packed sequences."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from trainer.devices import cpu_kernels
from trainer.devices.cpu_kernels.attention import Group
from trainer.devices.cpu_operations import CpuOperations

pytestmark = pytest.mark.skipif(cpu_kernels.library() is None, reason="needs a C compiler")

#: Type, and the largest error allowed, relative to the largest number of the result: bf16 rounds scores, weights,
#: their gradients and results.
TYPES = [(torch.float64, 1e-14), (torch.float32, 2e-6), (torch.bfloat16, 4 * 2.0**-8)]
every_type = pytest.mark.parametrize(("dtype", "error"), TYPES, ids=["float64", "float32", "bfloat16"])
S, A, D = 40, 3, 8
H = A * D
#: The lengths of each row's sequences; what is left of a row is padding. 16 and 32 are not filled up.
KINDS = {"rows": [[40], [23], [1]], "packed": [[20, 16, 4], [32], [1, 1, 37]], "one": [[40]]}
every_kind = pytest.mark.parametrize("kind", KINDS)


def micro_batch(kind: str) -> tuple[Tensor, Tensor | None]:
    """Sequence ids (B, S), and for packed rows where the sequences and padding begin."""
    ids, bounds = torch.zeros(len(KINDS[kind]), S, dtype=torch.int64), [0]
    for row, lengths in enumerate(KINDS[kind]):
        at = 0
        for number, length in enumerate(lengths, start=1):
            ids[row, at : at + length] = number
            at += length
            bounds.append(row * S + at)
        if at < S:
            bounds.append((row + 1) * S)
    # Bounds have a fixed number, the last of which repeat the end.
    return ids, torch.tensor([*bounds, len(ids) * S, len(ids) * S]) if kind == "packed" else None


def by_hand(x: Tensor, layers: list[nn.Linear], ids: Tensor, kept: Tensor | float = 1.0) -> Tensor:
    """Softmax over the tokens of a token's own sequence, written out; `kept`: factors of weights, (B, A, S, S)."""
    q, k, v = (layer(x).unflatten(2, (A, D)) for layer in layers)
    scores = torch.einsum("bqad,bkad->baqk", q, k) / D**0.5
    own = (ids[:, None, :, None] == ids[:, None, None, :]) & (ids > 0)[:, None, None, :]
    weights = torch.softmax(scores.masked_fill(~own, -1e300), -1) * kept
    return torch.einsum("baqk,bkad->bqad", weights, v).flatten(2)


def layers_of(dtype: torch.dtype) -> list[nn.Linear]:
    torch.manual_seed(3)
    return [nn.Linear(H, H, dtype=torch.float64).to(dtype) for _ in range(3)]


def compare(dtype: torch.dtype, error: float, kind: str, p: float, kept: Tensor | float) -> None:
    ids, bounds = micro_batch(kind)
    layers, x = layers_of(dtype), torch.randn(*ids.shape, H, dtype=torch.float64).to(dtype)
    wide = layers_of(torch.float64)
    for one, other in zip(wide, layers, strict=True):
        one.load_state_dict(other.state_dict())
    used = (ids > 0)[..., None]
    seed = torch.randn(x.shape, dtype=torch.float64).to(dtype) * used  # the results of padding are not used
    operations, results = CpuOperations(), []
    torch.manual_seed(9)
    for given, three in ((x.requires_grad_(), layers), (x.detach().double().requires_grad_(), wide)):
        if given is x:
            out = operations.self_attention(given, three, D, operations.attention_mask(ids, bounds), p)
        else:
            out = by_hand(given, three, ids, kept)
        parameters = [parameter for layer in three for parameter in layer.parameters()]
        results.append([out * used, *torch.autograd.grad(out, [given, *parameters], seed.to(given.dtype))])
    for number, (found, wanted) in enumerate(zip(*results, strict=True)):
        if number == 5:  # the bias of keys moves all scores of a query alike: its gradient is 0
            assert found.abs().max() <= error * results[1][3].abs().max() * 4
            continue
        assert (found.double() - wanted).abs().max() <= error * wanted.abs().max(), number


@every_type
@every_kind
def test_attention_is_that_of_vaswani(dtype: torch.dtype, error: float, kind: str) -> None:
    compare(dtype, error, kind, 0.0, 1.0)


@every_type
@pytest.mark.parametrize("kind", ["rows", "one"])
def test_the_same_weights_are_dropped_forward_and_backward(dtype: torch.dtype, error: float, kind: str) -> None:
    """Which are, is read from values that are unit vectors: it depends on the seed and the lengths alone."""
    ids, _ = micro_batch(kind)
    attended = ids.count_nonzero(1).int()
    group = Group(0, len(ids), S, S, attended)
    qkv = torch.zeros(len(ids) * S, 3, A, S, dtype=torch.float64)
    qkv[:, 2] = torch.eye(S, dtype=torch.float64).repeat(len(ids), 1)[:, None]
    torch.manual_seed(9)
    sequences = cpu_kernels.Sequences([group], len(qkv))
    shown = cpu_kernels.attention(qkv.flatten(1), torch.zeros(3 * A * S), sequences, A, 0.25)
    weights = shown.view(len(ids), S, A, S).transpose(1, 2)
    kept = (weights > 0).double() / 0.75
    inside = (ids > 0)[:, None, None, :].expand_as(kept)
    assert 0.2 < 1 - 0.75 * kept[inside].mean() < 0.3
    torch.testing.assert_close(weights, kept / attended[:, None, None, None] * inside)
    compare(dtype, error, kind, 0.25, kept)


def test_packed_gradients_are_those_of_what_was_dropped() -> None:
    """By a finite difference, exact to 1e-8: each sequence has a seed of its own, forward and backward."""
    ids, bounds = micro_batch("packed")
    sequences = CpuOperations().attention_mask(ids, bounds)
    torch.manual_seed(4)
    qkv = torch.randn(ids.numel(), 3 * H, dtype=torch.float64, requires_grad=True)

    direction = torch.randn_like(qkv)

    def weighted(qkv: Tensor) -> Tensor:
        torch.manual_seed(9)
        out = cpu_kernels.attention(qkv, torch.zeros(3 * H, dtype=torch.float64), sequences, A, 0.25)
        return (out * torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)).sum()

    (gradient,) = torch.autograd.grad(weighted(qkv), qkv)
    with torch.no_grad():
        difference = (weighted(qkv + 1e-5 * direction) - weighted(qkv - 1e-5 * direction)) / 2e-5
    torch.testing.assert_close((gradient * direction).sum(), difference, rtol=1e-7, atol=0)


def test_packed_sequences_drop_their_own() -> None:
    """Two equal sequences of a row do not drop the same weights."""
    ids = torch.tensor([[1] * 20 + [2] * 20])
    operations, layers = CpuOperations(), layers_of(torch.float64)
    x = torch.randn(1, 20, H, dtype=torch.float64).repeat(1, 2, 1)
    mask = operations.attention_mask(ids, torch.tensor([0, 20, 40]))
    without, with_dropout = (operations.self_attention(x, layers, D, mask, p)[0] for p in (0.0, 0.3))
    assert torch.equal(without[:20], without[20:])
    assert (with_dropout[:20] - with_dropout[20:]).abs().max() > 1e-3


def test_a_row_without_tokens_is_finite() -> None:
    ids = torch.zeros(2, S, dtype=torch.int64)
    ids[0] = 1
    operations, layers = CpuOperations(), layers_of(torch.float32)
    x = torch.randn(2, S, H).requires_grad_()
    out = operations.self_attention(x, layers, D, operations.attention_mask(ids, None), 0.1)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    assert out.isfinite().all()
    assert gradient.isfinite().all()
