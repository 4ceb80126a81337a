"""The audit's rules for a comparison: one arm against the baseline arm, each a list of runs of one configuration."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from testbed.analysis.comparison.confounders import made_first
from testbed.analysis.runs.comparability import LOSS_NOISE, cores_of, differing_validation, loss_noise
from testbed.audit.condition_rules import code_is_the_same, devices_are_the_same, more_devices_are_faster
from testbed.audit.conditions import DIFFERS, UNKNOWN, conditions
from testbed.audit.finding import FAILS, NOTE, Finding, Rule
from testbed.audit.measures import gain
from testbed.audit.reported import DATA, OFFLOADED, Claim, Reported
from testbed.audit.run_rules import RATE_TOLERANCE, is_exact, schedule_warmup_steps

# More than linear is a fault of the clock or of the work until shown otherwise. Our own files time every step of every
# rank on a synchronised clock, so there it may be caches, and is only pointed out.
FOREIGN_LINEAR_TOLERANCE = 0.01
OWN_LINEAR_TOLERANCE = 0.05


def work_is_equal(claim: Claim) -> Iterator[Finding]:
    base, other = claim.baseline.first, claim.other.first
    work = [item for item in conditions(claim) if item.is_work]
    steps = next(item for item in work if item.name == "optimizer steps")
    if differing := [item.against for item in work if item.spoils]:
        yield claim.fails(Rule.EQUAL_WORK, f"not equal work: {'; '.join(differing)}", _at_equal_updates(claim))
    elif steps.state == DIFFERS and base.losses and other.losses:
        words = f"{steps.against}: the logs compare rates, and neither losses nor whole times"
        yield claim.notes(Rule.EQUAL_WORK, words)
    is_open = claim.protocol == "time_to_loss" and not (base.run and other.run)  # of a log, batch and steps are free
    if unknown := [item.name for item in work if item.state == UNKNOWN and item.name != DATA and not is_open]:
        said = f"equal work cannot be shown, not in every file: {', '.join(unknown)}"
        yield claim.cannot_tell(Rule.EQUAL_WORK, said, *unknown)


def _at_equal_updates(claim: Claim) -> str | None:
    """Return the time of the other arm for as many optimizer steps at its own pace, by plain proportion."""
    base_steps, steps = claim.baseline.middle("optimizer_steps"), claim.other.middle("optimizer_steps")
    base_s, seconds = claim.baseline.middle("time_s"), claim.other.middle("time_s")
    if not base_steps or not steps or not base_s or not seconds or base_steps == steps:
        return None
    if claim.baseline.first.time_meaning.endswith("iteration") or claim.other.first.time_meaning.endswith("iteration"):
        return None
    scaled_s = seconds * base_steps / steps
    return (
        f"{base_steps:,.0f} optimizer steps at {claim.other.name}'s pace take {seconds:,.2f} s x {base_steps:,.0f} / "
        f"{steps:,.0f} = {scaled_s:,.0f} s, against {base_s:,.0f} s"
    )


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
        f"{base.rate:,.1f} x {base.time_s:,.2f} s = {tokens[0] * epochs[0]:,.0f} tokens against {other.rate:,.1f} x "
        f"{other.time_s:,.2f} s = {tokens[1] * epochs[1]:,.0f}"
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
    is_of_iterations = by == "time" and base.time_meaning.endswith("iteration")
    if is_of_iterations and (base.global_batch_size is None or base.global_batch_size != other.global_batch_size):
        return  # an iteration on more ranks can be of less data
    cores = _cores(claim)
    more_cores = cores[1] / cores[0] if cores else 1.0
    linear = more_cores if more_cores > 1 else other.world_size / base.world_size
    own = base.is_our_own and other.is_our_own
    slowest = [max(item.rank_times_s, default=0.0) for item in (base, other)]
    corrected = None
    if min(slowest) > 0 and len(other.rank_times_s) > 1:
        corrected = (
            f"{slowest[0] / slowest[1]:.2f}x = {slowest[0]:,.2f} s / {slowest[1]:,.2f} s by the slowest rank, "
            f"instead of {speed_up:.2f}x"
        )
    if linear > 1 and speed_up > linear * (1 + (OWN_LINEAR_TOLERANCE if own else FOREIGN_LINEAR_TOLERANCE)):
        yield claim.finds(
            Rule.STEP_CLOCK,
            NOTE if own else FAILS,
            f"{speed_up:.2f}x ({by}) on {linear:g} times the {'cores' if more_cores > 1 else 'ranks'} "
            + (
                f"but {cores[0]} and {cores[1]} cores: no more cores explain it, so look for threads that hinder each "
                "other, a machine that was busy with other work, or noise"
                if cores and more_cores <= 1
                else "is more than linear: both clocks cover every rank, so look for caches, clocks of the devices, or "
                "noise"
                if own
                else "is more than linear: look for work that the clock leaves out, or that was not done"
            ),
            corrected,
        )
    elif corrected and slowest[0] / slowest[1] < speed_up * (1 - RATE_TOLERANCE):
        yield claim.fails(
            Rule.STEP_CLOCK,
            f"{speed_up:.2f}x is of times averaged over ranks: an epoch is done when its slowest rank is",
            corrected,
        )


def _cores(claim: Claim) -> tuple[int, int] | None:
    """Return the CPU cores of both arms; None on GPUs and where a file does not say."""
    one, other = ({cores_of(run) for run in runs} for runs in claim.measured_runs)
    known = [cores.pop() for cores in (one, other) if len(cores) == 1]
    return (known[0], known[1]) if len(known) == 2 and known[0] and known[1] else None


def faster_is_not_worse(claim: Claim) -> Iterator[Finding]:
    """Compare validation losses at the end. Under weak scaling arms train with other batches, so nothing is said."""
    speed_up, by = gain(claim)
    base, other = claim.baseline.first, claim.other.first
    if by == "time" and base.time_meaning.endswith("iteration") and base.world_size != other.world_size:
        return  # an iteration of more ranks can be of more data
    if base.losses and other.losses and base.optimizer_steps != other.optimizer_steps:
        return  # losses of other steps: `work_is_equal` says so
    if speed_up is not None and 0 < speed_up < 1:  # whichever was named first
        claim, speed_up = claim.turned, 1 / speed_up
    before, after = claim.baseline.middle("val_loss"), claim.other.middle("val_loss")
    if not before or not after or speed_up is None or speed_up <= 1 or claim.protocol in ("weak", "time_to_loss"):
        return
    runs = [side.first.run for side in (claim.baseline, claim.other) if side.first.run]
    if len(runs) == 2 and any(not item.is_unknown_only for item in differing_validation(runs)):
        yield claim.notes(Rule.LOSSES, "validation losses are over different data or numbers of tokens")
        return
    sides = (claim.baseline, claim.other)
    losses = [[run.val_loss for run in side.runs if run.val_loss is not None] for side in sides]
    noise, whose = loss_noise(*losses)
    said = (
        f"{speed_up:.2f}x ({by}) with validation loss {after:.3f} against {before:.3f}: worse by {after - before:.3f}"
    )
    if after - before > noise:
        explained = f"more than the {noise:.3g} that seeds explain in published 124M runs"
        if whose is not None:
            explained = f"more than the {noise:.3g} between repeats"
        elif noise != LOSS_NOISE:
            explained = f"more than the {noise:.3g} that a seed may explain where a side has one run"
        corrected = "no speed-up at equal loss; time to a loss was not compared"
        yield claim.fails(Rule.LOSSES, f"{said}, {explained}", corrected)
    elif after - before > LOSS_NOISE and whose is None:
        yield claim.notes(
            Rule.LOSSES,
            f"{said}. One run of a side does not tell how much of that its seed explains; repeats with other seeds do",
        )


def ranks_do_not_train_on_the_same_data(claim: Claim) -> Iterator[Finding]:
    """Check that losses differ: at the same batch per rank, more ranks mean a larger global batch."""
    base, other = claim.baseline.first, claim.other.first
    if not base.world_size or not other.world_size or base.world_size == other.world_size:
        return
    kinds = ("val_loss", "train_loss")
    equal = next((kind for kind in kinds if _is_same(getattr(base, kind), getattr(other, kind))), None)
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
    yield claim.fails(
        Rule.EQUAL_WORK,
        f"the same {said} at the same batch per rank: every rank trained on identical batches, so the added ranks "
        "repeat the first one's work",
        corrected,
    )


def _is_same(before: float | None, after: float | None) -> bool:
    return bool(before and before == after and is_exact(before))


def _work_per_rank(item: Reported) -> float | None:
    """Return what one rank does in an iteration: sequences, or where its batch is unknown or only printed, its rate x
    time."""
    if item.batch_is_printed or not item.global_batch_size or not item.world_size:
        return item.work_per_iteration
    return item.global_batch_size / item.world_size


def data_parallel_batch_is_counted_once(claim: Claim) -> Iterator[Finding]:
    """Check the rate of torch.nn.DataParallel: it splits one batch, so the global batch does not grow with devices."""
    base, other = claim.baseline.first, claim.other.first
    before, after = (_work_per_rank(item) for item in (base, other))
    if not other.is_data_parallel_module or not other.world_size or other.world_size < 2:
        return
    if base.world_size != 1 or before is None or after is None or abs(after / before - 1) > 5 * RATE_TOLERANCE:
        return
    assert base.rate is not None and other.rate is not None  # what such a log prints
    assert base.time_s is not None and other.time_s is not None
    claimed = other.rate * other.world_size / base.rate
    yield claim.fails(
        Rule.THROUGHPUT,
        f"DataParallel splits one batch over {other.world_size} devices, but {other.rate:.2f} {other.rate_unit} is "
        f"credited to each of them: rate x time per device, {after:.2f}, is that of the whole batch on one device, "
        f"{before:.2f}",
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
        yield claim.fails(
            Rule.EQUAL_WORK, f"one run leaves the warm-up of the learning rate, the other never does: {words}"
        )


def repeats_are_interleaved(claim: Claim) -> Iterator[Finding]:
    if made_first(*claim.measured_runs):
        yield claim.notes(
            Rule.ONE_RUN,
            "all repeats of one arm ran before the other's, or nearly all: what drifts on the machine looks like a "
            "difference (interleave them, A B A B)",
        )


def offloading_is_the_same(claim: Claim) -> Iterator[Finding]:
    """Compare offloading, which a log without DeepSpeed has none of."""
    kept = [side.first.settings.get(OFFLOADED) for side in (claim.baseline, claim.other)]
    if kept[0] != kept[1]:
        said = " against ".join(value or "nothing offloaded" for value in kept)
        yield claim.notes(Rule.DEVICES, f"{said}, as DeepSpeed prints: what offloading costs is in the ratio")


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
    yield claim.fails(
        Rule.EQUAL_WORK,
        f"the printed global batches, {base.global_batch_size} on {base.world_size} and {other.global_batch_size} on "
        f"{other.world_size} ranks, are {per_rank[0]:g} and {per_rank[1]:g} sequences per rank and step; that does not "
        f"follow from rate x time, {work[0]:.3g} and {work[1]:.3g} {base.rate_unit.removesuffix('/s')} per rank and "
        "iteration: one batch per rank, so the work grew with the ranks",
        f"if {per_rank[0]:g} per rank is right, {per_rank[0] * other.world_size:g} sequences per step on "
        f"{other.world_size} ranks",
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
# these first: the conditions of a comparison
CLAIM_RULES: tuple[Callable[[Claim], Iterator[Finding]], ...] = (
    work_is_equal,
    faster_is_not_worse,
    code_is_the_same,
    devices_are_the_same,
    offloading_is_the_same,
    *ARITHMETIC_RULES,
)
