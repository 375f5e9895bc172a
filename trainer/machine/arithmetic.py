"""Checks of single operations: integers, copies, forward and backward passes, masks, compiled graphs, speed.

B: rows, S: tokens in a row, H: hidden size, A: heads, D: head size, M: masked positions.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from trainer.data.batch import Batch
from trainer.data.bert_batch import IGNORED
from trainer.devices.base import Device
from trainer.machine.subject import (
    Finding,
    Subject,
    attention_types,
    differing,
    fetch,
    layer_norm,
    linear,
    program,
    relative_error,
)
from trainer.models.config import ModelConfig
from trainer.models.operations import Operations
from trainer.parallel.fp32_sums import Embedding

#: Largest error of one operation, relative to the largest value: a thousand roundings in fp32, since a norm sums a
#: million squares; ten in bf16, since scores of attention are rounded before their exponential. Measured values:
#: docs/decisions.md.
LIMITS = {torch.float32: 1000 * 2**-24, torch.bfloat16: 10 * 2**-8}
#: Numbers where narrower types wrap or round: of 8, 16, 24 (the fraction of fp32) and 31 bits; and the ignored label.
_EDGES = (IGNORED, -1, 0, 1, 127, 128, 255, 256, 30521, 32767, 32768, 65535, 65536, 2**24 + 1, 2**31 - 1)
_B, _S, _M = 2, 32, 20


def check_integers(subject: Subject) -> Iterator[Finding]:
    """Ids and indices are exact, and so are the sums by which workers compare their weights."""
    device = subject.device
    ids = torch.tensor(_EDGES)
    (back,) = fetch(device, _put(device, ids))
    yield Finding("ids that come back changed", differing(back, ids))
    rows = torch.arange(70_000)
    chosen = torch.tensor([0, 255, 256, 32_767, 32_768, 65_536, 69_999])
    (found,) = fetch(device, _put(device, rows).index_select(0, _put(device, chosen)))
    yield Finding("rows selected in place of the right ones", differing(found, chosen))
    values = torch.randn(999, generator=torch.Generator().manual_seed(1))
    flipped = values.clone()
    flipped.view(torch.int32)[17] ^= 1
    tensors = [values, flipped, values.bfloat16(), ids]
    found_sums = device.summaries([_put(device, tensor) for tensor in tensors])
    wrong = sum(a != b for a, b in zip(found_sums, Device.summaries(device, tensors), strict=True))
    yield Finding("tensors whose 64-bit sum is wrong", wrong)


def check_copies(subject: Subject) -> Iterator[Finding]:
    """Tensors arrive on the device, and in a checkpoint, unchanged and each in its own place."""
    tensors = [torch.full((257,), float(index)) + torch.arange(257) / 512 for index in range(9)]
    copies = fetch(subject.device, *(_put(subject.device, tensor) for tensor in tensors))
    yield Finding("numbers that come back changed", sum(map(differing, copies, tensors)))


class Case(NamedTuple):
    """An operation with its inputs; those of a floating-point type get gradients."""

    name: str
    run: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)


def cases(model: ModelConfig) -> Iterator[Case]:
    """Everything that a BERT's forward pass consists of, in the sizes of `model`."""
    random = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=random)

    H, A, V = model.hidden_size, model.num_attention_heads, model.vocab_size
    ids = torch.randint(V, (_B, _S), generator=random)
    yield Case("embedding", lambda ops, weight, ids: _embed(weight, ids), (draw(V, H), ids))
    weight = draw(model.intermediate_size, H) * H**-0.5
    yield Case("linear", lambda ops, *of: F.linear(*of), (draw(_B, _S, H), weight, draw(model.intermediate_size)))
    yield Case("layer norm", lambda ops, x, *of: layer_norm(*of)(x), (draw(_B, _S, H), draw(H), draw(H)))
    yield Case("gelu", lambda ops, x: F.gelu(x), (3 * draw(_B, _S, H),))
    dense = draw(H, H) * H**-0.5, draw(H)
    yield Case("linear and gelu", lambda ops, x, *of: ops.dense_gelu(x, linear(*of)), (draw(_B, _S, H), *dense))
    yield Case("linear, residual and layer norm", _add_norm, (draw(_B, _S, H), *dense, draw(_B, _S, H), *draw(2, H)))
    yield Case("tanh", lambda ops, x: torch.tanh(x), (draw(_B, H),))
    yield Case("sum", lambda ops, x, y: x + y, (draw(_B, _S, H), draw(_B, _S, H)))
    heads = tuple(draw(_B, A, _S, H // A) for _ in range(3))
    yield Case("attention", _attend, (*heads, _sequence_ids()))
    yield Case("attention in packed rows", _attend, (*heads, _sequence_ids(), _cu_seqlens()))
    index = torch.randperm(_B * _S, generator=random)[:_M]
    yield Case("selected rows", lambda ops, x, index: x.index_select(0, index), (draw(_B * _S, H), index))
    labels = torch.randint(V, (_M,), generator=random)
    labels[::3] = IGNORED
    yield Case("cross-entropy", lambda ops, *of: ops.cross_entropy(*of), (3 * draw(_M, V), labels))
    yield Case("norm", lambda ops, x: torch.linalg.vector_norm(x), (draw(H * H),), (torch.float32,))


def check_operations(subject: Subject) -> Iterator[Finding]:
    """Results and gradients of every operation, against the CPU's in fp64."""
    device = subject.device
    for case in cases(subject.model):
        for dtype in case.dtypes:
            rounded = [x.to(dtype) if x.is_floating_point() else x for x in case.inputs]
            wanted = _results(case, Operations(), [x.double() if x.is_floating_point() else x for x in rounded])
            found = _results(case, device.operations, [_put(device, x) for x in rounded])
            for (what, expected), one in zip(wanted, fetch(device, *(tensor for _, tensor in found)), strict=True):
                name = f"{case.name}, {str(dtype).removeprefix('torch.')}, {what}"
                yield Finding(name, relative_error(one, expected), LIMITS[dtype])


def check_attention_mask(subject: Subject) -> Iterator[Finding]:
    """What is masked has no influence, to the bit: neither padding nor a packed row's other sequences. Where bf16 is
    rounded at random, two runs on the same numbers differ by their rounding."""
    device, model = subject.device, subject.model
    random = torch.Generator().manual_seed(0)
    shape = _B, model.num_attention_heads, _S, model.hidden_size // model.num_attention_heads
    query, key, value = (torch.randn(shape, generator=random) for _ in range(3))
    ids = _sequence_ids()
    hidden: dict[str, list[Tensor]] = {"padding": [], "a packed row's other sequence": [_cu_seqlens()]}
    for dtype, (name, packed) in itertools.product(attention_types(subject), hidden.items()):
        seen = ids[0] == 1 if packed else ids[0] > 0
        outs = []
        for scale in (1.0, 100.0):
            factors = torch.ones(_S).masked_fill(~seen, scale)[:, None]
            inputs = [x.to(dtype) for x in (query, key * factors, value * factors)]
            (out,) = fetch(device, _attend(device.operations, *(_put(device, x) for x in (*inputs, ids, *packed))))
            outs.append(out[0, :, seen])
        if dtype == torch.bfloat16 and not device.resumes_exactly(subject.config.precision):
            yield Finding(f"what {name} changes of outputs in {dtype}", relative_error(*outs), LIMITS[dtype])
        else:
            yield Finding(f"outputs in {dtype} that {name} changes", differing(*outs))


class _Affine(nn.Module):
    """x (…, n) → c·x·wᵀ with a constant c."""

    def __init__(self, constant: float, weight: Tensor) -> None:
        super().__init__()
        self.constant, self.weight = constant, nn.Parameter(weight.clone())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.constant * x, self.weight)


def check_compiled_graphs(subject: Subject) -> Iterator[Finding]:
    """No graph is reused for what it was not made for: another constant, other weights, another shape or number."""
    for way, device in subject.devices.items():
        random = torch.Generator().manual_seed(0)
        weight = torch.randn(16, 16, generator=random)
        for constant in (2.0, 3.0):
            module = _Affine(constant, weight).to(device.torch_device)
            call = program(device, module)
            for rows, scale in ((8, 1.0), (4, 1.0), (8, 0.5)):
                with torch.no_grad():
                    module.weight.copy_(_put(device, weight * scale))
                x = torch.randn(rows, 16, generator=random)
                (out,) = fetch(device, call(_put(device, x)))
                error = relative_error(out, F.linear(constant * x, weight * scale))
                yield Finding(f"{way}, constant {constant:g}, {rows} rows, weights × {scale:g}", error, 1e-5)
        for number in (0.0, 1.0, 0.3):
            x = _put(device, torch.ones(4))
            (out,) = fetch(device, x * device.number(number, torch.float32))
            yield Finding(f"{way}, times {number:g}", relative_error(out, torch.full((4,), number)), 1e-6)


def check_throughput(subject: Subject) -> Iterator[Finding]:
    """Products of square matrices against the peak. More than the peak means that the clock did not wait for them."""
    for dtype, precision in ((torch.bfloat16, "autocast"), (torch.float32, "fp32")):
        size, seconds = 256, 0.0
        while seconds < 0.01 and size < 8192:
            size *= 2
            seconds = _product_seconds(subject.device, size, dtype)
        rate, peak = 2 * size**3 / seconds, subject.device.peak_flops_per_s(precision)
        name = f"{str(dtype).removeprefix('torch.')}, {size}²: {rate / 1e12:.3g} TFLOP/s"
        if peak is None:
            yield Finding(f"{name}, peak not known")
        else:
            # A clock that does not wait gives shares of hundreds; a peak that is itself measured, like a CPU's, varies.
            yield Finding(f"{name}, share of {peak / 1e12:.3g}", rate / peak, 10.0)


def check_fallbacks(subject: Subject) -> Iterator[Finding]:
    """Operations that ran on the CPU although their tensors are the device's, unless the options allow them."""
    found = subject.device.fallbacks()
    if found is None:
        yield Finding("this device has none, or cannot tell")
    else:
        refused = set(found) - set(subject.config.allowed_fallbacks)
        yield Finding(", ".join(found) or "none", float(len(refused)))


def _put(device: Device, tensor: Tensor) -> Tensor:
    """The tensor on the device, moved there in the way that micro-batches are."""
    return device.put(_One(tensor)).tensor


@dataclass(frozen=True)
class _One(Batch):
    tensor: Tensor


def _results(case: Case, ops: Operations, inputs: list[Tensor]) -> list[tuple[str, Tensor]]:
    """The operation's result, and its gradient with respect to each floating-point input."""
    leaves = [x.requires_grad_() for x in inputs if x.is_floating_point()]
    out = case.run(ops, *inputs)
    # Any direction will do except a constant one, in which a norm's gradient is zero.
    direction = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape) + 0.5
    gradients = torch.autograd.grad(out, leaves, direction.to(out.dtype).to(out.device))
    return [("result", out), *((f"gradient of input {index}", one) for index, one in enumerate(gradients))]


def _embed(weight: Tensor, ids: Tensor) -> Tensor:
    module = Embedding(len(weight), weight.shape[1], padding_idx=0, device="meta")
    return functional_call(module, {"weight": weight}, (ids,))  # type: ignore[no-any-return]


def _attend(ops: Operations, query: Tensor, key: Tensor, value: Tensor, ids: Tensor, *packed: Tensor) -> Tensor:
    """Attention as a model calls it, with layers that choose query, key and value from what they are given side by
    side; 0 at padding, whose results are not used."""
    mask = ops.attention_mask(ids, *(packed or (None,)))
    _, A, _, D = query.shape
    x = torch.cat([part.transpose(1, 2).flatten(2) for part in (query, key, value)], dim=2)
    chosen = torch.eye(x.shape[2], dtype=x.dtype, device=x.device).split(A * D)
    out = ops.self_attention(x, [linear(weight, weight.new_zeros(A * D)) for weight in chosen], D, mask, 0.0)
    heads: Tensor = out.unflatten(2, (A, D)).transpose(1, 2)
    return heads.masked_fill(ids[:, None, :, None] == 0, 0.0)


def _add_norm(
    ops: Operations, x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor, scale: Tensor, shift: Tensor
) -> Tensor:
    one, two = ops.dense_add_norm(x, linear(weight, bias), residual, layer_norm(scale, shift), 0.0)
    return one + two


def _sequence_ids() -> Tensor:
    """(B, S): 12 and 8 tokens and padding in the first row, 32 in the second."""
    ids = torch.ones(_B, _S, dtype=torch.int64)
    ids[0, 12:20], ids[0, 20:] = 2, 0
    return ids


def _cu_seqlens() -> Tensor:
    return torch.tensor([0, 12, 20, 32, 64])


def _product_seconds(device: Device, size: int, dtype: torch.dtype) -> float:
    """Seconds of a product, the best of three; by the host's clock, since a device's may not wait for the work."""
    factor = torch.randn(size, size, generator=torch.Generator().manual_seed(0)).mul_(size**-0.5).to(dtype)
    factor = _put(device, factor)
    best = float("inf")
    for _ in range(4):  # the first compiles
        began = time.monotonic()
        product = factor
        for _ in range(4):
            product = product @ factor
        fetch(device, product[:1, :1].float())
        best = min(best, (time.monotonic() - began) / 4)
    return best
