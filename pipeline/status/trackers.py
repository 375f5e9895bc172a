"""Sends trackers what they still lack of finished trainings, and the results of evaluations."""

from __future__ import annotations

import time

from common.console import log
from pipeline.status.chain import StageTask, chain
from stages.directory.manifest import MANIFEST


def send(evaluation: StageTask) -> bool:
    """Send the trainings that led to `evaluation`, and its results if it is complete; whether trackers have it all now.

    It takes [trackers] wait_s at most; what is not sent is logged.
    """
    options = evaluation.settings.trackers.options
    if not options.remote:
        return True
    from trainer.metrics.companions import Companions
    from trainer.metrics.trackers.base import RECORD

    results = evaluation.directory / MANIFEST
    trainings = [stage for stage in chain(evaluation) if stage.resumes and (stage.directory / RECORD).exists()]
    every = [Companions(stage.directory, options, log) for stage in trainings]
    for companions in every:
        companions.send(results if companions is every[-1] and results.exists() else None)
    deadline = time.monotonic() + options.wait_s
    return all([companions.end(max(0.0, deadline - time.monotonic())) for companions in every])
