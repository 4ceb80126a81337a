"""Write the answer to a claim as one page that its author could be sent."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from testbed.audit.answer import FALLS, OPEN, Answer
from testbed.audit.conditions import in_words, strategy_of
from testbed.audit.page import QUOTED, without_folder, wrapped
from testbed.audit.reported import Side

LONGEST_VALUE = 30
SILENT = 20  # conditions that neither side says
IN_JSON = ("reasons", "instead", "ask", "also", "notes", "quotes", "read")  # of an Answer, as they are
SHOWN = 6  # reasons, and notes


def claim_page(answer: Answer) -> str:
    """Return the page: the verdict, the ratio in question, what decides it, the reasons, and what to ask for."""
    lines = [*wrapped(f"{_claim_in_words(answer)}: {answer.verdict}"), ""]
    lines += [f"  A  {_name(answer.claim.baseline)}", f"  B  {_name(answer.claim.other)}", ""]
    rows = [(each.name, _figure(each.a), _figure(each.b), f"B is {each.ratio_in_words}") for each in answer.measures]
    if not rows:
        lines.append("No rate and no time is in the files of both.")
    told = [each for each in answer.conditions if (each.a, each.b) != (None, None)]
    rows += [(each.name, in_words(each.a), in_words(each.b), each.state) for each in told]
    lines += _table([("", "A", "B", ""), *rows])
    if silent := [each.name for each in answer.conditions if each not in told]:
        more = f" and {len(silent) - SILENT} more" if len(silent) > SILENT + 1 else ""
        lines += wrapped(f"unknown of both: {', '.join(silent[: SILENT + (not more)])}{more}", "  ", "    ")
    for title, sentences in (
        ("Why it does not stand", answer.reasons if answer.verdict == FALLS else ()),
        ("What the files allow instead" if answer.verdict == FALLS else "To bear in mind", answer.instead),
        ("Also", answer.notes),
    ):
        if sentences:
            lines += ["", title]
            for sentence in sentences[:SHOWN]:
                lines += wrapped(f"- {sentence}", "  ", "    ")
            if len(sentences) > SHOWN:
                lines.append(f"  and {len(sentences) - SHOWN} more (--details)")
    if answer.quotes:
        lines += ["", f"{QUOTED}:"]
        for quote in answer.quotes:
            lines += wrapped(f"- {quote}", "  ", "    ")
    if answer.ask or answer.also:
        lines.append("")
    if answer.ask and answer.verdict == OPEN:
        lines += wrapped(f"It cannot be known without: {', '.join(answer.ask)}.", "", "  ")
    if further := [*(answer.ask if answer.verdict != OPEN else ()), *answer.also]:
        lines += wrapped(f"The author could add: {', '.join(dict.fromkeys(further))}.", "", "  ")
    for words in answer.read:
        lines += ["", *wrapped(f"Read from {words}", "", "  ")]
    return "\n".join(lines)


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 10_000 else f"{value:,.5g}"


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
    text = without_folder(side.name)
    more = f" and {len(side.runs) - 1} more runs" if len(side.runs) > 1 and side.runs[0].name == side.name else ""
    strategy = strategy_of(side)
    return f"{text}{more}" + (f"  ({strategy})" if strategy and strategy not in text else "")


def _table(rows: Sequence[tuple[str, str, str, str]]) -> Iterator[str]:
    cells = [(name, *(textwrap.shorten(value, LONGEST_VALUE, placeholder=" ...") for value in (a, b)), state)
             for name, a, b, state in rows]  # fmt: skip
    widths = [max(len(row[column]) for row in cells) for column in range(3)]
    for name, a, b, state in cells:
        yield f"  {name:<{widths[0]}}  {a:>{widths[1]}}  {b:>{widths[2]}}  {state}".rstrip()


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
        "findings": [asdict(finding) for finding in answer.findings],
        **{name: list(getattr(answer, name)) for name in IN_JSON},
    }
