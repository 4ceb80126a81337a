"""The learning rate of an optimizer step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from testbed.config.schedule import decay_steps

if TYPE_CHECKING:
    from testbed.config.settings import RunSettings


def learning_rate_at(step: int, settings: RunSettings) -> float:
    """Return the learning rate of optimizer step `step`, counted from 0.

    Warm-up, then as --lr_schedule says; the minimum from lr_decay_steps on.

    The first step already moves (linear: rate / warm-up steps), the last warm-up step has the full rate. The last step
    of wsd's schedule has exactly the minimum, a cosine reaches it one step later. The log of the step is DeepSpeed's
    (WarmupLR), which has the full rate one step earlier.
    """
    optimizer = settings.optimizer
    if step < optimizer.warmup_steps:
        if optimizer.warmup_shape == "log":
            share = math.log(step + 2) / math.log(max(2, optimizer.warmup_steps))
            return optimizer.learning_rate * min(1.0, share)
        return optimizer.learning_rate * (step + 1) / optimizer.warmup_steps
    if optimizer.lr_schedule == "constant":
        return optimizer.learning_rate
    falls_from = optimizer.warmup_steps
    if optimizer.lr_schedule == "wsd":
        assert optimizer.decay_share is not None
        falls_from = optimizer.lr_decay_steps - decay_steps(optimizer.lr_decay_steps, optimizer.decay_share)
    if step < falls_from:
        return optimizer.learning_rate
    falling_steps = optimizer.lr_decay_steps - falls_from
    is_wsd = optimizer.lr_schedule == "wsd"
    progress = min(1.0, (step + is_wsd - falls_from) / falling_steps) if falling_steps > 0 else 1.0
    left = 1 - progress if is_wsd else 0.5 * (1 + math.cos(math.pi * progress))
    return optimizer.min_learning_rate + left * (optimizer.learning_rate - optimizer.min_learning_rate)
