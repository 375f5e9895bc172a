"""Checks of dropout: its rate, and the independence of what is drawn."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from trainer.devices.base import Device
from trainer.machine.subject import Finding, Subject, attention_types, differing, fetch, layer_norm, linear, program
from trainer.models.encoder import Dropout

_P = 0.1
_N = 1 << 18
#: Standard deviations of a share or a correlation. One in 1.7 million exceeds it by chance; about a hundred are tried.
_SIGMAS = 5.0
#: p is rounded to a multiple of 2⁻¹⁶ by the CPU's dropout and by GPUs' in layers, in GPUs' attention to one of 2⁻⁸.
_ROUNDING, _ATTENTION_ROUNDING = 2**-17, 2**-9


def check_dropout_rate(subject: Subject) -> Iterator[Finding]:
    """A share p is dropped, the rest scaled by 1 / (1 - p); the same elements of the gradient are dropped."""
    for way, device in subject.devices.items():
        device.seed(1)
        x = torch.ones(_N).to(device.torch_device).requires_grad_()
        out = program(device, Dropout(_P, device.operations))(x)
        (gradient,) = torch.autograd.grad(out.sum(), [x])
        kept, gradient = fetch(device, out, gradient)
        error = abs((kept == 0).double().mean().item() - _P) - _ROUNDING
        yield Finding(f"{way}, share dropped, in standard deviations", error / _deviation(_N), _SIGMAS)
        scale = (kept[kept != 0] * (1 - _P) - 1).abs().max().item()
        yield Finding(f"{way}, scale of the rest", scale, 1e-4)
        yield Finding(f"{way}, elements dropped in one direction only", differing(gradient, kept))
    for dtype in attention_types(subject):
        subject.device.seed(1)
        error = abs(_dropped_by_a_layer(subject.device, _P, dtype).double().mean().item() - _P) - _ROUNDING
        yield Finding(f"a layer in {dtype}, share dropped, in standard deviations", error / _deviation(_N), _SIGMAS)
        for p in (0.0, _P):
            weights, gradient = _attention_weights(subject.device, p, dtype)
            error = abs((weights == 0).double().mean().item() - p) - _ATTENTION_ROUNDING
            sigmas, what = max(0.0, error) / _deviation(_ATTENDED * _ATTENDED), f"attention in {dtype}"
            yield Finding(f"{what}, share dropped at p = {p:g}", sigmas, _SIGMAS)
            yield Finding(f"{what}, weights dropped in one direction only", differing(gradient == 0, weights == 0))


def check_dropout_independence(subject: Subject) -> Iterator[Finding]:
    """The seed decides what is drawn; whatever else is drawn is independent of it."""
    for way, device in subject.devices.items():
        dropout = program(device, Dropout(0.5, device.operations))
        yield from (Finding(f"{way}, {what}", *rest) for what, *rest in _independence(device, _masks_of(dropout)))
    for dtype in attention_types(subject):
        found = _independence(subject.device, functools.partial(_dropped_by_a_layer, p=0.5, dtype=dtype))
        yield from (Finding(f"a layer in {dtype}, {what}", *rest) for what, *rest in found)
        masks = [_attention_weights(subject.device, _P, dtype, seed)[0] == 0 for seed in (1, 1, 2)]
        what = f"attention in {dtype}"
        yield Finding(f"{what}, elements that a repeated seed changes", differing(masks[0], masks[1]))
        yield Finding(f"{what}, two seeds that drop the same", float(torch.equal(masks[0], masks[2])))


def _independence(device: Device, draw: Callable[[Device], Tensor]) -> Iterator[tuple[str, float, float]]:
    device.seed(1)
    first, second = draw(device), draw(device)
    device.seed(1)
    again = draw(device)
    device.seed(2)
    other = draw(device)
    device.seed(1)
    with device.random_region(3):
        inside = draw(device)
    after = draw(device)
    yield "elements that a repeated seed changes", differing(again, first), 0
    yield "elements that a random region changes outside it", differing(after, first), 0
    pairs = {"two draws": second, "two seeds": other, "a random region and what is outside": inside}
    for what, mask in pairs.items():
        yield f"correlation of {what}, in standard deviations", _correlation(first, mask), _SIGMAS
    for lag in (*range(1, 9), 64, 1024):
        yield f"correlation at lag {lag}, in standard deviations", _correlation(first[lag:], first[:-lag]), _SIGMAS


def _masks_of(dropout: Callable[[Tensor], Tensor]) -> Callable[[Device], Tensor]:
    def draw(device: Device) -> Tensor:
        (out,) = fetch(device, dropout(torch.ones(_N).to(device.torch_device)))
        return out == 0

    return draw


def _correlation(a: Tensor, b: Tensor) -> float:
    """The correlation of two masks that drop a half, in standard deviations."""
    return abs(4 * ((a.double() - 0.5) * (b.double() - 0.5)).mean().item()) * math.sqrt(a.numel())


def _deviation(count: int) -> float:
    """The standard deviation of the share dropped of `count` at `_P`."""
    return math.sqrt(_P * (1 - _P) / count)


#: Numbers in a row.
_COLUMNS = 256
#: Tokens, and the head size that shows the weights of all of them.
_ATTENDED = 64


def _attention_weights(device: Device, p: float, dtype: torch.dtype, seed: int = 1) -> tuple[Tensor, Tensor]:
    """The weights after dropout, (S, S); without it, all are 1/S, as queries are 0 and values the identity. And the
    same from the gradient of the values."""
    ops, to = device.operations, functools.partial(torch.Tensor.to, device=device.torch_device)
    identity, zeros = to(torch.eye(_ATTENDED, dtype=dtype)), to(torch.zeros(_ATTENDED, dtype=dtype))
    nothing, weight = linear(0 * identity, zeros), identity.clone().requires_grad_()
    device.seed(seed)
    mask = ops.attention_mask(to(torch.ones(1, _ATTENDED, dtype=torch.int64)), None)
    out = ops.self_attention(identity[None], [nothing, nothing, linear(weight, zeros)], _ATTENDED, mask, p)
    # The gradient of values is that of the layer's weight, transposed.
    out, gradient = fetch(device, out, *torch.autograd.grad(out, [weight], [identity[None]]))
    return out[0], gradient


def _dropped_by_a_layer(device: Device, p: float, dtype: torch.dtype) -> Tensor:
    """Which of `_N` numbers of a layer are dropped before the norm: what was 1 is negative then."""
    ones = torch.ones(_COLUMNS, dtype=dtype).to(device.torch_device)
    x, square = (0 * ones.expand(rows, -1) for rows in (_N // _COLUMNS, _COLUMNS))
    norm = layer_norm(ones, 0 * ones, eps=1e-5)
    (out,) = fetch(device, device.operations.dense_add_norm(x, linear(square, ones), x, norm, p)[0])
    return (out < 0).flatten()
