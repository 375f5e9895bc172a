"""The report: one self-contained HTML page, from the template page.html.jinja."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from markupsafe import Markup

from common.files import disk_errors, replace_text
from stages.view import facts
from stages.view.chart import Series, line_chart
from stages.view.curves import points
from stages.view.run import Run
from stages.view.status import StageStatus
from stages.view.text import duration, moment, number, size
from stages.view.timeline import has_cuts, timeline

if TYPE_CHECKING:
    from jinja2 import Template

#: Chart widths in CSS pixels: desktop and phone.
WIDE, NARROW = 1168, 358
#: Maximum points per curve and phase.
MOST_POINTS = 200
#: Metric, title, unit, whether the vertical axis begins at 0.
_CHARTS = (
    ("masked_lm_loss", "Masked-LM loss", "nats per masked token", False),
    ("next_sentence_loss", "Next-sentence loss", "nats per pair", False),
    ("learning_rate", "Learning rate", "", True),
    ("throughput", "Throughput", "sequences per second", True),
    ("grad_norm", "Gradient norm", "L2, before clipping", True),
)


@dataclass(frozen=True)
class Chart:
    title: str
    #: `<svg>` elements; only the full-width chart has a wide one.
    wide: Markup | None
    narrow: Markup
    #: The plotted values.
    head: tuple[str, ...]
    rows: list[list[str]]


def page(run: Run) -> str:
    """Render the page as HTML. It loads no external resource and runs no script."""
    attempts = [(stage, attempt) for stage in run.stages for attempt in stage.attempts]
    return template("page.html.jinja").render(
        run=run,
        facts=facts,
        moment=moment,
        css=css(),
        curve_marks=list(_curve_marks(run)),
        loss=_chart(run, "loss", "Loss", _loss_unit(run), from_zero=False, hero=True),
        charts=[_chart(run, name, title, unit, from_zero=zero, hero=False) for name, title, unit, zero in _CHARTS],
        training_head=("", *(f"phase {phase}" for phase in run.curves)),
        evaluation=run.counts("evaluate"),
        timeline=[Markup(timeline(run.stages, width=width)) for width in (WIDE, NARROW)] if attempts else None,
        attempt_marks=list(_attempt_marks({attempt.how for _, attempt in attempts}, cuts=has_cuts(run.stages))),
        stage_rows=[_stage_row(stage) for stage in run.stages],
        attempt_rows=[
            [stage.stage, moment(one.started, seconds=True), duration(one.seconds), one.how, one.error, one.host]
            for stage, one in attempts
        ],
        model=None if run.model is None else str(run.model.absolute()),
    )


def write_page(path: Path, text: str) -> None:
    """Write a page in one step, without fsync, since it can be made again. Raises `DiskError`."""
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, text)


def _loss_unit(run: Run) -> str:
    has_pairs = any(curves.recent("next_sentence_loss") is not None for curves in run.curves.values())
    return "nats: masked-LM, and next-sentence times its weight" if has_pairs else "nats per masked token"


@functools.cache
def template(name: str) -> Template:
    """A template of this folder."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # takes 0.1 s; needed only here

    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template(name)


@functools.cache
def css() -> Markup:
    return Markup(Path(__file__).with_name("page.css").read_text(encoding="utf-8"))


def _curve_marks(run: Run) -> Iterator[tuple[Markup, str]]:
    """The legend of the curves: (drawing, text)."""
    for phase in run.curves:
        length = run.setting(phase, "seq_len")
        tokens = f": {length} tokens per sequence" if length else ""
        yield Markup('<path class="line p{}" d="M0 6H22"/>').format(phase), f"phase {phase}{tokens}"
    if any(len(curves.steps) > MOST_POINTS for curves in run.curves.values()):
        yield Markup('<path class="band p1" d="M0 1H22V11H0Z"/>'), "smallest to largest of a point's steps"
    if any(run.restarts(phase) for phase in run.curves):
        yield Markup('<path class="restart" d="M11 11l-4 -7h8Z"/>'), "resumed after an interruption"
    if len(run.curves) == 2:
        yield Markup('<path class="join" d="M11 0V12"/>'), "phase boundary; each phase has its own step axis"


def _chart(run: Run, name: str, title: str, unit: str, *, from_zero: bool, hero: bool) -> Chart | None:
    """The chart of a metric over both phases; None without points. `hero`: full width."""
    series = [
        Series(
            phase, *facts.span(run, phase), points(curves.steps, curves.values[name], MOST_POINTS), run.restarts(phase)
        )
        for phase, curves in run.curves.items()
    ]
    if not any(one.points for one in series):
        return None
    draw = functools.partial(line_chart, series, title=title, unit=unit, from_zero=from_zero)
    rows = [
        [
            str(one.phase),
            number(point.first) if point.first == point.last else f"{point.first:,} – {point.last:,}",
            *map(number, (point.mean, point.low, point.high)),
        ]
        for one in series
        for point in one.points
    ]
    wide = Markup(draw(width=WIDE, height=340)) if hero else None
    head = ("phase", "step", "mean", "smallest", "largest")
    return Chart(title, wide, Markup(draw(width=NARROW, height=250 if hero else 210)), head, rows)


def _stage_row(stage: StageStatus) -> list[str]:
    detail = "" if stage.is_complete or not stage.detail else f": {stage.detail}"
    taken = duration(stage.seconds_at_work) if stage.attempts else "–"
    stored = "–" if stage.bytes is None else size(stage.bytes)
    return [stage.stage, stage.state + detail, taken, stored, str(stage.directory or "–")]


def _attempt_marks(endings: Collection[str], *, cuts: bool) -> Iterator[tuple[Markup, str]]:
    """The legend of the timeline: (drawing, text)."""
    cross, bar = '<path class="mark {how}" d="M12 2l8 8m0 -8l-8 8"/>', '<path class="mark {how}" d="M20 0v12"/>'
    for how, mark, text in (
        ("complete", "", "complete"),
        ("running", "", "running"),
        ("interrupted", bar, "interrupted, state saved"),
        ("killed", bar, "killed, or the machine was lost"),
        ("failed", cross, "failed"),
        ("hung", cross, "hung: killed after a silence"),
    ):
        if how in endings:
            drawn = '<rect class="{how}" y="1" width="20" height="10" rx="1.5"/>' + mark
            yield Markup(drawn).format(how=how), text
    if cuts:
        yield Markup('<g class="cut"><rect width="22" height="12"/></g>'), "a long pause, cut out"
