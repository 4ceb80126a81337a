"""What `nsys stats` prints, as numbers: text tables of any locale's digits, and CSV.

The text is cut at the ruler of dashes under each header, never at white space: names hold spaces, and French digits do.
How a number is written (digit groups, decimal mark) is decided once per file from all of its numbers: the column says
how many decimals there are, so the mark is known and what is left are group separators. Every table is then checked
against itself: averages against totals, percentages against shares. What does not fit is a ValueError with file and
line, because a number that is read wrongly looks like a measurement.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from testbed.analysis.profiles.nsight_numbers import Number, NumberStyle, number_style
from testbed.errors import one_line
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
    """What one file holds. `trace` names the trace it was made from, so that one trace is never counted twice."""

    path: Path
    kind: str  # "text", "csv" or "sqlite"
    trace: str
    tables: dict[str, StatsTable]
    without_data: tuple[str, ...] = ()  # reports that nsys skipped, because the trace holds nothing for them
    not_read: tuple[str, ...] = ()  # reports that this reader does not know


@dataclass
class _Cells:
    """A table before its numbers are understood; the rows are (line number, line, cells)."""

    report: str
    line: int
    rows: list[tuple[int, str, list[str]]]
    any_decimals: bool = False  # CSV is not rounded to the widths of the text


def read_stats(path: Path) -> Stats:
    """The tables in a file that `nsys stats` printed, as text or with `--format csv`.

    ValueError names file and line of what does not fit, or says that there is no table.
    """
    try:
        return _read(Path(path))
    except ValueError as error:  # it repeats cells of the file, which can hold anything
        raise ValueError(one_line(str(error))) from None


def _read(path: Path) -> Stats:
    lines, is_whole = _lines(path)
    is_csv = any(line.startswith(("Time (%),", "Total (MB),")) for line in lines)
    cells, without_data, not_read = (_csv_tables if is_csv else _text_tables)(path, lines)
    if not cells:
        raise ValueError(f"{path} holds no table of nsys stats; make it with: nsys stats REPORT.nsys-rep > {path.name}")
    if not is_whole and cells[-1].rows[-1][0] == len(lines):
        raise ValueError(f"{path} line {len(lines)}: the file ends inside a table row, it was cut off")
    style = number_style(path, _numbers(cells))
    tables = {}
    for table in cells:
        if table.report in tables:
            raise ValueError(
                f"{path} line {table.line}: a second {table.report} table; keep one trace per file, so that "
                "it is known what belongs together"
            )
        with holding_together(path):  # a number of thousands of digits, say
            tables[table.report] = _checked_table(path, table, style)
    traces = {Path(found["trace"].replace("\\", "/")).stem for found in map(_SOURCE.search, lines) if found}
    if len(traces) > 1:
        raise ValueError(f"{path} is made of several traces ({', '.join(sorted(traces))}); keep one trace per file")
    trace = traces.pop() if traces else re.sub(f"_({'|'.join(REPORTS)})$", "", path.stem)
    return Stats(path, "csv" if is_csv else "text", trace, tables, tuple(without_data), tuple(not_read))


def _lines(path: Path) -> tuple[list[str], bool]:
    """The file's lines, and whether the last one is ended."""
    content = read_regular(path)
    # Windows shells redirect as UTF-16
    encoding = "utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ValueError(f"{path} line {line}: this is not {encoding.removesuffix('-sig').upper()} text") from None
    lines = text.replace("\r\n", "\n").split("\n")  # splitlines would also split at characters that names can hold
    return (lines[:-1], True) if lines[-1] == "" else (lines, False)


def _text_tables(path: Path, lines: list[str]) -> tuple[list[_Cells], list[str], list[str]]:
    tables: list[_Cells] = []
    without_data: list[str] = []
    not_read: list[str] = []
    number = 0
    while number < len(lines):
        heading = _HEADING.fullmatch(lines[number]) or _HEADING_OF_PROFILE.match(lines[number])
        if heading is None:
            if _RULER.fullmatch(lines[number]) and not not_read:
                raise ValueError(f"{path} line {number + 1}: a table without the heading that names its report")
            if _LOOKS_LIKE_A_ROW.match(lines[number]) and not not_read:
                raise ValueError(f"{path} line {number + 1}: a row outside of a table: {lines[number].strip()!r}")
            number += 1
            continue
        report = _known_name(heading["report"])
        start = _next_line_with_text(lines, number + 1)
        if report is None:
            not_read.append(heading["report"])
            number += 1
            while number < len(lines) and not (
                _HEADING.fullmatch(lines[number]) or _HEADING_OF_PROFILE.match(lines[number])
            ):
                number += 1
        elif start < len(lines) and (lines[start].startswith("SKIPPED") or _SOURCE.match(lines[start])):
            without_data.append(report)
            number = start + 1
        else:
            table, number = _text_table(path, lines, report, number, start)
            tables.append(table)
    skipped = _skipped_reports(lines)
    return tables, [*without_data, *(name for name in skipped if name not in without_data)], not_read


def _text_table(path: Path, lines: list[str], report: str, heading: int, start: int) -> tuple[_Cells, int]:
    """The table whose header is line `start` (from 0), and the number of the line after it."""
    if start + 1 >= len(lines):
        raise ValueError(f"{path} line {heading + 1}: the file ends before the table of {report}, it was cut off")
    if not _RULER.fullmatch(lines[start + 1]):
        raise ValueError(f"{path} line {start + 2}: under the header of {report} should be a ruler of dashes")
    spans = [match.span() for match in re.finditer("-+", lines[start + 1])]
    header = _cut(path, start + 1, lines[start], spans)
    _check_columns(path, start + 1, report, header)
    rows = []
    number = start + 2
    while number < len(lines) and lines[number].strip():
        cells = _cut(path, number + 1, lines[number], spans)
        if "" in cells:
            column = header[cells.index("")]
            raise ValueError(
                f"{path} line {number + 1}: nothing stands under {column!r}; the row does not fit the ruler, or was "
                "cut off"
            )
        rows.append((number + 1, lines[number], cells))
        number += 1
    if not rows:
        raise ValueError(f"{path} line {number}: the table of {report} has no rows, it was cut off")
    return _Cells(report, start + 1, rows), number


def _cut(path: Path, line_number: int, line: str, spans: Sequence[tuple[int, int]]) -> list[str]:
    """The cells of a line; the places between the dashes must be blank, or the line does not belong to the ruler."""
    edges = [0, *(edge for span in spans for edge in span), len(line)]
    for gap_start, gap_end in zip(edges[::2], edges[1::2], strict=True):
        if line[gap_start:gap_end].strip(" "):
            raise ValueError(
                f"{path} line {line_number}: does not fit the ruler of dashes, {line[gap_start:gap_end].strip(' ')!r} "
                f"stands between two columns (column {gap_start + 1} of the line)"
            )
    return [line[start:end].strip(" ") for start, end in spans]


def _csv_tables(path: Path, lines: list[str]) -> tuple[list[_Cells], list[str], list[str]]:
    tables, not_read = [], []
    report = named = _report_in_file_name(path)
    number = 0
    while number < len(lines):
        source = _SOURCE.search(lines[number])
        if source:
            named = Path(source["script"].replace("\\", "/")).stem
            report = _known_name(named)
            not_read += [named] if report is None else []
        if not lines[number].startswith(("Time (%),", "Total (MB),")) or (report is None and named is not None):
            number += 1
            continue
        header = next(csv.reader([lines[number]]))
        found = report or _report_with_columns(header)
        if found is None:
            raise ValueError(f"{path} line {number + 1}: which report has the columns {', '.join(header)}?")
        _check_columns(path, number + 1, found, header)
        table = _Cells(found, number + 1, [], any_decimals=True)
        first = number = number + 1
        reader = csv.reader((line + "\n" for line in lines[first:]), strict=True)
        for cells in _csv_rows(path, first, reader):
            if not cells or _SOURCE.search(cells[0]) or cells[0].startswith(("SKIPPED", "Generating", "NOTICE")):
                break
            raw = "\n".join(lines[number : first + reader.line_num])
            if len(cells) != len(header) or "" in cells:
                raise ValueError(f"{path} line {number + 1}: {len(cells)} cells under {len(header)} columns: {raw!r}")
            number = first + reader.line_num
            table.rows.append((number, raw, cells))
        if not table.rows:
            raise ValueError(f"{path} line {first}: the table of {found} has no rows, it was cut off")
        tables.append(table)
    return tables, _skipped_reports(lines), not_read


def _csv_rows(path: Path, first: int, reader: Any) -> Iterator[list[str]]:
    try:
        yield from reader
    except csv.Error as error:
        raise ValueError(f"{path} line {first + reader.line_num}: this is not CSV: {error}") from None


def _known_name(report: str) -> str | None:
    name = report.partition(":")[0]  # what stands behind a colon are the report's options
    name = _NAMES_UNTIL_2022.get(name, name)
    return name if name in REPORTS else None


def _report_in_file_name(path: Path) -> str | None:
    return next((name for name in REPORTS if path.stem.endswith(name)), None)


def _report_with_columns(header: list[str]) -> str | None:
    fitting = [name for name, columns in REPORTS.items() if list(columns) == header]
    return fitting[0] if len(fitting) == 1 else None


def _skipped_reports(lines: list[str]) -> list[str]:
    """Reports for which nsys says SKIPPED: the trace holds no such data."""
    found, last = [], None
    for line in lines:
        source = _SOURCE.search(line)
        last = _known_name(Path(source["script"].replace("\\", "/")).stem) if source else last
        if line.startswith("SKIPPED") and last and last not in found:
            found.append(last)
    return found


def _next_line_with_text(lines: list[str], number: int) -> int:
    while number < len(lines) and not lines[number].strip():
        number += 1
    return number


def _check_columns(path: Path, line: int, report: str, header: Sequence[str]) -> None:
    expected = REPORTS[report]
    if tuple(header) == expected:
        return
    unknown = [name for name in header if name not in expected]
    missing = [name for name in expected if name not in header]
    said = [f"has unknown columns {', '.join(map(repr, unknown))}"] if unknown else []
    said += [f"lacks {', '.join(map(repr, missing))}"] if missing else []
    hint = " (leave --timeunit out)" if any(re.search(r"\((us|ms|s\w*|\w+sec)\)", name) for name in unknown) else ""
    raise ValueError(f"{path} line {line}: {report} {' and '.join(said) or 'has its columns in another order'}{hint}")


def _numbers(tables: Sequence[_Cells]) -> Iterator[Number]:
    for table in tables:
        for line, _, cells in table.rows:
            for column, cell in zip(REPORTS[table.report], cells, strict=True):
                if column not in _TEXT_COLUMNS:
                    decimals = 0 if column in _WHOLE_COLUMNS else 3 if "(MB)" in column else 1
                    if table.any_decimals and decimals and (plain := re.fullmatch(r"[0-9]+\.([0-9]+)", cell)):
                        decimals = len(plain[1])
                    yield Number(cell, decimals, line, column)


def _checked_table(path: Path, table: _Cells, style: NumberStyle) -> StatsTable:
    """The numbers of a table, held against each other: a wrong digit rarely survives three sums."""
    columns = REPORTS[table.report]
    has_percent = columns[0] == "Time (%)"
    total_column, count_column, avg_column = columns[has_percent : has_percent + 3]
    rows = []
    for line, raw, cells in table.rows:
        named = dict(zip(columns, cells, strict=True))
        values = [style.value(named[column]) for column in columns if column not in _TEXT_COLUMNS]
        percent = values.pop(0) if has_percent else None
        total, count, avg, med, low, high, stddev = values
        where = f"{path} line {line}"
        if count < 1:
            raise ValueError(f"{where}: {count_column} is {count}, but a row stands for at least one")
        rounding = style.half_of_last_decimal(named[avg_column])
        slack = rounding + style.half_of_last_decimal(named[total_column]) / count
        if abs(avg - total / count) > 1.001 * slack + 1e-12 * avg:
            raise ValueError(f"{where}: {avg_column} is {avg}, but {total} / {count} is {total / count:.3f}")
        if not low - rounding <= avg <= high + rounding or not low - rounding <= med <= high + rounding:
            raise ValueError(f"{where}: the average {avg} and the median {med} should lie between {low} and {high}")
        rest = (float(avg), float(med), low, high, float(stddev), percent, named.get("Style"), raw)
        rows.append(Row(named[columns[-1]], total, int(count), *rest))
    if has_percent:
        _check_percentages(path, table, rows)
    return StatsTable(table.report, tuple(rows))


def _check_percentages(path: Path, table: _Cells, rows: Sequence[Row]) -> None:
    percents = [row.time_percent for row in rows if row.time_percent is not None]
    added = sum(percents)
    if abs(added - 100) > 0.05 * len(rows) + 0.05:  # each is rounded to 0.1
        raise ValueError(
            f"{path} line {table.line}: the percentages of {table.report} add up to {added:.1f}, not to 100: rows are "
            "missing"
        )
    total = sum(row.total for row in rows)
    for (line, _, _), row, percent in zip(table.rows, rows, percents, strict=True):
        share = 100 * row.total / total if total else percent
        if abs(share - percent) > 0.0501:
            raise ValueError(
                f"{path} line {line}: Time (%) is {row.time_percent}, but its time is {share:.2f} % of the table's: "
                "a row is missing or a number is damaged"
            )
