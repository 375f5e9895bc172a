"""Attention of sequences that lie one after another, without padding: FlashAttention-2 (Dao 2023, arXiv:2307.08691) as
one operator, which a compiled graph contains as a whole.

On NVIDIA GPUs it calls the kernels that torch has built in, through private operators: of torch's public functions,
`torch.nn.attention.varlen` (2.10) has no dropout, and nested tensors do not work with torch.compile. On the CPU it is
the same algorithm, one sequence after another.

T: tokens of all sequences, A: heads, D: head size, R: sequences, some of which may be empty.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.parallel.fp32_sums import at_least_fp32

#: What the kernels for GPUs take, and the least compute capability, Ampere's (torch 2.9 and 2.14,
#: aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp).
KERNEL_TYPES, HEAD_SIZE_MULTIPLE, HEAD_SIZE_MAX = (torch.bfloat16, torch.float16), 8, 256
CAPABILITY = (8, 0)


def head_size_max(capability: tuple[int, int]) -> int:
    """The largest heads with dropout on a GPU of this compute capability. On GPUs with little shared memory, the
    backward pass of larger heads starts no kernel and leaves the gradients undefined (torch,
    aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, which avoids this in its own choice of kernel)."""
    has_little = (8, 6) <= capability <= (8, 9) or capability >= (12, 0)
    return 192 if has_little else HEAD_SIZE_MAX


def takes(query: Tensor, most: int = HEAD_SIZE_MAX) -> bool:
    """Whether `varlen_attention` takes this type and head size on the tensor's device. `most`: on this GPU."""
    return not query.is_cuda or (query.dtype in KERNEL_TYPES and query.shape[-1] <= most)


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float
) -> Tensor:
    """Scaled dot-product attention, (T, A, D) → (T, A, D): a token attends to its own sequence.

    `cu_seqlens` (R + 1,) int32: where the sequences begin, and T. `max_seqlen`: at least the longest one's length; not
    read from `cu_seqlens`, as the host would wait for the device. `dropout_p`: share of the attention weights to drop.
    On a GPU the types are `KERNEL_TYPES` and D is at most `HEAD_SIZE_MAX`.
    """
    head_size = query.shape[-1]
    missing = -head_size % HEAD_SIZE_MULTIPLE
    if missing:
        query, key, value = (F.pad(x, (0, missing)) for x in (query, key, value))
    out: Tensor = forward(query, key, value, cu_seqlens, max_seqlen, dropout_p, head_size**-0.5)[0]
    return out[..., :head_size] if missing else out


def _forward(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """On the CPU: the result; the logarithm of each softmax's denominator, (A, T), in fp32 at least; and the state of
    the random numbers, (2,) uint64, from which the backward pass draws them again."""
    random_state = torch.randint(2**63 - 1 if dropout_p else 1, (2,), dtype=torch.int64).view(torch.uint64)
    out, log_sums = torch.empty_like(query), _log_sums_like(query)
    for (q, k, v), own, dropout in _sequences(cu_seqlens, random_state, dropout_p, query, key, value):
        scores = at_least_fp32(q @ k.transpose(1, 2)) * scale
        log_sums[:, own] = scores.logsumexp(-1)
        weights = (scores - log_sums[:, own, None]).exp()
        out[own] = ((weights * dropout).to(v.dtype) @ v).transpose(0, 1)
    return out, log_sums, random_state


def _backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, log_sums: Tensor, random_state: Tensor,
    cu_seqlens: Tensor, max_seqlen: int, dropout_p: float, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of query, key and value, from that of the result, (T, A, D), on the CPU."""
    d_query, d_key, d_value = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    given = query, key, value, out, gradient
    for (q, k, v, o, d_out), own, dropout in _sequences(cu_seqlens, random_state, dropout_p, *given):
        weights = (at_least_fp32(q @ k.transpose(1, 2)) * scale - log_sums[:, own, None]).exp()
        d_value[own] = ((weights * dropout).to(v.dtype).transpose(1, 2) @ d_out).transpose(0, 1)
        # Dao et al. 2022, arXiv:2205.14135, appendix B.4: the softmax's own sum of weight · gradient is out · gradient.
        d_weights = at_least_fp32(d_out @ v.transpose(1, 2)) * dropout
        d_scores = weights * (d_weights - at_least_fp32(o * d_out).sum(-1, keepdim=True)) * scale
        d_query[own] = (d_scores.to(k.dtype) @ k).transpose(0, 1)
        d_key[own] = (d_scores.to(q.dtype).transpose(1, 2) @ q).transpose(0, 1)
    return d_query, d_key, d_value


def _sequences(
    cu_seqlens: Tensor, random_state: Tensor, dropout_p: float, *tensors: Tensor
) -> Iterator[tuple[list[Tensor], slice, Tensor | float]]:
    """For each sequence of length L: its part of the tensors, each (A, L, D); where it lies; and the factors of its
    attention weights, (A, L, L), 0 for those that are dropped."""
    random = torch.Generator().manual_seed(int(random_state[0]))
    bounds = cu_seqlens.tolist()
    for begin, end in zip(bounds, bounds[1:], strict=False):
        if begin == end:
            continue
        own = slice(begin, end)
        parts = [x[own].transpose(0, 1).contiguous() for x in tensors]
        heads, length, _ = parts[0].shape
        drawn = torch.rand(heads, length, length, generator=random) if dropout_p else None
        yield parts, own, 1.0 if drawn is None else (drawn >= dropout_p) / (1 - dropout_p)


def _log_sums_like(query: Tensor) -> Tensor:
    tokens, heads, _ = query.shape
    return query.new_empty(heads, tokens, dtype=torch.float64 if query.dtype == torch.float64 else torch.float32)


def flash_forward(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The same by torch's kernel; the state is seed and offset of the GPU's default generator at that point."""
    out, log_sums, random_state, _, _ = torch.ops.aten._flash_attention_forward(
        query, key, value, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p,
        is_causal=False, return_debug_mask=False, scale=scale,
    )  # fmt: skip
    return out, log_sums, random_state


def flash_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, log_sums: Tensor, random_state: Tensor,
    cu_seqlens: Tensor, max_seqlen: int, dropout_p: float, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The same by torch's kernel."""
    unused = torch.empty((), dtype=torch.uint64, device=query.device)
    with _deterministic():
        d_query, d_key, d_value = torch.ops.aten._flash_attention_backward(
            gradient, query, key, value, out, log_sums, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p,
            is_causal=False, rng_state=random_state, unused=unused, scale=scale,
        )  # fmt: skip
    return d_query, d_key, d_value


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    """Has the kernel add up a query's gradient in a fixed order; by default it uses atomics, and a resumed run would
    end with other bytes. For this kernel alone: some other operations refuse to run like this. Not through the
    public function, which in later releases of torch also changes the settings of its compiler."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic
    fills, settings.fill_uninitialized_memory = settings.fill_uninitialized_memory, False  # new tensors, with NaN
    torch._C._set_deterministic_algorithms(True, warn_only=False)
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(before[0], warn_only=before[1])
        settings.fill_uninitialized_memory = fills


def _empty_forward(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), _log_sums_like(query), torch.empty(2, dtype=torch.uint64, device=query.device)


def _empty_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, log_sums: Tensor, random_state: Tensor,
    cu_seqlens: Tensor, max_seqlen: int, dropout_p: float, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    query, key, value, cu_seqlens, ctx.max_seqlen, ctx.dropout_p, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, *output, cu_seqlens)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, gradient: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if gradient is None:
        return (None,) * 7
    gradients = backward(gradient.contiguous(), *ctx.saved_tensors, ctx.max_seqlen, ctx.dropout_p, ctx.scale)
    return *gradients, None, None, None, None


_operator: Any = torch.library.custom_op
# The tag keeps a compiler from merging two calls, and from calling it again in the backward pass.
forward = _operator(
    "bert_pretraining::varlen_attention",
    _forward,
    mutates_args=(),
    device_types="cpu",
    tags=(torch.Tag.nondeterministic_seeded,),
)
backward = _operator("bert_pretraining::varlen_attention_backward", _backward, mutates_args=(), device_types="cpu")
forward.register_kernel("cuda", flash_forward)
backward.register_kernel("cuda", flash_backward)
forward.register_fake(_empty_forward)
backward.register_fake(_empty_backward)
forward.register_autograd(_differentiate, setup_context=_setup_context)
