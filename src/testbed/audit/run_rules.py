"""The audit's rules for one run's metrics file: what it contradicts itself, whatever it is compared with.

Each rule takes one `Reported` and yields findings. docs/audit.md lists them with the arithmetic.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator

import numpy as np

from testbed.audit.finding import FAILS, NOTE, Finding, Rule
from testbed.audit.reported import ANY, Reported

RATE_TOLERANCE = 0.01  # rounding of a printed rate; a real error here is a factor
BY_CHANCE, BEYOND_NOISE = 0.01, 3.0


def rate_agrees_with_tokens_and_time(item: Reported) -> Iterator[Finding]:
    """Compare the rate with tokens / wall time of the epochs (2.0), or with tokens / time of the rows (since 2.1)."""
    tokens, seconds = _tokens_and_seconds(item)
    if not item.rate or not tokens or not seconds:
        return
    expected = tokens / seconds
    factor, ranks = item.rate / expected, item.world_size or 1
    if abs(factor - 1) <= RATE_TOLERANCE:
        return
    arithmetic = f"{tokens:,.0f} tokens / {seconds:,.2f} s = {expected:,.1f} tokens/s"
    if ranks > 1 and abs(factor / ranks - 1) <= RATE_TOLERANCE:
        said = f"is {ranks} times that: it was multiplied by the number of devices, which the tokens already count"
    elif ranks > 1 and abs(factor * ranks - 1) <= RATE_TOLERANCE:
        said = f"is 1/{ranks} of that: it is of one rank, not of all"
    else:
        said = f"is {factor:.3g} times that"
    yield item.fails(Rule.THROUGHPUT, f"the recorded {item.rate:,.1f} tokens/s {said}", arithmetic)


def _tokens_and_seconds(item: Reported) -> tuple[float | None, float | None]:
    run = item.metrics
    if item.form == "2.2":
        per_step = item.config["global_batch_size"] * item.config["seq_len"]
        return per_step * len(run.step_times_s), float(run.step_times_s.sum())
    return run.work.get("tokens"), item.time_s


def warm_up_is_left_out(item: Reported) -> Iterator[Finding]:
    """Find slow first steps in the throughput, most of all where no warm-up is marked."""
    run = item.metrics
    if len(run.step_times_s) < 10:
        return
    times_s, usual_s = run.step_times_s, float(np.median(run.step_times_s))
    slow = int(np.argmax(times_s <= 1.5 * usual_s))  # steps before the first that is not slow
    rest_s = times_s[slow:]
    if not slow or times_s[:slow].min() <= rest_s.max():
        return
    # Steps that something else on the machine slowed down lie anywhere. That the slowest happen to be the first ones is
    # as likely as any other place among all, so with warm-up marked it takes more than one slow step of 15
    is_placed_by_chance = 1 / math.comb(len(times_s), slow) > BY_CHANCE
    if run.num_warmup_steps and is_placed_by_chance and times_s[:slow].max() < BEYOND_NOISE * usual_s:
        return
    tokens_per_step = run.work["tokens"] / max(1, item.optimizer_steps or 1)
    with_s, without_s = tokens_per_step / times_s.mean(), tokens_per_step / rest_s.mean()
    if without_s / with_s - 1 > 0.02:
        yield item.finds(
            Rule.WARM_UP,
            NOTE if run.num_warmup_steps else FAILS,
            f"the first {slow} measured step{'s take' if slow > 1 else ' takes'} {times_s[:slow].max() / usual_s:.1f} "
            f"times the median: {run.num_warmup_steps} warm-up steps were marked, so start-up is in the rate",
            f"{without_s:,.1f} tokens/s without them instead of {with_s:,.1f}",
        )


def rows_are_every_step_of_the_slowest_rank(item: Reported) -> Iterator[Finding]:
    """Check that each step has a row, and that no step is shorter than its slowest rank's."""
    run = item.metrics
    steps, slowest_s, recorded_s = run.train_steps, run.slowest_rank_times_s, run.all_step_times_s
    if not len(steps):
        return
    missing = int(steps[-1] - len(steps))
    if missing > 0:
        said = f"{len(steps):,} rows for {int(steps[-1]):,} optimizer steps: {missing:,} steps were not timed"
        yield item.fails(Rule.EVERY_STEP, said)
    if slowest_s.sum() > recorded_s.sum() * (1 + RATE_TOLERANCE):
        rate = run.work["tokens"] / slowest_s.sum()
        yield item.fails(
            Rule.STEP_CLOCK,
            f"step times add up to {recorded_s.sum():,.2f} s, the slowest ranks' to {slowest_s.sum():,.2f} s: a step "
            "is done when its slowest rank is",
            f"{rate:,.1f} tokens/s over all steps, by the slowest rank",
        )


def rate_of_one_rank_is_not_the_global_rate(item: Reported) -> Iterator[Finding]:
    if item.rate and item.time_s:
        said = "v1 throughput is of one rank, and the file does not say how many there were"
        yield item.cannot_tell(Rule.THROUGHPUT, said, "number of ranks")


def loss_of_zero_was_not_measured(item: Reported) -> Iterator[Finding]:
    epochs = item.metrics.record["epochs"] if item.form == "2.0" else []
    if any(value == 0 for value in [item.val_loss, *(epoch.get("val_loss_avg_global") for epoch in epochs)]):
        said = "a validation loss of exactly 0.0 says that nothing was validated"
        yield item.fails(Rule.UNKNOWN, said, "validation loss: unknown")


def is_exact(loss: float) -> bool:
    """Return whether a loss has enough digits that two runs do not have the same by chance."""
    return len(re.sub(r"[^0-9]|e.*", "", repr(loss)).strip("0")) >= 8


# rule -> the forms of files that it reads, and takes no other
METRICS_RULES: dict[Callable[[Reported], Iterator[Finding]], tuple[str, ...]] = {
    rate_agrees_with_tokens_and_time: ("2.0", "2.2"),
    warm_up_is_left_out: ("2.2",),
    rows_are_every_step_of_the_slowest_rank: ("2.2",),
    rate_of_one_rank_is_not_the_global_rate: ("v1",),
    loss_of_zero_was_not_measured: ANY,
}
