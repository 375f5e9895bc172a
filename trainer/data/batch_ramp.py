"""Global batches that grow during the first steps. Imports no numpy: the pipeline's settings read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.errors import UserError


@dataclass(frozen=True)
class BatchRamp:
    """A global batch that begins with one of `parts` equal parts and is whole from batch `steps` on (Cramming, Geiping
    and Goldstein 2022, arXiv:2212.14034). Batches are counted in absolute steps, so a longer run has the same."""

    steps: int = 0
    parts: int = 1

    def size(self, batch: int, whole: int) -> int:
        """Samples in batch `batch`, from 0; `whole`: those in a batch after the ramp."""
        if batch >= self.steps:
            return whole
        return whole // self.parts * (1 + batch * (self.parts - 1) // self.steps)

    def require_whole_parts(self, whole: int, unit: int) -> None:
        """Raise `UserError` unless a part of the `whole` batch is a multiple of `unit`: the samples that all workers
        together execute at once."""
        if self.steps and (whole % self.parts or whole // self.parts % unit):
            raise UserError(
                f"global_batch_size / batch_ramp_parts = {whole} / {self.parts} is not a multiple of {unit}, which "
                f"all workers execute at once; change one of the three"
            )


@dataclass(frozen=True)
class BatchSizes:
    """The sizes of global batches up to batch `end` (from 0), where a resumed run changed them; None: of the rest."""

    whole: int
    ramp: BatchRamp = BatchRamp()
    end: int | None = None

    def __getitem__(self, batch: int) -> int:
        """Samples in batch `batch`, from 0."""
        return self.ramp.size(batch, self.whole)


def batch_of(step: int, skipped: Sequence[int]) -> int:
    """The number of the batch, from 0, that step `step` (from 0) uses: steps pass over skipped batches, in ascending
    order."""
    for batch in skipped:
        step += batch <= step
    return step
