"""The audit's rules for two arms, each a list of runs of one configuration.

CONDITION_RULES: equal work, equal losses, one code, equal devices. ARITHMETIC_RULES: what figures of both contradict.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from testbed.analysis.comparison.confounders import CHANGED_FILES, COMMIT, DEVICE, confounders, made_first
from testbed.analysis.runs.arms import configuration
from testbed.analysis.runs.comparability import LOSS_NOISE, differing_validation, loss_noise
from testbed.audit.conditions import DIFFERS, OF_BOTH, UNKNOWN, conditions, kind_of
from testbed.audit.finding import FAILS, NOTE, Finding, Rule
from testbed.audit.measures import gain, is_one_batch_split
from testbed.audit.reported import DATA, Claim, Reported
from testbed.audit.run_rules import RATE_TOLERANCE, is_exact

# More than linear is a fault of the clock or of the work until shown otherwise. Our own files time every step of every
# rank on a synchronised clock, so there it may be caches, and is only pointed out.
FOREIGN_LINEAR_TOLERANCE = 0.01
OWN_LINEAR_TOLERANCE = 0.05
SLOWER = 0.95  # under it more than the noise of single runs made the larger run slower
HALF = 0.5
COST_OF_A_TOKEN = ("device_name", "num_parameters", "sequence_length")
THREADS = "cpu threads per rank"
# the files that differ from the commit, by the runs of one side that say it
_DIRTY: dict[tuple[str, ...], str] = {("True",): "in every run", ("False",): "in no run"}


def work_is_equal(claim: Claim) -> Iterator[Finding]:
    base, other = claim.firsts
    work = [item for item in conditions(claim) if item.is_work]
    steps = next(item for item in work if item.name == "optimizer steps")
    if differing := [item.against for item in work if item.spoils]:
        yield claim.fails(Rule.EQUAL_WORK, f"not equal work: {'; '.join(differing)}")
    elif steps.state == DIFFERS and base.losses and other.losses:
        words = f"{steps.against}: the logs compare rates, and neither losses nor whole times"
        yield claim.notes(Rule.EQUAL_WORK, words)
    is_open = claim.protocol == "time_to_loss" and not (base.run and other.run)  # of a log, batch and steps are free
    if unknown := [item.name for item in work if item.state == UNKNOWN and item.name != DATA and not is_open]:
        said = f"equal work cannot be shown, not in every file: {', '.join(unknown)}"
        yield claim.cannot_tell(Rule.EQUAL_WORK, said, *unknown)


def faster_is_not_worse(claim: Claim) -> Iterator[Finding]:
    """Compare validation losses at the end. Under weak scaling arms train with other batches, so nothing is said."""
    speed_up, by = gain(claim)
    base, other = claim.firsts
    if base.losses and other.losses and base.optimizer_steps != other.optimizer_steps:
        return  # losses of other steps: `work_is_equal` says so
    if speed_up is not None and 0 < speed_up < 1:  # whichever was named first
        claim, speed_up = claim.turned, 1 / speed_up
    before, after = claim.baseline.middle("val_loss"), claim.other.middle("val_loss")
    if not before or not after or speed_up is None or speed_up <= 1 or claim.protocol in ("weak", "time_to_loss"):
        return
    runs = [side.first.run for side in claim.sides if side.first.run]
    if len(runs) == 2 and any(not item.is_unknown_only for item in differing_validation(runs)):
        yield claim.notes(Rule.LOSSES, "validation losses are over different data or numbers of tokens")
        return
    losses = [[run.val_loss for run in side.runs if run.val_loss is not None] for side in claim.sides]
    noise, whose = loss_noise(*losses)
    worse = after - before
    said = f"{speed_up:.2f}x ({by}) with validation loss {after:.3f} against {before:.3f}: worse by {worse:.3f}"
    if worse > noise:
        between = "seeds" if whose is None else "repeats"
        said = f"{said}, more than the {noise:.3g} that chance explains between {between}"
        yield claim.fails(Rule.LOSSES, said, "no speed-up at equal loss; time to a loss was not compared")
    elif worse > LOSS_NOISE and whose is None:
        yield claim.notes(Rule.LOSSES, f"{said}. One run of a side does not tell how much of that its seed explains")


def code_and_devices_are_the_same(claim: Claim) -> Iterator[Finding]:
    """Compare commits, devices, machines and software.

    A commit, or threads on a CPU, that alone differs may be what is compared; beside other settings it is a second
    change. Other devices refute a claim. Another machine of the same devices, or other software, is a note.
    """
    differing = [item for item in confounders(*claim.measured_runs) if item.a != item.b]
    has_commits = any(item.kind == COMMIT for item in differing)
    is_second = bool(differing) and not _is_set_alike(claim)
    severity = FAILS if is_second else NOTE
    second = ", and other settings: two changes at once, so neither explains the difference" if is_second else ""
    for item in differing:
        said = f"{item.what} {item.against}"
        if item.kind == COMMIT:
            one, other = (" / ".join(each[:10] for each in side) for side in (item.a, item.b))
            yield claim.finds(Rule.TRACEABLE, severity, f"commit {one} against {other}{second}")
        elif item.kind == CHANGED_FILES and not has_commits:
            one, other = (_DIRTY.get(values, "in some runs") for values in (item.a, item.b))
            said = f"files that differ from the commit: {claim.names[0]} {one}, {claim.names[1]} {other}"
            yield claim.finds(Rule.TRACEABLE, severity, f"{said}{second}")
        elif item.kind == DEVICE and item.what != THREADS:
            yield claim.fails(Rule.DEVICES, said)
        elif item.kind == DEVICE and (len(set(claim.cores)) > 1 or None in claim.cores):
            alone = "" if is_second else ": a ratio of the two is what more cores do"
            yield claim.finds(Rule.DEVICES, severity, f"{said}{alone}")
        elif item.kind not in (DEVICE, CHANGED_FILES):
            yield claim.notes(Rule.DEVICES, f"{said}: it may explain the difference")


def _is_set_alike(claim: Claim) -> bool:
    """Return whether both arms have one configuration but for their devices, whose threads are a setting too."""
    found = []
    for run in (runs[0] for runs in claim.measured_runs):
        each = configuration(run)
        each["settings"].pop("threads_per_rank", None)
        found.append({name: value for name, value in each.items() if name != "devices"})
    return found[0] == found[1]


def rates_of_v1_are_of_all_ranks(claim: Claim) -> Iterator[Finding]:
    """Compare what one rank read, rate x time, in v1. An integer ratio of the two tells the ranks of an equal epoch."""
    base, other = claim.firsts
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
    base, other = claim.firsts
    speed_up, by = gain(claim)
    if speed_up is None or not base.world_size or not other.world_size or kind_of(claim) == OF_BOTH:
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
        else:
            clock = "work that the clock leaves out, or that was not done"
            said += f"is more than linear: look for {'caches, clocks of the devices, or noise' if own else clock}"
        yield claim.finds(Rule.STEP_CLOCK, NOTE if own else FAILS, said, corrected)
    elif corrected and slowest[0] / slowest[1] < speed_up * (1 - RATE_TOLERANCE):
        said = f"{speed_up:.2f}x is of times averaged over ranks: an epoch is done when its slowest rank is"
        yield claim.fails(Rule.STEP_CLOCK, said, corrected)


def more_devices_are_faster(claim: Claim) -> Iterator[Finding]:
    """Compare the rate of all devices on more of them with that on fewer, whichever was named first.

    In our own files a slow run is a result and is pointed out; in another program's it contradicts a claimed speed-up.
    Devices are cores on CPUs. Equal ranks are equal devices: the rule on devices says what more threads of one gain.
    """
    base, other = claim.firsts
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
    base, other = claim.firsts
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
    base, other = claim.firsts
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
    base, other = claim.firsts
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


def repeats_are_interleaved(claim: Claim) -> Iterator[Finding]:
    if made_first(*claim.measured_runs):
        said = "all repeats of one arm ran before the other's, or nearly all: interleave them (A B A B)"
        yield claim.notes(Rule.ONE_RUN, f"{said}, or what drifts on the machine looks like a difference")


CONDITION_RULES: tuple[Callable[[Claim], Iterator[Finding]], ...] = (
    work_is_equal,
    faster_is_not_worse,
    code_and_devices_are_the_same,
)
ARITHMETIC_RULES: tuple[Callable[[Claim], Iterator[Finding]], ...] = (
    rates_of_v1_are_of_all_ranks,
    speed_up_is_not_more_than_linear,
    ranks_do_not_train_on_the_same_data,
    data_parallel_batch_is_counted_once,
    repeats_are_interleaved,
    more_devices_are_faster,
)
CLAIM_RULES = (*CONDITION_RULES, *ARITHMETIC_RULES)
