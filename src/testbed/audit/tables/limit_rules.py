"""Check what no row of a table can exceed: peaks, memory, the ends of an average, whole micro batches."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from testbed.audit.finding import FAILS, NOTE, Finding, Rule
from testbed.audit.reported import Reported
from testbed.audit.tables.columns import Column
from testbed.audit.tables.figures import Figure, figures_of
from testbed.audit.tables.fits import Grid
from testbed.audit.tables.formula_rules import says_a_result
from testbed.audit.tables.peaks import PER_DEVICE, devices_named

OVER = 1.01  # beyond rounding
OVER_MEMORY = 1.12  # GB against GiB, and what a driver counts in
BYTES_PER_WEIGHT = 1.0  # 8 bits, the least without a word about it
SMALLER_WEIGHTS = re.compile(
    r"(?i)offload|cpu|nvme|disk|int4|[1-4][- ]?bit|nf4|fp4|qlora|quanti|bnb|infinity|adam8|moe|expert"
    r"|gptq|awq|gguf|ggml|exl2|hqq|\bq[2-6]_"
)
MEASURED_ONCE = ("token_rate", "sample_rate", "rate", "device_token_rate", "step_s", "flops")
SIZES = ("devices", "nodes")
SAME_DIGITS = 5


def shares_are_at_most_one(item: Reported) -> Iterator[Finding]:
    for grid in item.details["grids"]:
        for column in (*grid.of("mfu"), *grid.of("hfu")):
            for row, figure in enumerate(column.figures):
                if figure and figure.low > 1:
                    yield _fails(
                        item,
                        grid.place(row, column),
                        f"{column.heading} {figure.text}: no device does more than its peak",
                    )


def flops_are_at_most_the_peak(item: Reported) -> Iterator[Finding]:
    """Compare FLOP/s with the fastest units of the fastest device that the row or the text above its table names."""
    for grid in item.details["grids"]:
        for column in grid.of("flops"):
            for row, figure in enumerate(column.figures):
                named = devices_named(grid, row)
                if not figure or not named:
                    continue
                best = max(named, key=lambda device: device.fastest)
                count = 1 if PER_DEVICE.search(column.heading) else _devices_of(grid, row)
                if count and figure.low > OVER * best.fastest * count:
                    peak = f"{best.fastest / 1e12:,.0f} TFLOP/s dense in its narrowest arithmetic"
                    yield _fails(
                        item,
                        grid.place(row, column),
                        f"{column.heading} {figure.text} is over the peak of {best.name}, {peak}",
                    )


def memory_holds_the_weights(item: Reported) -> Iterator[Finding]:
    """Check that the devices of a row together hold one byte for each parameter, where nothing is offloaded."""
    for grid in item.details["grids"]:
        for column in grid.of("memory"):
            for row, memory in enumerate(column.figures):
                params, count = _figure(grid, "params", row), _devices_of(grid, row)
                words = " ".join([grid.above, *(f"{each.heading} {each.texts[row]}" for each in grid.columns)])
                if not memory or not params or not count or SMALLER_WEIGHTS.search(words):
                    continue
                if memory.high * count * OVER_MEMORY < params.low * BYTES_PER_WEIGHT:
                    message = f"{column.heading} {memory.text} x {count} devices is less than one byte for each of "
                    yield _fails(item, grid.place(row, column), f"{message}{params.text} parameters")


def averages_are_between_their_ends(item: Reported) -> Iterator[Finding]:
    """Check minimum <= average, median <= maximum, and the mean of the seeds that a row lists."""
    for grid in item.details["grids"]:
        ends = [_columns_like(grid, word) for word in (r"min(imum)?", r"(mean|avg|average|median)", r"max(imum)?")]
        lowest, middles, highest = ends
        if len(lowest) == len(highest) == 1:
            for middle in middles:
                yield from _between(item, grid, lowest[0], middle, highest[0])
        seeds = [column for column in grid.columns if re.fullmatch(r"(?i)(seed|run)\s*#?\d+", column.heading)]
        means = [column for column in grid.columns if re.fullmatch(r"(?i)mean|average|avg\.?", column.heading)]
        if len(seeds) > 1 and len(means) == 1:
            yield from _mean_of(item, grid, seeds, means[0])


def _between(item: Reported, grid: Grid, lowest: Column, middle: Column, highest: Column) -> Iterator[Finding]:
    figures = [_numbers(column) for column in (lowest, middle, highest)]
    for line, low, mean, high in zip(grid.lines, *figures, strict=True):
        if low and mean and high and low.value <= high.value and (mean.high < low.low or mean.low > high.high):
            yield _fails(item, line, f"{middle.heading} {mean.text} is not between {lowest.heading} {low.text} and "
                         f"{highest.heading} {high.text}")  # fmt: skip


def _mean_of(item: Reported, grid: Grid, seeds: Sequence[Column], mean: Column) -> Iterator[Finding]:
    values, means = [_numbers(column) for column in seeds], _numbers(mean)
    for row, (line, stated) in enumerate(zip(grid.lines, means, strict=True)):
        figures = [figure for column in values if (figure := column[row])]
        if stated and len(figures) == len(seeds):
            # All of them, or all but one: a first run warms up.
            taken = [figures, *(figures[:at] + figures[at + 1 :] for at in range(len(figures)) if len(figures) > 2)]
            if not any(_can_be_mean(stated, values_taken) for values_taken in taken):
                value = sum(figure.value for figure in figures) / len(figures)
                yield Finding(
                    Rule.FOLLOWS, (f"{item.name}:{line}",),
                    f"{mean.heading} {stated.text} does not follow from the {len(seeds)} values of the row", FAILS,
                    f"their mean is {value:.6g}",
                )  # fmt: skip


def _can_be_mean(mean: Figure, of: Sequence[Figure]) -> bool:
    low, high = (sum(getattr(one, end) for one in of) / len(of) for end in ("low", "high"))
    return mean.high >= low and mean.low <= high


def batches_are_of_whole_micro_batches(item: Reported) -> Iterator[Finding]:
    """Check that micro batch x data ranks divides the global batch, where no column gives the accumulation."""
    for grid in item.details["grids"]:
        if not (grid.of("batch") and grid.of("micro_batch") and grid.of("dp")) or grid.of("accumulation"):
            continue
        known = []
        for row in range(len(grid.lines)):
            batch, micro, ranks = (_whole(grid, name, row) for name in ("batch", "micro_batch", "dp"))
            if batch and micro and ranks:
                known.append((row, batch, micro * ranks))
        broken = [(row, batch, samples) for row, batch, samples in known if batch % samples]
        if 3 * len(broken) <= len(known):
            for row, batch, samples in broken:
                yield Finding(
                    Rule.FOLLOWS, (f"{item.name}:{grid.lines[row]}",),
                    f"global batch {batch:,} does not follow from the row: micro batch x data ranks is {samples:,}, "
                    f"which does not divide it; in {len(known) - len(broken)} other rows it does",
                    FAILS if says_a_result(grid, row) else NOTE,
                )  # fmt: skip


def a_measurement_is_not_two_rows(item: Reported) -> Iterator[Finding]:
    """Note a measured figure of five digits that two rows of other sizes share."""
    seen: dict[tuple[str, str], tuple[Grid, int]] = {}
    for grid in item.details["grids"]:
        for column in [column for quantity in MEASURED_ONCE for column in grid.of(quantity)]:
            for row, figure in enumerate(column.figures):
                digits = re.sub(r"\D", "", figure.text).strip("0") if figure else ""
                if not figure or len(digits) < SAME_DIGITS or "(" in column.texts[row]:
                    continue
                other_grid, other = seen.setdefault((str(column.quantity), figure.text), (grid, row))
                one, two = _sizes(other_grid, other), _sizes(grid, row)
                differ = [
                    name for name in ("devices", "nodes") if name in one and name in two and one[name] != two[name]
                ]
                if differ:
                    name = differ[0]
                    yield Finding(
                        Rule.FOLLOWS, (f"{item.name}:{grid.lines[row]}", f"{item.name}:{other_grid.lines[other]}"),
                        f"{column.heading} is {figure.text} to the last digit in rows of {one[name]:g} and of "
                        f"{two[name]:g} {name}", NOTE,
                    )  # fmt: skip


def _devices_of(grid: Grid, row: int) -> int | None:
    """Return the devices of a row, as many as its columns allow."""
    counts = [_whole(grid, "devices", row), _whole(grid, "dp", row)]
    nodes, each = _whole(grid, "nodes", row), _whole(grid, "devices_per_node", row)
    if nodes:
        counts.append(nodes * (each or 16))
    known = [count for count in counts if count]
    return max(known) if known else None


def _sizes(grid: Grid, row: int) -> dict[str, float]:
    return {name: figure.value for name in SIZES if (figure := _figure(grid, name, row))}


def _figure(grid: Grid, quantity: str, row: int) -> Figure | None:
    return next((column.figures[row] for column in grid.of(quantity)), None)


def _whole(grid: Grid, quantity: str, row: int) -> int | None:
    figure = _figure(grid, quantity, row)
    return int(figure.value) if figure and figure.value.is_integer() else None


def _columns_like(grid: Grid, word: str) -> list[Column]:
    return [column for column in grid.columns if re.fullmatch(rf"(?i){word}\.?", column.heading)]


def _numbers(column: Column) -> list[Figure | None]:
    return figures_of(column.texts, "number")


def _fails(item: Reported, line: int, message: str) -> Finding:
    return Finding(Rule.POSSIBLE, (f"{item.name}:{line}",), message, FAILS)
