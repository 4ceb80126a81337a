"""Read what `nsys stats` prints: text tables of any locale's digits, and CSV.

The text is cut at the ruler of dashes under each header, never at white space: names hold spaces, and French digits do.
A column has a known number of decimals. So the mark before them is the decimal mark in any locale, and whatever else
stands between digits separates groups. Every table is then checked against itself: averages against totals, percentages
against shares. What does not fit is an InputError with file and line: a number that is read wrongly looks like a
measurement.
"""

from __future__ import annotations

import csv
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from testbed.errors import InputError, one_line
from testbed.io import holding_together, read_regular

_STATISTICS = ("Avg", "Med", "Min", "Max", "StdDev")
_TIMES = tuple(f"{name} (ns)" for name in _STATISTICS)
_SIZES = tuple(f"{name} (MB)" for name in _STATISTICS)
# The six reports, and the columns that each has in this order (Nsight Systems 2021.2 to 2025.3).
REPORTS = {
    "nvtx_sum": ("Time (%)", "Total Time (ns)", "Instances", *_TIMES, "Style", "Range"),
    "osrt_sum": ("Time (%)", "Total Time (ns)", "Num Calls", *_TIMES, "Name"),
    "cuda_api_sum": ("Time (%)", "Total Time (ns)", "Num Calls", *_TIMES, "Name"),
    "cuda_gpu_kern_sum": ("Time (%)", "Total Time (ns)", "Instances", *_TIMES, "Name"),
    "cuda_gpu_mem_time_sum": ("Time (%)", "Total Time (ns)", "Count", *_TIMES, "Operation"),
    "cuda_gpu_mem_size_sum": ("Total (MB)", "Count", *_SIZES, "Operation"),
}
_NAMES_UNTIL_2022 = {
    "nvtxsum": "nvtx_sum",
    "osrtsum": "osrt_sum",
    "cudaapisum": "cuda_api_sum",
    "gpukernsum": "cuda_gpu_kern_sum",
    "gpumemtimesum": "cuda_gpu_mem_time_sum",
    "gpumemsizesum": "cuda_gpu_mem_size_sum",
}
_TEXT_COLUMNS = ("Style", "Range", "Name", "Operation")
_WHOLE_COLUMNS = ("Total Time (ns)", "Instances", "Num Calls", "Count", "Min (ns)", "Max (ns)")
_FIRST_COLUMNS = ("Time (%)", "Total (MB)")
_SEPARATOR = r"[,.'\u2019 \u00a0\u202f\u2009]"  # comma, dot, apostrophes, spaces: plain, no-break, narrow and thin
_WHOLE = rf"[0-9]+|[0-9]{{1,3}}(?:{_SEPARATOR}[0-9]{{2,3}})*{_SEPARATOR}[0-9]{{3}}"  # groups of two in India

_SOURCE = re.compile(r"Processing \[(?P<trace>[^\]]+)\] with \[(?P<script>[^\]]+)\]")
_HEADING = re.compile(r"\s*\*\* .* \((?P<report>[\w.:-]+)\):\s*")
_HEADING_OF_PROFILE = re.compile(r"\[\d+/\d+\] Executing '(?P<report>[\w.:-]+)' stats report")  # nsys profile --stats
_RULER = re.compile(r" *-{2,}(?: +-{2,})+ *")
_LOOKS_LIKE_A_ROW = re.compile(r" *\d[\d.,]* {2,}\d\S*(?: +\d\S*){3,}")


@dataclass(frozen=True)
class Row:
    """One line of a table: nanoseconds (whole) where the report is about time, megabytes (10^6) where about size.

    `med` and `stddev` are None where rows of several traces were added up; `raw` is the line as nsys printed it.
    """

    name: str
    total: int | float
    count: int
    avg: float
    med: float | None
    min: int | float
    max: int | float
    stddev: float | None
    time_percent: float | None = None
    style: str | None = None
    raw: str | None = field(default=None, compare=False)


@dataclass(frozen=True)
class StatsTable:
    """One report of one trace, its rows in the order of the file."""

    report: str
    rows: tuple[Row, ...]

    @property
    def total(self) -> int | float:
        return sum(row.total for row in self.rows)


@dataclass(frozen=True)
class Stats:
    """Content of one file. `trace` names the trace it was made from, so that one trace is never counted twice."""

    path: Path
    kind: str  # "text" or "csv"
    trace: str
    tables: dict[str, StatsTable]
    not_read: tuple[str, ...] = ()  # reports that this reader does not know


@dataclass(frozen=True)
class _Cells:
    """A table before its numbers are understood; the rows are (line number, line, cells)."""

    report: str
    line: int
    rows: list[tuple[int, str, list[str]]]


def read_stats(path: Path) -> Stats:
    """Read the tables in a file that `nsys stats` printed, as text or with `--format csv`.

    InputError names file and line of what does not fit, or says that there is no table.
    """
    try:
        return _read(Path(path))
    except ValueError as error:  # it repeats cells of the file, which can hold anything
        raise InputError(one_line(str(error))) from None


def _read(path: Path) -> Stats:
    lines, is_whole = _lines(path)
    is_csv = any(line.startswith(tuple(f"{name}," for name in _FIRST_COLUMNS)) for line in lines)
    cells, not_read = (_csv_tables if is_csv else _text_tables)(path, lines)
    if not cells:
        raise InputError(f"{path} holds no table of nsys stats; make it with: nsys stats REPORT.nsys-rep > {path.name}")
    if not is_whole and cells[-1].rows[-1][0] == len(lines):
        raise InputError(f"{path} line {len(lines)}: the file ends inside a table row, it was cut off")
    tables: dict[str, StatsTable] = {}
    for table in cells:
        if table.report in tables:
            raise InputError(
                f"{path} line {table.line}: a second {table.report} table; keep one trace per file, so that "
                "it is known what belongs together"
            )
        with holding_together(path):  # a number of thousands of digits, say
            tables[table.report] = _checked_table(path, table, is_csv)
    traces = {Path(found["trace"].replace("\\", "/")).stem for found in map(_SOURCE.search, lines) if found}
    if len(traces) > 1:
        raise InputError(f"{path} is made of several traces ({', '.join(sorted(traces))}); keep one trace per file")
    trace = traces.pop() if traces else re.sub(f"_({'|'.join(REPORTS)})$", "", path.stem)
    return Stats(path, "csv" if is_csv else "text", trace, tables, tuple(not_read))


def _lines(path: Path) -> tuple[list[str], bool]:
    """Return the file's lines, and whether the last one is ended."""
    content = read_regular(path)
    # Windows shells redirect as UTF-16
    encoding = "utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise InputError(f"{path} line {line}: this is not {encoding.removesuffix('-sig').upper()} text") from None
    lines = text.replace("\r\n", "\n").split("\n")  # splitlines would also split at characters that names can hold
    return (lines[:-1], True) if lines[-1] == "" else (lines, False)


def _text_tables(path: Path, lines: list[str]) -> tuple[list[_Cells], list[str]]:
    """Return the tables, each under the heading that names its report, and the reports that are not known here."""
    headings = {
        number: found["report"]
        for number, line in enumerate(lines)
        if (found := _HEADING.fullmatch(line) or _HEADING_OF_PROFILE.match(line))
    }
    tables: list[_Cells] = []
    not_read: list[str] = []
    _check_outside(path, lines, 0, min(headings, default=len(lines)))
    for heading, end in itertools.pairwise([*headings, len(lines)]):
        report = _known_name(headings[heading])
        start = next((number for number in range(heading + 1, end) if lines[number].strip()), end)
        if report is None:
            not_read.append(headings[heading])
        elif start == end or not (lines[start].startswith("SKIPPED") or _SOURCE.match(lines[start])):
            tables.append(_text_table(path, lines, report, heading, start))
            _check_outside(path, lines, start + 2 + len(tables[-1].rows), end)
    return tables, not_read


def _check_outside(path: Path, lines: list[str], start: int, end: int) -> None:
    for number in range(start, end):
        if _RULER.fullmatch(lines[number]):
            raise InputError(f"{path} line {number + 1}: a table without the heading that names its report")
        if _LOOKS_LIKE_A_ROW.match(lines[number]):
            raise InputError(f"{path} line {number + 1}: a row outside of a table: {lines[number].strip()!r}")


def _text_table(path: Path, lines: list[str], report: str, heading: int, start: int) -> _Cells:
    """Read the table whose header is line `start`, from 0."""
    if start + 1 >= len(lines):
        raise InputError(f"{path} line {heading + 1}: the file ends before the table of {report}, it was cut off")
    if not _RULER.fullmatch(lines[start + 1]):
        raise InputError(f"{path} line {start + 2}: under the header of {report} should be a ruler of dashes")
    spans = [match.span() for match in re.finditer("-+", lines[start + 1])]
    header = _cut(path, start + 1, lines[start], spans)
    _check_columns(path, start + 1, report, header)
    rows = []
    for number, line in enumerate(itertools.takewhile(str.strip, lines[start + 2 :]), start + 3):
        cells = _cut(path, number, line, spans)
        if "" in cells:
            column = header[cells.index("")]
            raise InputError(
                f"{path} line {number}: nothing stands under {column!r}; the row does not fit the ruler, or was cut off"
            )
        rows.append((number, line, cells))
    if not rows:
        raise InputError(f"{path} line {start + 2}: the table of {report} has no rows, it was cut off")
    return _Cells(report, start + 1, rows)


def _cut(path: Path, line_number: int, line: str, spans: Sequence[tuple[int, int]]) -> list[str]:
    """Return the cells of a line. Between the dashes it must be blank, or it does not belong to the ruler."""
    edges = [0, *(edge for span in spans for edge in span), len(line)]
    for gap_start, gap_end in zip(edges[::2], edges[1::2], strict=True):
        if line[gap_start:gap_end].strip(" "):
            raise InputError(
                f"{path} line {line_number}: does not fit the ruler of dashes, {line[gap_start:gap_end].strip(' ')!r} "
                f"stands between two columns (column {gap_start + 1} of the line)"
            )
    return [line[start:end].strip(" ") for start, end in spans]


def _csv_tables(path: Path, lines: list[str]) -> tuple[list[_Cells], list[str]]:
    """Return what `_text_tables` does. A line of nsys's names the report, or else the file's name or the columns do."""
    tables: list[_Cells] = []
    not_read: list[str] = []
    report, is_named, table = next((name for name in REPORTS if path.stem.endswith(name)), None), False, None
    for first, last, cells in _csv_rows(path, lines):
        if source := _SOURCE.search(lines[first]):
            script = Path(source["script"].replace("\\", "/")).stem
            report, is_named, table = _known_name(script), True, None
            not_read += [script] if report is None else []
        elif not cells or cells[0].startswith(("SKIPPED", "Generating", "NOTICE")):
            table = None
        elif cells[0] in _FIRST_COLUMNS:
            found = report if report or is_named else _report_with_columns(path, first + 1, cells)
            table = _Cells(found, first + 1, []) if found else None
            if found and table:
                _check_columns(path, first + 1, found, cells)
                tables.append(table)
        elif table:
            columns, raw = REPORTS[table.report], "\n".join(lines[first:last])
            if len(cells) != len(columns) or "" in cells:
                raise InputError(f"{path} line {first + 1}: {len(cells)} cells under {len(columns)} columns: {raw!r}")
            table.rows.append((last, raw, cells))
    for table in tables:
        if not table.rows:
            raise InputError(f"{path} line {table.line}: the table of {table.report} has no rows, it was cut off")
    return tables, not_read


def _csv_rows(path: Path, lines: list[str]) -> Iterator[tuple[int, int, list[str]]]:
    """Yield the cells of each row with its first line and the line after its last, from 0: a name can hold a line's
    end."""
    reader = csv.reader((line + "\n" for line in lines), strict=True)
    first = 0
    try:
        for cells in reader:
            yield first, reader.line_num, cells
            first = reader.line_num
    except csv.Error as error:
        raise InputError(f"{path} line {reader.line_num}: this is not CSV: {error}") from None


def _known_name(report: str) -> str | None:
    name = report.partition(":")[0]  # what stands behind a colon are the report's options
    name = _NAMES_UNTIL_2022.get(name, name)
    return name if name in REPORTS else None


def _report_with_columns(path: Path, line: int, header: list[str]) -> str:
    fitting = [name for name, columns in REPORTS.items() if list(columns) == header]
    if len(fitting) != 1:
        raise InputError(f"{path} line {line}: which report has the columns {', '.join(header)}?")
    return fitting[0]


def _check_columns(path: Path, line: int, report: str, header: Sequence[str]) -> None:
    expected = REPORTS[report]
    if tuple(header) == expected:
        return
    unknown = [name for name in header if name not in expected]
    missing = [name for name in expected if name not in header]
    said = [f"has unknown columns {', '.join(map(repr, unknown))}"] if unknown else []
    said += [f"lacks {', '.join(map(repr, missing))}"] if missing else []
    hint = " (leave --timeunit out)" if any(re.search(r"\((us|ms|s\w*|\w+sec)\)", name) for name in unknown) else ""
    raise InputError(f"{path} line {line}: {report} {' and '.join(said) or 'has its columns in another order'}{hint}")


def _number(where: str, column: str, text: str, is_csv: bool) -> tuple[int | float, float]:
    """Return the number in a cell, and how far it can be from the one that nsys rounded: 0 for a whole number."""
    decimals = 0 if column in _WHOLE_COLUMNS else 3 if "(MB)" in column else 1
    if is_csv and decimals and (plain := re.fullmatch(r"[0-9]+\.([0-9]+)", text)):
        decimals = len(plain[1])  # CSV is not rounded to the widths of the text
    parts = re.fullmatch(rf"({_WHOLE})" + (rf"[.,]([0-9]{{{decimals}}})" if decimals else "()"), text)
    if parts is None:
        kind = f"a number with {decimals} decimal{'s' * (decimals > 1)}" if decimals else "a whole number"
        raise InputError(f"{where}: {column} is {text!r}, which is not {kind}")
    whole = re.sub(_SEPARATOR, "", parts[1])
    return (float(f"{whole}.{parts[2]}"), 0.5 * 10**-decimals) if decimals else (int(whole), 0.0)


def _checked_table(path: Path, table: _Cells, is_csv: bool) -> StatsTable:
    """Return the numbers of a table, held against each other: a wrong digit rarely survives three sums."""
    columns = REPORTS[table.report]
    has_percent = columns[0] == "Time (%)"
    total_column, count_column, avg_column = columns[has_percent : has_percent + 3]
    rows = []
    for line, raw, cells in table.rows:
        where = f"{path} line {line}"
        named = dict(zip(columns, cells, strict=True))
        numbers = {
            column: _number(where, column, cell, is_csv)
            for column, cell in named.items()
            if column not in _TEXT_COLUMNS
        }
        values = [value for value, _ in numbers.values()]
        percent = values.pop(0) if has_percent else None
        total, count, avg, med, low, high, stddev = values
        if count < 1:
            raise InputError(f"{where}: {count_column} is {count}, but a row stands for at least one")
        rounding = numbers[avg_column][1]
        slack = rounding + numbers[total_column][1] / count
        if abs(avg - total / count) > 1.001 * slack + 1e-12 * avg:
            raise InputError(f"{where}: {avg_column} is {avg}, but {total} / {count} is {total / count:.3f}")
        if not low - rounding <= avg <= high + rounding or not low - rounding <= med <= high + rounding:
            raise InputError(f"{where}: the average {avg} and the median {med} should lie between {low} and {high}")
        rest = (float(avg), float(med), low, high, float(stddev), percent, named.get("Style"), raw)
        rows.append(Row(named[columns[-1]], total, int(count), *rest))
    if has_percent:
        _check_percentages(path, table, rows)
    return StatsTable(table.report, tuple(rows))


def _check_percentages(path: Path, table: _Cells, rows: Sequence[Row]) -> None:
    percents = [row.time_percent for row in rows if row.time_percent is not None]
    added = sum(percents)
    if abs(added - 100) > 0.05 * len(rows) + 0.05:  # each is rounded to 0.1
        raise InputError(
            f"{path} line {table.line}: the percentages of {table.report} add up to {added:.1f}, not to 100: rows are "
            "missing"
        )
    total = sum(row.total for row in rows)
    for (line, _, _), row, percent in zip(table.rows, rows, percents, strict=True):
        share = 100 * row.total / total if total else percent
        if abs(share - percent) > 0.0501:
            raise InputError(
                f"{path} line {line}: Time (%) is {row.time_percent}, but its time is {share:.2f} % of the table's: "
                "a row is missing or a number is damaged"
            )
