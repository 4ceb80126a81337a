"""Check the rows of a table against themselves and each other.

A figure is an interval: what its digits leave open. A formula is checked in a row that has all of its figures, and a
row is reported only where every way to count fails in it and more rows follow than not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from testbed.audit.conditions import (
    BATCHES,
    DIFFERS,
    OF_BOTH,
    OF_STRATEGY,
    SCALING,
    UNKNOWN,
    Condition,
    conditions,
    in_words,
    is_another_strategy,
    kind_of,
    strategy_of,
)
from testbed.audit.finding import FAILS, NOTE, Finding, Rule
from testbed.audit.reported import Claim, Reported
from testbed.audit.tables.columns import FORM, RESULTS, Figure, Grid, is_reference
from testbed.audit.tables.rows import RATIOS, devices_of, failure_of, side_of
from testbed.errors import InputError
from testbed.memory_model.devices import device_named

Powers = Mapping[str, int]  # quantity -> exponent
Product = tuple[Powers, float, float]  # and the ends of its value in one row
SLACK = 1.01  # beyond rounding: times and rates are averaged over windows that differ a little
LINEAR = 1.01
DATA_RANKS = "data_ranks"  # of the column dp, else devices / (tensor x pipeline ranks)
FIRST = "first "  # before a quantity: its figure in the row that a ratio refers to
RATES = {"token_rate": 1, "sample_rate": 1, "rate": 1, "step_rate": 1, "device_token_rate": 1,
         "step_s": -1, "time_s": -1}  # fmt: skip
SLOWER = 0.95  # as in condition_rules.py
WORK_OF_A_TOKEN = ("model", "sequence length", "kind of pass", "data")  # which no speed-up is meant to compare
_ESTIMATED = re.compile(
    r"\b(?:est\.?|estimated?|expected|projected|predicted|extrapolated|theoretical|simulated)(?:\b|$)", re.I
)


@dataclass(frozen=True)
class Formula:
    """Say that a product of powers is 1, in each way to count that is in use."""

    words: str
    variants: tuple[Powers, ...]
    ratio: str | None = None  # the column that refers to one row


def _of_any_scope(powers: Powers) -> tuple[Powers, ...]:
    """Return a convention for all devices, and those where one factor is of a single device."""
    return (powers, {**powers, "devices": 1}, {**powers, "devices": -1})


def _ratio_formula(name: str) -> Formula:
    """Return that a speed-up or an efficiency is a rate, or a time, over that of the row it refers to.

    The figures are of all devices, or else of one.
    """
    variants: list[Powers] = []
    for quantity, power in RATES.items():
        ratio = {name: -1, quantity: power, FIRST + quantity: -power}
        by_devices = [(0, 1), (-1, 0)][name == "efficiency"]
        if quantity == "device_token_rate":
            by_devices = by_devices[::-1]
        variants += [{**ratio, "devices": each, FIRST + "devices": -each} if each else ratio for each in by_devices]
    if name == "efficiency":
        variants.append({name: -1, "speedup": 1, "devices": -1, FIRST + "devices": 1})
    return Formula("", tuple(variants), name)


FORMULAS = (
    Formula("global batch = micro batch x accumulation x data ranks",
            ({"batch": -1, "micro_batch": 1, "accumulation": 1, DATA_RANKS: 1},)),
    Formula("devices = data x tensor x pipeline ranks", ({"devices": -1, "dp": 1, "tp": 1, "pp": 1},)),
    Formula("tokens/s of all = tokens/s of one device x devices",
            ({"token_rate": -1, "device_token_rate": 1, "devices": 1},)),
    Formula("tokens/s x time of a step = global batch x length",
            _of_any_scope({"token_rate": 1, "step_s": 1, "batch": -1, "length": -1})),
    Formula("samples/s x time of a step = global batch",
            _of_any_scope({"sample_rate": 1, "step_s": 1, "batch": -1})),
    Formula("tokens = steps x global batch x length", ({"tokens": -1, "steps": 1, "batch": 1, "length": 1},)),
    Formula("tokens/s x time = tokens", _of_any_scope({"token_rate": 1, "time_s": 1, "tokens": -1})),
    _ratio_formula("speedup"),
    _ratio_formula("efficiency"),
)  # fmt: skip


def figures_follow(item: Reported) -> Iterator[Finding]:
    for grid in item.details["grids"]:
        for formula in FORMULAS:
            checked = _products(grid, formula, _reference(grid, formula.ratio))
            apart = {row: found for row, found in checked.items() if not any(map(_holds, found))}
            holding = len(checked) - len(apart)
            others = _other_reference(grid, formula) if formula.ratio and len(apart) > 1 and not holding else None
            if others is not None and formula.ratio and (reference := _reference(grid, formula.ratio)) is not None:
                said = f"each {formula.ratio} is relative to line {grid.lines[others]}, and the 1 stands here"
                yield _fails(item, grid, reference, Rule.FOLLOWS, said)
            # of a ratio one row against one is enough: the two do not go together
            elif len(apart) < holding or (formula.ratio is not None and len(apart) == max(holding, 1)):
                for row, found in apart.items():
                    yield _does_not_follow(item, grid, row, formula, found[0])


def _other_reference(grid: Grid, formula: Formula) -> int | None:
    """Return the row to which every figure of a ratio is relative, which is not the one with 1."""
    stated = _reference(grid, formula.ratio)
    for row in range(len(grid.lines)):
        products = {at: found for at, found in _products(grid, formula, row).items() if at != stated}
        if row != stated and len(products) > 1 and all(any(map(_holds, found)) for found in products.values()):
            return row
    return None


def _does_not_follow(item: Reported, grid: Grid, row: int, formula: Formula, product: Product) -> Finding:
    powers, low, high = product
    factor = (low * high) ** 0.5
    if formula.ratio is None:
        ranks = ("dp", "devices", "tp", "pp") if DATA_RANKS in powers else ()
        shown = ", ".join(_said(grid, name, row) for name in (*powers, *ranks) if grid.column(name))
        return _fails(item, grid, row, Rule.FOLLOWS, f"{formula.words}: {shown} give {factor:.3g} times that")
    stated, reference, column = (
        grid.figure(formula.ratio, row),
        _reference(grid, formula.ratio),
        grid.column(formula.ratio),
    )
    assert stated and column and reference is not None  # the product has them
    value = f"{stated.value * factor:.3g}x" if formula.ratio == "speedup" else f"{stated.value * factor:.1%}"
    follows = f"does not follow from the figures of its row and of line {grid.lines[reference]}"
    said = f"{_said(grid, formula.ratio, row)} {follows}"
    return replace(_fails(item, grid, row, Rule.FOLLOWS, said), corrected=f"{column.heading} {value} would follow")


def _products(grid: Grid, formula: Formula, reference: int | None) -> dict[int, list[Product]]:
    """Return the rows that have all figures of a formula, with its product in each way to count."""
    found = {}
    for row in range(len(grid.lines)):
        if formula.ratio is None or (reference is not None and row != reference):
            products = [product for powers in formula.variants if (product := _product(grid, row, reference, powers))]
            if products:
                found[row] = products
    return found


def _product(grid: Grid, row: int, reference: int | None, powers: Powers) -> Product | None:
    low = high = 1.0
    for name, power in powers.items():
        quantity = name.removeprefix(FIRST)
        at = row if quantity == name or reference is None else reference
        figure = _data_ranks(grid, at) if quantity == DATA_RANKS else grid.figure(quantity, at)
        if figure is None:
            return None
        low *= (figure.low if power > 0 else figure.high) ** power
        high *= (figure.high if power > 0 else figure.low) ** power
    return powers, low, high


def _holds(product: Product) -> bool:
    _, low, high = product
    return low <= SLACK and high >= 1 / SLACK


def _data_ranks(grid: Grid, row: int) -> Figure | None:
    if grid.column("dp"):
        return grid.figure("dp", row)
    devices = grid.figure("devices", row)
    others = [grid.figure(name, row) for name in ("tp", "pp") if grid.column(name)]
    if devices is None or None in others:
        return None
    value = devices.value
    for figure in others:
        value /= figure.value if figure else 1.0
    return Figure(value, value, value)


def _reference(grid: Grid, name: str | None) -> int | None:
    """Return the row that a ratio refers to: the only one with 1, or the only one that says so."""
    column = grid.column(name) if name else None
    if column is None:
        return None
    ones = [row for row, figure in enumerate(column.figures) if figure and abs(figure.value - 1) < 1e-9]
    if not ones:
        ones = [row for row, text in enumerate(column.texts) if is_reference(text) and column.figures[row] is None]
    return ones[0] if len(ones) == 1 else None


def whole_micro_batches(item: Reported) -> Iterator[Finding]:
    """Check that micro batch x data ranks divides the global batch, where no column gives the accumulation."""
    for grid in item.details["grids"]:
        counts = _batches(grid)
        apart = [row for row, (batch, samples) in counts.items() if batch % samples]
        if 2 * len(apart) < len(counts):
            for row in apart:
                batch, samples = counts[row]
                said = f"global batch {batch:,} is not a multiple of micro batch x data ranks = {samples:,}"
                yield _fails(item, grid, row, Rule.FOLLOWS, said)


def _batches(grid: Grid) -> dict[int, tuple[int, int]]:
    """Return global batch, and micro batch x data ranks, of the rows that have them; none with an accumulation."""
    found = {}
    for row in range(len(grid.lines)) if not grid.column("accumulation") else ():
        batch, micro, ranks = grid.figure("batch", row), grid.figure("micro_batch", row), _data_ranks(grid, row)
        if batch and micro and ranks:
            found[row] = (round(batch.value), round(micro.value * ranks.value))
    return found


def no_device_does_more_than_its_peak(item: Reported) -> Iterator[Finding]:
    """Find an MFU over 100 %, and FLOP/s of one device over the peak of the device that the row names."""
    for grid in item.details["grids"]:
        for row in range(len(grid.lines)):
            mfu, tflops = grid.figure("mfu", row), grid.figure("tflops", row)
            device = side_of(item, grid, row).first.device_name
            peak = _peak_tflops(device) if device and tflops else None
            if mfu and mfu.low > 1:
                said = f"{_said(grid, 'mfu', row)}: no device does more than its peak"
                yield _fails(item, grid, row, Rule.POSSIBLE, said)
            if tflops and peak and "/gpu" in _heading(grid, "tflops") and tflops.low > peak:
                said = f"{_said(grid, 'tflops', row)} is more than the {peak:,.0f} TFLOP/s of {device} (data sheet)"
                yield _fails(item, grid, row, Rule.POSSIBLE, said)


def _peak_tflops(device: str) -> float | None:
    """Return the fastest dense units of a device, of which sparsity makes twice as much."""
    try:
        return 2e-12 * device_named(device).fastest
    except InputError:
        return None


def rows_compare_with_their_reference(item: Reported) -> Iterator[Finding]:
    """Answer every speed-up and efficiency against the row that it refers to, and rates against the fewest devices."""
    for grid in item.details["grids"]:
        ratios = [name for name in ("speedup", "efficiency") if grid.column(name)]
        for name in ratios:
            reference = _reference(grid, name)
            if reference is None:
                continue
            if failed := failure_of(grid, reference):
                said = f"{grid.column(name).heading} refers to a row that was not measured: {failed}"  # type: ignore[union-attr]
                yield _fails(item, grid, reference, Rule.POSSIBLE, said)
                continue
            for row in range(len(grid.lines)):
                if row != reference and grid.figure(name, row):
                    yield from _against_reference(item, grid, name, row, reference)
        if not ratios and (fewest := _on_fewest_devices(grid)) is not None:
            for row in range(len(grid.lines)):
                if row != fewest:
                    yield from _more_devices(item, grid, row, fewest)


def _against_reference(item: Reported, grid: Grid, name: str, row: int, reference: int) -> Iterator[Finding]:
    claim = Claim(side_of(item, grid, reference), side_of(item, grid, row))
    found = [each for each in conditions(claim) if each.state == DIFFERS]
    kind, said = kind_of(claim), _said(grid, name, row)
    runs = tuple(f"{item.name}:{grid.lines[each]}" for each in (row, reference))
    stated = grid.figure(name, row)
    assert stated is not None  # the caller looked
    spoiled = [each for each in found if each.spoils and each.name not in ("ranks", "figures are", "code version")]
    is_only_change = len(spoiled) == 1 and kind == OF_STRATEGY and not is_another_strategy(claim)
    differ = "; ".join(each.against for each in found if each in spoiled or each.name == "ranks")
    per_device = _per_device(claim)
    if kind == OF_BOTH:
        strategies = " against ".join(str(strategy_of(side)) for side in (claim.other, claim.baseline))
        is_batch = any(each.name in BATCHES for each in spoiled)
        message = f"{said} is not of {strategies} alone: {differ}{per_device}"
        yield Finding(Rule.EQUAL_WORK, runs, message, FAILS if is_batch else NOTE)
    elif _is_weak(claim, spoiled) and (divided := _time_that_is_divided(grid, name, row, reference)):
        message = f"{said} divides the {divided} of another batch: {differ}{per_device}"
        yield Finding(Rule.EQUAL_WORK, runs, message, FAILS)
    elif (
        spoiled
        and not (is_only_change and spoiled[0].name not in WORK_OF_A_TOKEN)
        and not (name == "efficiency" and _is_weak(claim, spoiled))  # which is what weak scaling reports
    ):
        yield Finding(Rule.EQUAL_WORK, runs, f"{said} compares rows of other work: {differ}{per_device}", NOTE)
    if name == "speedup" and (rates := _contradicting_rates(grid, row, reference)):
        yield Finding(Rule.FOLLOWS, runs, f"{said} with {rates}", FAILS)
    loss = next((each for each in found if each.name == "loss"), None)
    if loss and stated.low > 1 and name == "speedup" and loss.b > loss.a:  # type: ignore[operator]
        message = f"{said} with loss {in_words(loss.b)} against {in_words(loss.a)}: {loss.effect}"
        yield Finding(Rule.LOSSES, runs, message, FAILS)
    is_projected = any(each.name == "figures are" for each in found) or _is_estimated(grid, row, reference)
    if is_projected and not _ESTIMATED.search(_heading(grid, name)):
        yield Finding(Rule.POSSIBLE, runs, f"{said} is of a figure that its row calls a projection", NOTE)
    if name == "speedup":
        yield from _more_devices(item, grid, row, reference)


def _more_devices(item: Reported, grid: Grid, row: int, reference: int) -> Iterator[Finding]:
    """Find more than linear gains, and losses, on more devices; both directions, whichever row is the reference."""
    claim = Claim(side_of(item, grid, reference), side_of(item, grid, row))
    if (claim.other.first.world_size or 0) < (claim.baseline.first.world_size or 0):
        claim, row, reference = claim.turned, reference, row
    base, other = claim.baseline.first, claim.other.first
    if not base.world_size or not other.world_size or base.world_size == other.world_size or is_another_strategy(claim):
        return
    added = other.world_size / base.world_size
    speedup, at = grid.figure("speedup", row), grid.figure("speedup", reference)
    runs = tuple(f"{item.name}:{grid.lines[each]}" for each in (row, reference))
    if speedup and at:
        gain, low, high, said = (
            speedup.value / at.value,
            speedup.low / at.high,
            speedup.high / at.low,
            _said(grid, "speedup", row),
        )
    elif base.rate and other.rate and base.rate_unit == other.rate_unit and not base.rate_is_per_rank:
        gain = low = high = other.rate / base.rate
        said = f"{gain:.2f} times the {base.rate_unit}"
    else:
        return
    if low > LINEAR * added:
        said = f"{said} on {added:g} times the devices is more than linear"
        yield Finding(Rule.STEP_CLOCK, runs[:1] if speedup else runs, said, FAILS if speedup else NOTE)
    elif gain < SLOWER and high <= 1:
        said = f"more devices were slower: {said} on {other.world_size:,} devices against {base.world_size:,}"
        yield Finding(Rule.MORE_DEVICES, runs, said, NOTE, f"{gain / added:.0%} efficiency")


def _is_weak(claim: Claim, spoiled: Sequence[Condition]) -> bool:
    names = {each.name for each in spoiled}
    return kind_of(claim) == SCALING and len(names) == 1 and names <= set(BATCHES)


def _contradicting_rates(grid: Grid, row: int, reference: int) -> str | None:
    """Return a rate that is lower in a row with a speed-up over 1, or higher in one under 1."""
    stated, one, two = grid.figure("speedup", row), devices_of(grid, row), devices_of(grid, reference)
    for quantity in ("token_rate", "sample_rate", "step_rate", "rate"):
        at, before = grid.figure(quantity, row), grid.figure(quantity, reference)
        column = grid.column(quantity)
        if not stated or not at or not before or not column or one != two:
            continue
        if (stated.low > 1 and at.high < before.low) or (stated.high < 1 and at.low > before.high):
            return f"{_said(grid, quantity, row)} against {column.texts[reference]}"
    return None


def _per_device(claim: Claim) -> str:
    """Return in words what one device does of what one of the reference does, where the devices' number differs."""
    base, other = claim.baseline.first, claim.other.first
    if not base.rate or not other.rate or not base.world_size or not other.world_size or base.rate_is_per_rank:
        return ""
    if base.world_size == other.world_size or base.rate_unit != other.rate_unit:
        return ""
    each = other.rate / base.rate * base.world_size / other.world_size
    return f"; {each:.3g}x per device"


def _time_that_is_divided(grid: Grid, name: str, row: int, reference: int) -> str | None:
    """Return the heading of the step time whose ratio a speed-up is."""
    product = _product(grid, row, reference, {name: -1, "step_s": -1, FIRST + "step_s": 1})
    return _heading(grid, "step_s") if name == "speedup" and product and _holds(product) else None


def _is_estimated(grid: Grid, *rows: int) -> bool:
    """Return whether a time or a rate of these rows is marked as an estimate, or its heading is."""
    results = [column for column in grid.columns if column.quantity in RESULTS and column.quantity not in RATIOS]
    return any(_ESTIMATED.search(f"{column.heading} {column.texts[row]}") for column in results for row in rows)


def _on_fewest_devices(grid: Grid) -> int | None:
    devices = [(count, row) for row in range(len(grid.lines)) if (count := devices_of(grid, row))]
    least = min(devices, default=None)
    is_one = least is not None and sum(count == least[0] for count, _ in devices) == 1
    return least[1] if least and is_one and len(devices) > 1 else None


def _heading(grid: Grid, quantity: str) -> str:
    column = grid.column(quantity)
    return column.heading.lower().replace(" per ", "/").replace("device", "gpu") if column else ""


def _said(grid: Grid, quantity: str, row: int) -> str:
    column = grid.column(quantity)
    return f"{column.heading} {column.texts[row]}" if column else ""


def _fails(item: Reported, grid: Grid, row: int, rule: Rule, message: str) -> Finding:
    return Finding(rule, (f"{item.name}:{grid.lines[row]}",), message, FAILS)


def checks_of(item: Reported, grid: Grid) -> tuple[int, int]:
    """Return how many figures of a table could contradict another one or a limit, and by how many rules."""
    by_rule: dict[str, set[tuple[str, int | None]]] = {
        "peak": {("mfu", row) for row in range(len(grid.lines)) if grid.figure("mfu", row)},
        "whole": {(name, row) for row in _batches(grid) for name in ("batch", "micro_batch")},
        "reference": set(_compared(item, grid)),
    }
    for formula in FORMULAS:
        products = _products(grid, formula, _reference(grid, formula.ratio))
        for row, each in products.items() if len(products) > 1 or formula.ratio else ():
            for name in {name for powers, _, _ in each for name in powers}:
                at = _reference(grid, formula.ratio) if name.startswith(FIRST) else row
                by_rule.setdefault(f"{formula}", set()).add((name.removeprefix(FIRST), at))
    figures = {figure for found in by_rule.values() for figure in found}
    return len(figures), sum(bool(found) for found in by_rule.values())


def _compared(item: Reported, grid: Grid) -> Iterator[tuple[str, int]]:
    """Yield the figures of ratios for which their row and the reference's both say some condition."""
    for name in RATIOS:
        reference = _reference(grid, name)
        if reference is None:
            continue
        of_reference = side_of(item, grid, reference)
        for row in range(len(grid.lines)):
            if row != reference and grid.figure(name, row):
                found = conditions(Claim(of_reference, side_of(item, grid, row)))
                if any(each.state != UNKNOWN for each in found):
                    yield name, row


TABLE_RULES: dict[Callable[[Reported], Iterator[Finding]], tuple[str, ...]] = {
    figures_follow: (FORM,),
    whole_micro_batches: (FORM,),
    no_device_does_more_than_its_peak: (FORM,),
    rows_compare_with_their_reference: (FORM,),
}
