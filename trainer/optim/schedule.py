"""Learning-rate schedules as functions of the step."""

from __future__ import annotations

import math

from trainer.registry import stable_steps

#: Options that decide nothing before the end of the stable part.
DECAY_OPTIONS = ("schedule", "max_steps", "decay_share")


def linear_warmup_decay(step: int, *, peak: float, warmup_steps: int, max_steps: int) -> float:
    """The learning rate after `step` completed updates: linear from 0 to `peak` over `warmup_steps`, then linear to 0
    at `max_steps`.

    Equal to Hugging Face's `get_linear_schedule_with_warmup`.
    """
    if step < warmup_steps:
        return peak * step / warmup_steps
    return peak * max(0.0, (max_steps - step) / max(1, max_steps - warmup_steps))


def learning_rate(
    schedule: str, step: int, *, peak: float, warmup_steps: int, max_steps: int, decay_share: float = 1.0
) -> float:
    """The learning rate after `step` completed updates of a named schedule.

    All rise linearly over `warmup_steps`. Then: `linear` is `linear_warmup_decay`; `cosine` falls along half a period
    (Hugging Face's `get_cosine_schedule_with_warmup`); `constant` stays; `wsd`, warm-up-stable-decay (Hu et al. 2024,
    arXiv:2404.06395), stays, then falls linearly to 0 over the last `decay_share` of all steps.
    """
    if step < warmup_steps or schedule == "linear":
        return linear_warmup_decay(step, peak=peak, warmup_steps=warmup_steps, max_steps=max_steps)
    if schedule == "cosine":
        done = min(1.0, (step - warmup_steps) / max(1, max_steps - warmup_steps))
        return peak * 0.5 * (1 + math.cos(math.pi * done))
    decay_steps = max_steps - stable_steps(schedule, max_steps=max_steps, decay_share=decay_share)
    return peak * min(1.0, max(0.0, (max_steps - step) / decay_steps)) if decay_steps else peak
