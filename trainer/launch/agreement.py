"""How the workers of a run agree on stopping and saving: whatever one of them was asked for, all do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from trainer.launch.preemption import Interruptions
from trainer.parallel.mesh import Mesh

#: Target interval, in seconds, between checks for a stop request within a longer step.
_CHECK_INTERVAL_S = 5.0


class Decision(NamedTuple):
    """What all workers know and do after a step."""

    #: The counts of the next global batch.
    counts: list[int]
    #: Whether any worker has seen a step that was not finite.
    not_finite: bool
    stop: bool
    save: bool


class Agreement:
    """All workers call its methods at the same time."""

    def __init__(self, mesh: Mesh, interruptions: Interruptions) -> None:
        self._mesh, self._interruptions = mesh, interruptions
        #: Micro-steps between checks for a stop request; 1 until the first step has been timed.
        self._check_usteps = 1

    def begin(self) -> None:
        """From now on signals and spot notices are requests."""
        self._interruptions.begin()

    def stops_before(self, ustep: int) -> bool:
        """Whether to give up the step before its micro-step `ustep`; asked of all workers every few seconds."""
        if not ustep or ustep % self._check_usteps:
            return False
        return self._mesh.sum_on_host([self._interruptions.must_stop])[0] > 0

    def after_step(
        self, counts: Sequence[int], *, not_finite: bool, save: bool, micro_step_s: float | None
    ) -> Decision:
        """`counts`: this worker's of the next batch; `not_finite`, `save`: what this worker has seen and asks for;
        `micro_step_s`: seconds of a micro-step, None before the first step; the root's decides how often to check."""
        save = self._interruptions.take_save() or save
        check_usteps = self._check_usteps
        if micro_step_s is not None:
            check_usteps = max(1, round(_CHECK_INTERVAL_S / max(micro_step_s, 1e-9)))
        if self._mesh.tensor_parallel_rank:
            counts = tuple(0 for _ in counts)  # ranks that share a model have the same samples
        mine = [not_finite, self._interruptions.must_stop, save, check_usteps if self._mesh.is_root else 0]
        *totals, bad, stops, saves, self._check_usteps = self._mesh.sum_on_host([*counts, *mine])
        return Decision(totals, bad > 0, stops > 0, saves > 0)
