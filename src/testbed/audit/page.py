"""Write the findings of an audit as one page, like a referee's report, and the details behind it.

The page has the claims that do not stand, then figures that read otherwise, then one line for all that the files do not
record, then notes. A rule that many arms break is shown by its first findings and a count of the rest.
"""

from __future__ import annotations

import os
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from testbed.analysis.document.words import counted
from testbed.analysis.runs.load import METRICS_FILE
from testbed.audit.checked import Checked
from testbed.audit.finding import FAILS, NOTE, Finding, Rule

WIDTH = 110
PER_RULE = 2  # findings of one rule that a section shows
LONGEST_NOTE = 260  # characters of a message among the notes
SHOWN_RUNS = 2
SHOWN_TABLES = 10
SHOWN_SKIPPED = 10
SHOWN_UNKNOWN = 40
QUOTED = "The text says, and no column does; read it before you quote a ratio"
SHOWN_QUOTES = 4
ASKED_FIRST = ("global batch size", "precision", "number of ranks")  # without which no two rates compare


def page(findings: Sequence[Finding], num_runs: int, num_tables: int = 0, checked: Checked | None = None) -> str:
    """Return the summary of an audit of runs and of files with tables; its lines have at most WIDTH characters."""
    tables = f"{counted(num_tables, 'file')} of tables"
    runs = " and ".join([counted(num_runs, "run")] * bool(num_runs) + [tables] * bool(num_tables))
    what = _what_was_checked(checked) if checked else []
    if not findings:
        can_check = checked is None or checked.figures
        first = f"nothing found in {runs}" if can_check else f"nothing could be checked in {runs}"
        return "\n".join([first, *what])
    folder = _common_folder(findings)
    findings = [_shortened(finding, folder) for finding in findings]
    failed = [finding for finding in findings if finding.severity == FAILS]
    unknown = [finding for finding in findings if finding.unknown]
    rest = [finding for finding in findings if finding.severity == NOTE and not finding.unknown]
    where = f" in {folder}" if folder else ""
    lines = wrapped(f"Audit of {runs}{where}: {len(failed)} x {FAILS}, {len(rest)} x {NOTE}", "")
    lines += _section("Claims that do not stand", failed)
    lines += _section("Corrected figures", [finding for finding in rest if finding.corrected])
    lines += _unknown(unknown)
    lines += _section("Notes", [finding for finding in rest if not finding.corrected], LONGEST_NOTE)
    return "\n".join([*lines, *([""] if what else []), *what])


def _what_was_checked(checked: Checked) -> list[str]:
    """Return how many figures were checked, what columns were taken for, and the files that were skipped."""
    lines = [checked.in_words] if checked.figures or checked.columns else []
    for words in checked.columns[:SHOWN_TABLES]:
        lines += wrapped(words, "", "  ")
    if len(checked.columns) > SHOWN_TABLES:
        lines.append(f"and {len(checked.columns) - SHOWN_TABLES} more tables")
    if checked.quotes:
        lines += ["", f"{QUOTED}:"]
        for quote in checked.quotes[:SHOWN_QUOTES]:
            lines += wrapped(f"- {quote}", "  ", "    ")
        lines += [""] * bool(checked.skipped)
    if checked.skipped:
        skipped = f"skipped {counted(len(checked.skipped), 'file')} that the audit does not read"
        lines += wrapped(f"{skipped}: {_runs(checked.skipped, SHOWN_SKIPPED)}", "", "  ")
    return lines


def details(findings: Sequence[Finding]) -> str:
    """Return a paragraph per finding: severity and rule, the runs, what is wrong, and the figure instead."""
    lines = []
    for finding in (_shortened(finding, "") for finding in findings):
        lines.append(f"{finding.severity.upper()}: {finding.rule}")
        for text in (_runs(finding.runs, 4), finding.message):
            lines += wrapped(text, "  ")
        lines += [*_instead(finding, "  "), ""]
    return "\n".join(lines)


def _instead(finding: Finding, indent: str) -> list[str]:
    """Return the figure instead. One that was only inferred from others corrects nothing."""
    label = "does not match" if "would follow" in (finding.corrected or "") else "corrected"
    return wrapped(f"{label}: {finding.corrected}", indent, f"{indent}  ") if finding.corrected else []


def _section(title: str, findings: Sequence[Finding], longest: int | None = None) -> Iterator[str]:
    """Yield a title and, rule by rule, the first findings of each; nothing without findings."""
    if not findings:
        return
    yield from ("", title)
    by_rule: dict[Rule, list[Finding]] = {}
    for finding in _merged(findings):
        by_rule.setdefault(finding.rule, []).append(finding)
    for number, (rule, found) in enumerate(by_rule.items(), start=1):
        yield f"{number:3}. {rule}"
        for finding in found[:PER_RULE]:
            message = textwrap.shorten(finding.message, longest or len(finding.message), placeholder=" ...")
            yield from wrapped(f"{_runs(finding.runs)}: {message}", "     ")
            yield from _instead(finding, "     ")
        if len(found) > PER_RULE:
            yield f"     and {len(found) - PER_RULE} more of this rule (--details)"


def _merged(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Yield findings that say the same once, with all their runs."""
    alike: dict[tuple, list[Finding]] = {}
    for finding in findings:
        alike.setdefault((finding.rule, finding.message, finding.corrected), []).append(finding)
    for group in alike.values():
        yield replace(group[0], runs=tuple(dict.fromkeys(run for finding in group for run in finding.runs)))


def _unknown(findings: Sequence[Finding]) -> Iterator[str]:
    """Yield one paragraph that names everything that some file does not record."""
    if not findings:
        return
    counts = Counter(name for finding in findings for name in finding.unknown)
    names = sorted(counts, key=lambda name: (name not in ASKED_FIRST, -counts[name]))
    more = f" and {len(names) - SHOWN_UNKNOWN} more (--details)" if len(names) > SHOWN_UNKNOWN else ""
    yield from ("", "What cannot be known")
    yield from wrapped(f"not in every file: {', '.join(names[:SHOWN_UNKNOWN])}{more}", "     ")


def _runs(names: Sequence[str], most: int = SHOWN_RUNS) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return "; ".join(names[:most]) + more


def _common_folder(findings: Sequence[Finding]) -> str:
    """Return the folder below which all files of the findings lie; empty where there is none, or where we are in it."""
    paths = {run for finding in findings for run in finding.runs if "/" in run}
    if len(paths) < 2 or len({path.startswith("/") for path in paths}) > 1:
        return ""
    folder = os.path.commonpath([str(Path(path).parent) for path in paths])
    return "" if folder in ("", "/") or Path.cwd().is_relative_to(folder) else folder


def _shortened(finding: Finding, folder: str) -> Finding:
    runs = tuple(without_folder(run, folder) for run in finding.runs)
    corrected = without_folder(finding.corrected, folder) if finding.corrected else None
    return replace(finding, runs=runs, message=without_folder(finding.message, folder), corrected=corrected)


def wrapped(text: str, indent: str = "", further: str = "") -> list[str]:
    """Return the lines of a text, at most WIDTH wide. Names of files have hyphens, so those break none."""
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=further or indent,
                         break_long_words=False, break_on_hyphens=False)  # fmt: skip


def without_folder(text: str, folder: str = "") -> str:
    """Return a text with paths from `folder` or from here, and runs named by their folders."""
    text = text.replace(f"/{METRICS_FILE}", "").replace(f"{Path.cwd()}/", "")
    return re.sub(rf"(?<![\w./-]){re.escape(folder)}/", "", text) if folder else text
