"""Audit each public file alone, and keep what is found with its source."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from testbed.audit.claims import audit_runs, read_reported
from testbed.audit.finding import Finding
from testbed.audit.readers.text import text_of
from testbed.audit.reported import Reported
from testbed.errors import InputError
from testbed.experiments.field_audit.material import COMPANION, Material

LONGEST_QUOTE = 240  # characters of a row or a line of the source
MOST_QUOTED = 3
OF_STEPS = re.compile(r"lines? of steps? ([\d,]+\d|\d)")
SUBJECT = re.compile(r"(?:(?! does not |\d).)*")  # of a message: what stands before its first figure
FIGURE = re.compile(r"\d[\d,]*(?:\.\d+)?")
FOLDER_OF_A_PERSON = re.compile(r"(?<![\w.])/(?:tmp|home|root|work|Users)/[^\s\"']*")


def examine(materials: Sequence[Material], folder: Path) -> dict[str, Any]:
    """Return `files`, what was read of each, and `findings`, those about nothing but a missing record left out."""
    files, findings = [], []
    for material in materials:
        if material.kind == COMPANION:
            continue
        path = material.place(folder)
        about = {"repository": material.repository, "path": material.path, "commit": material.commit}
        try:
            items = read_reported([path])
            found = [finding for finding in audit_runs(items) if not finding.unknown]
        except InputError as error:
            why = str(error).replace(str(path), material.path)
            files.append(about | {"kind": material.kind, "tuned": material.tuned, "read": False, "why": why})
            continue
        count = {"kind": material.kind, "tuned": material.tuned, "read": True, "rows": num_rows(items)}
        files.append(about | count)
        lines = text_of(path).splitlines() if found else []
        entries = [_entry(material, path, finding, lines) for finding in found]
        findings += [about | {"tuned": material.tuned} | entry for entry in _with_ids(about, entries)]
    return {"files": files, "findings": findings}


def num_rows(items: Sequence[Reported]) -> int:
    """Return how many rows of tables were read, in tables whose columns are known."""
    return sum(len(grid.lines) for item in items for grid in item.details.get("grids", ()))


def _entry(material: Material, path: Path, finding: Finding, text: Sequence[str]) -> dict[str, Any]:
    numbers = [int(run.rpartition(":")[2]) for run in finding.runs if re.fullmatch(r":\d+", run[len(str(path)) :])]
    lines = numbers or _lines_of_log(finding.message, text)
    quoted = [] if material.figures_withheld else [_quoted(text[line - 1]) for line in lines[:MOST_QUOTED]]
    said = [_said(words, path, material) for words in (finding.message, finding.corrected or "")]
    return {
        "lines": lines, "quoted": quoted, "rule": str(finding.rule), "severity": finding.severity,
        "message": said[0], "corrected": said[1] or None,
    }  # fmt: skip


def _said(words: str, path: Path, material: Material) -> str:
    words = FOLDER_OF_A_PERSON.sub("...", words.replace(str(path), material.path))
    return FIGURE.sub("#", words) if material.figures_withheld else words


def _quoted(line: str) -> str:
    line = FOLDER_OF_A_PERSON.sub("...", " ".join(line.split()))
    return line if len(line) <= LONGEST_QUOTE else f"{line[:LONGEST_QUOTE]} ..."


def _lines_of_log(message: str, text: Sequence[str]) -> list[int]:
    """Return the line of the file that prints the step of a message and most of its figures; none where none does."""
    step = OF_STEPS.search(message)
    if not step:
        return []
    wanted = {float(figure.replace(",", "")) for figure in FIGURE.findall(message[step.end() :])}
    number, best = float(step[1].replace(",", "")), (0, 0)
    for line, content in enumerate(text, start=1):
        shown = {float(figure.replace(",", "")) for figure in FIGURE.findall(content)}
        if number in shown and len(shown & wanted) > best[0]:
            best = (len(shown & wanted), line)
    return [best[1]] if best[1] else []


def _with_ids(about: dict[str, Any], entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give each finding a name that stays while its source, its lines, its rule and what it is about do."""
    seen: dict[str, int] = {}
    found = []
    for entry in entries:
        subject = SUBJECT.match(entry["message"])
        key = "|".join([*map(str, [*about.values(), *entry["lines"]]), entry["rule"], subject[0] if subject else ""])
        seen[key] = number = seen.get(key, 0) + 1
        name = hashlib.sha256(f"{key}|{number}".encode()).hexdigest()[:8]
        found.append({"id": name} | entry)
    return found
