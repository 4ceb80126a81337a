"""End a run whose loss or gradient is no longer a finite number."""

from __future__ import annotations

import math

from testbed.metrics.world_step import WorldStep


class TrainingDiverged(Exception):
    """The loss or the gradient is not finite. Nothing of that step is recorded or saved."""


def raise_if_diverged(step: int, world: WorldStep, precision: str) -> None:
    """Check the loss and the gradient norm of an optimizer step, counted from 1.

    Raises:
        TrainingDiverged: one of them is not finite. With fp16 the gradient norm may be: the scaler skipped the update.
    """
    if not math.isfinite(world.loss):
        raise TrainingDiverged(
            f"the loss of step {step} is {world.loss}; lower --learning_rate or lengthen --warmup_steps"
        )
    assert world.grad_norm is not None
    if not math.isfinite(world.grad_norm) and precision != "fp16":
        raise TrainingDiverged(f"the gradient norm of step {step} is {world.grad_norm}; lower --learning_rate")


def check_validation(step: int, loss: float) -> None:
    """Check the validation loss after a step.

    Raises:
        TrainingDiverged: it is not finite.
    """
    if not math.isfinite(loss):
        raise TrainingDiverged(f"the validation loss after step {step} is {loss}; lower --learning_rate")
