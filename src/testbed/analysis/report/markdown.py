"""The report as GitHub markdown: the same words and tables; pictures as SVG files beside it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from testbed.analysis.report.details import ranges
from testbed.analysis.report.entries import Entry
from testbed.analysis.report.figures import WIDE, svg
from testbed.analysis.report.page import Report, Source, pictures_of, report_of
from testbed.analysis.report.sections import Cell, Picture, RunNumbers, Table, overview
from testbed.analysis.runs.load import Run
from testbed.analysis.scaling.tables import markdown_table
from testbed.errors import printable
from testbed.io import replacing, write_text


def markdown(
    runs: Sequence[Run], folder: Path = Path(), target_val_loss: float | None = None, pictures: str | None = None
) -> str:
    """The report on `runs` as text; paths in it are relative to `folder`.

    `pictures` is the folder, relative to the text, that holds them (see `write_markdown`); None leaves them out.
    """
    return _text(report_of(runs, folder, target_val_loss), pictures)


def summary(runs: Sequence[Run]) -> str:
    """What a terminal shows of the report: the table of configurations, the verdicts and the warnings."""
    report = report_of(runs, Path())
    lines = []
    section = overview(report.subject)
    for part in section.parts if section else []:
        rows = [part.columns, *([cell.name if isinstance(cell, Entry) else cell for cell in row] for row in part.rows)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines += [part.title, ""]
        for row in rows:
            cells = [
                cell.ljust(width) if column in part.text_columns else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            lines.append("   ".join(cells).rstrip())
        lines.append("")
    lines += [headline.sentence for headline in report.headlines]
    lines += [f"{verdict.kind}: {verdict.sentence}" for verdict in report.verdicts]
    lines += [f"Warning: {warning.title}: {warning.text}" for warning in report.warnings]
    return "\n".join(lines)


def write_markdown(runs: Sequence[Run], path: Path, target_val_loss: float | None = None) -> None:
    """Write the report to `path` and its pictures to `<name>_pictures/` beside it. Errors as in report.write_html."""
    path = Path(path)
    report = report_of(runs, path.parent, target_val_loss)
    folder = path.with_name(f"{path.stem}_pictures")
    folder.mkdir(parents=True, exist_ok=True)
    for picture in pictures_of(report):
        with replacing(folder / f"{picture.name}.svg") as temporary:
            temporary.write_bytes(svg(picture.draw, WIDE))
    write_text(path, _text(report, folder.name))


def _text(report: Report, pictures: str | None) -> str:
    lines = [f"# {_plain(report.title)}", "", _plain(report.lead), "", "## What the runs show", ""]
    lines += [f"**{headline.topic}.** {_plain(headline.text)}.  " for headline in report.headlines]
    lines += [""] * bool(report.headlines)
    lines += [f"- **{verdict.kind}**: {_plain(verdict.sentence)}" for verdict in report.verdicts]
    lines += ["- One configuration: nothing to compare it with."] * (not report.verdicts) + [""]
    if report.warnings:
        lines += ["> [!WARNING]", "> **Before you quote a number**"]
        for warning in report.warnings:
            where = f" (runs {ranges(warning.runs)})" if warning.runs else ""
            lines += [">", f"> **{_plain(warning.title)}.** {_plain(warning.text)}{where}"]
        lines += [""]
    for section in report.sections:
        lines += [f"## {_plain(section.title)}", ""]
        for paragraph in section.paragraphs:
            lines += [_plain(paragraph), ""]
        for part in section.parts:
            lines += _table(part) if isinstance(part, Table) else _picture(part, pictures)
    if report.absent:
        lines += [f"Not in these files: {_plain('; '.join(report.absent))}.", ""]
    lines += ["## Sources", ""]
    for entry, sources in report.sources:
        lines += [f'<a id="configuration-{entry.number}"></a>', "", f"### {_plain(entry.name)}", ""]
        for source in sources:
            lines += _source(source)
    return printable("\n".join(lines).rstrip(), kept="\n") + "\n"  # commands stand in it as they are


def _table(table: Table) -> list[str]:
    text = markdown_table([_plain(name) for name in table.columns], [list(map(_cell, row)) for row in table.rows])
    # A colon to the right of the dashes aligns numbers to the right.
    head, rule, *rest = text.split("\n")
    rule = "|".join(["", *(" --- " if n in table.text_columns else " ---: " for n in range(len(table.columns))), ""])
    title = [f"**{_plain(table.title)}**", ""] if table.title else []
    note = ["", _plain(table.note)] if table.note else []
    return [*title, head, rule, *rest, *note, ""]


def _picture(picture: Picture, pictures: str | None) -> list[str]:
    shown = [f"![{_plain(picture.title)}]({quote(pictures)}/{picture.name}.svg)", ""] if pictures else []
    made_of = ", ".join(_link(entry) for entry in picture.entries)
    if not shown:
        return []
    return [f"**{_plain(picture.title)}**", "", *shown, f"{_plain(picture.caption)} From: {made_of}.", ""]


def _source(source: Source) -> list[str]:
    command = source.run.command_line or "command not recorded"
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", command)), default=0))
    figures = ", ".join(f"{name} {_plain(value)}" for name, value in source.figures)
    return [
        f'<a id="run-{source.number}"></a>**Run {source.number}**: {figures}, '
        f"file [{_plain(source.file)}]({source.address})",
        "",
        fence,
        command,
        fence,
        "",
    ]


def _cell(cell: Cell) -> str:
    if isinstance(cell, RunNumbers):
        return ", ".join(f"[{part}](#run-{part.split('-')[0]})" for part in ranges(cell.numbers).split(", "))
    return _link(cell) if isinstance(cell, Entry) else _plain(cell)


def _link(entry: Entry) -> str:
    return f"[{_plain(entry.name)}](#configuration-{entry.number})"


def _plain(text: str) -> str:
    """Text that means nothing to markdown or HTML, on one line."""
    text = printable(" ".join(text.split())).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*\[\]])", r"\\\1", text)
