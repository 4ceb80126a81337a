"""Check the rows of a table against themselves and each other.

A figure is an interval: what its digits leave open. A formula is checked in a row that has all of its figures, and a
row is reported only where every way to count fails in it and more rows follow than not.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import permutations

from testbed.audit.comparison_rules import SLOWER
from testbed.audit.conditions import (
    BATCHES,
    DIFFERS,
    LEARNS,
    OF_BOTH,
    OF_STRATEGY,
    SCALING,
    UNKNOWN,
    Condition,
    conditions,
    in_words,
    is_another_strategy,
    kind_of,
    learns_worse,
    strategy_of,
)
from testbed.audit.finding import FAILS, NOTE, Finding, Rule
from testbed.audit.measures import measures, of_one_device
from testbed.audit.reported import MODEL, PASS, PRECISION, STATUS, Claim
from testbed.audit.tables.columns import RATES, RATIOS, RESULTS, TIMES, Grid, quantity_of
from testbed.audit.tables.figures import Figure, exactly, is_reference
from testbed.audit.tables.peaks import mfu_is_of_one_peak, no_device_does_more_than_its_peak
from testbed.audit.tables.rows import claim_of, fails, failure_of, plain_heading, said_of, side_of
from testbed.audit.words import FORMS, value_of

Powers = Mapping[str, int]  # quantity -> exponent
Product = tuple[Powers, float, float]  # and the ends of its value in one row
SLACK = 1.01  # beyond rounding: times and rates are averaged over windows that differ a little
LINEAR = 1.05  # caches and the noise of single runs give as much
DATA_RANKS = "data_ranks"  # of the column dp, else devices / (tensor x pipeline ranks)
FIRST = "first "  # before a quantity: its figure in the row that a ratio refers to
POWERS = dict.fromkeys(RATES, 1) | dict.fromkeys(TIMES, -1)
APART = 1.15  # a claimed ratio and those of the figures, where other digits and other steps explain nothing
_OF_SPEED = re.compile(
    r"(?i)^(?!.*\b(?:up to|less|memory|smaller|larger|cheaper|cost|parameters?|peak|theoretical|ideal|alone|kernels?"
    r"|expect\w*|paper|old|interconnect|network|link|with \d+|on \d+|each|per)\b).*\b(?:faster|quicker|as fast)\b"
)
CLAIMED = 0.03  # by which a ratio of the text may be off
WORK_OF_A_TOKEN = {"model", "sequence length", "kind of pass", "data"}  # which no speed-up is meant to compare
LONGEST_NOTE = 160
NEARLY_EQUAL = 0.03  # batches of one rank
_ESTIMATED = re.compile(rf"{FORMS[STATUS].pattern}|\best\b", re.I)


_VERSUS = re.compile(r"\b(?:vs\.?|versus|over|relative to|compared (?:to|with)|against) (.*)")
_AS_REFERENCE = re.compile(r"(?i)\b(?:base(?:line)?|reference|ref|vanilla|original|naive|eager|standard|single|1)\b")


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
    for quantity, power in POWERS.items():
        ratio = {name: -1, quantity: power, FIRST + quantity: -power}
        by_devices = [(0, 1), (-1, 0)][name == "efficiency"]
        if quantity.startswith("device_"):
            by_devices = by_devices[::-1]
        variants += [{**ratio, "devices": each, FIRST + "devices": -each} if each else ratio for each in by_devices]
    if name == "efficiency":
        variants.append({name: -1, "speedup": 1, "devices": -1, FIRST + "devices": 1})
    return Formula("", tuple(variants), name)


FORMULAS = (
    Formula("global batch = micro batch x accumulation x data ranks",
            ({"batch": -1, "micro_batch": 1, "accumulation": 1, DATA_RANKS: 1},)),
    Formula("devices = data x tensor x pipeline ranks",
            ({"devices": -1, "dp": 1, "tp": 1, "pp": 1}, {"devices": -1, "dp": 1, "tp": 1, "pp": 1, "cp": 1})),
    Formula("tokens/s of all = tokens/s of one device x devices",
            ({"token_rate": -1, "device_token_rate": 1, "devices": 1},)),
    Formula("samples/s of all = samples/s of one device x devices",
            ({"sample_rate": -1, "device_sample_rate": 1, "devices": 1},)),
    Formula("tokens/s x time of a step = global batch x length",
            _of_any_scope({"token_rate": 1, "step_s": 1, "batch": -1, "length": -1})),
    Formula("samples/s x time of a step = global batch",
            _of_any_scope({"sample_rate": 1, "step_s": 1, "batch": -1})),
    Formula("tokens = steps x global batch x length", ({"tokens": -1, "steps": 1, "batch": 1, "length": 1},)),
    Formula("tokens/s x time = tokens", _of_any_scope({"token_rate": 1, "time_s": 1, "tokens": -1})),
    _ratio_formula("speedup"),
    _ratio_formula("efficiency"),
)  # fmt: skip


@dataclass(frozen=True)
class Pair:
    """A row of a table as one side of a claim, and the row that it is compared with as the other."""

    grid: Grid
    row: int
    reference: int

    @cached_property
    def claim(self) -> Claim:
        base, other = (side_of(self.grid, row) for row in (self.reference, self.row))
        return claim_of(base, other)

    @cached_property
    def conditions(self) -> list[Condition]:
        return conditions(self.claim)

    def finds(self, rule: Rule, severity: str, message: str, corrected: str | None = None) -> Finding:
        return Finding(rule, self.claim.names[::-1], message, severity, corrected)


def figures_follow(grid: Grid) -> Iterator[Finding]:
    for formula in FORMULAS:
        reference = _reference(grid, formula.ratio)
        checked = _products(grid, formula, reference)
        apart = {row: found[0] for row, found in checked.items() if not any(map(_holds, found))}
        holding = len(checked) - len(apart)
        is_ratio = reference is not None
        if swapped := _swapped(grid, formula, reference, [*apart]):
            heading, (one, two) = said_of(grid, swapped[0]), (grid.lines[row] for row in swapped[1:])
            words = f"{heading} of lines {one} and {two} would follow from their figures if they were exchanged"
            yield fails(grid, swapped[2], Rule.FOLLOWS, words)
        elif (mixed := _counted_otherwise(checked)) and formula.ratio == "efficiency":
            lines = ", ".join(str(grid.lines[row]) for row in checked if row != mixed[0])
            words = f"is not counted as in line {lines}: one is of all devices, the other of one"
            yield fails(grid, mixed[0], Rule.FOLLOWS, f"{said_of(grid, formula.ratio, mixed[0])} {words}")
        # of a ratio one row against one is enough: the two do not go together
        else:
            divided_by = _other_reference(grid, formula, reference, [*apart]) if is_ratio and not holding else None
            is_told = len(apart) < holding or divided_by is not None or (is_ratio and len(apart) == max(holding, 1))
            for row, product in apart.items() if is_told else ():
                said, instead = _does_not_follow(grid, row, formula, product, reference)
                said += f"; it is of line {grid.lines[divided_by]}" if divided_by is not None else ""
                yield fails(grid, row, Rule.FOLLOWS, said, instead)


def _other_reference(grid: Grid, formula: Formula, reference: int | None, apart: list[int]) -> int | None:
    """Return the row from which all ratios follow that do not follow from the one that they are said to refer to."""
    for row in (row for row in range(len(grid.lines)) if row != reference and row not in apart):
        found = _products(grid, formula, row)
        if apart and all(at in found and any(map(_holds, found[at])) for at in apart):
            return row
    return None


def _swapped(grid: Grid, formula: Formula, reference: int | None, apart: list[int]) -> tuple[str, int, int] | None:
    """Return the ratio, and the two rows in which alone it does not follow and in which it would if exchanged."""
    column = grid.column(formula.ratio) if formula.ratio else None
    if column is None or formula.ratio is None or reference is None or len(apart) != 2:
        return None
    figures, (one, two) = list(column.figures), apart
    figures[one], figures[two] = figures[two], figures[one]
    exchanged = replace(column, figures=tuple(figures))
    turned = replace(grid, columns=tuple(exchanged if each is column else each for each in grid.columns))
    found = _products(turned, formula, reference)
    is_mended = all(row in found and any(map(_holds, found[row])) for row in apart)
    return (formula.ratio, one, two) if is_mended else None


def _counted_otherwise(checked: Mapping[int, list[Product]]) -> list[int]:
    """Return the rows, fewer than the others, that a formula counts in another way than all others: per device."""
    ways = {row: {tuple(powers.items()) for powers, _, _ in (each for each in found if _holds(each))}
            for row, found in checked.items()}  # fmt: skip
    by_rate = [{name for way in each for name, _ in way} & {*RATES} for each in ways.values()]
    if len(ways) < 2 or not set.intersection(*by_rate) or set.intersection(*ways.values()):
        return []
    alone = [row for row in ways if set.intersection(*(each for at, each in ways.items() if at != row))]
    return alone[:1]


def _does_not_follow(
    grid: Grid, row: int, formula: Formula, product: Product, reference: int | None
) -> tuple[str, str | None]:
    """Return what contradicts a figure, and for a ratio what would follow."""
    powers, low, high = product
    factor = (low * high) ** 0.5
    stated = grid.figure(formula.ratio, row) if formula.ratio else None
    if stated is None or formula.ratio is None or reference is None:
        ranks = ("dp", "devices", "tp", "pp") if DATA_RANKS in powers else ()
        shown = ", ".join(said_of(grid, name, row) for name in (*powers, *ranks) if grid.column(name))
        return f"{formula.words}: {shown} give {factor:.3g} times that", None
    value = f"{stated.value * factor:.3g}x" if formula.ratio == "speedup" else f"{stated.value * factor:.1%}"
    lines = grid.lines[row], grid.lines[reference]
    follows = "does not follow from the figures of its row"
    follows += f" and of line {lines[1]}" if lines[0] != lines[1] else ""
    heading = said_of(grid, formula.ratio)
    return f"{said_of(grid, formula.ratio, row)} {follows}", f"{heading} {value} would follow"


def _products(grid: Grid, formula: Formula, reference: int | None) -> dict[int, list[Product]]:
    """Return the rows that have all figures of a formula, with its product in each way to count."""
    found = {}
    for row in range(len(grid.lines)) if formula.ratio is None or reference is not None else ():
        products = (_product(grid, row, reference, powers) for powers in formula.variants if row != reference)
        known = [product for product in products if product]
        if known and not (formula.ratio and _has_unread_result(grid, row)):
            found[row] = known
    return found


def _has_unread_result(grid: Grid, row: int) -> bool:
    """Return whether a row has a result that is not read, as a marked one: the ratio may be of that."""
    columns = [column for column in grid.columns if column.quantity in POWERS and any(column.figures)]
    return any(column.figures[row] is None and re.search(r"\d", column.texts[row]) for column in columns)


def _product(grid: Grid, row: int, reference: int | None, powers: Powers) -> Product | None:
    low = high = 1.0
    for name, power in powers.items():
        quantity = name.removeprefix(FIRST)
        at = row if quantity == name or reference is None else reference
        figure = _data_ranks(grid, at) if quantity == DATA_RANKS else grid.figure(quantity, at)
        if quantity == "devices" and FIRST + quantity in powers:
            figure = figure or grid.figure("nodes", at)
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
    others = [grid.figure(name, row) for name in ("tp", "pp", "cp") if grid.column(name)]
    if devices is None or None in others:
        return None
    return exactly(devices.value / math.prod(figure.value for figure in others if figure))


def _reference(grid: Grid, name: str | None) -> int | None:
    """Return the reference row of a ratio: the only row with 1, or the only one that is marked as reference, of
    several the one that the heading names."""
    column = grid.column(name) if name else None
    if column is None or grid.columns[0].word == PASS:  # each row is a part of one run
        return None
    ones = [row for row, figure in enumerate(column.figures) if figure and abs(figure.value - 1) < 1e-9]
    if not ones:
        ones = [row for row, text in enumerate(column.texts)
                if is_reference(text) and column.figures[row] is None and not failure_of(grid, row)]  # fmt: skip
        if len(ones) > 1 and (against := _VERSUS.search(column.heading.lower())):
            ones = [row for row in ones if grid.columns[0].texts[row].lower() == against[1].strip(" )]")]
    return ones[0] if len(ones) == 1 else None


def reference_of(grid: Grid) -> int | None:
    """Return the row that the others are compared with: of a ratio, or else the first that has a rate or a time."""
    of_ratios = [row for name in RATIOS if (row := _reference(grid, name)) is not None]
    return next(iter(of_ratios), next((row for row in range(len(grid.lines)) if _has_result(grid, row)), None))


def _has_result(grid: Grid, row: int) -> bool:
    return any(grid.figure(name, row) for name in POWERS)


def whole_micro_batches(grid: Grid) -> Iterator[Finding]:
    """Check that micro batch x data ranks divides the global batch, where no column gives the accumulation."""
    counts = _batches(grid)
    apart = [row for row, (batch, samples) in counts.items() if batch % samples]
    for row in apart if 2 * len(apart) < len(counts) else ():
        said = "global batch {:,} is not a multiple of micro batch x data ranks = {:,}".format(*counts[row])
        yield fails(grid, row, Rule.FOLLOWS, said)


def _batches(grid: Grid) -> dict[int, tuple[int, int]]:
    """Return global batch, and micro batch x data ranks, of the rows that have them; none with an accumulation."""
    found = {}
    for row in range(len(grid.lines)) if not grid.column("accumulation") else ():
        batch, micro, ranks = grid.figure("batch", row), grid.figure("micro_batch", row), _data_ranks(grid, row)
        if batch and micro and ranks:
            found[row] = (round(batch.value), round(micro.value * ranks.value))
    return found


def rows_compare_with_their_reference(grid: Grid) -> Iterator[Finding]:
    """Answer every speed-up and efficiency against the row that it refers to, and rates against the fewest devices."""
    ratios = [name for name in RATIOS if grid.column(name)]
    for name in ratios:
        reference = _reference(grid, name)
        if reference is not None and (failed := failure_of(grid, reference)):
            said = f"{said_of(grid, name)} refers to a row that was not measured: {failed}"
            yield fails(grid, reference, Rule.POSSIBLE, said)
            continue
        for pair in _pairs(grid, name) if _is_referred_to(grid, name, reference) else ():
            yield from _against_reference(pair, name, said_of(grid, name, pair.row))
    yield from _not_measured(grid)
    yield from _of_expected_figures(grid)
    yield from _claimed_efficiencies(grid)
    for pair, sentence in _claimed_by_the_text(grid) if not ratios else ():
        words = textwrap.shorten(sentence, LONGEST_NOTE, placeholder=" ...")
        yield from _against_reference(pair, "speedup", f'"{words}"')
    yield from _contradicted_claims(grid)


def _is_referred_to(grid: Grid, name: str, row: int | None) -> bool:
    """Return whether a ratio of 1 is the reference of the others, and not 1 by chance.

    Where the rates of several rows can be divided by its own, one of them has to give the ratio. Where none can, it is
    the first or the last row, or has a name of a reference, which the heading may say too.
    """
    if row is None or grid.figure(name, row) is None:
        return row is not None
    checked = _products(grid, _ratio_formula(name), row)
    if len(checked) > 1:
        return any(any(map(_holds, found)) for found in checked.values())
    words = grid.columns[0].texts[row].lower()
    is_named = {*re.findall(r"[a-z]{3,}", words)} & {*said_of(grid, name).lower().split()}
    rows = [at for at in range(len(grid.lines)) if grid.figure(name, at)]
    return bool(checked or is_named) or row in (rows[0], rows[-1]) or _AS_REFERENCE.search(words) is not None


def _not_measured(grid: Grid) -> Iterator[Finding]:
    """Note a table of which the text says that it was not measured."""
    shown = next((column for column in grid.columns if column.quantity in RESULTS and any(column.figures)), None)
    if shown is None:
        return
    if grid.warning and not any(column.word == STATUS or _ESTIMATED.search(column.heading) for column in grid.columns):
        said = f"{shown.heading} may be no measurement; the text says of it: "
        said += textwrap.shorten(grid.warning, LONGEST_NOTE, placeholder=" ...")
        yield Finding(Rule.POSSIBLE, (grid.place(0),), said, NOTE)


def _of_expected_figures(grid: Grid) -> Iterator[Finding]:
    """Note speed-ups of a column whose heading says that it was not measured: beside a measured rate that their row
    lacks, or against another column of their row."""
    expected = [each for each in grid.columns if not each.quantity and value_of(STATUS, each.heading)]
    for column in expected if grid.column("speedup") else ():
        for row in range(len(grid.lines)):
            if grid.figure("speedup", row) and not _has_result(grid, row) and re.search(r"\d", column.texts[row]):
                said = (
                    f"{said_of(grid, 'speedup', row)} is of {column.heading} {column.texts[row]}: nothing was measured"
                )
                yield Finding(Rule.POSSIBLE, (grid.place(row),), said, NOTE)
    ratio = next((each for each in grid.columns if not each.quantity and quantity_of(each.heading) == "speedup"), None)
    for column in expected:
        if ratio and re.search(r"\d", column.texts[0]):
            said = f"{ratio.heading} may divide by, or be of, figures that are not measured: {column.heading}"
            yield Finding(Rule.POSSIBLE, (grid.place(0),), said, NOTE)


def _claimed_efficiencies(grid: Grid) -> Iterator[Finding]:
    """Find a sentence that gives a number of devices another efficiency than their row has against the fewest."""
    rows = [row for row in range(len(grid.lines)) if grid.devices[row] and _has_result(grid, row)]
    if not rows or len({grid.devices[row] for row in rows}) < len(rows):
        return
    reference = min(rows, key=lambda row: grid.devices[row] or 0)
    for devices, share, sentence in grid.said.efficiencies:
        for row in (row for row in rows if grid.devices[row] == devices and row != reference):
            pair = Pair(grid, row, reference)
            each = of_one_device(measures(pair.claim))
            if each and abs(each.ratio - share) > CLAIMED:
                words = textwrap.shorten(sentence, LONGEST_NOTE, placeholder=" ...")
                at, of = grid.lines[row], grid.lines[reference]
                said = f'"{words}": the figures of line {at} give {each.ratio:.0%} of line {of} for one device'
                yield pair.finds(Rule.FOLLOWS, FAILS, said)


def _claimed_by_the_text(grid: Grid) -> Iterator[tuple[Pair, str]]:
    """Yield the rows whose figures have the ratio that a sentence claims, and the sentence."""
    for rows, claimed, sentence in grid.said.claims:
        for row, reference in permutations(rows, 2):
            pair = Pair(grid, row, reference)
            gains = [each.ratio for each in measures(pair.claim) if abs(each.ratio / claimed - 1) <= CLAIMED]
            if gains and not failure_of(grid, reference) and (is_another_strategy(pair.claim) or gains[0] > 1):
                yield pair, sentence


def _contradicted_claims(grid: Grid) -> Iterator[Finding]:
    """Note a sentence that says of two rows how many times as fast one is, where no figure of them has that ratio."""
    for rows, claimed, sentence in grid.said.claims:
        named = grid.said.named.rows_in(sentence)
        if len(rows) != 2 or named != rows or not _OF_SPEED.search(sentence):
            continue
        if not grid.said.named.rows_in(re.split(r"(?i)\bthan\b", sentence)[0]):
            continue  # what is faster stands in another sentence
        pair = Pair(grid, *sorted(rows, reverse=True))
        ratios = [each.ratio for each in measures(pair.claim)]
        if ratios and all(abs(math.log(claimed) - abs(math.log(each))) > math.log(APART) for each in ratios):
            given = ", ".join(f"{max(each, 1 / each):.3g}x" for each in ratios)
            words = textwrap.shorten(sentence, LONGEST_NOTE, placeholder=" ...")
            yield pair.finds(Rule.FOLLOWS, NOTE, f'"{words}": the figures give {given}')


def _size(grid: Grid, row: int) -> int | None:
    """Return the devices of a row, or its nodes where only these are known."""
    nodes = grid.figure("nodes", row)
    return grid.devices[row] or (round(nodes.value) if nodes else None)


def _pairs(grid: Grid, name: str) -> list[Pair]:
    """Return each row that has a ratio, with the row that the ratio refers to."""
    reference = _reference(grid, name)
    rows = [row for row in range(len(grid.lines)) if row != reference and grid.figure(name, row)]
    return [Pair(grid, row, reference) for row in rows] if reference is not None else []


def _against_reference(pair: Pair, name: str, said: str) -> Iterator[Finding]:
    """Answer a ratio, of a column or in the words of a sentence, against the row that it refers to."""
    grid, row, claim = pair.grid, pair.row, pair.claim
    found = {each.name: each for each in pair.conditions if each.state == DIFFERS}
    kind = kind_of(claim)
    spoiled = [each for each in found.values() if each.spoils and not _is_meant(each, grid, name, claim)]
    names = {each.name for each in spoiled}
    is_weak = kind == SCALING and len(names) == 1 and names <= set(BATCHES)
    is_sound = is_weak and (name == "efficiency" or _is_in_proportion(found)) and grid.scaling != "strong"
    is_only_change = (
        len({*names} | {*found} & {"model"}) == 1 and kind == OF_STRATEGY and not is_another_strategy(claim)
    )
    differ = "; ".join(each.against for each in found.values() if each in spoiled or each.name == "ranks")
    differ += _per_device(claim)
    if kind == OF_BOTH and name == "speedup":  # an efficiency is of more devices, and no gain of a strategy
        strategies = " against ".join(str(strategy_of(side)) for side in (claim.other, claim.baseline))
        severity = FAILS if names & set(BATCHES) else NOTE
        yield pair.finds(Rule.EQUAL_WORK, severity, f"{said} is not of {strategies} alone: {differ}")
    elif is_weak and _divides_times(pair, name):
        heading = plain_heading(grid, "step_s")
        yield pair.finds(Rule.EQUAL_WORK, FAILS, f"{said} divides the {heading} of another batch: {differ}")
    elif (
        spoiled
        and not (is_only_change and not names & WORK_OF_A_TOKEN)
        and not is_sound  # which is what weak scaling reports
    ):
        is_strong = is_weak and grid.scaling == "strong"
        of = "is called strong scaling, and the batch grows" if is_strong else "compares rows of other work"
        yield pair.finds(Rule.EQUAL_WORK, NOTE, f"{said} {of}: {differ}")
    is_projected = "figures are" in found or _is_estimated(grid)
    if is_projected and not _ESTIMATED.search(plain_heading(grid, name)):
        yield pair.finds(Rule.POSSIBLE, NOTE, f"{said} is of a figure that its row does not call measured")
    if name == "speedup":
        stated = grid.figure("speedup", row) or exactly(next(measures(claim)).ratio)
        learnt = ("loss",) if _compares_models(grid) else LEARNS
        for each in (found[name] for name in learnt if name in found):
            if stated.low > 1 and learns_worse(claim, each):
                heading = "loss " if each.name == "loss" else ""
                message = f"{said} with {heading}{in_words(each.b)} against {in_words(each.a)}: {each.effect}"
                yield pair.finds(Rule.LOSSES, FAILS, message)
    if name == "speedup" or grid.column("speedup") is None:
        yield from _more_devices(pair)


def _is_meant(each: Condition, grid: Grid, ratio: str, claim: Claim) -> bool:
    """Return whether a condition that differs is what a speed-up is of, or is open: the page says it in its columns.

    A precision is; so are models, one a row or in the heading ("vs BERT Large"), and a CPU against a GPU.
    """
    if each.name == "model":
        against = _VERSUS.search(said_of(grid, ratio).lower())
        is_named = against is not None and {*re.findall(r"[a-z]{3,}", str(each.a).lower())} & {*against[1].split()}
        names = [text.lower() for text in grid.columns[0].texts]
        return (
            bool(is_named) or _compares_models(grid) or (grid.columns[0].word == MODEL and len({*names}) == len(names))
        )
    if each.name == "precision" and is_another_strategy(claim):
        words = " ".join((*grid.columns[0].texts, said_of(grid, ratio)))  # which may say that it is compared
        return FORMS[PRECISION].search(words) is not None
    return each.name in ("ranks", "figures are", "precision") or "cpu" in (str(each.a).lower(), str(each.b).lower())


def _is_in_proportion(found: Mapping[str, Condition]) -> bool:
    """Return whether the batch grows with the ranks: each has the same."""
    batch, ranks = next((found[name] for name in BATCHES if name in found), None), found.get("ranks")
    growth = [each.b / each.a for each in (batch, ranks)
              if each and isinstance(each.a, int) and isinstance(each.b, int) and each.a]  # fmt: skip
    return len(growth) == 2 and abs(growth[0] / growth[1] - 1) < NEARLY_EQUAL


def _compares_models(grid: Grid) -> bool:
    """Return whether rows are models, whose sizes the table prints: a distilled one is meant to be smaller."""
    return grid.columns[0].word == MODEL and grid.column("params") is not None


def _more_devices(pair: Pair) -> Iterator[Finding]:
    """Find more than linear gains, and losses, on more devices; both directions, whichever row is the reference."""
    few, many = (_size(pair.grid, row) for row in (pair.reference, pair.row))
    if not few or not many or few == many or is_another_strategy(pair.claim):
        return
    if many < few:
        pair = replace(pair, row=pair.reference, reference=pair.row)
        few, many = many, few
    added, what = many / few, "devices" if pair.grid.column("devices") else "nodes"
    speedup, at = (pair.grid.figure("speedup", row) for row in (pair.row, pair.reference))
    if not speedup or not at:
        efficiency = pair.grid.figure("efficiency", pair.row)
        if efficiency and efficiency.low > LINEAR:
            said = f"{said_of(pair.grid, 'efficiency', pair.row)} on {added:g} times the {what} is more than linear"
            yield replace(pair.finds(Rule.STEP_CLOCK, FAILS, said), runs=(pair.claim.names[1],))
        return
    gain, said = speedup.over(at), said_of(pair.grid, "speedup", pair.row)
    if gain.low > LINEAR * added:
        said = f"{said} on {added:g} times the {what} is more than linear"
        yield replace(pair.finds(Rule.STEP_CLOCK, FAILS, said), runs=(pair.claim.names[1],))
    elif gain.value < SLOWER and gain.high <= 1:
        said = f"more {what} were slower: {said} on {many:,} {what} against {few:,}"
        if not any(pair.grid.column(name) for name in POWERS):  # nothing but the heading says what the figures are
            said += ", unless the column has efficiencies"
        yield pair.finds(Rule.MORE_DEVICES, NOTE, f"{said} ({gain.value / added:.0%} efficiency)")


def _per_device(claim: Claim) -> str:
    """Return in words what one device does of what one of the reference does, where the devices' number differs."""
    each = of_one_device(measures(claim))
    is_other = claim.baseline.first.world_size != claim.other.first.world_size
    return f"; {each.ratio:.3g}x per device" if each and is_other else ""


def _divides_times(pair: Pair, name: str) -> bool:
    """Return whether a speed-up is the ratio of two step times, or an efficiency that ratio over the devices'."""
    powers = {name: -1, "step_s": -1, FIRST + "step_s": 1}
    powers |= {"devices": -1, FIRST + "devices": 1} if name == "efficiency" else {}
    product = _product(pair.grid, pair.row, pair.reference, powers)
    return product is not None and _holds(product)


def _is_estimated(grid: Grid) -> bool:
    """Return whether the heading of a time or a rate marks it as an estimate."""
    results = [column for column in grid.columns if column.quantity in RESULTS and column.quantity not in RATIOS]
    return any(_ESTIMATED.search(column.heading) for column in results)


def findings_of_table(grid: Grid) -> Iterator[Finding]:
    """Yield what the rules for tables find in one."""
    found = [finding for rule in TABLE_RULES for finding in rule(grid)]
    wrong = {name for each in found if each.rule == Rule.FOLLOWS for name in each.runs}
    for each in found:  # a row that contradicts itself is compared with none
        if each.rule != Rule.MORE_DEVICES or not wrong & {*each.runs}:
            yield each


def checks_of(grid: Grid) -> tuple[int, int]:
    """Return how many figures of a table could contradict another one or a limit, and by how many rules."""
    rows = range(len(grid.lines))
    pairs = [(name, pair) for name in RATIOS for pair in _pairs(grid, name)]
    by_rule: list[set[tuple[str, int | None]]] = [
        {("mfu", row) for row in rows if grid.figure("mfu", row)},
        {(name, row) for row in _batches(grid) for name in ("batch", "micro_batch")},
        {(name, pair.row) for name, pair in pairs if any(each.state != UNKNOWN for each in pair.conditions)},
    ]
    for formula in FORMULAS:
        reference = _reference(grid, formula.ratio)
        products = _products(grid, formula, reference)
        names = {row: {name for powers, _, _ in found for name in powers} for row, found in products.items()}
        by_rule.append({
            (name.removeprefix(FIRST), reference if name.startswith(FIRST) else row)
            for row, each in names.items() if len(products) > 1 or formula.ratio for name in each
        })  # fmt: skip
    return len(set().union(*by_rule)), sum(map(bool, by_rule))


TABLE_RULES: tuple[Callable[[Grid], Iterator[Finding]], ...] = (
    figures_follow,
    whole_micro_batches,
    no_device_does_more_than_its_peak,
    mfu_is_of_one_peak,
    rows_compare_with_their_reference,
)
