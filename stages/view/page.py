"""The report: one page of HTML that needs nothing but itself."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator
from html import escape
from pathlib import Path

from stages.view import facts
from stages.view.chart import Series, line_chart
from stages.view.curves import points
from stages.view.html import cards, details, table
from stages.view.run import Run
from stages.view.status import StageStatus
from stages.view.text import duration, moment, number, size
from stages.view.timeline import has_cuts, timeline

#: Widths of pictures, in CSS pixels: where there is room, and on a phone.
_WIDE, _NARROW = 1168, 358
#: Points of a curve for each phase.
_MOST_POINTS = 200
#: name in the metrics, title, unit, whether the axis begins at 0
_CHARTS = (
    ("masked_lm_loss", "Masked-LM loss", "nats a masked token", False),
    ("next_sentence_loss", "Next-sentence loss", "nats a pair", False),
    ("learning_rate", "Learning rate", "", True),
    ("throughput", "Throughput", "sequences a second", True),
    ("grad_norm", "Gradient norm", "L2, before clipping", True),
)


def page(run: Run) -> str:
    """The page, as text. It asks no other address for anything, and runs no script."""
    state, headline = run.headline
    body = [
        "<header><h1>BERT pretraining</h1>",
        f'<p class="state {state}"><b>{escape(headline)}</b></p>',
        f'<p class="quiet">as of {escape(moment(run.written, seconds=True))}</p>',
        *_progress(run),
        cards(facts.at_a_glance(run)),
        "</header>",
        *_curves(run),
        *_evaluation(run),
        *_stages(run),
        *_model(run),
        *_settings(run),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>BERT pretraining: {escape(headline)}</title><link rel="icon" href="data:,">'
        f"<style>{_css()}</style></head>\n<body>{chr(10).join(body)}</body></html>\n"
    )


@functools.cache
def _css() -> str:
    return Path(__file__).with_name("page.css").read_text(encoding="utf-8")


def _progress(run: Run) -> Iterator[str]:
    for stage in run.stages:
        if stage.state == "running" and stage.done is not None and stage.total:
            yield f'<progress max="{stage.total}" value="{stage.done}" aria-label="{escape(stage.stage)}"></progress>'


def _curves(run: Run) -> Iterator[str]:
    if not run.curves:
        return
    yield "<h2>Curves</h2>"
    yield _legend(run)
    figure = functools.partial(_figure, run)
    yield figure("loss", "Loss", "nats: masked-LM and next-sentence together", from_zero=False, hero=True)
    yield '<div class="grid-of-charts" style="margin-top:26px">'
    for name, title, unit, from_zero in _CHARTS:
        yield figure(name, title, unit, from_zero=from_zero, hero=False)
    yield "</div>"


def _legend(run: Run) -> str:
    items = []
    for phase in run.curves:
        length = run.setting(phase, "seq_len")
        tokens = f": {length} tokens a sequence" if length else ""
        items.append((f'<path class="line p{phase}" d="M0 6H22"/>', f"phase {phase}{tokens}"))
    if any(len(curves.steps) > _MOST_POINTS for curves in run.curves.values()):
        items.append(('<path class="band p1" d="M0 1H22V11H0Z"/>', "smallest to largest of the steps of a point"))
    if any(run.restarts(phase) for phase in run.curves):
        items.append(('<path class="restart" d="M11 11l-4 -7h8Z"/>', "went on after an interruption"))
    if len(run.curves) == 2:
        items.append(('<path class="join" d="M11 0V12"/>', "the join; each phase has its own scale of steps"))
    drawn = "".join(
        f'<li><svg viewBox="0 0 22 12" aria-hidden="true">{svg}</svg>{escape(text)}</li>' for svg, text in items
    )
    return f'<ul class="legend">{drawn}</ul>'


def _figure(run: Run, name: str, title: str, unit: str, *, from_zero: bool, hero: bool) -> str:
    """A chart and, folded away, its numbers. `hero`: over the full width."""
    series = [
        Series(
            phase, *facts.span(run, phase), points(curves.steps, curves.values[name], _MOST_POINTS), run.restarts(phase)
        )
        for phase, curves in run.curves.items()
    ]
    if not any(one.points for one in series):
        return ""
    chart = functools.partial(line_chart, series, title=title, unit=unit, from_zero=from_zero)
    if hero:
        drawn = f'<div class="wide">{chart(width=_WIDE, height=340)}</div>'
        drawn += f'<div class="narrow">{chart(width=_NARROW, height=250)}</div>'
    else:
        drawn = chart(width=_NARROW, height=210)
    rows = (
        [
            str(one.phase),
            number(point.first) if point.first == point.last else f"{point.first:,} – {point.last:,}",
            *map(number, (point.mean, point.low, point.high)),
        ]
        for one in series
        for point in one.points
    )
    numbers = table(("phase", "step", "mean", "smallest", "largest"), rows, numbers=(1, 2, 3, 4))
    return f"<figure><h3>{escape(title)}</h3>{drawn}{details('Numbers', numbers)}</figure>"


def _evaluation(run: Run) -> Iterator[str]:
    yield '<div class="beside">'
    trained = facts.training_table(run)
    if trained:
        head = ("", *(f"phase {phase}" for phase in run.curves))
        yield f"<section><h2>Results</h2>{table(head, trained, numbers=(1, 2))}</section>"
    counts = run.counts("evaluate")
    if counts.get("samples"):
        said = "The merged model on examples of documents that were kept apart"
        rows = table(("", ""), facts.evaluation_table(counts), numbers=(1,), caption=said)
        yield f"<section><h2>Evaluation</h2>{rows}</section>"
    elif counts:
        said = "The data set has no test shards, so nothing was measured."
        yield f"<section><h2>Evaluation</h2><p>{said}</p></section>"
    made = facts.data_table(run)
    if made:
        yield f"<section><h2>Data</h2>{table(('', ''), made, numbers=(1,))}</section>"
    yield "</div>"


def _stages(run: Run) -> Iterator[str]:
    yield "<h2>Stages</h2>"
    drawn = timeline(run.stages, width=_WIDE)
    if drawn:
        endings = {attempt.how for stage in run.stages for attempt in stage.attempts}
        yield _endings_legend(endings, cuts=has_cuts(run.stages))
        yield f'<figure><div class="wide">{drawn}</div>'
        yield f'<div class="narrow">{timeline(run.stages, width=_NARROW)}</div></figure>'
    rows = [_stage_row(stage) for stage in run.stages]
    yield details(
        "All stages", table(("stage", "state", "at work", "size", "directory"), rows, numbers=(2, 3), paths=(4,))
    )
    attempts = [
        [stage.stage, moment(one.started, seconds=True), duration(one.seconds), one.how, one.error, one.host]
        for stage in run.stages
        for one in stage.attempts
    ]
    if attempts:
        ends = sum(stage.stops for stage in run.stages)
        stopped = f", {ends} of them stopped early" if ends else ""
        head = ("stage", "started", "at work", "ended", "with", "host")
        yield details(
            f"{len(attempts)} {'attempt' if len(attempts) == 1 else 'attempts'}{stopped}",
            table(head, attempts, numbers=(1, 2)),
        )


def _stage_row(stage: StageStatus) -> list[str]:
    detail = "" if stage.is_complete or not stage.detail else f": {stage.detail}"
    taken = duration(stage.seconds_at_work) if stage.attempts else "–"
    stored = "–" if stage.bytes is None else size(stage.bytes)
    return [stage.stage, stage.state + detail, taken, stored, str(stage.directory or "–")]


def _endings_legend(endings: Collection[str], *, cuts: bool) -> str:
    marks = {"failed": '<path class="mark failed" d="M12 2l8 8m0 -8l-8 8"/>'}
    marks["hung"] = marks["failed"]
    marks |= {how: f'<path class="mark {how}" d="M20 0v12"/>' for how in ("interrupted", "killed")}
    words = {
        "interrupted": "interrupted, state saved",
        "killed": "killed, or the machine was lost",
        "hung": "hung: killed after a silence",
    }
    order = ("complete", "running", "interrupted", "killed", "failed", "hung")
    items = [
        f'<li><svg viewBox="0 0 22 12" aria-hidden="true"><rect class="{how}" y="1" width="20" height="10" rx="1.5"/>'
        f"{marks.get(how, '')}</svg>{words.get(how, how)}</li>"
        for how in order
        if how in endings
    ]
    if cuts:
        cut = '<g class="cut"><rect width="22" height="12"/></g>'
        items.append(f'<li><svg viewBox="0 0 22 12" aria-hidden="true">{cut}</svg>a long rest, cut out</li>')
    return f'<ul class="legend">{"".join(items)}</ul>'


def _model(run: Run) -> Iterator[str]:
    yield "<h2>The model</h2>"
    if run.model is None:
        yield '<p class="quiet">It is made after phase 2.</p>'
    else:
        path = str(run.model.absolute())
        yield f"<p>A Hugging Face directory with its tokenizer and a model card: <code>{escape(path)}</code></p>"
        yield f"<pre>{escape(facts.usage(path))}</pre>"
    yield '<div class="beside">'
    for title, rows in (("Sizes", facts.size_table(run)), ("Versions", facts.versions(run))):
        if rows:
            yield f"<section><h2>{title}</h2>{table(('', ''), rows, numbers=(1,))}</section>"
    yield "</div>"


def _settings(run: Run) -> Iterator[str]:
    sections = facts.settings_tables(run)
    if sections:
        yield '<h2>Settings</h2><div class="columns">'
        for title, head, rows in sections:
            yield f"<section>{table(head, rows, caption=title)}</section>"
        yield "</div>"
