"""The operator for attention without padding: values and gradients on the CPU; for the GPU kernels, what can be checked
without a GPU: that they take these arguments, and return what the operator declares."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from common.errors import UserError
from trainer.devices.cuda import CudaOperations
from trainer.models import varlen_attention as module
from trainer.models.varlen_attention import (
    KERNEL_TYPES,
    backward,
    flash_backward,
    flash_forward,
    forward,
    head_size_max,
    takes,
)
from trainer.models.varlen_attention import varlen_attention as attend

#: Empty sequences, as static shapes have them, at the beginning, between others and at the end.
LENGTHS = (0, 4, 3, 0, 1, 7, 0)
TOKENS, HEADS = sum(LENGTHS), 2
BOUNDS = torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32)
SCALE = 0.3


def inputs(head_size: int = 8, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    drawn = (torch.randn(TOKENS, HEADS, head_size, dtype=torch.float64, generator=random) for _ in range(3))
    return [x.to(dtype).requires_grad_() for x in drawn]


def sequence_by_sequence(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """torch's own attention of each sequence alone."""
    parts = zip(*(x.transpose(0, 1).split(LENGTHS, dim=1) for x in (query, key, value)), strict=True)
    return torch.cat([F.scaled_dot_product_attention(*part) for part in parts], dim=1).transpose(0, 1)


@pytest.mark.parametrize("head_size", [8, 5], ids=["a multiple of 8", "padded to one"])
def test_values_and_gradients_are_those_of_torch_for_each_sequence(head_size: int) -> None:
    given = inputs(head_size)
    out, expected = attend(*given, BOUNDS, 7, 0.0), sequence_by_sequence(*given)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    weights = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    ours, theirs = (torch.autograd.grad((x * weights).sum(), given) for x in (out, expected))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_views_of_one_product_give_what_copies_give() -> None:
    """Query, key and value that lie side by side, as they come from one product."""
    joined = torch.cat([x.detach().flatten(1) for x in inputs()], dim=1).requires_grad_()
    views = [x.view(TOKENS, HEADS, -1) for x in joined.split(joined.shape[1] // 3, dim=1)]
    copies = [x.detach().contiguous().requires_grad_() for x in views]
    assert not views[0].is_contiguous()
    out, expected = attend(*views, BOUNDS, 7, 0.0), attend(*copies, BOUNDS, 7, 0.0)
    assert torch.equal(out, expected)
    out.sum().backward()
    expected.sum().backward()
    assert joined.grad is not None
    assert torch.equal(joined.grad, torch.cat([x.grad.flatten(1) for x in copies if x.grad is not None], dim=1))


def test_bf16_is_as_near_to_the_true_values_as_torch_own_bf16() -> None:
    given = inputs(dtype=torch.bfloat16)
    true = sequence_by_sequence(*(x.double() for x in given))
    error, theirs = (
        (x.double() - true).abs().max() for x in (attend(*given, BOUNDS, 7, 0.0), sequence_by_sequence(*given))
    )
    assert error <= 2 * theirs


@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_gradients_are_the_derivatives(dropout_p: float) -> None:
    """With dropout, too: the backward pass drops what the forward pass has dropped."""

    def seeded(*given: Tensor) -> Tensor:
        torch.manual_seed(3)
        return attend(*given, BOUNDS, 7, dropout_p)

    assert torch.autograd.gradcheck(seeded, inputs(), raise_exception=False)


def test_the_seed_decides_what_is_dropped_and_the_backward_pass_draws_nothing() -> None:
    """Otherwise a resumed run would end with other bytes: each micro-step is seeded once."""
    found = []
    for seed in (1, 1, 2):
        given = inputs()
        torch.manual_seed(seed)
        out = attend(*given, BOUNDS, 7, 0.4)
        after = torch.get_rng_state()
        out.sum().backward()
        assert torch.equal(torch.get_rng_state(), after)
        found.append([out, *(x.grad for x in given if x.grad is not None)])
    assert all(map(torch.equal, found[0], found[1]))
    assert not torch.equal(found[0][0], found[2][0])


@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_torch_takes_it_for_a_sound_operator(dropout_p: float) -> None:
    given = inputs()
    torch.library.opcheck(forward, (*given, BOUNDS, 7, dropout_p, SCALE))
    with torch.no_grad():
        out = forward(*given, BOUNDS, 7, dropout_p, SCALE)
        detached = [x.detach() for x in given]
        torch.library.opcheck(backward, (out[0], *detached, *out, BOUNDS, 7, dropout_p, SCALE))


def compiled(function: Any, traced: list[Any], **options: Any) -> Any:
    def backend(graph: torch.fx.GraphModule, examples: list[Tensor]) -> Any:
        traced.append(graph)
        return graph.forward

    return torch.compile(function, backend=backend, fullgraph=True, **options)


def test_one_graph_has_it_as_one_operator_whatever_the_lengths() -> None:
    """With the same number of sequences, some of them empty."""
    torch._dynamo.reset()
    traced: list[Any] = []
    call = compiled(lambda *given: attend(*given, 7, 0.0), traced, dynamic=False)
    for bounds in (BOUNDS, torch.tensor([0, 0, 1, 2, 5, 8, 15, 15], dtype=torch.int32)):
        torch.testing.assert_close(call(*inputs(), bounds), attend(*inputs(), bounds, 7, 0.0), rtol=0, atol=0)
    assert len(traced) == 1
    operators = [node.target for node in traced[0].graph.nodes if node.op == "call_function"]
    assert operators.count(torch.ops.bert_pretraining.varlen_attention.default) == 1


class Calls(TorchDispatchMode):
    """Records the calls to torch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def described(tensors: Any) -> list[tuple[Any, ...]]:
    return [(x.shape, x.dtype, x.device, x.stride()) for x in tensors]


@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("dtype", KERNEL_TYPES)
def test_gpu_kernels_are_called_as_torch_declares_them(dtype: torch.dtype, dropout_p: float) -> None:
    """On tensors without values: torch's own description of its kernels gives shapes, types and devices, and refuses
    arguments that they do not take. The sequences' lengths are never read."""
    with FakeTensorMode(), Calls() as calls:
        gradient = torch.empty(TOKENS, HEADS, 64, device="cuda:0", dtype=dtype)
        joined = torch.empty(TOKENS, 3 * HEADS * 64, device="cuda:0", dtype=dtype)  # as the model has them
        query, key, value = (x.view(TOKENS, HEADS, 64) for x in joined.chunk(3, dim=1))
        bounds = torch.empty(len(BOUNDS), device="cuda:0", dtype=torch.int32)
        rest = (bounds, 7, dropout_p, SCALE)
        kernel = flash_forward(query, key, value, *rest)
        gradients = flash_backward(gradient, query, key, value, *kernel, *rest)
        said = forward(query, key, value, *rest)
        said_gradients = backward(gradient, query, key, value, *said, *rest)
    assert described(kernel) == described(said)
    assert described(gradients) == described(said_gradients) == described([gradient] * 3)
    by_name = {func: (args, kwargs) for func, args, kwargs in calls.seen}
    args, kwargs = by_name[torch.ops.aten._flash_attention_forward.default]
    assert args[:3] == (query, key, value)
    assert args[3] is args[4] is bounds
    assert args[5:10] == (7, 7, dropout_p, False, False)  # both lengths, neither causal nor with a debug mask
    assert kwargs == {"scale": SCALE}
    args, kwargs = by_name[torch.ops.aten._flash_attention_backward.default]
    assert args[:6] == (gradient, query, key, value, *kernel[:2])
    assert args[8:12] == (7, 7, dropout_p, False)
    assert args[12] is kernel[2]
    assert kwargs == {"scale": SCALE}


def test_torch_still_declares_the_kernels_like_this() -> None:
    """They are private and may change in any release: the same from 2.9 to 2.14, except for more options at the end."""
    forward_schema, backward_schema = (
        str(getattr(torch.ops.aten, name).default._schema)
        for name in ("_flash_attention_forward", "_flash_attention_backward")
    )
    assert forward_schema.startswith(
        "aten::_flash_attention_forward(Tensor query, Tensor key, Tensor value, Tensor? cum_seq_q, Tensor? cum_seq_k, "
        "SymInt max_q, SymInt max_k, float dropout_p, bool is_causal, bool return_debug_mask, *, float? scale=None, "
    )
    assert forward_schema.endswith(
        "-> (Tensor output, Tensor softmax_logsumexp, Tensor rng_state, Tensor unused, Tensor debug_attn_mask)"
    )
    assert backward_schema.startswith(
        "aten::_flash_attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, "
        "Tensor logsumexp, Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, float dropout_p, "
        "bool is_causal, Tensor rng_state, Tensor unused, *, float? scale=None, "
    )
    assert backward_schema.endswith("-> (Tensor, Tensor, Tensor)")


@pytest.mark.parametrize("before", [(False, False), (True, True)])
def test_the_gpu_kernel_alone_is_told_to_add_in_a_fixed_order(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, before: tuple[bool, bool]
) -> None:
    def settings() -> tuple[bool, bool, bool]:
        return (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        )

    class Seen(TorchDispatchMode):
        inside: tuple[bool, ...] = ()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._flash_attention_backward.default:
                self.inside = settings()
            return func(*args, **(kwargs or {}))

    request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    # The public function changes the settings of torch's compiler, too, in releases after 2.9.
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda *_, **__: pytest.fail("the compiler's settings"))
    with FakeTensorMode(), Seen() as seen:
        query = torch.empty(TOKENS, HEADS, 64, device="cuda:0", dtype=torch.bfloat16)
        bounds = torch.empty(len(BOUNDS), device="cuda:0", dtype=torch.int32)
        results = flash_forward(query, query, query, bounds, 7, 0.1, SCALE)
        flash_backward(query, query, query, query, *results, bounds, 7, 0.1, SCALE)
    assert seen.inside == (True, False, False)
    assert settings() == (*before, True)
    monkeypatch.undo()


def test_gpu_kernels_are_used_for_what_they_take() -> None:
    with FakeTensorMode():
        for dtype, head_size, expected in (
            (torch.bfloat16, 64, True), (torch.float16, 256, True), (torch.bfloat16, 264, False),
            (torch.float32, 64, False), (torch.float64, 64, False),
        ):  # fmt: skip
            assert takes(torch.empty(4, 2, head_size, dtype=dtype, device="cuda:0")) is expected
            assert not takes(torch.empty(4, 2, 200, dtype=dtype, device="cuda:0"), 192)
    assert takes(torch.empty(4, 2, 64))
    assert module.CAPABILITY == (8, 0)


def test_larger_heads_with_dropout_are_refused_where_their_gradients_would_be_undefined() -> None:
    """As torch's own kernel selection does, in sdp_utils.cpp: sm86, sm87, sm89 and sm12x."""
    capabilities = [(8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)]
    assert [head_size_max(one) for one in capabilities] == [256, 192, 192, 192, 256, 256, 256, 192, 192]
    operations = CudaOperations(head_size_max=192)
    with FakeTensorMode():
        query = torch.empty(1, 2, 64, 200, device="cuda:0", dtype=torch.bfloat16)
        bounds = torch.empty(5, device="cuda:0", dtype=torch.int64)
        mask = operations.attention_mask(torch.ones(1, 64, device="cuda:0", dtype=torch.int64), bounds, 16)
        operations.attention(query, query, query, mask, 0.0)
        with pytest.raises(UserError, match=r"attention heads of 200 .* at most 192 on this GPU"):
            operations.attention(query, query, query, mask, 0.1)


def test_with_a_mask_no_kernel_is_used_that_adds_in_any_order() -> None:
    """torch would choose its memory-efficient kernel on a GPU."""
    operations, x = CudaOperations(has_flash=False), torch.zeros(2, 2, 16, 8, requires_grad=True)
    with Calls() as calls:
        mask = operations.attention_mask(torch.ones(2, 16, dtype=torch.int64), None, 16)
        operations.attention(x, x, x, mask, 0.1).sum().backward()
    used = {str(called) for called, *_ in calls.seen}
    assert not [name for name in used if "attention" in name], used
    assert [name for name in used if "bmm" in name]
