"""The ratios between two sides: rates of all devices and of one, times, and the time to one loss."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from testbed.analysis.scaling.time_to_loss import time_to_loss
from testbed.analysis.statistics import compare
from testbed.audit.conditions import NEAR
from testbed.audit.reported import ROW, Claim, Reported, Side

ENOUGH_REPEATS = 5
MOST = 1e6  # of a ratio; more is damage
SPEED_UP = "speed-up"  # the unit of a rate of which a table prints the ratio alone
# names of what a rate is about
ALL, PER_DEVICE, PRINTED = "throughput of all devices", "throughput of one device", "printed speed-up"


@dataclass(frozen=True)
class Measure:
    """One quantity of both sides; `ratio` says how many times as fast B is. `low` and `high` hold its 95 % interval."""

    name: str
    a: float
    b: float
    ratio: float
    low: float | None = None
    high: float | None = None

    @property
    def ratio_in_words(self) -> str:
        bounds = f" ({self.low:.3g} to {self.high:.3g})" if self.low is not None else ""
        return f"{self.ratio:.3g}x{bounds}"


def measures(claim: Claim) -> Iterator[Measure]:
    """Yield the ratios that the files of both sides give."""
    base, other = claim.baseline, claim.other
    unit = base.first.rate_unit
    # speed-ups of two tables are relative to two things
    is_one_table = base.first.details.get("table") == other.first.details.get("table")
    if unit == other.first.rate_unit and (unit != SPEED_UP or is_one_table):
        is_split = is_one_batch_split(claim)  # then the rate that is credited to each device is that of all
        of_all = (rate_of_all(base), other.middle("rate") if is_split else rate_of_all(other))
        yield from _rate(_named(ALL, unit), base, other, of_all)
        sizes = base.first.world_size, other.first.world_size
        of_one = [rate / size if rate and size else None for rate, size in zip(of_all, sizes, strict=True)]
        if None in of_all and base.first.rate_is_per_rank and other.first.rate_is_per_rank:
            of_one = [base.middle("rate"), other.middle("rate")]
        yield from _rate(_named(PER_DEVICE, unit), base, other, of_one)
    a, b = base.middle("time_s"), other.middle("time_s")
    meanings = base.first.time_meaning, other.first.time_meaning
    if (
        a
        and b
        and min(a, b) > 0
        and _is_one_time(claim)
        and meanings[0].endswith("iteration") == meanings[1].endswith("iteration")
    ):
        yield Measure(f"{meanings[0]}, s", a, b, a / b)
    if times := _times_to_one_loss(base.first, other.first):
        yield Measure(f"time to a loss of {times[2]:.3f}, s", times[0], times[1], times[0] / times[1])


def _is_one_time(claim: Claim) -> bool:
    """Return whether two times are of the same thing: an iteration of equal work, or what one heading names."""
    base, other = claim.baseline.first, claim.other.first
    is_of_rows = ROW in (base.form, other.form)
    for name in ("global_batch_size", "sequence_length") if base.time_meaning.endswith("iteration") else ():
        values = {getattr(base, name), getattr(other, name)} - {None}
        if len(values) > 1:
            return False
    return not is_of_rows or base.time_meaning == other.time_meaning


def _named(what: str, unit: str) -> str:
    if unit == SPEED_UP:
        return PRINTED if what == ALL else f"{PRINTED} per device"
    return what if unit == "throughput" else f"{what}, {unit}"


def _rate(name: str, base: Side, other: Side, both: Sequence[float | None]) -> Iterator[Measure]:
    """Yield the ratio of two rates, with its interval where both sides have enough repeats."""
    a, b = both
    if not a or not b or not 1 / MOST < b / a < MOST:
        return
    rates = [[item.rate for item in side.runs if item.rate] for side in (base, other)]
    ratio = compare(rates[1], rates[0]) if all(len(each) >= ENOUGH_REPEATS for each in rates) else None
    scale = (b / a) / ratio.ratio if ratio else 1.0
    low, high = (ratio.low, ratio.high) if ratio else (None, None)
    yield Measure(name, a, b, b / a, low * scale if low else None, high * scale if high else None)


def _times_to_one_loss(base: Reported, other: Reported) -> tuple[float, float, float] | None:
    """Return the seconds of training to the higher of the two final losses, and that loss; None: no curves."""
    lengths = {base.sequence_length, other.sequence_length} - {None}
    if len(lengths) > 1 or len({base.num_parameters, other.num_parameters} - {None}) > 1:
        return None  # losses of other models do not compare
    curves = [_curve(item) for item in (base, other)]
    if min(map(len, curves)) < 2:
        return None
    target = max(min(loss for _, loss in curve) for curve in curves)
    times = [next(time_s for time_s, loss in curve if loss <= target) for curve in curves]
    return (times[0], times[1], target) if min(times) > 0 else None


def _curve(item: Reported) -> list[tuple[float, float]]:
    """Return (seconds of training, loss): validations of our runs, medians of NEAR training losses of a log."""
    if item.run is not None:
        found = []
        for point in item.run.validation_losses:
            reached = time_to_loss(item.run, point.loss)
            if reached and reached.train_time_s:
                found.append((reached.train_time_s, point.loss))
        return found
    if not item.time_s or not item.time_meaning.endswith("iteration"):
        return []
    points = [(step, loss) for step, loss in item.losses if math.isfinite(loss)]
    return [
        (points[at - 1][0] * item.time_s, median(loss for _, loss in points[at - NEAR : at]))
        for at in range(NEAR, len(points) + 1)
    ]


def gain(claim: Claim) -> tuple[float | None, str]:
    """Return the ratio of the rates of all devices, else of times for the same work; None: the files give neither."""
    sides = claim.baseline, claim.other
    if is_one_batch_split(claim):
        one_s, split_s = (side.middle("time_s") for side in sides)
        return (one_s / split_s if one_s and split_s else None), "time of the one batch that DataParallel splits"
    rates = [rate_of_all(side) for side in sides]
    if rates[0] and rates[1] and sides[0].first.rate_unit == sides[1].first.rate_unit:
        return rates[1] / rates[0], "throughput of all devices"
    times = [side.middle("time_s") for side in sides]
    is_iteration = [side.first.time_meaning.endswith("iteration") for side in sides]
    if not times[0] or not times[1] or is_iteration[0] != is_iteration[1]:
        return None, ""
    batches = [side.first.global_batch_size for side in sides]
    if is_iteration[0]:
        if not batches[0] or not batches[1] or any(side.first.batch_is_printed for side in sides):
            return None, ""
        return batches[1] / times[1] * times[0] / batches[0], "batch / time"
    steps = [side.first.optimizer_steps for side in sides]
    if None not in (*batches, *steps):
        work = [batch * count for batch, count in zip(batches, steps, strict=True) if batch and count]
        if len(work) < 2 or abs(work[1] / work[0] - 1) > 0.01:
            return None, ""
    return times[0] / times[1], "time"


def is_one_batch_split(claim: Claim) -> bool:
    """Return whether a log credits each device of DataParallel with the whole batch, so that rates do not add up."""
    base, other = claim.baseline.first, claim.other.first
    work = base.work_per_iteration, other.work_per_iteration
    is_alike = bool(work[0] and work[1] and abs(work[1] / work[0] - 1) <= 0.05)
    return other.is_data_parallel_module and base.world_size == 1 and is_alike


def rate_of_all(side: Side) -> float | None:
    """Return the rate of all devices: as quoted, that of one times their number, or batch x length / time of a step."""
    rate, ranks, item = side.middle("rate"), side.first.world_size, side.first
    if rate is None and item.rate_unit == "tokens/s" and item.time_s and item.time_meaning.endswith("iteration"):
        known = item.global_batch_size and item.sequence_length and not item.batch_is_printed
        return item.global_batch_size * item.sequence_length / item.time_s if known else None  # type: ignore[operator]
    if not side.first.rate_is_per_rank:
        return rate
    return rate * ranks if rate and ranks else None
