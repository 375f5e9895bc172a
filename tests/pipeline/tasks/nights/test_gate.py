"""The gate between nights, by itself: which losses pass, which night they are compared with, and what is pruned."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.settings.load import overlaid
from pipeline.tasks.nights import records, states
from pipeline.tasks.nights.directories import NightDirs

NIGHT = datetime.date(2026, 11, 20)
HELD_OUT = {"x_test_0.hdf5": "1" * 64}


def facts(loss: float, *, held_out: Any = HELD_OUT, accepted: bool | None = None) -> dict[str, Any]:
    """A record; `accepted`: what a gate decided, None without one."""
    gate: dict[str, Any] | None = None
    if accepted is not None:
        gate = {"accepted": accepted, "loss": loss, "reference": "2026-11-01", "reference_loss": 1, "tolerance": 0.5}
    return {"evaluation": {"masked_lm_loss": loss}, "held_out": held_out, "gate": gate}


def write(nights: Path, **records: dict[str, Any]) -> None:
    for day, record in records.items():
        (nights / f"2026-11-{day[1:]}").mkdir(parents=True)
        (nights / f"2026-11-{day[1:]}.json").write_text(json.dumps(record))


@pytest.mark.parametrize(
    ("loss", "passes"), [(4.0, True), (4.25, True), (4.2501, False), (float("nan"), False), (float("inf"), False)]
)
def test_a_loss_up_to_the_tolerance_passes(tmp_path: Path, loss: float, passes: bool) -> None:
    write(tmp_path, d19=facts(4.0))
    gate = records.judged(tmp_path, NIGHT, facts(loss), 0.25)
    assert gate is not None
    assert gate["accepted"] is passes
    assert (gate["reference"], gate["reference_loss"]) == ("2026-11-19", 4.0)


@pytest.mark.parametrize("tolerance", [None, 0.1])
@pytest.mark.parametrize("nothing", [{}, None])
def test_nights_without_held_out_text_are_not_judged(tmp_path: Path, nothing: Any, tolerance: float | None) -> None:
    """Their text was not split, or their ready-made shards include no test shards."""
    record = {"evaluation": {"samples": 0}, "held_out": nothing, "gate": None}
    write(tmp_path, d18=record, d19=record)
    assert records.judged(tmp_path, NIGHT, record, tolerance) is None


def test_nights_that_are_each_a_little_worse_are_not_all_accepted(tmp_path: Path) -> None:
    """One by one as `Nightly` records them."""
    accepted = []
    for day in range(1, 11):
        date, loss = datetime.date(2026, 11, day), 4.0 + 0.02 * day
        gate = records.judged(tmp_path, date, facts(loss), 0.05)
        write(tmp_path, **{f"d{day:02}": {**facts(loss), "gate": gate}})
        accepted.append(gate is None or gate["accepted"])
    assert accepted == [True] * 3 + [False] * 7


def test_it_is_compared_with_the_best_accepted_night_before_it_on_the_same_examples(tmp_path: Path) -> None:
    write(
        tmp_path,
        d13=facts(float("nan")),
        d14=facts(5.0),
        d15=facts(4.0, accepted=True),
        d16=facts(4.05, accepted=True),
        d17=facts(1.0, held_out={"x_test_0.hdf5": "2" * 64}),
        d18=facts(2.0, accepted=False),
        d20=facts(3.0),
        d21=facts(3.0, accepted=True),
    )
    (tmp_path / "2026-11-19.state.json").write_text("{}")
    gate = records.judged(tmp_path, NIGHT, facts(4.1), 0.0)
    assert gate is not None
    assert (gate["accepted"], gate["reference"]) == (False, "2026-11-15")
    assert records.judged(tmp_path, NIGHT, facts(9.0), None) is None, "no gate"
    others = facts(9.0, held_out={"x_test_0.hdf5": "3" * 64})
    assert records.judged(tmp_path, NIGHT, others, 0.0) is None, "no night to compare with"
    assert records.is_accepted({"evaluation": {}}), "a night from before there were gates"


@pytest.fixture
def nights(tmp_path: Path) -> NightDirs:
    """With keep = 1."""
    overlay = {"run": {"work_dir": str(tmp_path)}, "nights": {"keep": "1"}}
    return NightDirs(overlaid(overlay))


def test_latest_and_pruning_pass_over_rejected_nights(nights: NightDirs) -> None:
    """With keep = 1, these stay: the newest complete night, and the accepted one that `latest` points to."""
    write(nights.path, d15=facts(5.0), d16=facts(4.0, accepted=True), d17=facts(9.0, accepted=False))
    write(nights.path, d18={})
    (nights.path / "2026-11-18.json").unlink()
    nights.record(datetime.date(2026, 11, 18), facts(9.0, accepted=False))
    assert (nights.path / "latest").resolve().name == "2026-11-16"
    nights.prune(datetime.date(2026, 11, 18))
    left = {path.name for path in nights.path.iterdir() if path.is_dir() and not path.is_symlink()}
    assert left == {"2026-11-16", "2026-11-18"}
    # Judged again, with another tolerance.
    nights.record(datetime.date(2026, 11, 18), facts(9.0, accepted=True))
    assert (nights.path / "latest").resolve().name == "2026-11-18"
    nights.record(datetime.date(2026, 11, 18), facts(9.0, accepted=False))
    assert (nights.path / "latest").resolve().name == "2026-11-16"


def test_the_trend_counts_complete_nights_that_were_all_rejected(tmp_path: Path) -> None:
    def headline() -> str:
        return records.trend_text(tmp_path).splitlines()[-1]

    assert headline() == "no night is complete yet"
    write(tmp_path, d19=facts(9.0, accepted=False), d20=facts(9.5, accepted=False))
    assert headline() == "2 complete, all of them rejected"
    write(tmp_path, d21=facts(4.0, accepted=True))
    assert headline().startswith("3 complete, 2 of them rejected; latest: 2026-11-21, loss 4")


REJECTED = facts(9.0, accepted=False)["gate"]


@pytest.mark.parametrize(
    "part",
    [
        *({"gate": value} for value in ("x", {"a": 1}, {"accepted": False})),
        *({"gate": {**REJECTED, name: None}} for name in ("accepted", "loss", "reference", "tolerance")),
        *({"evaluation": value} for value in ([], {"masked_lm_loss": "4.0"}, {"masked_lm_accuracy": 10**400})),
        *({"text": value} for value in ("x", {"tokens": "2026"}, {"documents": [1]})),
        *({"start_from": value} for value in ("x", {"night": None})),
        {"seconds_at_work": {}}, {"seconds": "x"},
    ],
    ids=str,
)  # fmt: skip
def test_a_damaged_part_of_a_record_is_left_out_and_the_night_counts_as_without_a_gate(
    nights: NightDirs, part: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    records._note.cache_clear()
    write(nights.path, d18=facts(5.0), d19={**facts(4.0), **part})
    state = states.state_of(nights.path, datetime.date(2026, 11, 19))
    assert (state.status, state.line) == ("complete", "")
    assert "2026-11-19 " in records.trend_text(nights.path)
    assert records.write_trend(nights.path).exists()
    gate = records.judged(nights.path, NIGHT, facts(4.1), 0.0)
    assert gate is not None
    assert gate["reference"] == ("2026-11-18" if "evaluation" in part else "2026-11-19")
    nights.record(NIGHT, facts(9.0, accepted=False))
    nights.prune(NIGHT)
    assert (nights.path / "latest").resolve().name == "2026-11-19"
    (name,) = part
    assert capsys.readouterr().err.count(f"2026-11-19.json is damaged: {name} is left out") == 1


@pytest.mark.parametrize("record", ["", '{"date"', "[]"])
def test_a_night_whose_record_is_damaged_is_neither_complete_nor_continued(nights: NightDirs, record: str) -> None:
    write(nights.path, d18=facts(5.0), d19=facts(4.0))
    date = datetime.date(2026, 11, 19)
    assert nights.is_complete(date)
    (nights.path / "2026-11-19.json").write_text(record)
    assert not nights.is_complete(date), "`Nightly --date` makes it again"
    assert states.state_of(nights.path, date).status == "missing", "`nights --check` says the same"
    states.write(nights.path, date, states.now("running"))
    assert [killed for killed, _ in states.killed(nights.path)] == [date]
    assert list(records.by_date(nights.path)) == ["2026-11-18"]
    nights.record(NIGHT, facts(9.0, accepted=False))
    assert (nights.path / "latest").resolve().name == "2026-11-18"


@pytest.mark.parametrize(
    ("state", "status"),
    [
        ({"status": ["running"], "pid": 1}, "missing"),
        ({"status": "gone"}, "missing"),
        ({"pid": 1}, "missing"),
        ({"status": "failed", "started": 3, "host": None, "pid": "x", "line": ["x"]}, "failed"),
    ],
)
def test_of_a_damaged_state_only_what_is_whole_counts(tmp_path: Path, state: dict[str, Any], status: str) -> None:
    (tmp_path / f"{NIGHT}.state.json").write_text(json.dumps(state))
    found = states.state_of(tmp_path, NIGHT)
    assert (found.status, found.started, found.host, found.pid, found.line) == (status, "", "", 0, "")
    assert not list(states.killed(tmp_path))
