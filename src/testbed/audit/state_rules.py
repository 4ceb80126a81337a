"""The audit's rules for the state of transformers' Trainer: what it says of the run, against the log that it holds.

Formulas as in transformers, trainer.py: `_inner_training_loop` (schedule, epochs) and `_determine_best_metric`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

from testbed.audit.finding import Finding, Rule
from testbed.audit.log_lines import FLOAT_NOISE, disagreement
from testbed.audit.log_rules import said
from testbed.audit.readers import trainer_state
from testbed.audit.reported import Reported
from testbed.audit.trainer_rules import counted_in, is_in

MOST_OF_THE_GAPS = 0.9  # between logged losses
SAME_NUMBER = 1e-4  # relative: a result may be printed with fewer places
ON_A_LINE = 1e-6  # relative to the greatest of five learning rates
OFF_A_LINE = 1e-3


def state_is_that_of_its_history(item: Reported) -> Iterator[Finding]:
    """Compare what the state says of the run with the log that it holds."""
    state, rows = item.details["state"], item.details["log_history"]
    final, steps = item.details["final"], [row["step"] for row in rows if "step" in row]
    done = state.get("global_step")
    if done is not None and steps and max(steps) > done:
        yield item.fails(Rule.FOLLOWS, f"global_step is {done:,.0f}, and its log goes on to step {max(steps):,.0f}")
    elif done is not None and final and final.get("step", done) != done:
        message = f"global_step is {done:,.0f}, and by its log the run ended at step {final['step']:,.0f}"
        yield item.fails(Rule.FOLLOWS, message)
    flops = final.get("total_flos"), state.get("total_flos")
    if None not in flops and flops[0] != flops[1]:
        yield item.fails(Rule.FOLLOWS, f"total_flos is {flops[1]:.10g}, and {flops[0]:.10g} where the log ends")


def best_result_is_of_its_step(item: Reported) -> Iterator[Finding]:
    """Look for the best result among the evaluations, and at the step that the state names."""
    best, at = item.details["state"].get("best_metric"), item.details["best_step"]
    rows = [row for row in item.details["log_history"] if any(name.startswith("eval_") for name in row)]
    if best is None or not rows:
        return
    steps = {
        row.get("step")
        for row in item.details["log_history"]
        for value in row.values()
        if math.isclose(value, best, rel_tol=SAME_NUMBER)
    }
    if not steps:
        yield item.fails(Rule.FOLLOWS, f"best_metric {best!r} is the result of no evaluation in its log")
    elif at is not None and at not in steps and at in {row.get("step") for row in rows}:
        where = ", ".join(f"{step:,.0f}" for step in sorted(step for step in steps if step is not None))
        yield item.fails(
            Rule.FOLLOWS,
            f"the best result is said to be of step {at:,.0f}, and best_metric {best!r} is of step {where}",
        )


def schedule_has_its_epochs(item: Reported) -> Iterator[Finding]:
    """Check that max_steps end in the last of num_train_epochs, by the steps of an epoch, give or take one in each."""
    state = item.details["state"]
    planned, epochs, done, epoch = (
        state.get(name, 0.0) for name in ("max_steps", "num_train_epochs", "global_step", "epoch")
    )
    if 0 < planned < done:
        yield item.fails(Rule.FOLLOWS, f"global_step is {done:,.0f}, of {planned:,.0f} in max_steps")
        return
    if min(planned, epochs, done, epoch) <= 0 or epochs > trainer_state.MOST_EPOCHS:
        return
    per_epoch = done / epoch
    if (epochs - 1) * (per_epoch - 1) - 1 < planned <= epochs * (per_epoch + 1) + 1:
        return
    yield item.fails(
        Rule.FOLLOWS,
        f"max_steps {planned:,.0f} are {planned / per_epoch:.4g} epochs of {done:,.0f} / {epoch:.6g} = "
        f"{per_epoch:,.1f} steps, and num_train_epochs is {epochs:,.0f}",
    )


def rates_count_whole_batches(item: Reported) -> Iterator[Finding]:
    """Check that the rates of the end are of a whole number of samples per step, give or take a batch in each epoch."""
    final, state = item.details["final"], item.details["state"]
    names = ("train_runtime", "train_samples_per_second", "train_steps_per_second")
    runtime_s, samples_rate, steps_rate = (final.get(name, 0.0) for name in names)
    epochs = state.get("num_train_epochs", 0.0)
    if min(runtime_s, samples_rate, steps_rate, epochs) <= 0:
        return
    epochs = 0.0 if epochs > trainer_state.MOST_EPOCHS else epochs  # then the samples are steps x batch
    samples, counted = (counted_in(rate, runtime_s) for rate in (samples_rate, steps_rate))
    steps = next((final[name] for name in ("max_steps", "global_step") if is_in(final.get(name), counted)), None)
    fewest = 0.0 if steps is None else steps - epochs - bool(epochs)
    if steps is None or fewest <= 0:
        return
    least, most = samples[0] / (steps + 2 * epochs), samples[1] / fewest
    if math.floor(most * (1 + FLOAT_NOISE)) < math.ceil(least * (1 - FLOAT_NOISE)):
        yield item.notes(
            Rule.FOLLOWS,
            f"train_samples_per_second {samples_rate:g} x {runtime_s:,.10g} s = {samples_rate * runtime_s:,.6g} "
            f"samples in {steps:,.0f} steps are {samples_rate * runtime_s / steps:.4g} a step, and no whole batch "
            "gives that",
        )


def steps_follow_from_epochs(item: Reported) -> Iterator[Finding]:
    """Check each entry's step against its epoch, against the entries around it, and against the interval of logging."""
    accused: set[float] = set()
    if found := disagreement(trainer_state.EPOCHS, item.details["epochs"]):
        accused = {float(line.step) for line in found.lines}
        yield item.fails(Rule.FOLLOWS, *said(found))
    steps = [row["step"] for row in item.details["log_history"] if "step" in row]
    for step, around in [*_off_the_interval(item), *_out_of_order(steps)]:
        if not accused & {step, *around}:
            accused.add(step)
            between = " and ".join(f"{each:,.0f}" for each in around)
            yield item.fails(Rule.FOLLOWS, f"the log has step {step:,.0f} between the steps {between}")


def _off_the_interval(item: Reported) -> list[tuple[float, tuple[float, float]]]:
    """Return the steps of losses that stand between two others, two intervals apart, and not in their middle."""
    steps = [row["step"] for row in item.details["log_history"] if "loss" in row and "step" in row]
    gaps = Counter(after - before for before, after in pairwise(steps))
    if not gaps:
        return []
    (interval, count), total = gaps.most_common(1)[0], len(steps) - 1
    if interval <= 0 or count < max(3, MOST_OF_THE_GAPS * (total - 2)):
        return []
    triples = zip(steps, steps[1:], steps[2:], strict=False)
    return [
        (step, (before, after))
        for before, step, after in triples
        if after - before == 2 * interval and step - before != interval
    ]


def _out_of_order(steps: Sequence[float]) -> list[tuple[float, tuple[float, float]]]:
    """Return the one step without which they all go up; none where a second run begins."""
    falls = [index for index, (before, after) in enumerate(pairwise(steps)) if after < before]
    if len(falls) != 1 or len(steps) < 4:
        return []
    at = falls[0]
    for wrong in (at, at + 1):
        if 0 < wrong < len(steps) - 1 and steps[wrong - 1] <= steps[wrong + 1]:
            return [(steps[wrong], (steps[wrong - 1], steps[wrong + 1]))]
    return []


def learning_rate_is_on_its_line(item: Reported) -> Iterator[Finding]:
    """Look for one learning rate off a straight line on which the two before it and the two behind it lie."""
    rows = [row for row in item.details["log_history"] if {"loss", "learning_rate", "step"} <= row.keys()]
    for start in range(len(rows) - 4):
        five = rows[start : start + 5]
        steps, rates = [row["step"] for row in five], [row["learning_rate"] for row in five]
        if any(after <= before for before, after in pairwise(steps)):
            continue
        slope = (rates[4] - rates[0]) / (steps[4] - steps[0])
        off = [abs(rate - rates[0] - slope * (step - steps[0])) for step, rate in zip(steps, rates, strict=True)]
        largest = max(rates[0], rates[4])
        if max(off[1], off[3]) <= ON_A_LINE * largest and off[2] > OFF_A_LINE * largest > 0:
            expected = rates[0] + slope * (steps[2] - steps[0])
            yield item.fails(
                Rule.FOLLOWS,
                f"learning_rate {rates[2]:.6g} of step {steps[2]:,.0f} is off the straight line of the steps "
                f"{steps[0]:,.0f} to {steps[4]:,.0f}",
                f"{expected:.6g}",
            )


# rule -> the forms of files that it reads
STATE_RULES = dict.fromkeys(
    (
        state_is_that_of_its_history,
        best_result_is_of_its_step,
        schedule_has_its_epochs,
        rates_count_whole_batches,
        steps_follow_from_epochs,
        learning_rate_is_on_its_line,
    ),
    (trainer_state.FORM,),
)
