"""Line chart over both phases as an SVG, with the phase boundary, a min-max band and restart marks.

The phases may differ much in length, so each has its own horizontal scale: a share of the width proportional to its
steps, but at least `_LEAST_SHARE`. Colours are CSS classes, defined by the page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape

from stages.view.curves import Point
from stages.view.text import number

_LEAST_SHARE = 0.3
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 10, 20, 34
#: Quantile of the values that the vertical axis shows; values beyond it are clipped.
_SHOWN = 0.98


@dataclass(frozen=True)
class Series:
    """One phase of a curve."""

    phase: int
    #: First and last step of the phase, planned steps included.
    first: float
    last: float
    points: Sequence[Point]
    #: First step after each interruption.
    restarts: Sequence[int] = ()
    #: In the text alternative; default: the phase.
    name: str = ""


@dataclass(frozen=True)
class Span:
    """The extent of a phase on the horizontal axis."""

    series: Series
    left: float
    right: float

    def x(self, step: float) -> float:
        steps = max(1, self.series.last - self.series.first)
        return self.left + (step - self.series.first) / steps * (self.right - self.left)


def line_chart(
    series: Sequence[Series],
    *,
    title: str,
    unit: str,
    width: int,
    height: int,
    from_zero: bool = False,
    overlaid: bool = False,
    axis: str = "optimizer step",
) -> str:
    """Draw an `<svg>` of `width` × `height` units.

    `from_zero`: the vertical axis begins at 0. `overlaid`: the series share one horizontal axis, called `axis`, and
    their numbers only choose their colours.
    """
    spans = _overlaid(series, width) if overlaid else _spans(series, width)
    low, high = _limits(series, from_zero)
    ticks = _ticks(low, high, max(4, height // 50))
    low, high = min(low, ticks[0]), max(high, ticks[-1])
    bottom = height - _BOTTOM

    def y(value: float) -> float:
        return bottom - (min(max(value, low), high) - low) / (high - low) * (bottom - _TOP)

    parts = [
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(_described(series, title, unit, axis))}">',
        f'<text class="unit" x="{_LEFT}" y="11">{escape(unit)}</text>',
    ]
    for value in ticks:
        parts.append(f'<path class="grid" d="M{_LEFT} {y(value):.1f}H{width - _RIGHT}"/>')
        parts.append(f'<text class="tick end" x="{_LEFT - 6}" y="{y(value) + 4:.1f}">{number(value)}</text>')
    parts += _steps_axis(spans, bottom, width, axis)
    for span in spans:
        parts += _curve(span, y, bottom)
    if len(spans) == 2 and not overlaid:
        x = (spans[0].right + spans[1].left) / 2
        parts.append(f'<path class="join" d="M{x:.1f} {_TOP - 4}V{bottom}"/>')
        parts.append(f'<text class="tick end p1" x="{x - 5:.1f}" y="{_TOP + 6}">phase 1</text>')
        parts.append(f'<text class="tick p2" x="{x + 5:.1f}" y="{_TOP + 6}">phase 2</text>')
    parts.append("</svg>")
    return "".join(parts)


def _spans(series: Sequence[Series], width: int) -> list[Span]:
    """Divide the width among the phases in proportion to their steps, within limits."""
    left, right = _LEFT, width - _RIGHT
    if len(series) == 1:
        return [Span(series[0], left, right)]
    first, second = (one.last - one.first + 1 for one in series)
    share = min(max(first / (first + second), _LEAST_SHARE), 1 - _LEAST_SHARE)
    middle = left + share * (right - left)
    return [Span(series[0], left, middle), Span(series[1], middle, right)]


def _overlaid(series: Sequence[Series], width: int) -> list[Span]:
    first, last = min(one.first for one in series), max(one.last for one in series)
    return [Span(replace(one, first=first, last=last), _LEFT, width - _RIGHT) for one in series]


def _limits(series: Sequence[Series], from_zero: bool) -> tuple[float, float]:
    points = [point for one in series for point in one.points]
    highs = sorted(point.high for point in points)
    lows = sorted(point.low for point in points)
    high = max(max(point.mean for point in points), highs[math.ceil(_SHOWN * len(highs)) - 1])
    low = min(min(point.mean for point in points), lows[math.floor((1 - _SHOWN) * len(lows))])
    low = 0.0 if from_zero else low
    return (low, high) if high > low else (low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2)


def _ticks(low: float, high: float, about: int) -> list[float]:
    """Round tick values that enclose [low, high], with about `about` steps of 1, 2 or 5 times a power of ten."""
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def _steps_axis(spans: Sequence[Span], bottom: float, width: int, axis: str) -> list[str]:
    """The horizontal axis: round steps, and always the last step of each phase."""
    right = width - _RIGHT
    parts = [f'<path class="axis" d="M{_LEFT} {bottom}H{right}"/>']
    taken: list[tuple[float, float]] = []

    def label(step: float, x: float) -> None:
        text = number(step)
        wide = 7.2 * len(text)
        left = min(x - wide / 2, right - wide)
        if not any(left < end + 8 and begin < left + wide + 8 for begin, end in taken):
            taken.append((left, left + wide))
            parts.append(f'<path class="axis" d="M{x:.1f} {bottom}v4"/>')
            parts.append(f'<text class="tick mid" x="{left + wide / 2:.1f}" y="{bottom + 16}">{text}</text>')

    for span in reversed(spans):
        label(span.series.last, span.right)
    for span in spans:
        first, last = span.series.first, span.series.last
        for value in _ticks(first, max(last, first + 1), max(1, int((span.right - span.left) / 75))):
            if value == int(value) and first - 1 <= value <= last:
                label(value, span.x(value))
    parts.append(f'<text class="tick end" x="{right}" y="{bottom + 31}">{escape(axis)}</text>')
    return parts


def _curve(span: Span, y: Callable[[float], float], bottom: float) -> list[str]:
    points, phase = span.series.points, span.series.phase
    if not points:
        return []
    middles = [(span.x((point.first + point.last) / 2), point) for point in points]
    parts = []
    if any(point.last > point.first for point in points):
        upper = "L".join(f"{x:.1f} {y(point.high):.1f}" for x, point in middles)
        lower = "L".join(f"{x:.1f} {y(point.low):.1f}" for x, point in reversed(middles))
        parts.append(f'<path class="band p{phase}" d="M{upper}L{lower}Z"/>')
    line = "L".join(f"{x:.1f} {y(point.mean):.1f}" for x, point in middles)
    if len(points) == 1:
        x, point = middles[0]
        parts.append(f'<circle class="dot p{phase}" cx="{x:.1f}" cy="{y(point.mean):.1f}" r="2"/>')
    else:
        parts.append(f'<path class="line p{phase}" d="M{line}"/>')
    for step in span.series.restarts:
        x = span.x(step)
        parts.append(
            f'<path class="restart" d="M{x:.1f} {bottom}l-4 -7h8Z"><title>resumed at step {step}</title></path>'
        )
    return parts


def _described(series: Sequence[Series], title: str, unit: str, axis: str) -> str:
    """Text alternative of the chart, for screen readers."""
    where = axis.split()[-1]
    words = [
        f"{one.name or f'phase {one.phase}'} from {number(one.points[0].mean)} at {where} {one.points[0].first:.10g} "
        f"to {number(one.points[-1].mean)} at {where} {one.points[-1].last:.10g}"
        for one in series
        if one.points
    ]
    return f"{title} ({unit}): {'; '.join(words)}"
