"""The learning rate of an optimizer step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from testbed.config.settings import RunSettings
from testbed.config.schedule import decay_steps


def learning_rate_at(step: int, settings: RunSettings) -> float:
    """Learning rate of optimizer step `step`, counted from 0: linear warm-up, then as --lr_schedule says; the minimum
    from lr_decay_steps on.

    The first step already moves (rate / warm-up steps), the last warm-up step has the full rate, the last step of the
    schedule is still above the minimum.
    """
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    if settings.lr_schedule == "constant":
        return settings.learning_rate
    falls_from = settings.warmup_steps
    if settings.lr_schedule == "wsd":
        falls_from = settings.lr_decay_steps - decay_steps(settings.lr_decay_steps, settings.decay_share)
    if step < falls_from:
        return settings.learning_rate
    falling_steps = settings.lr_decay_steps - falls_from
    progress = min(1.0, (step - falls_from) / falling_steps) if falling_steps > 0 else 1.0
    left = 1 - progress if settings.lr_schedule == "wsd" else 0.5 * (1 + math.cos(math.pi * progress))
    return settings.min_learning_rate + left * (settings.learning_rate - settings.min_learning_rate)
