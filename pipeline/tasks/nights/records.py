"""What is recorded of a complete night in WORK/nights/<date>.json: model, evaluation, the gate's decision; and the
trend over all of them."""

from __future__ import annotations

import contextlib
import datetime
import functools
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.console import log
from common.errors import DiskError
from common.files import read_json
from pipeline.status.stage_dirs import StageDirs, number_of
from stages.directory import attempts
from stages.directory.records import held_out_shards

if TYPE_CHECKING:
    from stages.view.trend import Night

#: The page with the trend, in WORK/nights.
PAGE = "trend.html"
#: The loss that nights are compared by.
LOSS = "masked_lm_loss"


def results(night: Path) -> dict[str, Any]:
    """Results of the complete chain in the directory `night`: model, evaluation, time at work, text read, the held-out
    shards by sha256, and the night that it continued. Raises `DiskError`."""
    chain = {one.label: one for one in StageDirs(night).evaluated_chain()}
    if "evaluate" not in chain or "merge_shards" not in chain:
        raise DiskError(f"{night}: the chain finished, but its evaluation is missing; run the same again")
    record = {label: one.record for label, one in chain.items()}
    tokens, dataset = record.get("tokenize_corpus"), record.get("shard_dataset-phase2")
    started_from = record.get("pretrain-phase1", {}).get("inputs", {}).get("start_from")
    spent = (one for stage in chain.values() for one in attempts.read(stage.path, running=False, complete=True))
    return {
        "model": str(chain["merge_shards"].path / "model"),
        "evaluation": record["evaluate"]["counts"],
        "seconds_at_work": round(sum(one.seconds for one in spent), 1),
        "text": {name: tokens["counts"][name] for name in ("documents", "tokens")} if tokens else None,
        "held_out": held_out_shards(record["evaluate"], dataset or {}) or None,
        "start_from": started_from,
    }


def read(path: Path) -> dict[str, Any] | None:
    """A night's record; None if it is missing or damaged. What is of another type in it is noted and left out, so that
    a damaged decision of the gate counts as none."""
    record = read_json(path)
    if record is None:
        return None
    invalid = [name for name, is_valid in _VALID.items() if record.get(name) is not None and not is_valid(record[name])]
    if invalid:
        _note(f"{path} is damaged: {', '.join(invalid)} is left out")
    return {name: value for name, value in record.items() if name not in invalid}


@functools.cache
def _note(line: str) -> None:
    """Log it, once."""
    log(f"note: {line}")


def _has(value: Any, *numbers: str) -> bool:
    """Whether it is an object in which each of these is a number or left out."""
    return isinstance(value, dict) and all(_is_number(value[name]) for name in numbers if value.get(name) is not None)


def _is_number(value: Any) -> bool:
    return number_of(value) is not None


def _is_gate(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("accepted"), bool)
        and isinstance(value.get("reference"), str)
        and all(_is_number(value.get(name)) for name in ("loss", "reference_loss", "tolerance"))
    )


#: What is read of a record, and whether it is as `Nightly` writes it; each may be null.
_VALID: dict[str, Callable[[Any], bool]] = {
    "gate": _is_gate,
    "evaluation": lambda value: _has(value, LOSS, "masked_lm_accuracy"),
    "text": lambda value: _has(value, "documents", "tokens"),
    "start_from": lambda value: isinstance(value, dict) and isinstance(value.get("night"), str),
    "seconds": _is_number,
    "seconds_at_work": _is_number,
}


def by_date(nights: Path) -> dict[str, dict[str, Any]]:
    """The records of all complete nights by date, oldest first."""
    found = {}
    for path in sorted(nights.glob("*.json")):
        with contextlib.suppress(ValueError):
            datetime.date.fromisoformat(path.stem)
            if (record := read(path)) is not None:
                found[path.stem] = record
    return found


def is_accepted(record: Mapping[str, Any]) -> bool:
    """Whether no gate has rejected the night; the records of nights without one do not say."""
    return bool((record.get("gate") or {}).get("accepted", True))


def judged(
    nights: Path, date: datetime.date, facts: Mapping[str, Any], tolerance: float | None
) -> dict[str, Any] | None:
    """The gate's decision: the night of `date` is accepted if its held-out loss is at most that of the best accepted
    night before it, on the same held-out shards, plus `tolerance` in nats. None: there is no gate, or no such night.

    If each were compared with the last one, every night could be a little worse than the one before.
    """
    if tolerance is None or not facts["held_out"]:
        return None
    same = [
        (name, before)
        for name, record in by_date(nights).items()
        if name < date.isoformat() and is_accepted(record) and record.get("held_out") == facts["held_out"]
        if (before := (record.get("evaluation") or {}).get(LOSS)) is not None
    ]
    if not same:
        return None
    reference, limit = min(same, key=lambda one: (math.isnan(one[1]), one[1]))
    loss = facts["evaluation"][LOSS]
    return {
        "accepted": loss <= limit + tolerance,
        "loss": loss, "reference": reference, "reference_loss": limit, "tolerance": tolerance,
    }  # fmt: skip


def rejection(gate: Mapping[str, Any]) -> str:
    """Why the gate rejected a night, in words."""
    return (
        f"held-out loss {gate['loss']:.4f} is above the {gate['reference_loss']:.4f} of night {gate['reference']} by "
        f"more than gate_tolerance = {gate['tolerance']:g}"
    )


def trend_text(nights: Path) -> str:
    """The trend over all complete nights as a table."""
    from stages.view import trend

    return trend.text(_nights(nights))


def write_trend(nights: Path) -> Path:
    """Write the trend's page; returns its path. Raises `DiskError`."""
    from stages.view import trend
    from stages.view.page import write_page

    write_page(nights / PAGE, trend.page(_nights(nights), time.time()))
    return nights / PAGE


def _nights(nights: Path) -> list[Night]:
    from stages.view.trend import Night

    return [
        Night.of(date, record, "" if is_accepted(record) else rejection(record["gate"]))
        for date, record in by_date(nights).items()
    ]
