"""Change single figures in copies of real files, and count the changes that the audit finds.

Only a figure that the rest of its row or of its log determines is changed, and by more than rounding leaves open: in a
table, one of a formula that holds in its row; in a log, one of a line that says the same in another unit.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from testbed.audit.claims import FAILS, audit_runs, read_reported
from testbed.audit.log_lines import LogLine, Relation
from testbed.audit.readers.text import text_of
from testbed.audit.reported import Reported
from testbed.audit.tables.agreement import best_fits
from testbed.audit.tables.figures import NUMBER
from testbed.audit.tables.intervals import interval_of
from testbed.audit.tables.relations import FORMULAS
from testbed.errors import InputError
from testbed.experiments.field_audit.material import TABLE, Material

LEAST_CHANGE, MOST_CHANGE = 1.03, 10.0
EXCHANGED_DIGITS = 0.3  # of the changes
ROWS_OF_A_CONSTANT = 4  # with fewer, two rows against one may be of two kinds
TRIES = 200
LONGEST_LOG = 200_000  # characters that are read again for each change
FEWEST_LINES = 4
FIGURES_OF_A_STEP, MOST_FIGURES = 3, 40  # in a line of a log that is of a step
PRINTED = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?![\w.]*\d)")


@dataclass(frozen=True)
class Planted:
    """One changed figure: the text before and after, and the line that holds it."""

    material: Material
    line: int
    before: str
    after: str
    is_found: bool


@dataclass(frozen=True)
class Cell:
    """A figure of a table that a formula and the rest of its row determine."""

    line: int
    text: str
    least_change: float  # its logarithm, beyond which rounding explains nothing
    power: int


def plant(materials: Sequence[Material], folder: Path, number: int, seed: int) -> list[Planted]:
    """Return `number` changes, half of them in tables as long as there are logs, spread evenly over the projects."""
    rng = random.Random(seed)
    tables: dict[str, list[Any]] = {}  # (material, cell) of each project
    logs: dict[str, list[Any]] = {}  # material
    for material in materials:
        if material.kind == TABLE:
            for cell in determined_cells(material.place(folder)):
                tables.setdefault(material.repository, []).append((material, cell))
        elif _has_sound_relations(_read_file(material.place(folder))):
            logs.setdefault(material.repository, []).append(material)
    planted: list[Planted] = []
    while len(planted) < number and (tables or logs):
        is_table = bool(tables) and (not logs or len(planted) % 2 == 0)
        kinds = tables if is_table else logs
        project = rng.choice(sorted(kinds))
        chosen = rng.choice(kinds[project])
        one = plant_in_table(chosen[0], chosen[1], folder, rng) if is_table else plant_in_log(chosen, folder, rng)
        if one:
            planted.append(one)
        else:
            kinds[project].remove(chosen)
            if not kinds[project]:
                del kinds[project]
    return planted


def determined_cells(path: Path) -> list[Cell]:
    """Return the figures of a file's tables that enter a formula which holds, in rows of which nothing is said."""
    items = _read_file(path)
    accused = {run.rpartition(":")[2] for finding in audit_runs(items) for run in finding.runs}
    found: dict[tuple[int, str], Cell] = {}
    for grid in (grid for item in items for grid in item.details.get("grids", ())):
        for formula in FORMULAS:
            for fit in best_fits(grid, formula):
                fewest = 2 if formula.is_one or formula.is_definition else ROWS_OF_A_CONSTANT
                if not fit.is_sound or fit.outliers or len(fit.rows) < fewest or fit.support < 1:
                    continue
                for row in fit.rows:
                    ends = interval_of(fit.terms, row, within_row=formula.is_one)
                    if ends is None or str(grid.lines[row]) in accused:
                        continue
                    for term in fit.terms:
                        if term.column.figures[row]:
                            cell = Cell(grid.lines[row], term.column.texts[row], ends[1] - ends[0], term.power)
                            found.setdefault((cell.line, term.column.heading), cell)
    return list(found.values())


def plant_in_table(material: Material, cell: Cell, folder: Path, rng: random.Random) -> Planted | None:
    """Change the figure of a cell; None where its text does not stand once in its line."""
    path = material.place(folder)
    lines = text_of(path).split("\n")
    number = NUMBER.search(cell.text)
    if not number or lines[cell.line - 1].count(number[2]) != 1:
        return None
    after = changed(number[2], cell.least_change / abs(cell.power), rng)
    if after is None:
        return None
    lines[cell.line - 1] = lines[cell.line - 1].replace(number[2], after)
    findings = _findings(path, "\n".join(lines))
    is_found = any(run.endswith(f":{cell.line}") for finding in findings for run in finding.runs)
    return Planted(material, cell.line, number[2], after, is_found)


def plant_in_log(material: Material, folder: Path, rng: random.Random) -> Planted | None:
    """Change a figure of a line that another figure of it determines; None where none was met."""
    path = material.place(folder)
    text = text_of(path)
    if len(text) > LONGEST_LOG and path.suffix != ".json":
        text = text[:LONGEST_LOG].rpartition("\n")[0]
    lines = text.split("\n")
    before = _read(path, text)
    if not _has_sound_relations(before):
        return None
    fewest = 1 if path.suffix == ".json" else FIGURES_OF_A_STEP
    places = [index for index, line in enumerate(lines) if fewest <= len(PRINTED.findall(line)) <= MOST_FIGURES]
    for _ in range(TRIES if places else 0):
        index = rng.choice(places)
        number = rng.choice(list(PRINTED.finditer(lines[index])))
        after = changed(number[0], 0.0, rng)
        if after is None:
            continue
        line = lines[index][: number.start()] + after + lines[index][number.end() :]
        items = _read(path, "\n".join([*lines[:index], line, *lines[index + 1 :]]))
        if len(items) == 1 and _is_determined(before[0], items[0]):
            is_found = any(finding.severity == FAILS for finding in audit_runs(items))
            return Planted(material, index + 1, number[0], after, is_found)
    return None


def changed(text: str, least: float, rng: random.Random) -> str | None:
    """Return another figure printed like this one, or with two of its digits exchanged; None where that is too near.

    `least` is the logarithm of the change below which rounding could explain it.
    """
    plain = text.replace(",", "")
    if not re.fullmatch(r"\d+(\.\d+)?", plain) or float(plain) == 0:
        return None
    decimals = len(plain.partition(".")[2])
    for _ in range(20):
        if rng.random() < EXCHANGED_DIGITS:
            places = [place for place in range(len(plain) - 1) if "." not in plain[place : place + 2]]
            if not places:
                continue
            place = rng.choice(places)
            value = float(plain[:place] + plain[place + 1] + plain[place] + plain[place + 2 :])
        else:
            factor = math.exp(rng.uniform(math.log(LEAST_CHANGE), math.log(MOST_CHANGE)))
            value = float(plain) * rng.choice((factor, 1 / factor))
        after = f"{value:,.{decimals}f}" if "," in text else f"{value:.{decimals}f}"
        number = float(after.replace(",", ""))
        if number > 0 and abs(math.log(number / float(plain))) > max(least, math.log(LEAST_CHANGE)):
            return after
    return None


def _is_determined(before: Reported, after: Reported) -> bool:
    """Return whether one line now says what no other line of the log says, in a relation that held in all of them."""
    if len(before.lines) != len(after.lines) or len(before.lines) < FEWEST_LINES:
        return False
    moved = [index for index, (old, new) in enumerate(zip(before.lines, after.lines, strict=True)) if old != new]
    return len(moved) in (1, 2) and any(
        relation.words in {other.words for other in after.relations}
        and _is_outside(relation, before.lines, after.lines[moved[0]], moved[0])
        for relation in before.relations
    )


def _is_outside(relation: Relation, lines: Sequence[LogLine], line: LogLine, index: int) -> bool:
    intervals = [ends for each in lines if (ends := relation.interval(each))]
    old, new = relation.interval(lines[index]), relation.interval(line)
    if not old or not new or len(intervals) < FEWEST_LINES:
        return False
    is_held = max(low for low, _ in intervals) <= min(high for _, high in intervals)
    lowest, highest = min(low for low, _ in intervals), max(high for _, high in intervals)
    return is_held and (new[1] < lowest or new[0] > highest)


def _has_sound_relations(items: Sequence[Reported]) -> bool:
    """Return whether a log has lines to compare, and no claim of it falls as it is."""
    is_of_lines = len(items) == 1 and bool(items[0].relations) and len(items[0].lines) >= FEWEST_LINES
    return is_of_lines and not any(finding.severity == FAILS for finding in audit_runs(items))


def _findings(path: Path, text: str) -> list[Any]:
    return audit_runs(_read(path, text))


def _read(path: Path, text: str) -> list[Reported]:
    with TemporaryDirectory() as folder:
        copy = Path(folder) / path.name
        copy.write_text(text, encoding="utf-8")
        return _read_file(copy)


def _read_file(path: Path) -> list[Reported]:
    """Return the runs of a file, or none where it is of no known format."""
    try:
        return read_reported([path])
    except InputError:
        return []


def clean_rows(materials: Sequence[Material], folder: Path, number: int, seed: int) -> list[tuple[Material, int, bool]]:
    """Return random rows of files that were found clean by hand, and whether the audit says something of them."""
    rows = list(_rows([material for material in materials if material.clean], folder))
    random.Random(seed).shuffle(rows)
    return rows[:number]


def _rows(materials: Sequence[Material], folder: Path) -> Iterator[tuple[Material, int, bool]]:
    for material in materials:
        items = _read_file(material.place(folder))
        accused = {run.rpartition(":")[2] for finding in audit_runs(items) for run in finding.runs}
        for line in (line for item in items for grid in item.details.get("grids", ()) for line in grid.lines):
            yield material, line, str(line) in accused
