"""Which trials continue at a rung of a sweep: trials are ranked among those whose losses can be compared. What a trial
makes, and what a sweep's name is."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from common.errors import UserError
from pipeline.settings.sweep_file import Halving
from pipeline.status import latest
from pipeline.tasks import sweep
from pipeline.tasks.runner import UpstreamMissing
from pipeline.tasks.stage import Stage
from pipeline.tasks.sweep import Decision
from stages.directory.manifest import MANIFEST
from stages.view import comparison
from stages.view.comparison import scores

HALF = Halving((200,), 0.5)
#: The training loss depends on the masking rate: 30 % is harder than 15 %.
TRAINING = {"low": 3.0, "high": 3.4, "worse": 3.6, "past": 2.8}


def test_a_trial_that_failed_in_another_run_is_tried_again_whatever_the_clocks_say() -> None:
    """Each run keeps to what has failed in it, also beside another one."""
    trial: Any = SimpleNamespace(failures=lambda: {"another": "no space"})
    assert sweep.Trial.error(trial) is None
    trial.failures = lambda: {"another": "no space", sweep._RUN: "too large"}
    assert sweep.Trial.error(trial) == "too large"


def test_a_trial_without_an_evaluation_passes_and_does_not_change_how_the_others_are_ranked() -> None:
    """`high` is better on held-out text and worse in training."""
    held_out = {"low": 4.1, "high": 3.9, "worse": 4.5, "past": None}
    alone = Decision.of(HALF, {name: loss for name, loss in held_out.items() if loss}, TRAINING)
    beside = Decision.of(HALF, held_out, TRAINING)
    assert (alone.losses, alone.best) == (beside.losses, beside.best)
    assert list(beside.best) == ["high", "low"]
    assert list(beside.going) == ["low", "high", "past"]
    assert list(beside.lines()) == [
        "trial low continues: 4.1 held-out masked-LM loss",
        "trial high continues: 3.9 held-out masked-LM loss",
        "trial worse stops: 4.5 held-out masked-LM loss",
        "trial past continues, not ranked: it was not evaluated at this step",
    ]


class Stub:
    """A trial up to a rung, or to its end with None; `Stub.reached_by` records how far each of them has got."""

    reached_by: set[tuple[str, int | None]] = set()
    fails = ("a", None)
    failed: set[str] = set()

    def __init__(self, name: str, rung: int | None) -> None:
        self.key = name, rung

    def make(self) -> None:
        if self.key == self.fails:
            self.failed.add(self.key[0])
        else:
            self.reached_by.add(self.key)

    def reached(self) -> bool:
        return self.key in self.reached_by

    def error(self) -> str | None:
        return "the disk is full" if self.key[0] in self.failed else None

    def held_out_loss(self) -> float:
        return float("abcd".index(self.key[0]))

    def training_loss(self) -> float:
        return 0.0


def test_a_trial_that_fails_later_changes_no_decision_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Luigi calls `run` again from its beginning whenever the trials that it yielded are done."""
    monkeypatch.setattr(sweep, "of_goals", lambda *_: SimpleNamespace(remark=""))
    monkeypatch.setattr(Stub, "reached_by", set())
    monkeypatch.setattr(Stub, "failed", set())
    file = SimpleNamespace(trials=dict.fromkeys("abcd"), halving=HALF, name="four")
    fake: Any = SimpleNamespace(
        file=file, directory=tmp_path, _stages=list, grid="four.toml", page=tmp_path / "page.html",
        _trials=lambda names, rung: {name: Stub(name, rung) for name in names},
        _decide=lambda trials: sweep.Sweep._decide(fake, trials),
        comparison=lambda: comparison.Comparison("four", []),
    )  # fmt: skip
    with pytest.raises(UserError, match="1 of 4 trials failed: a"):
        work(fake)
    assert {name for name, rung in Stub.reached_by if rung is None} == {"b"}


def work(fake: Any) -> None:
    """Do what luigi's worker does."""
    left = True
    while left:
        left = False
        for trials in sweep.Sweep.run(fake):
            todo = [one for one in cast("list[Stub]", trials) if not (one.reached() or one.error())]
            if todo:
                todo[0].make()
                left = True
                break


def test_training_losses_rank_only_where_nothing_is_held_out() -> None:
    decision = Decision.of(HALF, dict.fromkeys(TRAINING), TRAINING)
    assert list(decision.going) == ["low", "past"]
    assert "in training" in decision.by
    assert "in training" not in scores({"a": None, "b": 4.0}, {"a": 1.0, "b": 2.0})[0]


def test_a_loss_that_is_not_a_number_is_the_last() -> None:
    decision = Decision.of(Halving((200,), 0.5, ("lost",)), {"diverged": math.nan, "lost": 9.0, "good": 4.0}, TRAINING)
    assert list(decision.best) == ["good", "lost"]
    assert scores({}, {})[1] == {}


def test_a_trial_makes_no_more_once_its_training_is_past_the_rung(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run trains it, or the store has it: the rung's checkpoint is gone, so that no model can be made of it."""
    made = list[str]()
    fake: Any = SimpleNamespace(trial="a", rung=200, reached=lambda: "pretrain" in made, _make=made.append)
    monkeypatch.setattr(sweep, "Stage", str)
    monkeypatch.setattr(sweep, "would_run", lambda _: ["pretrain", "merge_shards", "evaluate"])
    sweep.Trial.run(fake)
    assert made == ["pretrain"]


def test_a_trial_makes_itself_what_the_store_no_longer_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shards were to be fetched, so that the tokens were not needed."""
    made = list[str]()
    tokens: Any = SimpleNamespace(name="tokens", make=lambda: made.append("tokens"))
    shards: Any = SimpleNamespace(name="shards", stored="its record")

    def make() -> None:
        if "tokens" not in made:
            raise UpstreamMissing([tokens])
        made.append("shards")

    shards.make, shards.make_here = make, lambda: Stage.make_here(shards)
    monkeypatch.setattr(sweep, "Stage", SimpleNamespace)
    monkeypatch.setattr(sweep, "is_complete", lambda stage: stage.name in made)
    fake: Any = SimpleNamespace(trial="a")
    fake._make = lambda stage: sweep.Trial._make(fake, stage)
    sweep.Trial._make(fake, shards)
    assert made == ["tokens", "shards"]
    assert shards.stored is None


@pytest.mark.parametrize("is_linked", [True, False])
def test_a_rung_is_complete_without_a_manifest_and_is_not_the_latest_training(tmp_path: Path, is_linked: bool) -> None:
    other = tmp_path / "pretrain-phase1-0"
    other.mkdir()
    (other / MANIFEST).touch()
    if is_linked:
        latest.link("pretrain-phase1", other)
    directory = tmp_path / "pretrain-phase1-1"
    rung: Any = SimpleNamespace(label="pretrain-phase1", directory=directory, why_incomplete=lambda: None, store=None)
    assert Stage.complete(rung)
    links = tmp_path / "latest"
    assert [link.resolve() for link in (links.iterdir() if links.exists() else ())] == [other] * is_linked


def test_another_file_with_the_name_of_a_sweep_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The sweep's folder, its page and its trials' failures have that name. A file that was moved is still the same."""
    first, second = (tmp_path / folder / "rates.toml" for folder in ("a", "b"))
    for path in (first, second):
        path.parent.mkdir()
        path.touch()
    file = SimpleNamespace(trials={}, halving=HALF, name="rates")
    directory = tmp_path / "work" / "sweeps" / "rates"

    def given(path: Path) -> Any:
        return SimpleNamespace(
            file=file, directory=directory, grid=str(path), _stages=list, _trials=lambda names, rung=None: {}
        )

    next(sweep.Sweep.run(given(first)))
    sweep.Sweep.complete(given(first))
    with pytest.raises(SystemExit):
        sweep.Sweep.complete(given(second))
    assert capsys.readouterr().err == (
        f"error: {second} has the same name as {first}, whose sweep is in {directory}; rename one of the files\n"
    )
    first.rename(first.with_name("old.toml"))
    sweep.Sweep.complete(given(second))
