"""The learning rate."""

from __future__ import annotations


def linear_warmup_decay(step: int, *, peak: float, warmup_steps: int, max_steps: int) -> float:
    """The learning rate of the update that follows `step` finished ones: linear from 0 to `peak` over `warmup_steps`,
    then linear to 0 at `max_steps`. Hugging Face's `get_linear_schedule_with_warmup`, as a function of the step.
    """
    if step < warmup_steps:
        return peak * step / warmup_steps
    return peak * max(0.0, (max_steps - step) / max(1, max_steps - warmup_steps))
