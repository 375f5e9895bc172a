"""How the workers of a run agree on stopping and saving: whatever one of them is asked to do, all do."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from trainer.launch.preemption import Requests
from trainer.parallel.mesh import Mesh

#: Target interval, in seconds, between checks for a stop request within a longer step.
_CHECK_INTERVAL_S = 5.0


class Decision(NamedTuple):
    """What all workers know and do before a step."""

    #: The counts of the step's global batch.
    counts: list[int]
    #: Whether any worker has seen a step that was not finite.
    not_finite: bool
    stop: bool
    save: bool


class Agreement:
    """All workers call its methods at the same time."""

    def __init__(self, mesh: Mesh, requests: Requests) -> None:
        self._mesh, self._requests = mesh, requests
        #: Micro-steps between checks for a stop request; 1 until the first step has been timed.
        self._check_usteps = 1
        #: When the last step began, and how many of its micro-steps have begun.
        self._began, self._usteps = 0.0, 0

    def begin(self) -> None:
        """From now on signals and spot notices are requests."""
        self._requests.begin()

    def stops_before(self, ustep: int) -> bool:
        """Whether to give up the step before its micro-step `ustep`; asked of all workers every few seconds."""
        if not ustep:
            self._began = time.monotonic()
        self._usteps = ustep + 1
        if not ustep or ustep % self._check_usteps:
            return False
        return self._mesh.sum_on_host([self._requests.must_stop])[0] > 0

    def before_step(self, counts: Sequence[int], *, not_finite: bool, save: bool) -> Decision:
        """`counts`: this worker's for the step's batch; `not_finite`, `save`: what this worker has seen and asks for.

        The time of the root's latest micro-steps decides how often to check for a stop during the next ones.
        """
        save = self._requests.take_save() or save
        check_usteps = self._check_usteps
        if self._usteps:
            seconds = max(time.monotonic() - self._began, 1e-9)
            check_usteps = max(1, round(_CHECK_INTERVAL_S * self._usteps / seconds))
        if self._mesh.tensor_parallel_rank:
            counts = tuple(0 for _ in counts)  # ranks that share a model have the same samples
        mine = [not_finite, self._requests.must_stop, save, check_usteps if self._mesh.is_root else 0]
        *totals, bad, stops, saves, self._check_usteps = self._mesh.sum_on_host([*counts, *mine])
        return Decision(totals, bad > 0, stops > 0, saves > 0)
