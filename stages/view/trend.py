"""The trend over nights: loss, accuracy, time and text of each; as text and as a page."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from markupsafe import Markup

from stages.view.chart import Series, line_chart
from stages.view.curves import Point
from stages.view.page import NARROW, WIDE, Chart, css, template
from stages.view.text import columns, duration, moment, number, percent

#: Title, unit, name of the value in `Night`, whether the vertical axis begins at 0.
_CHARTS = (
    ("Held-out loss", "nats per masked token", "loss", False),
    ("Held-out accuracy", "share of masked tokens", "accuracy", False),
    ("Time at work", "minutes", "minutes", True),
    ("Text read", "million tokens", "million_tokens", True),
)
HEAD = ("night", "loss", "accuracy", "time", "documents", "tokens", "continues", "state")


@dataclass(frozen=True)
class Night:
    """A complete night; None for what it did not measure or record."""

    date: str
    loss: float | None
    accuracy: float | None
    seconds: float | None
    documents: int | None
    tokens: int | None
    #: The night that it continued; "": trained anew.
    start_from: str
    #: Why the gate rejected it; "": accepted.
    rejection: str

    @classmethod
    def of(cls, date: str, record: dict[str, Any], rejection: str) -> Self:
        evaluation, text = record.get("evaluation") or {}, record.get("text") or {}
        return cls(
            date, evaluation.get("masked_lm_loss"), evaluation.get("masked_lm_accuracy"),
            record.get("seconds_at_work", record.get("seconds")), text.get("documents"), text.get("tokens"),
            (record.get("start_from") or {}).get("night", ""), rejection,
        )  # fmt: skip

    @property
    def minutes(self) -> float | None:
        return None if self.seconds is None else self.seconds / 60

    @property
    def million_tokens(self) -> float | None:
        return None if self.tokens is None else self.tokens / 1e6

    @property
    def row(self) -> list[str]:
        return [
            self.date,
            number(self.loss),
            "–" if self.accuracy is None else percent(self.accuracy),
            "–" if self.seconds is None else duration(self.seconds),
            number(self.documents),
            number(self.tokens),
            self.start_from or "nothing",
            f"rejected: {self.rejection}" if self.rejection else "accepted",
        ]


def headline(nights: Sequence[Night]) -> str:
    """How many there are, and the last accepted one."""
    if not nights:
        return "no night is complete yet"
    accepted = [night for night in nights if not night.rejection]
    if not accepted:
        return f"{len(nights)} complete, all of them rejected"
    last, rejected = accepted[-1], len(nights) - len(accepted)
    return f"{len(nights)} complete, {rejected} of them rejected; latest: {last.date}, loss {number(last.loss)}"


def text(nights: Sequence[Night]) -> str:
    """The table, newest night last, and the headline."""
    return "\n".join([*columns([HEAD, *(night.row for night in nights)]), "", headline(nights)])


def page(nights: Sequence[Night], written: float) -> str:
    """Render the page as HTML. It loads no external resource and runs no script."""
    return template("trend.html.jinja").render(
        headline=headline(nights),
        css=css(),
        written=moment(written, seconds=True),
        head=HEAD,
        rows=[night.row for night in nights],
        marks=[(Markup('<path class="line p{}" d="M0 6H22"/>').format(at), name) for at, name in _KINDS],
        charts=[_chart(nights, *chart) for chart in _CHARTS],
    )


_KINDS = ((1, "accepted"), (2, "rejected"))


def _chart(nights: Sequence[Night], title: str, unit: str, name: str, from_zero: bool) -> Chart | None:
    """A value of all nights, numbered from 1: a line through the accepted ones, a dot for each rejected one; None
    without values."""
    found = [(at, night, getattr(night, name)) for at, night in enumerate(nights, 1)]
    measured = [(night, Point(at, at, value, value, value)) for at, night, value in found if value is not None]
    if not measured:
        return None
    accepted = [point for night, point in measured if not night.rejection]
    rejected = [(night, point) for night, point in measured if night.rejection]
    last = float(len(nights))
    series = [
        *([Series(1, 1, last, accepted, name="accepted nights")] if accepted else []),
        *(Series(2, 1, last, [point], name=f"rejected night {night.date}") for night, point in rejected),
    ]
    draw = functools.partial(
        line_chart, series, title=title, unit=unit, overlaid=True, axis="night", from_zero=from_zero
    )
    rows = [[night.date, number(point.mean)] for night, point in measured]
    return Chart(
        title, Markup(draw(width=WIDE, height=260)), Markup(draw(width=NARROW, height=220)), ("night", unit), rows
    )
