"""Check FLOP/s and MFU against the peak and the other rows, and the headings of two columns against each other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from statistics import median

from testbed.audit.finding import NOTE, Finding, Rule
from testbed.audit.reported import DEVICE, MODEL, PRECISION
from testbed.audit.tables.columns import Column, Grid
from testbed.audit.tables.english import english
from testbed.audit.tables.rows import fails, plain_heading, said_of, side_of
from testbed.audit.tables.words import BATCHES, value_of
from testbed.errors import InputError
from testbed.memory_model.devices import device_named

APART, ALIKE = 0.045, 0.025  # shares by which FLOP/s may differ from the proportion of the other rows
MOST_MFU = 10  # more is another figure, as the length beside it
_OF_A_SHAPE = re.compile(
    r"(?i)\blayers?\b|hidden|\bheads?\b|\bdepth\b|\bwidth\b|vocab|recomp|checkpointing|\bexperts?\b"
)
_IS_RATIO = re.compile(r"(?i)speed-?up|\bfactor\b|\bratio\b|\bgain\b|faster|improvement")
_IS_TIMED = re.compile(
    r"(?i)\b(?:m?s|sec|min|hours?|h|time|tokens|tok|samples|images|img|it|steps?|throughput|latency)\b"
)


def no_device_does_more_than_its_peak(grid: Grid) -> Iterator[Finding]:
    """Find an MFU over 100 %, and FLOP/s of one device over the peak of the device that the row names."""
    for row in range(len(grid.lines)):
        mfu, tflops = grid.figure("mfu", row), grid.figure("tflops", row)
        run = side_of(grid, row).first
        device, precision = run.device_name, run.settings.get(PRECISION)
        peak = _peak_tflops(device, precision or "") if device and tflops else None
        if mfu and 1 < mfu.low < MOST_MFU:
            said = f"{said_of(grid, 'mfu', row)}: no device does more than its peak"
            yield fails(grid, row, Rule.POSSIBLE, said)
        is_of_one = "/gpu" in plain_heading(grid, "tflops") or grid.is_of_one
        if tflops and peak and is_of_one and tflops.low > peak:
            said = f"{said_of(grid, 'tflops', row)} is more than the {peak:,.0f} TFLOP/s of {device} (data sheet)"
            yield fails(grid, row, Rule.POSSIBLE, said)


def flops_follow(grid: Grid) -> Iterator[Finding]:
    """Find the one row in which FLOP/s, or the MFU, are not in the proportion to its speed that they have in the
    others."""
    for name in ("tflops", "mfu"):
        work = {row: each for row in range(len(grid.lines)) if (each := _flops_per_work(grid, row, name))}
        if any(
            len({column.texts[row] for row in work}) > 1
            for column in grid.columns
            if _OF_A_SHAPE.search(column.heading)
        ):
            continue
        if len(work) < 3:
            continue
        middle = median(work.values())
        apart = [row for row, each in work.items() if abs(each / middle - 1) > APART]
        near = [row for row, each in work.items() if abs(each / middle - 1) < ALIKE]
        figure = grid.figure(name, apart[0]) if apart else None
        if figure and len(apart) <= len(near) // 2 and len(apart) + len(near) == len(work):
            for row in apart:
                figure = grid.figure(name, row)
                follows = figure.value * middle / work[row] if figure else 0.0
                value = f"{follows:.0%}" if name == "mfu" else f"{follows:.3g}"
                said = f"{said_of(grid, name, row)} does not match the other rows: at its speed {value} would follow"
                yield fails(grid, row, Rule.FOLLOWS, said)


def _flops_per_work(grid: Grid, row: int, name: str) -> float | None:
    """Return the FLOP/s of a row over its speed and size, which have one ratio where all rows count FLOP alike."""
    value, size = grid.figure(name, row), _size_of_model(grid, row)
    if value is None or size is None:
        return None
    for quantity, power in (("device_token_rate", 1), ("token_rate", 1), ("step_s", -1)):
        speed = grid.figure(quantity, row)
        if speed is None:
            continue
        product = speed.value**power * size
        for divisor, exponent in (("devices", -1), ("batch", 1), ("any_batch", 1), ("length", 1)):
            column = grid.column(divisor)
            is_used = quantity != "device_token_rate" if divisor == "devices" else quantity == "step_s"
            if column and is_used:
                each = column.figures[row]
                if each is None:
                    return None
                product *= each.value**exponent
        return value.value / product
    return None


def _size_of_model(grid: Grid, row: int) -> float | None:
    """Return the parameters of a row's model, 1 where no column says them, and None where a column does not in this
    row."""
    params = grid.column("params")
    if params:
        return params.figures[row].value if params.figures[row] else None  # type: ignore[union-attr]
    models = next((column.texts for column in grid.columns if column.word == MODEL), None)
    if models is None or len({*models}) == 1:
        return 1.0
    size = re.match(r"[^\d]*(\d+(?:\.\d+)?) ?([MB])\b", models[row])
    return float(size[1]) * (1e9 if size[2] == "B" else 1e6) if size else None


def columns_are_of_one_work(grid: Grid) -> Iterator[Finding]:
    """Note a ratio of two columns whose headings say other devices, batches or lengths, beside other names."""
    ratio, timed = compared_columns(grid)
    headings = [english(column.heading) for column in timed]
    for name in ("devices", "nodes", DEVICE, *BATCHES, "length") if ratio else ():
        values = [value_of(name, heading) for heading in headings]
        names = [
            re.sub(r"\W+", "", heading.replace(value, "")) for heading, value in zip(headings, values, strict=True)
        ]
        if all(values) and values[0] != values[1] and names[0] != names[1]:
            against = " against ".join(column.heading for column in timed)
            said = f"{ratio.heading} divides columns of other {name}: {against}"  # type: ignore[union-attr]
            yield Finding(Rule.EQUAL_WORK, (grid.place(0),), said, NOTE)


def compared_columns(grid: Grid) -> tuple[Column | None, list[Column]]:
    """Return the column of a ratio that refers to no row, and the two columns of times or rates beside it; None:
    there are none."""
    ratio = next(
        (column for column in grid.columns if column.quantity is None and _IS_RATIO.search(english(column.heading))),
        None,
    )
    timed = [column for column in grid.columns if _IS_TIMED.search(column.heading) and column is not ratio]
    return (ratio, timed) if ratio and len(timed) == 2 else (None, [])


def _peak_tflops(device: str, precision: str) -> float | None:
    """Return the dense peak in a precision that a row trains in; else of the fastest units, which sparsity doubles."""
    try:
        found = device_named(device)
        return 1e-12 * found.peak_flops.get(precision if precision in ("bf16", "fp16") else "", 2 * found.fastest)
    except InputError:
        return None
