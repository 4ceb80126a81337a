"""When a run's validation loss first reached a target: the protocol that asks for learning, not for tokens per second.

A loss is known only where it was validated. Between the last validation above the target and the first at or below it
the loss is taken as a straight line over the optimizer steps, and step, time and tokens are read off that line. Without
this a result would be rounded up to the next validation, which favours whoever validates at lucky moments; with it the
error is the curvature of the loss between two validations, so validate often near the target (--eval_every). Only the
first crossing counts: a loss that rises above the target again afterwards does not take it back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from testbed.analysis.runs.load import Run
from testbed.analysis.statistics import median_interval
from testbed.errors import InputError


@dataclass(frozen=True)
class TimeToLoss:
    """What it took to reach a loss; None: the file does not record it.

    `train_time_s` is the sum of optimizer step times. `elapsed_s` is wall time since the first step began, with every
    validation up to then inside. `is_upper_bound`: the first validation was already at or below the target, so it was
    reached at this moment or earlier.
    """

    step: float | None
    train_time_s: float | None
    elapsed_s: float | None
    tokens: float | None
    is_upper_bound: bool


def time_to_loss(run: Run, target: float) -> TimeToLoss | None:
    """Return step, seconds and tokens at which the validation loss of `run` first reached `target`; None: it never did.

    Raises:
        InputError: the run validated nothing, so "never reached" cannot be told from "not measured".
    """
    points = run.validation_losses
    if not points:
        raise InputError(f"{run.path} holds no validation loss: a time to loss needs validations (--eval_every STEPS)")
    number = next((number for number, point in enumerate(points) if point.loss <= target), None)
    if number is None:
        return None
    before, after = points[max(number - 1, 0)], points[number]
    share = 1.0 if number == 0 else (before.loss - target) / (before.loss - after.loss)

    def at_target(quantity: str) -> float | None:
        low, high = getattr(before, quantity), getattr(after, quantity)
        return None if low is None or high is None else float(low + share * (high - low))

    step, batch, length = at_target("step"), run.work.get("global_batch_size"), run.work.get("seq_len")
    tokens = None if step is None or batch is None or length is None else step * batch * length
    return TimeToLoss(step, at_target("train_time_s"), at_target("elapsed_s"), tokens, is_upper_bound=number == 0)


def time_to_loss_of_arm(runs: Sequence[Run], target: float, failed: Sequence[Run] = ()) -> dict[str, Any]:
    """Return the time to loss over the repeats of one configuration.

    A run that never reached the target is censored: it would have taken longer, by an unknown amount. It ranks above
    every other, so the median is known as soon as more than half of the runs reached the target, and is None before.
    An interval would need the missing values: with censored runs it is None.

    Of the `failed` runs of the configuration those that had not reached the target count among the censored ones,
    whether they validated or not: without them, an arm would be judged by the runs that survived.
    """
    lost = [run for run in failed if not run.validation_losses or time_to_loss(run, target) is None]
    validated = [run for run in runs if run.validation_losses]
    found = [*(time_to_loss(run, target) for run in validated), *[None] * len(lost)]
    reached = [item for item in found if item is not None]
    num_never = len(found) - len(reached)
    never = f"{num_never} of {len(found)} runs never reached the target"
    never += f" ({len(lost)} failed)" if lost else ""
    reason = None
    if not found:
        reason = "no run validated"
    elif 2 * len(reached) <= len(found):
        reason = f"{never}: no median is claimed"
    elif num_never:
        reason = f"{never}: the median counts them as slower than all"
    return {
        "target_val_loss": target,
        "n": len(found),
        "num_reached": len(reached),
        "num_never_reached": num_never,
        "num_upper_bounds": sum(item.is_upper_bound for item in reached),
        "reason": reason,
        **{
            name: interval_of([getattr(item, name) for item in reached], num_never)
            for name in ("train_time_s", "elapsed_s", "tokens", "step")
        },
    }


def interval_of(values: Sequence[float | None], num_never: int = 0) -> dict[str, Any]:
    """Return the values of an arm's runs, one of each, with their median and its 95 % interval.

    The interval is None below 5 runs, and all is None where a run lacks the value. `num_never` further runs lie above
    them all: then there is no interval, and no median where they are as many as the others.
    """
    known = [value for value in values if value is not None]
    median = low = high = None
    if known and len(known) == len(values) and len(known) > num_never:
        median = float(np.median([*known, *[math.inf] * num_never]))
        _, low, high = (None, None, None) if num_never else median_interval(known)
    return {"median": median, "low": finite(low), "high": finite(high), "values": known}


def finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)
