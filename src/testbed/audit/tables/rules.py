"""Check the rows of a table against themselves and each other.

A figure is an interval: what its digits leave open. A formula is checked in a row that has all of its figures, and a
row is reported only where every way to count fails in it and more rows follow than not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from testbed.audit.finding import FAILS, NOTE, Finding, Rule
from testbed.audit.reported import Reported
from testbed.audit.tables.columns import FORM, Figure, Grid, is_reference

Powers = Mapping[str, int]  # quantity -> exponent
SLACK = 1.01  # beyond rounding: times and rates are averaged over windows that differ a little
LINEAR = 1.01
DATA_RANKS = "data_ranks"  # of the column dp, else devices / (tensor x pipeline ranks)
FACTORS = {"token_rate": 1, "sample_rate": 1, "rate": 1, "device_token_rate": 1, "step_s": -1, "time_s": -1}
SAME_WORK = ("length", "params")


@dataclass(frozen=True)
class Formula:
    """Say that a product of powers is 1, in each way to count that is in use."""

    words: str
    subject: str
    variants: tuple[Powers, ...]


def _of_any_scope(powers: Powers) -> tuple[Powers, ...]:
    """Return a convention for all devices, and those where one factor is of a single device."""
    return (powers, {**powers, "devices": 1}, {**powers, "devices": -1})


FORMULAS = (
    Formula("global batch = micro batch x accumulation x data ranks", "batch",
            ({"batch": -1, "micro_batch": 1, "accumulation": 1, DATA_RANKS: 1},)),
    Formula("devices = data x tensor x pipeline ranks", "devices", ({"devices": -1, "dp": 1, "tp": 1, "pp": 1},)),
    Formula("tokens/s of all = tokens/s of one device x devices", "token_rate",
            ({"token_rate": -1, "device_token_rate": 1, "devices": 1},)),
    Formula("tokens/s x time of a step = global batch x length", "token_rate",
            _of_any_scope({"token_rate": 1, "step_s": 1, "batch": -1, "length": -1})),
    Formula("samples/s x time of a step = global batch", "sample_rate",
            _of_any_scope({"sample_rate": 1, "step_s": 1, "batch": -1})),
    Formula("tokens = steps x global batch x length", "tokens",
            ({"tokens": -1, "steps": 1, "batch": 1, "length": 1},)),
    Formula("tokens/s x time = tokens", "token_rate", _of_any_scope({"token_rate": 1, "time_s": 1, "tokens": -1})),
)  # fmt: skip


def figures_follow(item: Reported) -> Iterator[Finding]:
    for grid in item.details["grids"]:
        for formula in FORMULAS:
            checked = dict(_products(grid, formula))
            apart = {row: ends for row, ends in checked.items() if not any(_holds(each) for each in ends)}
            if 0 < len(apart) < len(checked) - len(apart):
                for row, ends in apart.items():
                    shown = _shown(grid, row, formula.variants[0])
                    factor = (ends[0][0] * ends[0][1]) ** 0.5
                    yield _fails(
                        item, grid, row, Rule.FOLLOWS, f"{formula.words}: {shown} give {factor:.3g} times that"
                    )


def _products(grid: Grid, formula: Formula) -> Iterator[tuple[int, list[tuple[float, float]]]]:
    """Yield each row that has all figures of a formula, with the ends of its product in each way to count."""
    for row in range(len(grid.lines)):
        found = [ends for powers in formula.variants if (ends := _product(grid, row, powers))]
        if found:
            yield row, found


def _product(grid: Grid, row: int, powers: Powers) -> tuple[float, float] | None:
    low = high = 1.0
    for quantity, power in powers.items():
        figure = _data_ranks(grid, row) if quantity == DATA_RANKS else grid.figure(quantity, row)
        if figure is None:
            return None
        low *= figure.low if power > 0 else 1 / figure.high
        high *= figure.high if power > 0 else 1 / figure.low
    return low, high


def _holds(ends: tuple[float, float]) -> bool:
    return ends[0] <= SLACK and ends[1] >= 1 / SLACK


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


def whole_micro_batches(item: Reported) -> Iterator[Finding]:
    """Check that micro batch x data ranks divides the global batch, where no column gives the accumulation."""
    for grid in item.details["grids"]:
        if grid.column("accumulation"):
            continue
        counts = {}
        for row in range(len(grid.lines)):
            batch, micro, ranks = grid.figure("batch", row), grid.figure("micro_batch", row), _data_ranks(grid, row)
            if batch and micro and ranks:
                counts[row] = (round(batch.value), round(micro.value * ranks.value))
        apart = [row for row, (batch, samples) in counts.items() if batch % samples]
        if 2 * len(apart) < len(counts):
            for row in apart:
                batch, samples = counts[row]
                said = f"global batch {batch:,} is no multiple of micro batch x data ranks = {samples:,}"
                yield _fails(item, grid, row, Rule.FOLLOWS, said)


def ratios_follow(item: Reported) -> Iterator[Finding]:
    """Compare speed-ups and efficiencies with the rates and times beside them, against the one reference row."""
    for grid in item.details["grids"]:
        for name in ("speedup", "efficiency"):
            reference = _reference(grid, name)
            ratios = _ratios(grid, name, reference) if reference is not None else {}
            apart = [row for row, (stated, expected) in ratios.items() if not any(_meet(stated, e) for e in expected)]
            follow = len(ratios) - len(apart)
            if apart and (len(apart) < follow or len(ratios) == 1):
                for row in apart:
                    expected = ratios[row][1][0]
                    value = f"{expected.value:.3g}x" if name == "speedup" else f"{expected.value:.1%}"
                    column = grid.column(name)
                    assert column is not None  # it has the ratio
                    yield Finding(
                        Rule.FOLLOWS, (f"{item.name}:{grid.lines[row]}",),
                        f"{column.heading} {column.texts[row]} does not follow from the figures of its row and of line "
                        f"{grid.lines[reference]}", FAILS, f"{column.heading} {value} would follow",
                    )  # fmt: skip


def _reference(grid: Grid, name: str) -> int | None:
    """Return the row that a ratio refers to: the only one with 1, or the only one that says so."""
    column = grid.column(name)
    if column is None:
        return None
    ones = [row for row, figure in enumerate(column.figures) if figure and abs(figure.value - 1) < 1e-9]
    if not ones:
        ones = [row for row, text in enumerate(column.texts) if is_reference(text) and column.figures[row] is None]
    return ones[0] if len(ones) == 1 else None


def _ratios(grid: Grid, name: str, reference: int) -> dict[int, tuple[Figure, list[Figure]]]:
    """Return for each row its ratio, and what it can be by each column that it may be of."""
    found = {}
    for row in range(len(grid.lines)):
        stated = grid.figure(name, row)
        devices = _quotient(grid.figure("devices", row), grid.figure("devices", reference))
        expected = []
        for quantity, power in FACTORS.items():
            ratio = _quotient(grid.figure(quantity, row), grid.figure(quantity, reference))
            if ratio is not None:
                ratio = ratio if power > 0 else _inverse(ratio)
                of_all = _times(ratio, devices) if quantity == "device_token_rate" and devices else ratio
                expected += _conventions(of_all, devices, name)
        if name == "efficiency" and devices and (speedup := grid.figure("speedup", row)):
            expected.append(_times(speedup, _inverse(devices)))
        if stated and expected and row != reference:
            found[row] = (stated, expected)
    return found


def _conventions(ratio: Figure, devices: Figure | None, name: str) -> list[Figure]:
    """Return a ratio of all devices as a speed-up or an efficiency; last, as if the figures were of one device."""
    if devices is None:
        return [ratio] if name == "speedup" else []
    each = _times(ratio, _inverse(devices))
    return [ratio, _times(ratio, devices)] if name == "speedup" else [each, ratio]


def more_than_linear(item: Reported) -> Iterator[Finding]:
    """Find a speed-up over more devices than the reference's that is more than their number."""
    for grid in item.details["grids"]:
        column, reference = grid.column("speedup"), _reference(grid, "speedup")
        for row in range(len(grid.lines)) if column and reference is not None else ():
            devices = _quotient(grid.figure("devices", row), grid.figure("devices", reference))
            figure = grid.figure("speedup", row)
            if column and figure and devices and devices.value > 1 and figure.low > LINEAR * devices.value:
                said = (
                    f"{column.heading} {column.texts[row]} on {devices.value:g} times the devices is more than linear"
                )
                yield _fails(item, grid, row, Rule.STEP_CLOCK, said)


def shares_are_at_most_one(item: Reported) -> Iterator[Finding]:
    for grid in item.details["grids"]:
        column = grid.column("mfu")
        for row, figure in enumerate(column.figures if column else ()):
            if column and figure and figure.low > 1:
                said = f"{column.heading} {column.texts[row]}: no device does more than its peak"
                yield _fails(item, grid, row, Rule.POSSIBLE, said)


def compared_rows_do_the_same_work(item: Reported) -> Iterator[Finding]:
    """Note a speed-up or an efficiency whose row has another length, model or batch than the reference's."""
    for grid in item.details["grids"]:
        for name in ("speedup", "efficiency"):
            column, reference = grid.column(name), _reference(grid, name)
            for row in range(len(grid.lines)) if column and reference is not None else ():
                if column and column.figures[row] and reference is not None and row != reference:
                    differ = _differing(grid, row, reference)
                    if differ:
                        runs = tuple(f"{item.name}:{grid.lines[each]}" for each in (row, reference))
                        said = f"{column.heading} {column.texts[row]} compares rows of other work: {'; '.join(differ)}"
                        yield Finding(Rule.EQUAL_WORK, runs, said, NOTE)


def _differing(grid: Grid, row: int, other: int) -> list[str]:
    """Return what sets the work of two rows apart. One batch of all ranks, or one of each rank, is enough."""
    batches = [name for name in ("batch", "micro_batch") if _differs(grid, name, row, other) is not None]
    names = [name for name in SAME_WORK if _differs(grid, name, row, other)]
    if batches and all(_differs(grid, name, row, other) for name in batches):
        names.append(batches[0])
    columns = [column for name in names if (column := grid.column(name))]
    return [f"{column.heading} {column.texts[row]} against {column.texts[other]}" for column in columns]


def _differs(grid: Grid, quantity: str, row: int, other: int) -> bool | None:
    one, two = grid.figure(quantity, row), grid.figure(quantity, other)
    return None if one is None or two is None else one.low > two.high or two.low > one.high


def _quotient(one: Figure | None, other: Figure | None) -> Figure | None:
    if one is None or other is None:
        return None
    return Figure(one.value / other.value, one.low / other.high, one.high / other.low)


def _inverse(figure: Figure) -> Figure:
    return Figure(1 / figure.value, 1 / figure.high, 1 / figure.low)


def _times(one: Figure, other: Figure) -> Figure:
    return Figure(one.value * other.value, one.low * other.low, one.high * other.high)


def _meet(one: Figure, other: Figure) -> bool:
    return one.low <= other.high * SLACK and other.low <= one.high * SLACK


def _shown(grid: Grid, row: int, powers: Powers) -> str:
    names = ["dp", "devices", "tp", "pp"] if DATA_RANKS in powers else []
    columns = [column for name in (*powers, *names) if (column := grid.column(name))]
    return ", ".join(f"{column.heading} {column.texts[row]}" for column in columns)


def _fails(item: Reported, grid: Grid, row: int, rule: Rule, message: str) -> Finding:
    return Finding(rule, (f"{item.name}:{grid.lines[row]}",), message, FAILS)


def num_checked(grid: Grid) -> int:
    """Return how many figures of a table could contradict another one or a limit, each counted once."""
    found: set[tuple[str, int]] = set()
    for formula in FORMULAS:
        rows = [row for row, _ in _products(grid, formula)]
        found |= {(name, row) for row in rows for name in formula.variants[0] if len(rows) > 1}
    for name in ("speedup", "efficiency"):
        reference = _reference(grid, name)
        ratios = _ratios(grid, name, reference) if reference is not None else {}
        bases = [quantity for quantity in FACTORS if grid.column(quantity)]
        found |= {(each, row) for row in ratios for each in (name, *bases)}
        found |= {(each, reference) for each in (name, *bases) if ratios and reference is not None}
    column = grid.column("mfu")
    found |= {("mfu", row) for row, figure in enumerate(column.figures if column else ()) if figure}
    return len(found)


TABLE_RULES: dict[Callable[[Reported], Iterator[Finding]], tuple[str, ...]] = {
    figures_follow: (FORM,),
    whole_micro_batches: (FORM,),
    ratios_follow: (FORM,),
    more_than_linear: (FORM,),
    shares_are_at_most_one: (FORM,),
    compared_rows_do_the_same_work: (FORM,),
}
