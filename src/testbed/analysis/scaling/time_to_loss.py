"""When a run's validation loss first reached a target: the protocol that asks for learning, not for tokens per second.

A loss is known only where it was validated. Between the last validation above the target and the first at or below it
the loss is taken as a straight line over the optimizer steps, and step, time and tokens are read off that line. Without
this a result would be rounded up to the next validation, which favours whoever validates at lucky moments; with it the
error is the curvature of the loss between two validations, so validate often near the target (--eval_every). Only the
first crossing counts: a loss that rises above the target again afterwards does not take it back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from testbed.analysis.document import markdown
from testbed.analysis.document.model import Document, Section, Table, Text
from testbed.analysis.document.words import BRACKETS, Number
from testbed.analysis.runs.comparability import differing_work
from testbed.analysis.runs.load import Point, Run
from testbed.analysis.statistics import median_interval
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
    An interval would need the missing values: with censored runs it is None.

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
            name: interval_of([getattr(item, name) for item in reached], num_never)
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


# How much sooner one arm is where another one ends, seed by seed. A target that is alike for all seeds is one that the
# unluckiest reference run just reaches, and the others pass on the way; what a recipe saves against "train to the end"
# is told only by each run's own last loss.


@dataclass(frozen=True)
class SeedPair:
    """Two runs of one seed: where the reference ended, and when the other was there; None: never."""

    seed: int
    ended: Point
    reached: TimeToLoss | None

    @property
    def share_of_steps(self) -> float | None:
        """Steps that the other needed, as a share of the reference's; of tokens too, as their steps hold as many."""
        if self.reached is None:
            return None
        assert self.reached.step is not None and self.ended.step is not None
        return self.reached.step / self.ended.step

    @property
    def share_of_time(self) -> float | None:
        """The same of the sums of step times, so that dearer steps count."""
        if self.reached is None:
            return None
        assert self.reached.train_time_s is not None and self.ended.train_time_s is not None
        return self.reached.train_time_s / self.ended.train_time_s


def pairs_of_seeds(runs: Sequence[Run], references: Sequence[Run]) -> list[SeedPair]:
    """Return one pair per seed, in the order of the seeds.

    Raises:
        InputError: one sentence: a side lacks a seed or has it twice, a run did not validate, or the runs of a pair do
            not learn the same task in steps of as many tokens.
    """
    by_seed: list[dict[Any, Run]] = [{run.work.get("seed"): run for run in side} for side in (runs, references)]
    if any(len(found) != len(side) or None in found for found, side in zip(by_seed, (runs, references), strict=True)):
        raise InputError("a seed stands twice on one side, or is not recorded; each seed makes one pair")
    if by_seed[0].keys() != by_seed[1].keys():
        raise InputError(
            f"the sides have other seeds, {sorted(by_seed[0])} and {sorted(by_seed[1])}; give runs of the same ones"
        )
    return [_pair(seed, by_seed[0][seed], by_seed[1][seed]) for seed in sorted(by_seed[0])]


def _pair(seed: int, run: Run, reference: Run) -> SeedPair:
    pair = (run, reference)
    batch = [item for item in differing_work(pair) if item.field == "global_batch_size"]
    if unequal := [*differing_work(pair, "time_to_loss"), *batch]:
        words = "; ".join(f"{item.field} ({' and '.join(item.values)})" for item in unequal)
        raise InputError(f"{run.path} and {reference.path} differ in {words}")
    for each in (run, reference):
        if not each.validation_losses or None in (
            each.validation_losses[-1].step,
            each.validation_losses[-1].train_time_s,
        ):
            raise InputError(f"{each.path} records no validation loss with its step and time (--eval_every STEPS)")
    ended = reference.validation_losses[-1]
    return SeedPair(seed, ended, time_to_loss(run, ended.loss))


def final_loss_table(pairs: Sequence[SeedPair], name: str, reference: str) -> str:
    """Return Markdown: a row per seed, and the medians of the shares with 95 % intervals where every run got there."""
    header = ["seed", f"{reference} ends at", "after steps", f"{name} is there after"]
    header += ["share of the tokens", "share of the time"]
    rows = []
    for pair in pairs:
        row = [str(pair.seed), f"{pair.ended.loss:.4f}", f"{pair.ended.step:,.0f}"]
        found = ["never", "", ""]
        if pair.reached is not None:
            at_most = "at most " if pair.reached.is_upper_bound else ""  # nobody looked before
            found = [f"{pair.reached.step:,.0f}", f"{pair.share_of_steps:.3f}", f"{pair.share_of_time:.3f}"]
            found = [at_most + text for text in found]
        rows.append(row + found)
    if any(pair.reached is None for pair in pairs):
        outcome: Text = f"{name} did not get there in every run, so no median is claimed."
    else:
        of_steps = [pair.share_of_steps for pair in pairs if pair.share_of_steps is not None]
        of_time = [pair.share_of_time for pair in pairs if pair.share_of_time is not None]
        tokens, time = (
            Number(median, ".3f", low, high, interval=BRACKETS)
            for median, low, high in (median_interval(of_steps), median_interval(of_time))
        )
        outcome = f"Median over {len(pairs)} seeds: ", tokens, " of the tokens, ", time, " of the time."
    return markdown.text(Document(sections=[Section(blocks=[Table(header, rows)])], notes=[[outcome]]))
