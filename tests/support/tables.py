"""Tables of Markdown for tests of the audit, written row by row."""

from __future__ import annotations

from pathlib import Path


def table(header: str, *rows: str) -> str:
    width = header.count("|") + 1
    return "\n".join(f"| {line} |" for line in (header, " | ".join(["---"] * width), *rows)) + "\n"


def saved(folder: Path, text: str, name: str = "table.md") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path
