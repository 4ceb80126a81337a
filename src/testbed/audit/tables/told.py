"""Read what a sentence says of rows that it names: "Baseline uses 16 sequences per GPU, CPU offload uses 64".

A sentence is read where each of its numbers is of one quantity and stands beside other rows. All others are quoted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from testbed.audit.tables.grid import rows_named
from testbed.audit.tables.words import IN_SENTENCES, NUMBER, WORDS

_NUMBER = re.compile(rf"(?<![\w.-]){NUMBER}(?![\w-]|\.\d)", re.I)
_BARE = re.compile(r"(?i)\s*(?:of (?:them|these|those)\b|$|[.!)])")  # behind a number that repeats the quantity
_PARTS = re.compile(r"(?i),\s|;|\b(?:while|whereas|but|and|against|versus|compared (?:to|with))\b")
_CONTRAST = re.compile(r"(?i)\b(?:while|whereas|against|versus|compared (?:to|with))\b")
_INSTEAD = re.compile(rf"(?i)\s*(?:\w+ )?(?:instead of|rather than) {NUMBER}\b")


def told_apart(sentences: Iterable[str], names: Sequence[str], notes: Sequence[str]) -> dict[str, list[str]]:
    """Return the numbers that sentences give to rows by name, and what a note on one row says that it has "instead".

    Returns:
        quantity -> the number of each row as text, empty where none is told. One that is told twice is left out.
    """
    found: dict[str, list[str]] = {}
    told = [each for sentence in sentences if (each := _of_sentence(sentence, names))]
    told += [each for row, note in enumerate(notes) if (each := _instead(note, row, len(notes)))]
    for quantity, numbers in told:
        again = quantity in found
        found[quantity] = [""] * len(names) if again else [numbers.get(row, "") for row in range(len(names))]
    return {quantity: numbers for quantity, numbers in found.items() if any(numbers)}


def _of_sentence(sentence: str, names: Sequence[str]) -> tuple[str, dict[int, str]] | None:
    """Return the quantity of a sentence, and the number of each row that it names."""
    parts: list[tuple[set[int], str]] = []
    before: set[int] = set()
    for part in _PARTS.split(re.sub(r"[*_`]+", "", sentence)):
        rows = rows_named(names, part) or rows_named(names, re.sub(r"(?<=[a-z])(?=[A-Z])", " ", part), re.I)
        for row in rows:  # 8-bit is no number
            part = re.sub(re.escape(names[row]), "", part, flags=re.I)
        before |= rows
        if _NUMBER.search(part) or any(form.search(part) for form in IN_SENTENCES.values()):
            parts.append((before, part))
            before = set()
    if len(names) == len(parts) == 2 and _CONTRAST.search(sentence):  # of two rows, the other
        parts = [(rows or {0, 1} - parts[1 - at][0], part) for at, (rows, part) in enumerate(parts)]
    rows_told = [row for rows, _ in parts for row in rows]
    if len(parts) < 2 or not all(rows for rows, _ in parts) or len({*rows_told}) < len(rows_told):
        return None
    for quantity, form in IN_SENTENCES.items():
        numbers = [_number_of(part, form) for _, part in parts]
        if any(form.search(part) for _, part in parts) and all(numbers) and len({*numbers}) > 1:
            return quantity, {
                row: str(number) for (rows, _), number in zip(parts, numbers, strict=True) for row in rows
            }
    return None


def _number_of(part: str, form: re.Pattern[str]) -> str | None:
    """Return the only number of a part, of a quantity or bare; None: there is another, or none."""
    matches = list(form.finditer(part))
    rest = form.sub(" ", part)
    others = list(_NUMBER.finditer(rest))
    if len(matches) == 1 and not others:
        return _plain(next(group for group in matches[0].groups() if group))
    if not matches and len(others) == 1 and _BARE.match(rest, others[0].end()):
        return _plain(others[0][1])
    return None


def _instead(note: str, row: int, num_rows: int) -> tuple[str, dict[int, str]] | None:
    """Return the quantity of which a note says what its row has instead of what the others have."""
    for quantity, form in IN_SENTENCES.items():
        for match in form.finditer(note):
            if instead := _INSTEAD.match(note, match.end()):
                own, of_others = (next(group for group in each.groups() if group) for each in (match, instead))
                return quantity, {at: _plain(own if at == row else of_others) for at in range(num_rows)}
    return None


def _plain(number: str) -> str:
    return str(WORDS.get(number.lower(), number))
