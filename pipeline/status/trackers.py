"""Sends trackers what they still lack of finished training runs, and the results of evaluations."""

from __future__ import annotations

import time

from common.console import log
from pipeline.status.chain import StageTask, chain, is_complete
from stages.directory.manifest import MANIFEST


def _trainings(evaluation: StageTask) -> list[StageTask]:
    return [stage for stage in chain(evaluation) if stage.resumes]


def is_tracked(training: StageTask) -> bool:
    """Whether trackers were set for the training when it began."""
    from trainer.metrics.trackers.base import RECORD

    return (training.directory / RECORD).exists()


def untracked(evaluation: StageTask) -> list[str]:
    """The trainings that led to `evaluation` and were made without a tracker."""
    return [stage.label for stage in _trainings(evaluation) if is_complete(stage) and not is_tracked(stage)]


def send(evaluation: StageTask) -> bool:
    """Send the trainings that led to `evaluation`, and its results if it is complete; whether trackers have it all now.

    It takes [trackers] wait_s at most; what is not sent is logged.
    """
    options = evaluation.settings.trackers.options
    if not options.remote:
        return True
    from trainer.metrics.companions import Companions

    results = evaluation.directory / MANIFEST
    trainings = [stage for stage in _trainings(evaluation) if is_tracked(stage)]
    every = [Companions(stage.directory, options, log) for stage in trainings]
    for companions in every:
        companions.send(results if companions is every[-1] and results.exists() else None)
    deadline = time.monotonic() + options.wait_s
    return all([companions.end(max(0.0, deadline - time.monotonic())) for companions in every])
