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
    if step < settings.optimizer.warmup_steps:
        return settings.optimizer.learning_rate * (step + 1) / settings.optimizer.warmup_steps
    if settings.optimizer.lr_schedule == "constant":
        return settings.optimizer.learning_rate
    falls_from = settings.optimizer.warmup_steps
    if settings.optimizer.lr_schedule == "wsd":
        assert settings.optimizer.decay_share is not None
        falls_from = settings.optimizer.lr_decay_steps - decay_steps(
            settings.optimizer.lr_decay_steps, settings.optimizer.decay_share
        )
    if step < falls_from:
        return settings.optimizer.learning_rate
    falling_steps = settings.optimizer.lr_decay_steps - falls_from
    progress = min(1.0, (step - falls_from) / falling_steps) if falling_steps > 0 else 1.0
    left = 1 - progress if settings.optimizer.lr_schedule == "wsd" else 0.5 * (1 + math.cos(math.pi * progress))
    return settings.optimizer.min_learning_rate + left * (
        settings.optimizer.learning_rate - settings.optimizer.min_learning_rate
    )
