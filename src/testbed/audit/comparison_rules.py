"""The audit's rules for what the figures of two arms contradict together, each a list of runs of one configuration."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from testbed.analysis.comparison.confounders import DEVICE, confounders, made_first
from testbed.audit.condition_rules import CONDITION_RULES, THREADS
from testbed.audit.conditions import DIFFERS, conditions
from testbed.audit.finding import FAILS, NOTE, Finding, Rule
from testbed.audit.measures import gain, is_one_batch_split
from testbed.audit.reported import Claim, Reported
from testbed.audit.run_rules import RATE_TOLERANCE, is_exact, schedule_warmup_steps

# More than linear is a fault of the clock or of the work until shown otherwise. Our own files time every step of every
# rank on a synchronised clock, so there it may be caches, and is only pointed out.
FOREIGN_LINEAR_TOLERANCE = 0.01
OWN_LINEAR_TOLERANCE = 0.05
SLOWER = 0.95  # under it more than the noise of single runs made the larger run slower
HALF = 0.5
COST_OF_A_TOKEN = ("device_name", "num_parameters", "sequence_length")


def rates_of_v1_are_of_all_ranks(claim: Claim) -> Iterator[Finding]:
    """Compare what one rank read, rate x time, in v1. An integer ratio of the two tells the ranks of an equal epoch."""
    base, other = claim.baseline.first, claim.other.first
    if base.form != "v1" or other.form != "v1" or not (base.rate and other.rate and base.time_s and other.time_s):
        return
    assert base.run is not None and other.run is not None  # of a training_metrics.json
    epochs = [len(run.record["train_time_per_epoch"]) for run in (base.run, other.run)]
    tokens = [base.rate * base.time_s / epochs[0], other.rate * other.time_s / epochs[1]]
    ratio = tokens[0] / tokens[1] if tokens[1] else math.inf
    if not math.isfinite(ratio) or abs(ratio - 1) <= RATE_TOLERANCE:  # infinite: numbers that no run measured
        return
    if ratio < 1 - RATE_TOLERANCE:  # whichever was named first
        return (yield from rates_of_v1_are_of_all_ranks(claim.turned))
    ranks = round(ratio)
    arithmetic = (
        f"{base.rate:,.1f} x {base.time_s:,.2f} s = {base.rate * base.time_s:,.0f} tokens against {other.rate:,.1f} x "
        f"{other.time_s:,.2f} s = {other.rate * other.time_s:,.0f}"
    )
    if ranks < 2 or abs(ratio / ranks - 1) > RATE_TOLERANCE:
        yield claim.fails(Rule.EQUAL_WORK, f"rate x time gives other tokens: {arithmetic}")
        return
    yield claim.fails(
        Rule.THROUGHPUT,
        f"throughput of one rank against another number of ranks: {arithmetic}, 1/{ranks} per epoch, so over the same "
        f"data the second ran on {ranks} times as many ranks",
        f"{ranks} x {other.rate:,.1f} = {ranks * other.rate:,.0f} tokens/s over all ranks, "
        f"{ranks * other.rate / base.rate:.2f}x the first instead of {other.rate / base.rate:.2f}x",
    )


def speed_up_is_not_more_than_linear(claim: Claim) -> Iterator[Finding]:
    """Check the speed-up from fewer ranks to more, whichever was named first."""
    if (claim.other.first.world_size or 0) < (claim.baseline.first.world_size or 0):
        claim = claim.turned
    base, other = claim.baseline.first, claim.other.first
    speed_up, by = gain(claim)
    if speed_up is None or not base.world_size or not other.world_size:
        return
    cores = claim.cores
    more_cores = cores[1] / cores[0] if cores[0] and cores[1] else None
    linear = more_cores if more_cores and more_cores > 1 else other.world_size / base.world_size
    own = base.is_our_own and other.is_our_own
    slowest = [max(item.rank_times_s, default=0.0) for item in (base, other)]
    corrected = None
    if min(slowest) > 0 and len(other.rank_times_s) > 1:
        corrected = (
            f"{slowest[0] / slowest[1]:.2f}x = {slowest[0]:,.2f} s / {slowest[1]:,.2f} s by the slowest rank, "
            f"instead of {speed_up:.2f}x"
        )
    if linear > 1 and speed_up > linear * (1 + (OWN_LINEAR_TOLERANCE if own else FOREIGN_LINEAR_TOLERANCE)):
        said = f"{speed_up:.2f}x ({by}) on {linear:g} times the {'cores' if (more_cores or 0) > 1 else 'ranks'} "
        if more_cores and more_cores <= 1:
            said += f"but {cores[0]} and {cores[1]} cores: no more cores explain it; look for a busy machine, or noise"
        elif own:
            said += "is more than linear: look for caches, clocks of the devices, or noise"
        else:
            said += "is more than linear: look for work that the clock leaves out, or that was not done"
        yield claim.finds(Rule.STEP_CLOCK, NOTE if own else FAILS, said, corrected)
    elif corrected and slowest[0] / slowest[1] < speed_up * (1 - RATE_TOLERANCE):
        said = f"{speed_up:.2f}x is of times averaged over ranks: an epoch is done when its slowest rank is"
        yield claim.fails(Rule.STEP_CLOCK, said, corrected)


def more_devices_are_faster(claim: Claim) -> Iterator[Finding]:
    """Compare the rate of all devices on more of them with that on fewer, whichever was named first.

    In our own files a slow run is a result and is pointed out; in another program's it contradicts a claimed speed-up.
    Devices are cores on CPUs. Equal ranks are equal devices: the rule on devices says what more threads of one gain.
    """
    base, other = claim.baseline.first, claim.other.first
    few, many = claim.cores if None not in claim.cores else (base.world_size, other.world_size)
    if not few or not many or few == many or base.world_size == other.world_size or not _differ_in_devices_alone(claim):
        return
    if many < few:
        claim, few, many = claim.turned, many, few
    ratio, by = gain(claim)
    if ratio is None or (ratio >= SLOWER and ratio >= HALF * many / few):
        return
    is_slower = ratio < SLOWER
    said = "more devices were slower" if is_slower else "efficiency is under 50 %"
    yield claim.finds(
        Rule.MORE_DEVICES,
        FAILS if is_slower and not (base.is_our_own and other.is_our_own) else NOTE,
        f"{said}: {ratio:.2f}x ({by}) on {many} devices against {few}",
        f"{ratio * few / many:.0%} efficiency: {many} devices do the work of {ratio * few:.2f}",
    )


def _differ_in_devices_alone(claim: Claim) -> bool:
    """Return whether a difference in rates could be the devices' number: same devices, model, and instruments."""
    base, other = claim.baseline.first, claim.other.first
    is_one_form = base.form == other.form or (base.run is not None and other.run is not None)
    if claim.protocol == "time_to_loss" or bool(base.instruments) != bool(other.instruments) or not is_one_form:
        return False
    if base.run is None and any(getattr(base, name) != getattr(other, name) for name in COST_OF_A_TOKEN):
        return False  # in logs, unknown in one only is another
    of_devices = (item for item in confounders(*claim.measured_runs) if item.kind == DEVICE and item.a != item.b)
    differing = {each.name for each in conditions(claim) if each.state == DIFFERS}
    return not differing & {"model", "sequence length"} and all(item.what == THREADS for item in of_devices)


def ranks_do_not_train_on_the_same_data(claim: Claim) -> Iterator[Finding]:
    """Check that losses differ: at the same batch per rank, more ranks mean a larger global batch."""
    base, other = claim.baseline.first, claim.other.first
    if not base.world_size or not other.world_size or base.world_size == other.world_size:
        return
    kinds = ("val_loss", "train_loss")
    losses = [(kind, getattr(base, kind)) for kind in kinds if getattr(base, kind) == getattr(other, kind)]
    equal = next((kind for kind, loss in losses if loss and is_exact(loss)), None)
    ranks_agree = len(set(other.rank_train_losses)) == 1
    if equal is None and ranks_agree and base.train_loss and other.train_loss and is_exact(base.train_loss):
        equal = "train_loss" if abs(other.train_loss / base.train_loss - 1) < 1e-6 else None
    before, after = (_work_per_rank(item) for item in (base, other))
    is_one_batch = base.global_batch_size and base.global_batch_size == other.global_batch_size
    if equal is None or (is_one_batch and not other.batch_is_printed):
        return
    said = f"{equal.replace('_', ' ')} {getattr(other, equal)!r} on {base.world_size} and on {other.world_size} ranks"
    if before is None or after is None or abs(after / before - 1) > RATE_TOLERANCE:
        is_known = before is not None and after is not None
        unknown = "though not at one batch per rank" if is_known else "the batch per rank is not in the files"
        yield claim.notes(Rule.EQUAL_WORK, f"the same {said}, {unknown}")
        return
    corrected = None
    if base.rate and other.rate and base.rate_unit == other.rate_unit:
        ratio = other.rate / base.rate if other.rate_is_per_rank else other.rate / base.rate / other.world_size
        useful = other.rate if other.rate_is_per_rank else other.rate / other.world_size
        corrected = (
            f"counted once, {useful:,.4g} {other.rate_unit} are useful: {ratio:.2f}x the first instead of "
            f"{ratio * other.world_size / base.world_size:.2f}x"
        )
    said = f"the same {said} at the same batch per rank: every rank trained on identical batches"
    yield claim.fails(Rule.EQUAL_WORK, said, corrected)


def _work_per_rank(item: Reported) -> float | None:
    """Return what one rank does in an iteration: sequences, or where its batch is unknown or only printed, its rate x
    time."""
    if item.batch_is_printed or not item.global_batch_size or not item.world_size:
        return item.work_per_iteration
    return item.global_batch_size / item.world_size


def data_parallel_batch_is_counted_once(claim: Claim) -> Iterator[Finding]:
    """Check the rate of torch.nn.DataParallel: it splits one batch, so the global batch does not grow with devices."""
    base, other = claim.baseline.first, claim.other.first
    if not other.world_size or other.world_size < 2 or not is_one_batch_split(claim):
        return
    assert base.rate and other.rate and base.time_s and other.time_s  # what such a log prints
    before, after = base.rate * base.time_s, other.rate * other.time_s
    claimed = other.rate * other.world_size / base.rate
    yield claim.fails(
        Rule.THROUGHPUT,
        f"DataParallel splits one batch over {other.world_size} devices, but {other.rate:.2f} {other.rate_unit} is "
        f"credited to each of them: rate x time, {after:.2f}, is that of the whole batch on one device, {before:.2f}",
        f"{other.rate:.2f} {other.rate_unit} over all devices, {base.time_s / other.time_s:.2f}x = "
        f"{base.time_s:.4f} s / {other.time_s:.4f} s instead of {claimed:.2f}x",
    )


def both_leave_the_warm_up_of_the_learning_rate(claim: Claim) -> Iterator[Finding]:
    left = []
    for side in (claim.baseline, claim.other) if claim.protocol != "time_to_loss" else ():
        warmup, steps = schedule_warmup_steps(side.first), side.first.optimizer_steps
        if not warmup or not steps:
            return
        left.append((steps > warmup, steps, warmup))
    if left and left[0][0] != left[1][0]:
        words = " against ".join(f"{steps:,} steps with {warmup:,} of warm-up" for _, steps, warmup in left)
        said = f"one run leaves the warm-up of the learning rate, the other never does: {words}"
        yield claim.fails(Rule.EQUAL_WORK, said)


def repeats_are_interleaved(claim: Claim) -> Iterator[Finding]:
    if made_first(*claim.measured_runs):
        said = "all repeats of one arm ran before the other's, or nearly all: interleave them (A B A B)"
        yield claim.notes(Rule.ONE_RUN, f"{said}, or what drifts on the machine looks like a difference")


def the_loader_fed_the_printed_batch(claim: Claim) -> Iterator[Finding]:
    """Compare printed batches per rank with rate x time, which of one model is in proportion to the real ones."""
    base, other = claim.baseline.first, claim.other.first
    work = base.work_per_iteration, other.work_per_iteration
    if not (base.batch_is_printed and other.batch_is_printed and base.world_size and other.world_size):
        return
    if not work[0] or not work[1] or base.rate_unit != other.rate_unit:
        return
    assert base.global_batch_size is not None and other.global_batch_size is not None  # printed
    per_rank = base.global_batch_size / base.world_size, other.global_batch_size / other.world_size
    if per_rank[0] == per_rank[1] or not abs(work[1] / work[0] - 1) <= RATE_TOLERANCE:  # nan is not
        return
    unit, ranks = base.rate_unit.removesuffix("/s"), other.world_size
    yield claim.fails(
        Rule.EQUAL_WORK,
        f"the printed global batches, {base.global_batch_size} on {base.world_size} and {other.global_batch_size} on "
        f"{ranks} ranks, are {per_rank[0]:g} and {per_rank[1]:g} sequences per rank and step; that does not follow "
        f"from rate x time, {work[0]:.3g} and {work[1]:.3g} {unit} per rank and iteration",
        f"if {per_rank[0]:g} per rank is right, {per_rank[0] * ranks:g} sequences per step on {ranks} ranks",
    )


# what the figures of both sides contradict together
ARITHMETIC_RULES: tuple[Callable[[Claim], Iterator[Finding]], ...] = (
    rates_of_v1_are_of_all_ranks,
    speed_up_is_not_more_than_linear,
    ranks_do_not_train_on_the_same_data,
    data_parallel_batch_is_counted_once,
    both_leave_the_warm_up_of_the_learning_rate,
    repeats_are_interleaved,
    more_devices_are_faster,
    the_loader_fed_the_printed_batch,
)
CLAIM_RULES = (*CONDITION_RULES, *ARITHMETIC_RULES)
