"""Learning-rate schedules as functions of the step."""

from __future__ import annotations


def linear_warmup_decay(step: int, *, peak: float, warmup_steps: int, max_steps: int) -> float:
    """The learning rate after `step` completed updates: linear from 0 to `peak` over `warmup_steps`, then linear to 0
    at `max_steps`.

    Equal to Hugging Face's `get_linear_schedule_with_warmup`.
    """
    if step < warmup_steps:
        return peak * step / warmup_steps
    return peak * max(0.0, (max_steps - step) / max(1, max_steps - warmup_steps))


def learning_rate(schedule: str, step: int, *, peak: float, warmup_steps: int, max_steps: int) -> float:
    """The learning rate of a named schedule: `linear` is `linear_warmup_decay`, `constant` omits its decay."""
    if schedule == "constant" and step >= warmup_steps:
        return peak
    return linear_warmup_decay(step, peak=peak, warmup_steps=warmup_steps, max_steps=max_steps)
