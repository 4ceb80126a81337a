"""A document as GitHub Markdown; its pictures are SVG files in a folder of their own."""

from __future__ import annotations

import re
from urllib.parse import quote

from testbed.analysis.document.model import (
    Block,
    Cell,
    Document,
    Link,
    Picture,
    RunLinks,
    Source,
    Statement,
    Table,
    Text,
)
from testbed.analysis.document.words import Number, ranges
from testbed.errors import printable


def text(document: Document, pictures: str | None = None) -> str:
    """Return the document. `pictures` is the folder, relative to the text, that holds them; None leaves them out."""
    lines = [f"# {escaped(document.title)}", ""] if document.title else []
    lines += [escaped(document.lead), ""] if document.lead else []
    lines += _claims(document) if document.title else []
    for section in document.sections:
        lines += [f"## {escaped(section.title)}", ""] if section.title else []
        for block in section.blocks:
            lines += _block(block, pictures)
    for group in document.notes:
        lines += [*map(escaped, group), ""]
    lines += ["## Sources", ""] if document.sources else []
    for link, sources in document.sources:
        lines += [f'<a id="configuration-{link.number}"></a>', "", f"### {escaped(link.name)}", ""]
        for source in sources:
            lines += _source(source)
    return printable("\n".join(lines).rstrip(), kept="\n")  # commands stand in it as they are


def table_text(table: Table) -> str:
    """Return the header, the rule and the rows. A colon to the right of the dashes aligns numbers to the right."""
    rule = [" --- " if table.is_text(column) else " ---: " for column in range(len(table.columns))]
    rows = [_row([escaped(name) for name in table.columns]), f"|{'|'.join(rule)}|"]
    return "\n".join([*rows, *(_row(list(map(_cell, row))) for row in table.rows)])


def escaped(text: Text) -> str:
    """Return text that means nothing to Markdown or HTML, on one line. Numbers in it are ours, and stay."""
    parts = text if isinstance(text, tuple) else (text,)
    return "".join(str(part) if isinstance(part, Number) else _inert(part) for part in parts).strip()


def _inert(text: str) -> str:
    text = printable(re.sub(r"\s+", " ", text)).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*\[\]])", r"\\\1", text)


def _claims(document: Document) -> list[str]:
    lines = ["## What the runs show", ""]
    if document.headlines:
        lines += _statements(document.headlines)
    lines += [f"- **{verdict.kind}**: {escaped(verdict.sentence)}" for verdict in document.verdicts]
    lines += ["- One configuration: nothing to compare it with."] * (not document.verdicts) + [""]
    if document.cautions:
        lines += ["> [!WARNING]", "> **Before you quote a number**"]
        for caution in document.cautions:
            where = f" (runs {ranges(caution.runs)})" if caution.runs else ""
            lines += [">", f"> **{escaped(caution.title)}.** {escaped(caution.text)}{where}"]
        lines += [""]
    return lines


def _block(block: Block, pictures: str | None) -> list[str]:
    if isinstance(block, str):
        return [escaped(block), ""]
    if isinstance(block, tuple):
        return _statements(block)
    title = [f"**{escaped(block.title)}**", ""] if block.title else []
    if isinstance(block, Table):
        return [*title, table_text(block), *(["", escaped(block.note)] if block.note else []), ""]
    return [*title, *_picture(block, pictures), ""] if pictures else []


def _statements(statements: tuple[Statement, ...]) -> list[str]:
    return [*(f"**{escaped(each.topic)}.** {escaped(each.text)}  " for each in statements), ""]


def _picture(picture: Picture, pictures: str) -> list[str]:
    image = f"![{escaped(picture.title)}]({quote(pictures)}/{picture.name}.svg)"
    return [image, "", f"{escaped(picture.caption)} From: {', '.join(map(_cell, picture.links))}."]


def _source(source: Source) -> list[str]:
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", source.command)), default=0))
    figures = ", ".join(f"{name} {escaped(value)}" for name, value in source.figures)
    return [
        f'<a id="run-{source.number}"></a>**Run {source.number}**: {figures}, '
        f"file [{escaped(source.file)}]({source.address})",
        "",
        fence,
        source.command,
        fence,
        "",
    ]


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _cell(cell: Cell) -> str:
    if isinstance(cell, RunLinks):
        return ", ".join(f"[{part}](#run-{part.split('-')[0]})" for part in ranges(cell.numbers).split(", "))
    if isinstance(cell, Link):
        return f"[{escaped(cell.name)}](#configuration-{cell.number})"
    return escaped(cell)
