"""Check the rows of a table against themselves and each other.

A figure is an interval: what its digits leave open. A formula is checked in a row that has all of its figures, and a
row is reported only where every way to count fails in it and more rows follow than not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from testbed.audit.finding import FAILS, NOTE, Finding, Rule
from testbed.audit.reported import Reported
from testbed.audit.tables.columns import FORM, Figure, Grid, is_reference

Powers = Mapping[str, int]  # quantity -> exponent
Product = tuple[Powers, float, float]  # and the ends of its value in one row
SLACK = 1.01  # beyond rounding: times and rates are averaged over windows that differ a little
LINEAR = 1.01
DATA_RANKS = "data_ranks"  # of the column dp, else devices / (tensor x pipeline ranks)
FIRST = "first "  # before a quantity: its figure in the row that a ratio refers to
RATES = {"token_rate": 1, "sample_rate": 1, "rate": 1, "device_token_rate": 1, "step_s": -1, "time_s": -1}
SAME_WORK = ("length", "params")


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
            checked = _products(grid, formula)
            apart = {row: found for row, found in checked.items() if not any(map(_holds, found))}
            is_only_one = formula.ratio is not None and len(checked) == 1
            if len(apart) < len(checked) - len(apart) or is_only_one:
                for row, found in apart.items():
                    yield _does_not_follow(item, grid, row, formula, found[0])


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


def _products(grid: Grid, formula: Formula) -> dict[int, list[Product]]:
    """Return the rows that have all figures of a formula, with its product in each way to count."""
    reference = _reference(grid, formula.ratio)
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


def limits_are_kept(item: Reported) -> Iterator[Finding]:
    """Find an MFU over 100 %, and a speed-up by more than the devices that were added."""
    for grid in item.details["grids"]:
        reference = _reference(grid, "speedup")
        for row in range(len(grid.lines)):
            mfu, speedup = grid.figure("mfu", row), grid.figure("speedup", row)
            added = _product(grid, row, reference, {"devices": 1, FIRST + "devices": -1})
            if mfu and mfu.low > 1:
                yield _fails(
                    item, grid, row, Rule.POSSIBLE, f"{_said(grid, 'mfu', row)}: no device does more than its peak"
                )
            if speedup and added and speedup.low > LINEAR * added[1] > LINEAR:
                said = f"{_said(grid, 'speedup', row)} on {added[1]:g} times the devices is more than linear"
                yield _fails(item, grid, row, Rule.STEP_CLOCK, said)


def compared_rows_do_the_same_work(item: Reported) -> Iterator[Finding]:
    """Note a speed-up or an efficiency whose row has another length, model or batch than the reference's."""
    for grid in item.details["grids"]:
        for name in ("speedup", "efficiency"):
            reference = _reference(grid, name)
            if reference is None:
                continue
            for row in range(len(grid.lines)):
                differ = _differing(grid, row, reference) if grid.figure(name, row) else []
                if differ:
                    runs = tuple(f"{item.name}:{grid.lines[each]}" for each in (row, reference))
                    said = f"{_said(grid, name, row)} compares rows of other work: {'; '.join(differ)}"
                    yield Finding(Rule.EQUAL_WORK, runs, said, NOTE)


def _differing(grid: Grid, row: int, other: int) -> list[str]:
    """Return what sets the work of two rows apart. One batch of all ranks, or one of each rank, is enough."""
    batches = [name for name in ("batch", "micro_batch") if _differs(grid, name, row, other) is not None]
    names = [name for name in SAME_WORK if _differs(grid, name, row, other)]
    if batches and all(_differs(grid, name, row, other) for name in batches):
        names.append(batches[0])
    columns = {name: column for name in names if (column := grid.column(name))}
    return [f"{_said(grid, name, row)} against {column.texts[other]}" for name, column in columns.items()]


def _differs(grid: Grid, quantity: str, row: int, other: int) -> bool | None:
    one, two = grid.figure(quantity, row), grid.figure(quantity, other)
    return None if one is None or two is None else one.low > two.high or two.low > one.high


def _said(grid: Grid, quantity: str, row: int) -> str:
    column = grid.column(quantity)
    return f"{column.heading} {column.texts[row]}" if column else ""


def _fails(item: Reported, grid: Grid, row: int, rule: Rule, message: str) -> Finding:
    return Finding(rule, (f"{item.name}:{grid.lines[row]}",), message, FAILS)


def num_checked(grid: Grid) -> int:
    """Return how many figures of a table could contradict another one or a limit, each counted once."""
    found: set[tuple[str, int | None]] = {("mfu", row) for row in range(len(grid.lines)) if grid.figure("mfu", row)}
    found |= {(name, row) for row in _batches(grid) for name in ("batch", "micro_batch")}
    for formula in FORMULAS:
        products = _products(grid, formula)
        if len(products) > 1 or formula.ratio:
            for row, each in products.items():
                for name in {name for powers, _, _ in each for name in powers}:
                    at = _reference(grid, formula.ratio) if name.startswith(FIRST) else row
                    found.add((name.removeprefix(FIRST), at))
    return len(found)


TABLE_RULES: dict[Callable[[Reported], Iterator[Finding]], tuple[str, ...]] = {
    figures_follow: (FORM,),
    whole_micro_batches: (FORM,),
    limits_are_kept: (FORM,),
    compared_rows_do_the_same_work: (FORM,),
}
