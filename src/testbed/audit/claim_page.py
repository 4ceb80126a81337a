"""Write the answer to a claim as one page that its author could be sent."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from testbed.analysis.runs.load import METRICS_FILE
from testbed.audit.answer import FALLS, OPEN, Answer
from testbed.audit.conditions import Condition, in_words, strategy_of
from testbed.audit.reported import Side

WIDTH = 110
LONGEST_VALUE = 30
SILENT = 20  # conditions that neither side says
SHOWN = 6  # reasons, and notes


def claim_page(answer: Answer) -> str:
    """Return the page: the verdict, the ratio in question, what decides it, the reasons, and what to ask for."""
    names = [_name(side) for side in (answer.claim.baseline, answer.claim.other)]
    lines = [*_wrapped(f"{_claim_in_words(answer)}: {answer.verdict}"), ""]
    lines += [f"  A  {names[0]}", f"  B  {names[1]}", ""]
    rows = [(each.name, f"{each.a:,.5g}", f"{each.b:,.5g}", f"B is {each.ratio_in_words}") for each in answer.measures]
    if not rows:
        lines.append("No rate and no time is in the files of both.")
    rows += [_row(each) for each in answer.conditions if (each.a, each.b) != (None, None)]
    lines += _table([("", "A", "B", ""), *rows])
    if silent := [each.name for each in answer.conditions if (each.a, each.b) == (None, None)]:
        more = f" and {len(silent) - SILENT} more" if len(silent) > SILENT + 1 else ""
        lines += _wrapped(f"unknown of both: {', '.join(silent[: SILENT + (not more)])}{more}", "  ", "    ")
    for title, sentences in (
        ("Why it does not stand", answer.reasons if answer.verdict == FALLS else ()),
        ("What the files allow instead" if answer.verdict == FALLS else "To bear in mind", answer.instead),
        ("Also", answer.notes),
    ):
        if sentences:
            lines += ["", title]
            for sentence in sentences[:SHOWN]:
                lines += _wrapped(f"- {sentence}", "  ", "    ")
            if len(sentences) > SHOWN:
                lines.append(f"  and {len(sentences) - SHOWN} more (--details)")
    if answer.ask or answer.also:
        lines.append("")
    if answer.ask and answer.verdict == OPEN:
        lines += _wrapped(f"It cannot be known without: {', '.join(answer.ask)}.", "", "  ")
    if further := [*(answer.ask if answer.verdict != OPEN else ()), *answer.also]:
        lines += _wrapped(f"The author could add: {', '.join(dict.fromkeys(further))}.", "", "  ")
    for words in answer.read:
        lines += ["", *_wrapped(f"Read from {words}", "", "  ")]
    return "\n".join(lines)


def _claim_in_words(answer: Answer) -> str:
    question = answer.in_question
    ratio = f"{answer.claimed:g}x" if answer.claimed is not None else question.ratio_in_words if question else "faster"
    a, b = (strategy_of(side) or "" for side in (answer.claim.baseline, answer.claim.other))
    ranks = [side.first.world_size for side in (answer.claim.baseline, answer.claim.other)]
    which = f"{b} against {a}" if a and b and a != b else "B against A"
    if None not in ranks and ranks[0] != ranks[1]:
        which += f" on {ranks[1]} devices against {ranks[0]}"
    return f"{which}, {ratio}"


def _name(side: Side) -> str:
    text = side.name.replace(f"/{METRICS_FILE}", "").replace(f"{Path.cwd()}/", "")
    more = f" and {len(side.runs) - 1} more runs" if len(side.runs) > 1 and side.runs[0].name == side.name else ""
    strategy = strategy_of(side)
    return f"{text}{more}" + (f"  ({strategy})" if strategy and strategy not in text else "")


def _row(condition: Condition) -> tuple[str, str, str, str]:
    return (condition.name, in_words(condition.a), in_words(condition.b), condition.state)


def _table(rows: Sequence[tuple[str, str, str, str]]) -> Iterator[str]:
    cells = [(name, *(textwrap.shorten(value, LONGEST_VALUE, placeholder=" ...") for value in (a, b)), state)
             for name, a, b, state in rows]  # fmt: skip
    widths = [max(len(row[column]) for row in cells) for column in range(3)]
    for name, a, b, state in cells:
        yield f"  {name:<{widths[0]}}  {a:>{widths[1]}}  {b:>{widths[2]}}  {state}".rstrip()


def _wrapped(text: str, indent: str = "", further: str = "") -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=further or indent,
                         break_long_words=False, break_on_hyphens=False)  # fmt: skip


def answer_in_json(answer: Answer) -> dict[str, Any]:
    """Return an answer as `--json` writes it."""
    return {
        "claim": {"a": answer.claim.baseline.name, "b": answer.claim.other.name, "ratio": answer.claimed},
        "verdict": answer.verdict,
        "measures": [asdict(each) for each in answer.measures],
        "conditions": [
            {"name": each.name, "a": each.a, "b": each.b, "state": each.state, "spoils": each.spoils}
            for each in answer.conditions
        ],
        **{name: list(getattr(answer, name)) for name in ("reasons", "instead", "ask", "also", "notes", "read")},
    }
