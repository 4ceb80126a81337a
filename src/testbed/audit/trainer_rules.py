"""The audit's rules for the figures with which Hugging Face's Trainer ends a run, wherever they are kept.

Formulas as in transformers: trainer_utils.py, speed_metrics: rate = amount / train_runtime, rounded to three places.
The amounts are those of the whole schedule before transformers 5, and of this call since then. train_loss is the sum of
this call's losses over all steps before transformers 5, and over this call's steps since then.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from statistics import median

from testbed.audit.finding import Finding, Rule
from testbed.audit.readers.evaluations import RATE_SLACK, TIME_SLACK
from testbed.audit.reported import ANY, Reported

LOSS_TOLERANCE = 0.02  # of a mean of logged losses, which are rounded to four places
UNLOGGED_STEPS = 0.02  # of all: more steps behind the last logged loss leave the mean open
LEAST_LOSS = 0.01  # four places of a smaller one are too few


def rate_counts_the_steps_that_were_done(item: Reported) -> Iterator[Finding]:
    """Compare steps per second x seconds with the steps that the run counted."""
    final = item.details.get("final") or {}
    if not {"train_runtime", "train_steps_per_second", "global_step"} <= final.keys():
        return
    runtime_s, rate, done = final["train_runtime"], final["train_steps_per_second"], final["global_step"]
    planned = final.get("max_steps")
    counted = counted_in(rate, runtime_s)
    if runtime_s <= 0 or done < 1 or counted[0] <= done <= counted[1]:
        return
    product = f"{rate:g} steps/s x {runtime_s:,.2f} s = {rate * runtime_s:,.0f} steps"
    samples = final.get("train_samples_per_second")
    corrected = (
        f"at most {samples:g} x {done:,.0f} / {rate * runtime_s:,.0f} = {samples * done / (rate * runtime_s):.3g} "
        "samples/s"
        if samples and done < counted[0]
        else None
    )
    if planned is not None and done < planned and counted[0] <= planned <= counted[1]:
        yield item.fails(
            Rule.THROUGHPUT,
            f"the rates count all {planned:,.0f} steps of the schedule, and the run ended after {done:,.0f}: {product}",
            corrected,
        )
    elif done < counted[0]:
        yield item.fails(
            Rule.THROUGHPUT, f"{product}, which does not follow from the {done:,.0f} steps of the run", corrected
        )
    elif planned == done and _is_of_all_steps(item, done - counted[1], done - counted[0]):
        yield item.fails(
            Rule.THROUGHPUT,
            f"{product}, but train_loss is the mean over all {done:,.0f} steps, so this call did them all",
            f"{done:,.0f} / {runtime_s:,.2f} s = {done / runtime_s:.3g} steps/s",
        )


def counted_in(rate: float, runtime_s: float) -> tuple[float, float]:
    """Return the fewest and the most steps or samples that a rounded rate allows."""
    slack = RATE_SLACK * runtime_s * (1 + 1e-6) + TIME_SLACK * rate + 1e-4
    return rate * runtime_s - slack, rate * runtime_s + slack


def _is_of_all_steps(item: Reported, first: float, last: float) -> bool:
    """Return whether train_loss is the mean over all steps, and not over those behind a step from `first` to `last`."""
    said, rests = item.details["final"].get("train_loss"), _mean_losses(item)
    steps = sorted(rests)
    near = {step for edge in (first, last) for step in sorted(steps, key=lambda each: abs(each - edge))[:2]} - {0.0}
    behind = [rest for step, rest in rests.items() if step in near or first <= step <= last]
    return _is_close(said, rests.get(0)) and not any(_is_close(said, rest) for rest in behind)


def is_in(count: float | None, counted: tuple[float, float]) -> bool:
    return count is not None and counted[0] <= count <= counted[1]


def train_loss_is_the_mean_of_what_was_logged(item: Reported) -> Iterator[Finding]:
    """Compare the mean loss of the end with the mean of the logged losses, which covers the steps it speaks of.

    Before transformers 5 a resumed run divides the losses after the checkpoint by all steps, while the rates count all
    steps in the time after the checkpoint. The loss then tells the checkpoint.
    """
    final = item.details.get("final") or {}
    if not {"train_loss", "global_step", "train_runtime"} <= final.keys() or final["train_loss"] <= 0:
        return
    said, done = final["train_loss"], final["global_step"]
    rests = _mean_losses(item)
    mean = rests.get(0)
    if mean is None or any(_is_close(said, rest) for rest in rests.values()):
        return  # of all steps, or in transformers 5 of those since the run was resumed
    message = (
        f"train_loss {said:.4f} does not follow from the logged losses, whose mean over {done:,.0f} steps is {mean:.4f}"
    )
    divided = {step: rest * (done - step) / done for step, rest in rests.items()}
    resumed = min(divided, key=lambda step: abs(said / divided[step] - 1), default=None)
    if resumed is None or not _is_close(said, divided[resumed]):
        yield item.notes(Rule.FOLLOWS, message)
        return
    message += (
        f"; the losses after step {resumed:,.0f}, divided by all {done:,.0f} steps, give it, as in a run resumed there"
    )
    counted = counted_in(final.get("train_steps_per_second", 0), final["train_runtime"])
    if counted[0] <= done <= counted[1]:
        yield item.fails(
            Rule.THROUGHPUT,
            f"{message}, and then train_runtime is of {done - resumed:,.0f} steps, while the rates count {done:,.0f}",
            f"about ({done:,.0f} - {resumed:,.0f}) / {final['train_runtime']:,.2f} s = "
            f"{(done - resumed) / final['train_runtime']:.3g} steps/s",
        )
    else:
        yield item.notes(Rule.FOLLOWS, message)


def _mean_losses(item: Reported) -> dict[float, float]:
    """Return {step: mean loss of the steps after it}, for 0 and each logged step that leaves enough of them."""
    rows = [row for row in item.details.get("log_history") or [] if "loss" in row and "step" in row]
    steps = [0.0, *(row["step"] for row in rows)]
    gaps = [after - before for before, after in pairwise(steps)]
    if not gaps or min(gaps) <= 0 or max(gaps) > 2 * median(gaps):
        return {}  # a step was written twice, or lines are missing
    unlogged = item.details["final"]["global_step"] - steps[-1]
    means, total = {}, 0.0
    for row, (before, after) in zip(reversed(rows), reversed([*pairwise(steps)]), strict=True):
        total += (after - before) * row["loss"]
        mean = total / (steps[-1] - before)
        if 0 <= unlogged <= UNLOGGED_STEPS * (steps[-1] - before) and mean > LEAST_LOSS:
            means[before] = mean
    return means


def _is_close(said: float | None, mean: float | None) -> bool:
    return said is not None and mean is not None and abs(said / mean - 1) <= LOSS_TOLERANCE


TRAINER_RULES = {
    rate_counts_the_steps_that_were_done: ANY,
    train_loss_is_the_mean_of_what_was_logged: ANY,
}
