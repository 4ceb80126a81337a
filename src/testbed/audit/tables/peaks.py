"""Check what rows of a table say of a device's peak: MFU over 100 %, FLOP/s over the peak, and FLOP/s over MFU."""

from __future__ import annotations

from collections.abc import Iterator

from testbed.audit.finding import NOTE, Finding, Rule
from testbed.audit.reported import PRECISION
from testbed.audit.tables.columns import Grid
from testbed.audit.tables.figures import Figure, exactly
from testbed.audit.tables.rows import fails, plain_heading, said_of, side_of
from testbed.errors import InputError
from testbed.memory_model.devices import device_named

MOST_MFU = 10  # more is another figure, as the length beside it
APART = 1.02  # beyond rounding: a data sheet's peak is rounded too


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
        if tflops and peak and _is_of_one_device(grid) and tflops.low > peak:
            said = f"{said_of(grid, 'tflops', row)} is more than the {peak:,.0f} TFLOP/s of {device} (data sheet)"
            yield fails(grid, row, Rule.POSSIBLE, said)


def _is_of_one_device(grid: Grid) -> bool:
    return "/gpu" in plain_heading(grid, "tflops") or grid.is_of_one


def _peak_tflops(device: str, precision: str) -> float | None:
    """Return the dense peak in a precision that a row trains in; else of the fastest units, which sparsity doubles."""
    try:
        found = device_named(device)
        return 1e-12 * found.peak_flops.get(precision if precision in ("bf16", "fp16") else "", 2 * found.fastest)
    except InputError:
        return None


def mfu_is_of_one_peak(grid: Grid) -> Iterator[Finding]:
    """Find rows whose FLOP/s and MFU give another peak than those of all others on the same device do.

    One other row is enough where it gives the peak of the data sheet. A row alone is held against that, which is noted.
    """
    if not _is_of_one_device(grid) and len({*grid.devices}) > 1:
        return  # of all devices, or of one: nothing says which
    kinds: dict[tuple[str | None, str | None], dict[int, Figure]] = {}
    for row in range(len(grid.lines)):
        tflops, mfu = grid.figure("tflops", row), grid.figure("mfu", row)
        if tflops and mfu:
            run = side_of(grid, row).first
            kinds.setdefault((run.device_name, run.settings.get(PRECISION)), {})[row] = tflops.over(mfu)
    for (device, precision), peaks in kinds.items():
        precision = precision or "bf16"
        known = _peak_tflops(device, precision) if device else None
        for row, peak in peaks.items():
            both = f"{said_of(grid, 'tflops', row)} and {said_of(grid, 'mfu', row)} give"
            others = [each for other, each in peaks.items() if other != row]
            if not others and known and not _is_one(peak, exactly(known)):
                said = f"{both} a peak of {peak.value:,.0f} TFLOP/s; the data sheet of {device} has {known:,.0f}"
                yield Finding(Rule.FOLLOWS, (grid.place(row),), f"{said} in {precision}", NOTE)
            agree = all(_is_one(one, two) for one in others for two in others)
            is_enough = len(others) > 1 or any(known and _is_one(each, exactly(known)) for each in others)
            if agree and is_enough and not any(_is_one(peak, each) for each in others):
                said = f"{both} another peak than the {others[0].value:,.0f} TFLOP/s of the other rows"
                flops = grid.figure("tflops", row)
                share = f"{flops.value / others[0].value:.1%}" if flops else ""
                yield fails(grid, row, Rule.FOLLOWS, said, f"{said_of(grid, 'mfu')} {share} would follow")


def _is_one(one: Figure, two: Figure) -> bool:
    return one.low <= APART * two.high and two.low <= APART * one.high
