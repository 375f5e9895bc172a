"""Timeline of the stages as an SVG: a bar per attempt with its outcome; long idle times are cut out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from html import escape

from stages.directory.attempts import Attempt
from stages.view.status import StageStatus
from stages.view.text import duration, moment

_TOP, _BOTTOM = 26, 8
#: Idle time longer than this share of the working time is replaced by a gap of this width.
_REST_SHARE = 0.15
_CUT_WIDTH = 30
#: Width below which the narrow layout is used.
_BELOW = 600
_TICK_SECONDS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800)


@dataclass(frozen=True)
class Layout:
    """Positions of the rows and bars: bars beside the stage names, or below them in the narrow layout."""

    width: int
    #: Height of a row.
    height: int
    #: Horizontal extent of the bars.
    left: int
    right: int
    #: Offset of a bar from the top of its row.
    bar: int

    @classmethod
    def of(cls, width: int) -> Layout:
        if width < _BELOW:
            return cls(width, height=38, left=4, right=width - 4, bar=19)
        return cls(width, height=22, left=128, right=width - 76, bar=4)


@dataclass(frozen=True)
class Stretch:
    """A period without a long idle time, and its horizontal extent."""

    began: float
    ended: float
    left: float
    right: float

    def x(self, time: float) -> float:
        return self.left + (time - self.began) / max(self.ended - self.began, 1e-9) * (self.right - self.left)


def has_cuts(stages: Sequence[StageStatus]) -> bool:
    """Whether idle time is cut out of their timeline."""
    attempts = [attempt for stage in stages for attempt in stage.attempts]
    return len(_stretches(attempts, Layout.of(1000))) > 1 if attempts else False


def timeline(stages: Sequence[StageStatus], *, width: int) -> str:
    """Draw an `<svg>` of `width` units with a row per started stage; '' if none has started."""
    rows = [stage for stage in stages if stage.attempts]
    if not rows:
        return ""
    layout = Layout.of(width)
    stretches = _stretches([attempt for stage in rows for attempt in stage.attempts], layout)
    height = _TOP + layout.height * len(rows) + _BOTTOM
    words = ", ".join(f"{stage.stage} {duration(stage.seconds_at_work)} ({stage.state})" for stage in rows)
    parts = [f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="Time line: {escape(words)}">']
    parts += _axis(stretches, layout, height)
    for row, stage in enumerate(rows):
        top = _TOP + layout.height * row
        parts.append(f'<text class="tick" x="0" y="{top + 14}">{escape(stage.stage)}</text>')
        parts.append(f'<text class="tick end" x="{width}" y="{top + 14}">{duration(stage.seconds_at_work)}</text>')
        parts += [_bar(attempt, stretches, top + layout.bar) for attempt in stage.attempts]
    return "".join([*parts, "</svg>"])


def _stretches(attempts: Sequence[Attempt], layout: Layout) -> list[Stretch]:
    busy: list[list[float]] = []
    for attempt in sorted(attempts, key=lambda attempt: attempt.started):
        if busy and attempt.started <= busy[-1][1]:
            busy[-1][1] = max(busy[-1][1], attempt.ended)
        else:
            busy.append([attempt.started, attempt.ended])
    at_work = sum(ended - began for began, ended in busy)
    merged = [busy[0]]
    for began, ended in busy[1:]:
        if began - merged[-1][1] > max(_REST_SHARE * at_work, 1.0):
            merged.append([began, ended])
        else:
            merged[-1][1] = ended
    # All gaps together take at most half of the width.
    wide = layout.right - layout.left
    cut = min(_CUT_WIDTH, wide / 2 / max(1, len(merged) - 1))
    room = wide - cut * (len(merged) - 1)
    total = max(sum(ended - began for began, ended in merged), 1e-9)
    stretches, left = [], float(layout.left)
    for began, ended in merged:
        right = left + room * (ended - began) / total
        stretches.append(Stretch(began, ended, left, right))
        left = right + cut
    return stretches


def _bar(attempt: Attempt, stretches: Sequence[Stretch], top: float) -> str:
    stretch = next(s for s in stretches if s.began <= attempt.started <= s.ended)
    x, end = stretch.x(attempt.started), stretch.x(attempt.ended)
    right = max(end, x + 2)
    title = f"{attempt.how} after {duration(attempt.seconds)}, from {moment(attempt.started, seconds=True)}"
    if attempt.host:
        title += f" on {attempt.host}"
    if attempt.error:
        title += f": {attempt.error}"
    mark = ""
    if attempt.how in ("failed", "hung"):
        mark = f'<path class="mark {attempt.how}" d="M{right - 4:.1f} {top + 2}l8 8m0 -8l-8 8"/>'
    elif attempt.how in ("interrupted", "killed"):
        mark = f'<path class="mark {attempt.how}" d="M{right:.1f} {top - 2}v16"/>'
    return (
        f'<g class="attempt"><title>{escape(title)}</title><rect class="{attempt.how}" x="{x:.1f}" y="{top}" '
        f'width="{right - x:.1f}" height="12" rx="1.5"/>{mark}</g>'
    )


def _axis(stretches: Sequence[Stretch], layout: Layout, height: float) -> list[str]:
    parts, taken = [], 0.0
    for before, after in zip(stretches, stretches[1:], strict=False):
        middle = (before.right + after.left) / 2
        rest = f"a pause of {duration(after.began - before.ended)} is cut out"
        parts.append(
            f'<g class="cut"><title>{rest}</title><rect x="{before.right + 4:.1f}" y="{_TOP}" '
            f'width="{max(1.0, after.left - before.right - 8):.1f}" height="{height - _TOP - _BOTTOM}"/>'
            f'<text class="tick mid" x="{middle:.1f}" y="{height - _BOTTOM - 4}">⋯</text></g>'
        )
    for stretch in stretches:
        for time, label in _ticks(stretch):
            x, half = stretch.x(time), 3.4 * len(label)
            parts.append(f'<path class="grid" d="M{x:.1f} {_TOP - 6}V{height - _BOTTOM}"/>')
            x_label = min(max(x, half), layout.width - half)
            if x_label - half >= taken + 6 or not taken:
                taken = x_label + half
                parts.append(f'<text class="tick mid" x="{x_label:.1f}" y="{_TOP - 12}">{label}</text>')
    return parts


def _ticks(stretch: Stretch) -> list[tuple[float, str]]:
    """Round local times; the first tick of a day shows its date."""
    about = max(1.0, (stretch.right - stretch.left) / 90)
    raw = (stretch.ended - stretch.began) / about
    step = next((seconds for seconds in _TICK_SECONDS if seconds >= raw), _TICK_SECONDS[-1])
    began = datetime.fromtimestamp(stretch.began)
    midnight = began.replace(hour=0, minute=0, second=0, microsecond=0)
    time = midnight + timedelta(seconds=(int((began - midnight).total_seconds()) // step) * step)
    ticks: list[tuple[float, str]] = []
    day = None
    while time.timestamp() <= stretch.ended and len(ticks) < 40:
        exists = datetime.fromtimestamp(time.timestamp()) == time  # not in the hour that summer time leaves out
        if exists and time.timestamp() >= stretch.began:
            form = "%H:%M:%S" if step < 60 else "%H:%M"
            label = time.strftime(form) if step < 86400 else time.strftime("%m-%d")
            if step < 86400 and step >= 3600 and time.date() != day:
                label = time.strftime("%m-%d %H:%M")
            day = time.date()
            ticks.append((time.timestamp(), label))
        time += timedelta(seconds=step)
    return ticks or [(stretch.began, began.strftime("%H:%M:%S" if step < 60 else "%H:%M"))]
