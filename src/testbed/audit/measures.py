"""The ratios between two sides: rates of all devices and of one, times, and the time to one loss."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from testbed.analysis.scaling.time_to_loss import time_to_loss
from testbed.analysis.statistics import compare
from testbed.audit.conditions import NEAR
from testbed.audit.reported import OF_EPOCH, ROW, SPEED_UP, Claim, Reported, Side

ENOUGH_REPEATS = 5
MOST = 1e6  # of a ratio; more is damage
# names of what a ratio is about
ALL, PER_DEVICE, PRINTED = "throughput of all devices", "throughput of one device", "printed speed-up"
SPLIT = "time of the one batch that DataParallel splits"
TO_LOSS = "time to a loss"


@dataclass(frozen=True)
class Measure:
    """One quantity of both sides; `ratio` says how many times as fast B is. `low` and `high` hold its 95 % interval."""

    name: str
    a: float
    b: float
    ratio: float
    low: float | None = None
    high: float | None = None
    is_of_unit: bool = False  # of a heading of which the unit alone is known

    @property
    def ratio_in_words(self) -> str:
        bounds = f" ({self.low:.3g} to {self.high:.3g})" if self.low is not None else ""
        return f"{self.ratio:.3g}x{bounds}"


def measures(claim: Claim) -> Iterator[Measure]:
    """Yield the ratios that the files of both sides give, that of the whole job first."""
    base, other = claim.baseline, claim.other
    one, two = base.first, other.first
    times = [base.middle("time_s"), other.middle("time_s")]
    if is_one_batch_split(claim):
        yield from _of_times(SPLIT, times)
    else:
        yield from _of_rates(claim)
    if one.is_of_iteration == two.is_of_iteration and _is_one_time(one, two):
        yield from _of_times(one.time_meaning, times)
    yield from _under_one_heading(one, two)
    yield from _to_one_loss(one, two)


def _under_one_heading(one: Reported, two: Reported) -> Iterator[Measure]:
    """Yield the ratios of two rows under headings that are not known, and have the unit of a rate or a time."""
    a, b = (item.details.get("measured", {}) for item in (one, two))
    for heading in (name for name in a if name in b):
        (before, is_time), (after, _) = a[heading], b[heading]
        name = f"{re.sub(r' ?[(].*', '', heading)}, s" if is_time else heading  # the figures are in seconds
        yield Measure(name, before, after, before / after if is_time else after / before, is_of_unit=True)


def of_one_device(ratios: Iterable[Measure]) -> Measure | None:
    """Return the ratio of what one device of each side does."""
    return next((each for each in ratios if each.name.startswith((PER_DEVICE, f"{PRINTED} per"))), None)


def gain(claim: Claim) -> tuple[float | None, str]:
    """Return the ratio of the whole jobs, by rates or else by times of the same work; None: the files give neither."""
    items = claim.firsts
    work = [item.global_batch_size * item.optimizer_steps for item in items
            if item.global_batch_size and item.optimizer_steps]  # fmt: skip
    is_other_work = len(work) > 1 and abs(work[1] / work[0] - 1) > 0.01
    for each in measures(claim):
        if each.name.startswith((ALL, SPLIT)):
            return each.ratio, each.name.partition(",")[0]
        if each.name == f"{items[0].time_meaning}, s" and not items[0].is_of_iteration and not is_other_work:
            return each.ratio, "time"
    return None, ""


def _of_rates(claim: Claim) -> Iterator[Measure]:
    base, other = claim.baseline, claim.other
    (a, unit), (b, other_unit) = _rate_of_all(base), _rate_of_all(other)
    # speed-ups of two tables are relative to two things
    if unit != other_unit or (unit == SPEED_UP and base.first.details.get("table") != other.first.details.get("table")):
        return
    sizes = base.first.world_size, other.first.world_size
    is_open = (unit == "throughput" or base.first.form == "torchvision log") and not (
        base.first.rate_is_per_rank and other.first.rate_is_per_rank
    )
    if is_open and sizes[0] != sizes[1] and ROW not in (base.first.form, other.first.form):
        return  # a metric of which nothing says whether it is of one device or of all
    yield from _of_rate(_named(ALL, unit), claim, (a, b))
    of_one = [rate / size if rate and size else None for rate, size in zip((a, b), sizes, strict=True)]
    if None in (a, b) and base.first.rate_is_per_rank and other.first.rate_is_per_rank:
        of_one = [base.middle("rate"), other.middle("rate")]
    yield from _of_rate(_named(PER_DEVICE, unit), claim, of_one)


def _rate_of_all(side: Side) -> tuple[float | None, str]:
    """Return the rate of all devices and its unit: as quoted, that of one times their number, or batch / time."""
    rate, item = side.middle("rate"), side.first
    batch = item.global_batch_size
    if rate is None and item.rate_unit == "tokens/s" and item.time_s and item.is_of_iteration:
        if not batch or item.batch_is_printed:
            return None, item.rate_unit
        length = item.sequence_length
        return batch * (length or 1) / item.time_s, item.rate_unit if length else "sequences/s"
    if rate and item.rate_is_per_rank:
        return rate * item.world_size if item.world_size else None, item.rate_unit
    return rate, item.rate_unit


def _named(what: str, unit: str) -> str:
    if unit == SPEED_UP:
        return PRINTED if what == ALL else f"{PRINTED} per device"
    return what if unit == "throughput" else f"{what}, {unit}"


def _of_rate(name: str, claim: Claim, both: Sequence[float | None]) -> Iterator[Measure]:
    """Yield the ratio of two rates, with its interval where both sides have enough repeats."""
    a, b = both
    if not a or not b or min(a, b) <= 0 or not 1 / MOST < b / a < MOST:
        return
    rates = [[item.rate for item in side.runs if item.rate] for side in claim.sides]
    ratio = compare(rates[1], rates[0]) if min(map(len, rates)) >= ENOUGH_REPEATS else None
    scale = (b / a) / ratio.ratio if ratio else 1.0
    low, high = (ratio.low, ratio.high) if ratio else (None, None)
    bounds = low * scale if low else None, high * scale if high else None
    yield Measure(name, a, b, b / a, *bounds)


def _of_times(name: str, times: Sequence[float | None]) -> Iterator[Measure]:
    a, b = times
    if a and b and min(a, b) > 0:
        yield Measure(f"{name}, s", a, b, a / b)


def _is_one_time(one: Reported, two: Reported) -> bool:
    """Return whether two times are of the same thing: an iteration of equal work, or what one heading names."""
    for name in ("global_batch_size", "sequence_length") if one.is_of_iteration else ():
        if len({getattr(one, name), getattr(two, name)} - {None}) > 1:
            return False
    meanings = {one.time_meaning, two.time_meaning}
    return len(meanings) == 1 or not (ROW in (one.form, two.form) or OF_EPOCH in meanings)


def _to_one_loss(base: Reported, other: Reported) -> Iterator[Measure]:
    """Yield the ratio of the seconds of training to the higher of the two final losses, where there are curves."""
    if len({base.sequence_length, other.sequence_length} - {None}) > 1:
        return
    if len({base.num_parameters, other.num_parameters} - {None}) > 1:
        return  # losses of other models do not compare
    curves = [_curve(item) for item in (base, other)]
    if min(map(len, curves)) > 1:
        target = max(min(loss for _, loss in curve) for curve in curves)
        times = [next(time_s for time_s, loss in curve if loss <= target) for curve in curves]
        yield from _of_times(f"{TO_LOSS} of {target:.3f}", times)


def _curve(item: Reported) -> list[tuple[float, float]]:
    """Return (seconds of training, loss): validations of our runs, medians of NEAR training losses of a log."""
    if item.run is not None:
        reached = [(time_to_loss(item.run, point.loss), point.loss) for point in item.run.validation_losses]
        return [(found.train_time_s, loss) for found, loss in reached if found and found.train_time_s]
    if not item.time_s or not item.is_of_iteration:
        return []
    points = [(step, loss) for step, loss in item.losses if math.isfinite(loss)]
    return [
        (points[at - 1][0] * item.time_s, median(loss for _, loss in points[at - NEAR : at]))
        for at in range(NEAR, len(points) + 1)
    ]


def is_one_batch_split(claim: Claim) -> bool:
    """Return whether a log credits each device of DataParallel with the whole batch, so that rates do not add up."""
    base, other = claim.firsts
    work = base.work_per_iteration, other.work_per_iteration
    is_alike = bool(work[0] and work[1] and abs(work[1] / work[0] - 1) <= 0.05)
    return other.is_data_parallel_module and base.world_size == 1 and is_alike
