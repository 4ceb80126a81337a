"""Say what may explain a row that contradicts a formula: other work, another device, a count that no column gives."""

from __future__ import annotations

import math
import re

from testbed.audit.tables.fits import SLACK, Grid, Outlier
from testbed.audit.tables.intervals import interval_of, is_reference_row

RECOMPUTATION = math.log(4 / 3)  # FLOPs of activation checkpointing, counted or not
FAR = math.log(1.15)  # what two rows alone can hold against a third
COUNTS = ("devices", "nodes", "dp")  # grow together
BATCHES = ("batch", "micro_batch")
# Words in a row's label that stand for other work, other arithmetic or another device.
KIND = re.compile(
    r"fp\d+|tf32|bf16|int\d|amp|mixed|mxfp\d|nvfp4|\b(?:[abhlvt]|gb?h?)\d{2,4}\b|rtx|\b\d+(?:\.\d+)?[bm]\b|lora|frozen"
    r"|seq\w*[\s=_]*\d+|\b\d+k\b|checkpoint\w*|recompute\w*|offload\w*|compile\w*|xla|\bac\b|moe",
    re.I,
)
# In brackets behind a count, it counts something else: "1 (4 ranks each)". A frequency or a version is no count.
OWN_COUNT = re.compile(r"\((?![^()]*\d+(\.\d+)? ?([gm]?hz)\s*\)).*\d")
SIZE = re.compile(r"\d+(?:\.\d+)?[bm]")


def is_certain(grid: Grid, one: Outlier) -> bool:
    """Return whether nothing that the table says explains the row, and enough rows speak against it."""
    formula = one.formula
    if one.distance <= formula.slack / 2 or (formula.is_of_flops and is_near(one, RECOMPUTATION)):
        return False
    if any(OWN_COUNT.search(term.column.texts[one.row]) and term.column.is_setting for term in one.terms):
        return False  # "1 (4 ranks each)": the row says itself that it counts in another way
    if one.needs_support:
        return True
    if formula.is_one:
        return len(one.members) > 1 or one.distance > FAR
    if formula.is_definition:
        return not _is_second_reference(one) and not _has_another_reference(grid, one)
    if len(one.members) < 3 and one.distance <= FAR:
        return False
    if formula.subject == "devices" and any(column.texts[one.row] == "1" for column in grid.of("nodes")):
        return False  # one node need not be full
    return not _differs_in_what_it_ran(grid, one) and not _has_a_hidden_factor(one)


def _differs_in_what_it_ran(grid: Grid, one: Outlier) -> bool:
    """Return whether the row differs from those that agree in something that they have in common."""
    used = {id(term.column) for term in one.terms}
    has_count = any(term.column.quantity in COUNTS for term in one.terms)
    for column in grid.settings:
        if id(column) in used or (column.quantity in COUNTS and has_count):
            continue
        of_members, own = {column.texts[row] for row in one.members}, column.texts[one.row]
        if len(of_members) == 1 and own not in of_members:
            return True
        kinds = [kinds_in(text) for text in of_members]
        if column.quantity is None and kinds and not one.formula.is_of_any_kind:
            added = kinds_in(own).difference(*kinds)
            missing = kinds[0].intersection(*kinds) - kinds_in(own)
            sizes = {kind for each in kinds for kind in each if SIZE.fullmatch(kind)}
            if missing or any(not SIZE.fullmatch(kind) or len(sizes) < 2 for kind in added):
                return True
    return False


def kinds_in(text: str) -> set[str]:
    return set(KIND.findall(text.lower()))


def _has_a_hidden_factor(one: Outlier) -> bool:
    """Return whether a batch or a count that no column gives may explain the row: it misses by a small whole factor."""
    given = {term.column.quantity for term in one.terms}
    families = (COUNTS, BATCHES)
    given |= {name for family in families if given & set(family) for name in family}
    return not given.issuperset(one.formula.hidden) and _is_small_factor(one)


def _is_second_reference(one: Outlier) -> bool:
    """Return whether the row's ratio is 1 or left out, as in the row that the others refer to."""
    subject = one.terms[0].column
    is_one = [is_reference_row(subject, row) for row in (one.row, *one.members)]
    return subject.figures[one.row] is None or (is_one[0] and any(is_one[1:]))


def _has_another_reference(grid: Grid, one: Outlier) -> bool:
    """Return whether the ratio of the row follows from another row of the table that is a reference itself."""
    subject, slack = one.terms[0].column, one.formula.slack
    references = [row for row in range(len(grid.lines)) if row != one.row and is_reference_row(subject, row)]
    bases = (interval_of(one.terms[1:], row, within_row=True) for row in references)
    return not one.is_within_row and any(
        base is not None and one.low - slack <= base[1] and one.high + slack >= base[0] for base in bases
    )


def _is_small_factor(one: Outlier) -> bool:
    return any(is_near(one, math.log(factor)) for factor in (2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128))


def is_near(one: Outlier, factor: float) -> bool:
    """Return whether the row may miss by just a factor, up or down, given as its logarithm."""
    lowest, highest = one.low - one.agreed[1] - SLACK, one.high - one.agreed[0] + SLACK
    return lowest <= factor <= highest or lowest <= -factor <= highest
