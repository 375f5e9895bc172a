"""Who goes on at a rung of a sweep: trials are ranked among those whose losses can be compared."""

from __future__ import annotations

import math

from pipeline.settings.sweep_file import Halving
from pipeline.tasks.sweep import Decision
from stages.view.comparison import scores

HALF = Halving((200,), 0.5)
#: In training the rate of masking is in the loss: 30 % is harder than 15 %.
TRAINING = {"low": 3.0, "high": 3.4, "worse": 3.6, "past": 2.8}


def test_a_trial_without_an_evaluation_passes_and_does_not_change_how_the_others_are_ranked() -> None:
    """`high` is better on held-out text and worse in training."""
    held_out = {"low": 4.1, "high": 3.9, "worse": 4.5, "past": None}
    alone = Decision.of(HALF, {name: loss for name, loss in held_out.items() if loss}, TRAINING)
    beside = Decision.of(HALF, held_out, TRAINING)
    assert (alone.losses, alone.best) == (beside.losses, beside.best)
    assert list(beside.best) == ["high", "low"]
    assert list(beside.going) == ["low", "high", "past"]
    assert list(beside.lines()) == [
        "trial low goes on: 4.1 held-out masked-LM loss",
        "trial high goes on: 3.9 held-out masked-LM loss",
        "trial worse stops: 4.5 held-out masked-LM loss",
        "trial past goes on, not ranked: it was not evaluated at this step",
    ]


def test_training_losses_rank_only_where_nothing_is_held_out() -> None:
    decision = Decision.of(HALF, dict.fromkeys(TRAINING), TRAINING)
    assert list(decision.going) == ["low", "past"]
    assert "in training" in decision.by
    assert "in training" not in scores({"a": None, "b": 4.0}, {"a": 1.0, "b": 2.0})[0]


def test_a_loss_that_is_not_a_number_is_the_last() -> None:
    decision = Decision.of(Halving((200,), 0.5, ("lost",)), {"diverged": math.nan, "lost": 9.0, "good": 4.0}, TRAINING)
    assert list(decision.best) == ["good", "lost"]
    assert scores({}, {})[1] == {}
