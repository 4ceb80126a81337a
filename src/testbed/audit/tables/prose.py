"""Answer what the text of a page claims of two rows of its tables: "Ours is 2.1x faster than DDP".

A sentence with one speed-up is read if it compares two named rows. The claim is wrong if no table of the page supports
it: the rows give less, or they differ in what invalidates a ratio and in more than their names say. A sentence that
names one row alone is checked against every other row of the table in its section.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from testbed.audit.answer import Answer, answer
from testbed.audit.conditions import DIFFERS, OF_STRATEGY, in_words, is_another_strategy, kind_of
from testbed.audit.finding import FAILS, NOTE, Finding, Rule
from testbed.audit.measures import roughness
from testbed.audit.reported import Claim, Reported
from testbed.audit.tables.columns import Grid
from testbed.audit.tables.rows import claim_of, side_of
from testbed.audit.tables.sentences import SPEED_UP, Spoken, named_rows

ROUNDED, HEDGED = 0.05, 0.15  # by which rows may give less than "2x", and than "about 2x"
OF_ANY = 0.15  # and than "2x" without a reference
MOST_ROWS = 8  # of a table whose row may be compared with any other
_ABOUT = re.compile(r"(?i)(?:\b(?:nearly|almost|about|around|roughly|approximately|close to|some)|[~]) ?(?:an? )?$")
_AT_MOST = re.compile(r"(?i)\b(?:up to|at most|as much as) ?(?:an? )?$")
_COMPARED = re.compile(r"(?i)\b(?:than|over|compared (?:to|with)|versus|vs\.?|relative to|against)\b\.?")
_BETWEEN = re.compile(r"(?i)(?: [\w-]+){0,2} ?[\"'*`(]?")  # "than the plain DDP"
_SELF = re.compile(r"(?i)\b(?:we|our|ours|us|this|it)\b")
# what is not said of these rows, or not of training, or not as a fact
_OTHER = re.compile(
    r"(?i)\bnot\b|n't|\b(?:could|should|might|may|would|if|expect\w*|estimat\w+|theor\w+|project(?:ed|ion)s?|claim\w*"
    r"|papers?|reported?|inference|decod\w+|generat\w+|latency|sampling|data ?load\w*|load\w*|tokeniz\w+|preprocess\w*"
    r"|kernels?|attention|backward|forward|all-?reduce|optimizer step|compil\w+|start\w*|checkpoint\w*)\b"
)


@dataclass(frozen=True)
class Sentence:
    """A claim in words: `row` is `factor` times as fast as `reference`, in each of `places`.

    Attributes:
        slack: share by which the rows may give less; 1: only an upper bound is said.
    """

    line: int
    factor: float
    slack: float
    places: tuple[tuple[Grid, int, int], ...]  # table, row, reference
    is_of_any: bool = False  # the sentence names no reference: the places are all that there could be


def claims_in(sentences: Iterable[Spoken], grids: Sequence[Grid]) -> list[Sentence]:
    """Return the sentences of a page that compare two rows of a table, or "ours" with one of a table of two."""
    found = []
    for line, sentence, section in sentences:
        factor = _factor_in(sentence)
        factor = None if factor and _OTHER.search(_without_names(sentence, grids)) else factor
        if factor is not None:
            rows = [(grid, *two) for grid in grids if (two := _rows_in(sentence, grid))]
            alone = [] if rows else [each for grid in grids for each in _beside_any(sentence, section, grid)]
            if rows or alone:
                found.append(Sentence(line, *factor, tuple(rows or alone), is_of_any=not rows))
    return found


def _without_names(sentence: str, grids: Sequence[Grid]) -> str:
    """Return a sentence without the names of rows, whose words are about nothing else: "FlashAttention-2"."""
    words = sentence.lower()
    for grid in grids:
        for name in grid.names:
            if name in words:
                words = re.sub(rf"(?<![\w+-]){re.escape(name)}(?!\w|[+-]\w)", "_", words)
    return words


def text_claims_what_rows_show(item: Reported) -> Iterator[Finding]:
    """Answer each claim of the text by the rows that it names; one table that carries it is enough."""
    for said in item.details.get("said", ()):
        wrong = [_fault(item, said, *place) for place in said.places]
        if said.is_of_any:
            yield from _more_than_any(item, said)
        elif all(wrong):
            grid, row, reference = said.places[0]
            rule, words, instead = wrong[0]  # type: ignore[misc]
            lines = f"lines {grid.lines[row]} and {grid.lines[reference]}"
            message = f"the text says {said.factor:g}x of {lines}: {words}"
            yield Finding(rule, (f"{item.name}:{said.line}",), message, FAILS, instead)


def _more_than_any(item: Reported, said: Sentence) -> Iterator[Finding]:
    """Note a speed-up without a reference that no other row of the table below it gives."""
    most, at = 0.0, said.places[0]
    for grid, row, reference in said.places:
        claim = claim_of(side_of(item, grid, reference), side_of(item, grid, row))
        question = answer(claim).in_question
        if question is None or roughness(claim):
            return
        most, at = max((most, at), (question.ratio, (grid, row, reference)), key=lambda each: each[0])
    grid, row, reference = at
    if said.slack < 1 and most < said.factor * (1 - max(said.slack, OF_ANY)):
        words = f"against line {grid.lines[reference]}, the slowest, its figures give {most:.3g}x"
        message = f"the text says {said.factor:g}x of line {grid.lines[row]}: {words}"
        yield Finding(Rule.FOLLOWS, (f"{item.name}:{said.line}",), message, NOTE)


def _fault(item: Reported, said: Sentence, grid: Grid, row: int, reference: int) -> tuple[Rule, str, str | None] | None:
    """Return what two rows have against a claim: the rule, the words, and what would follow; None: nothing."""
    claim = claim_of(side_of(item, grid, reference), side_of(item, grid, row))
    found = answer(claim)
    question = found.in_question
    if question is None:
        return None
    instead = found.instead[0].rstrip(".") if found.instead else None
    if question.ratio < said.factor * (1 - said.slack - roughness(claim)) and said.slack < 1:
        return Rule.FOLLOWS, f"their figures give {question.ratio_in_words} ({question.name})", instead
    names = (grid.name(reference), grid.name(row))
    if _is_what_is_compared(claim, found, names):
        return None
    reasons = [reason for reason in found.reasons if not reason.startswith(("B is slower", "No detectable"))]
    if not reasons:
        return None
    words = re.sub(r"\b([AB]) is\b", lambda side: f"{names[side[1] == 'B']} is", " ".join(reasons[:2])).rstrip(".")
    rule = Rule.LOSSES if "learns worse" in words else Rule.EQUAL_WORK
    return rule, words[0].lower() + words[1:], instead


def _is_what_is_compared(claim: Claim, found: Answer, names: tuple[str, str]) -> bool:
    """Return whether all that spoils the ratio stands in the names of the rows: "H100 is 2x faster than A100"."""
    spoiling = [each for each in found.conditions if each.spoils and each.state == DIFFERS]
    if not spoiling:
        return False
    is_one_change = len(spoiling) == 1 and kind_of(claim) == OF_STRATEGY and not is_another_strategy(claim)
    return is_one_change or all(
        in_words(value).lower() in name
        for each in spoiling
        for value, name in zip((each.a, each.b), names, strict=True)
    )


def _factor_in(sentence: str) -> tuple[float, float] | None:
    """Return the only speed-up that a sentence gives, and by how much less the rows may give; None: none, or more."""
    found = list(SPEED_UP.finditer(sentence))
    if len(found) != 1 or len(re.findall(r"\d ?x\b", sentence)) > 1:
        return None
    match = found[0]
    group = next(number for number, text in enumerate(match.groups(), start=1) if text)
    number, is_percent = float(match[group]), "%" in match[0]
    factor = 1 + number / 100 if is_percent else number
    before = sentence[: match.start(group)]
    if factor <= 1:
        return None
    if _AT_MOST.search(before):
        return factor, 1.0
    last = 10.0 ** -len(match[group].partition(".")[2]) / (100 if is_percent else 1)
    return factor, max(HEDGED if _ABOUT.search(before) else ROUNDED, 0.5 * last / factor)


def _rows_in(sentence: str, grid: Grid) -> tuple[int, int] | None:
    """Return the row that is said to be faster, and the one that it is compared with."""
    words, named = sentence.lower(), named_rows(sentence.lower(), grid)
    compared = list(_COMPARED.finditer(words))
    if len(compared) != 1 or not named or len({row for _, row in named}) > 2:
        return None
    between = _BETWEEN.match(words, compared[0].end())
    last = between.end() if between else compared[0].end()
    against = next((row for at, row in named if compared[0].end() <= at <= last), None)
    others = {row for _, row in named} - {against}
    if against is None or (not others and (len(grid.lines) != 2 or not _SELF.search(words[: compared[0].start()]))):
        return None
    return (others.pop() if others else 1 - against), against


def _beside_any(sentence: str, section: range, grid: Grid) -> list[tuple[Grid, int, int]]:
    """Return the only row that a sentence names with each other row as a reference, for a table of its section."""
    named = {row for _, row in named_rows(sentence.lower(), grid)}
    named -= {row for row in named if re.match(r"(?:average|mean|total|geo\w*)\b", grid.name(row))}
    if len(named) != 1 or len(grid.lines) > MOST_ROWS or grid.lines[0] not in section or _COMPARED.search(sentence):
        return []
    (row,) = named
    return [(grid, row, other) for other in range(len(grid.lines)) if other != row]
