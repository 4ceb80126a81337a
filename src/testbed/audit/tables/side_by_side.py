"""Take apart tables that measure two things in two columns: "throughput - FP32" beside "throughput - mixed precision".

Each of their rows is a comparison of its own: it becomes a table of two rows, which the rules read like any other.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from testbed.audit.tables.columns import IN_WORDS, QUANTITIES, RESULTS, by_unit, only, quantity_of
from testbed.audit.tables.figures import figure_of, plain
from testbed.audit.tables.grid import Row, Table

COUNTS = ("micro_batch", "batch", "any_batch", "devices")
RATIO = re.compile(r"(?i)speed-?[ _]?up|\bfaster\b|\bgain\b|\bimprovement\b|\u6bd4$|^(?:ratio|rel\.?|x)$")
_WITH_UNIT = re.compile(
    r"(?i)~? ?\d[\d., ~-]*(?:ms|s|secs?|seconds|m|min(?:ute)?s?|h|hrs?|hours?|d|days?)\b(?!/(?!epoch|step|iter)).*"
)
HEADINGS = {"token_rate": "tokens/s", "device_token_rate": "tokens/s/gpu", "sample_rate": "samples/s",
            "step_rate": "steps/s"}  # fmt: skip
APART = 0.03  # of a ratio from that of its two figures
_DASHED = re.compile(r"(.+?) ?(?: -|: ) ?([^()]{1,40}?) ?(\([^()]{1,40}\))?")
_BRACKETED = re.compile(r"(.{1,60}?) ?\(([^()]{1,40})\)")


@dataclass(frozen=True)
class _Pair:
    """Two columns of one quantity, and what each is of."""

    quantity: str
    heading: str
    places: tuple[int, int]
    labels: tuple[str, str]


def side_by_side(table: Table) -> list[Table]:
    """Return a table of two rows for each row of a table that compares two columns; none for any other table.

    It has one column of ratios, and most of them are the ratio of one pair of times or rates: this pair is compared.
    """
    headings = [plain(heading) for heading in table.header]
    ratios = [place for place, heading in enumerate(headings) if RATIO.search(heading)]
    pairs = [] if len(ratios) != 1 else [*_pairs(headings, ratios[0]), *_of_cells(table, headings, ratios[0])]
    for pair in pairs:
        if pair.quantity in RESULTS:
            for way in (pair, _Pair(pair.quantity, pair.heading, pair.places[::-1], pair.labels[::-1])):
                if _is_meant(table, ratios[0], way):
                    others = [each for each in pairs if each.quantity in COUNTS]
                    return [_of_row(table, row, ratios[0], way, others) for row in table.rows if _is_read(row, way)]
    return []


def _pairs(headings: list[str], ratio: int) -> list[_Pair]:
    found: dict[tuple[str, str], list[tuple[int, str]]] = {}
    for place, heading in enumerate(headings):
        if place != ratio and (said := _labelled(heading)):
            quantity, plain_heading, label = said
            found.setdefault((quantity, plain_heading), []).append((place, label))
    return [
        _Pair(quantity, heading, (two[0][0], two[1][0]), (two[0][1], two[1][1]))
        for (quantity, heading), two in found.items()
        if len(two) == 2 and two[0][1] != two[1][1]
    ]


def _of_cells(table: Table, headings: list[str], ratio: int) -> list[_Pair]:
    """Return the only two columns whose cells are times by their units: "original" and "optimized", of "~8 min"."""
    cells = [[plain(row.cells[place]) for row in table.rows] for place in range(len(headings))]
    places = [
        place for place, heading in enumerate(headings)
        if place != ratio and not quantity_of(heading) and all(map(_WITH_UNIT.fullmatch, cells[place]))
    ]  # fmt: skip
    labels = tuple(headings[place] for place in places)
    return [_Pair("time_s", "time", tuple(places), labels)] if len(places) == 2 else []  # type: ignore[arg-type]


def _labelled(heading: str) -> tuple[str, str, str] | None:
    """Return quantity, heading without the label, and label: of "eager (us)", a time, and eager."""
    if match := _DASHED.fullmatch(heading):
        base = f"{match[1]} {match[3] or ''}".strip()
        return (quantity, base, match[2]) if (quantity := quantity_of(base)) else None
    if (match := _BRACKETED.fullmatch(heading)) and (quantity := quantity_of(match[1])):
        return (quantity, match[1], match[2]) if quantity_of(heading) == quantity else None
    if quantity_of(heading) is None and (unit := by_unit(heading)):  # "eager (us)", "our scan, ms", "ours_img_s"
        at = heading.lower().index(unit[2])
        label = re.sub(r"[\W_]+$", "", heading[:at])
        plain_heading = HEADINGS.get(unit[0], f"time ({unit[2].strip(' _,([')})")
        return (unit[0], plain_heading, label) if label else None
    return None


def _is_meant(table: Table, ratio: int, pair: _Pair) -> bool:
    """Return whether most ratios are of this pair, the second over the first in speed."""
    kind = QUANTITIES[pair.quantity][0]
    held = read = 0
    for row in table.rows:
        first, second = (figure_of(plain(row.cells[place]), kind) for place in pair.places)
        stated = figure_of(plain(row.cells[ratio]), "factor")
        if first and second and stated:
            before, after = (first, second) if kind == "time" else (second, first)
            read += 1
            held += before.low / after.high / (1 + APART) < stated.value < before.high / after.low * (1 + APART)
    return 2 * held > read


def _is_read(row: Row, pair: _Pair) -> bool:
    return all(figure_of(plain(row.cells[place]), QUANTITIES[pair.quantity][0]) for place in pair.places)


def _of_row(table: Table, row: Row, ratio: int, pair: _Pair, counts: list[_Pair]) -> Table:
    """Return a row as a table: the two things that it measures as rows, with what they share."""
    apart = {place for each in (pair, *counts) for place in each.places} | {ratio}
    headings = ["strategy", pair.heading, "speedup"]
    cells = [[label, row.cells[place]] for label, place in zip(pair.labels, pair.places, strict=True)]
    devices = [only(IN_WORDS["devices"], label) for label in pair.labels]
    if all(devices) and not any(quantity_of(plain(heading)) == "devices" for heading in table.header):
        counts = [*counts, _Pair("devices", "GPUs", (-1, -1), (str(devices[0]), str(devices[1])))]
    for two, text in zip(cells, ("1.00x", row.cells[ratio]), strict=True):
        two.append(text)
    for each in counts:
        headings.append(each.heading)
        is_turned = pair.places[0] > pair.places[1]
        for two, place, label in zip(cells, each.places[:: -1 if is_turned else 1], each.labels, strict=True):
            two.append(row.cells[place] if place >= 0 else label)
    for place, heading in enumerate(table.header):
        if place in apart or _labelled(plain(heading)):
            continue
        headings.append(heading)
        both = (
            re.fullmatch(r"(\d+) ?/ ?(\d+)", plain(row.cells[place])) if quantity_of(plain(heading)) in COUNTS else None
        )
        for at, two in enumerate(cells):
            two.append(both[at + 1] if both else row.cells[place])
    rows = tuple(Row(row.line, tuple(two), row.footnote, row.said) for two in cells)
    return Table(tuple(headings), rows, table.line, table.around)
