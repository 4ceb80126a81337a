"""When a run's validation loss first reached a target: the protocol that asks for learning, not for tokens per second.

A loss is known only where it was validated. Between the last validation above the target and the first at or below it
the loss is taken as a straight line over the optimizer steps, and step, time and tokens are read off that line. Without
this a result would be rounded up to the next validation, which favours whoever validates at lucky moments; with it the
error is the curvature of the loss between two validations, so validate often near the target (--eval_every). Only the
first crossing counts: a loss that rises above the target again afterwards does not take it back.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from testbed.analysis.runs.load import Point, Run
from testbed.errors import InputError


@dataclass(frozen=True)
class TimeToLoss:
    """What it took to reach `target`; None: the file does not record it.

    `train_time_s` is the sum of optimizer step times. `elapsed_s` is wall time since the first step began, with every
    validation up to then inside. `is_upper_bound`: the first validation was already at or below the target, so it was
    reached at this moment or earlier.
    """

    target: float
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
    after = next((number for number, point in enumerate(points) if point.loss <= target), None)
    if after is None:
        return None
    before = points[max(after - 1, 0)]
    reached = _between(before, points[after], target)
    step = reached(lambda point: point.step)
    tokens_per_step = _tokens_per_step(run)
    return TimeToLoss(
        target=target,
        step=step,
        train_time_s=reached(lambda point: point.train_time_s),
        elapsed_s=reached(lambda point: point.elapsed_s),
        tokens=None if step is None or tokens_per_step is None else step * tokens_per_step,
        is_upper_bound=after == 0,
    )


def time_to_loss_of_arm(runs: Sequence[Run], target: float, failed: Sequence[Run] = ()) -> dict[str, Any]:
    """Return the time to loss over the repeats of one configuration.

    A run that never reached the target is censored: it would have taken longer, by an unknown amount. It ranks above
    every other, so the median is known as soon as more than half of the runs reached the target, and is None before.
    An interval and a spread would need the missing values: with censored runs they are None.

    Of the `failed` runs of the configuration those that had not reached the target count among the censored ones,
    whether they validated or not: without them, an arm would be judged by the runs that survived.
    """
    lost = [run for run in failed if not run.validation_losses or time_to_loss(run, target) is None]
    validated = [run for run in runs if run.validation_losses]
    found = [*(time_to_loss(run, target) for run in validated), *[None] * len(lost)]
    reached = [item for item in found if item is not None]
    num_never = len(found) - len(reached)
    seeds = {run.work.get("seed") for run in (*validated, *lost)}
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
        "num_seeds": len(seeds),
        "reason": reason,
        **{
            name: _summary([getattr(item, name) for item in reached], num_never)
            for name in ("train_time_s", "elapsed_s", "tokens", "step")
        },
    }


def _between(before: Point, after: Point, target: float) -> Callable[[Callable[[Point], float | None]], float | None]:
    share = 1.0 if before is after else (before.loss - target) / (before.loss - after.loss)

    def at_target(quantity: Callable[[Point], float | None]) -> float | None:
        low, high = quantity(before), quantity(after)
        return None if low is None or high is None else float(low + share * (high - low))

    return at_target


def _tokens_per_step(run: Run) -> int | None:
    batch, length = run.work.get("global_batch_size"), run.work.get("seq_len")
    return None if batch is None or length is None else batch * length


def _summary(values: Sequence[float | None], num_never: int) -> dict[str, Any]:
    """Return median, 95 % interval and spread over seeds; `num_never` further runs lie above them all."""
    from testbed.analysis.statistics import median_interval

    known = [value for value in values if value is not None]
    summary: dict[str, Any] = dict.fromkeys(("median", "low", "high", "smallest", "largest", "stdev"))
    if len(known) < len(values) or len(known) <= num_never:
        return {**summary, "values": known}
    summary["median"] = float(np.median([*known, *[math.inf] * num_never]))
    if not num_never:
        summary["smallest"], summary["largest"] = min(known), max(known)
        summary["stdev"] = statistics.stdev(known) if len(known) > 1 else None
        _, summary["low"], summary["high"] = median_interval(known)
    return {**summary, "values": known}
