"""Check the figures of a sentence against each other: "from 10.4 h to 6.2 h, 62 % less", "on average 2.6x faster"."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean, geometric_mean, harmonic_mean, median

from testbed.audit.finding import FAILS, Finding, Rule
from testbed.audit.reported import Reported
from testbed.audit.tables.columns import Grid
from testbed.audit.tables.sentences import SPEED_UP, Spoken, named_rows

SLACK = 0.04  # of a ratio, beyond the rounding of its figures
LEAST_AVERAGED = 3  # figures of a column
_UNIT = (
    r"(?:h|hours?|hrs?|min(?:ute)?s?|s|sec(?:ond)?s?|ms|days?"
    r"|(?:k ?)?(?:tok(?:en)?s?|samples?|images?|img|seq(?:uence)?s?|it(?:eration)?s?|steps?)(?:/s(?:ec)?| per second))"
)
_FIGURE = r"(\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?)"
# two figures of one unit, and within a few words the ratio that is said of them
_CHANGE = re.compile(
    rf"(?<![\w.,]){_FIGURE} ?({_UNIT})?(?: per (?:step|iteration|epoch))?,? (?:down |up )?(?:to|->|→) "
    rf"{_FIGURE} ?({_UNIT})\b[^.;%]{{0,40}}?(?<![\w.,])(\d{{1,3}}(?:\.\d+)?) ?(%(?: of\b)?|x\b|times\b)(.{{0,20}})",
    re.I,
)
_OF_SPEED = re.compile(r"(?i)\s*(?:as fast|faster|quicker|shorter|less|speed-?up|reduction|improvement|[.,;!)]|$)")
_ELSEWHERE = re.compile(r"(?i)\b(?:memory|loss|accuracy|perplexity|efficien\w+|utili[sz]ation|mfu|per gpu|cost)\b")
_OF_COST = re.compile(r"(?i)\b(?:memory|cost|utili[sz]ation)\b")
_AVERAGE = re.compile(
    r"(?i)\b(?:on average|averag(?:e|ed|es|ing) (?:of|out at|speed-?up|gain)|geomean|mean speed-?up)\b"
)
_OF_OTHERS = re.compile(r"(?i)\bup to\b|\bat most\b|\bthan\b|\bversus\b|\bvs\b|\bcompared\b")


def figures_of_sentences_follow(item: Reported) -> Iterator[Finding]:
    """Find a change whose two figures give another ratio than the one beside them, and an average that is none."""
    for line, message in item.details.get("sums", ()):
        yield Finding(Rule.FOLLOWS, (f"{item.name}:{line}",), message, FAILS)


def sums_in(sentences: Iterable[Spoken], grids: Sequence[Grid]) -> list[tuple[int, str]]:
    """Return (line, what does not follow) of the sentences of a page."""
    found = []
    for line, sentence, _ in sentences:
        message = _of_change(sentence) or _of_average(sentence, grids)
        if message:
            found.append((line, message))
    return found


def _of_change(sentence: str) -> str | None:
    changes = list(_CHANGE.finditer(sentence))
    if len(changes) != 1 or _ELSEWHERE.search(sentence):
        return None
    before, unit, after, other_unit, said, sign, behind = changes[0].groups()
    if sign.endswith("of") and not re.match(r" (?:it|that|the (?:time|original|former|old))\b", behind):
        return None  # "20 % of the budget"
    if "%" not in sign and not _OF_SPEED.match(behind):
        return None  # "on 4x A100"
    if unit and unit.lower().rstrip("s") != other_unit.lower().rstrip("s"):
        return None
    a, b = (float(text.replace(",", "")) for text in (before, after))
    if min(a, b) <= 0 or a == b:
        return None
    loose = SLACK + sum(0.5 * _last_place(text) / value for text, value in ((before, a), (after, b)))
    more = max(a, b) / min(a, b)
    stated = float(said) / 100 if "%" in sign else float(said)
    # 1.68x, 60 % of it, 68 % more or 40 % less
    ratios = (more, 1 / more) if sign != "%" else (more - 1, 1 - 1 / more, more)
    unit_of_said = 0.5 * _last_place(said) / (100 if "%" in sign else 1)
    if any(abs(stated - ratio) <= loose * ratio + unit_of_said for ratio in ratios):
        return None
    return (
        f"the text says {said} {sign.removesuffix(' of')} of {before} and {after} {other_unit}, which is {more:.3g} "
        f"times, or {more - 1:.0%} more and {1 - 1 / more:.0%} less"
    )


def _of_average(sentence: str, grids: Sequence[Grid]) -> str | None:
    columns = [column for grid in grids for column in grid.columns if column.quantity == "speedup"]
    claims = list(SPEED_UP.finditer(sentence))
    if len(columns) != 1 or len(claims) != 1 or not _AVERAGE.search(sentence):
        return None
    is_named = any(named_rows(sentence.lower(), grid) for grid in grids)
    if is_named or _OF_COST.search(sentence) or _OF_OTHERS.search(sentence):
        return None
    number = float(next(group for group in claims[0].groups() if group))
    stated = 1 + number / 100 if "%" in claims[0][0] else number
    every = [figure.value for figure in columns[0].figures if figure]
    others = [value for value in every if value != 1] or every
    if len(others) < LEAST_AVERAGED:
        return None
    means = [mean(values) for values in (every, others) for mean in (fmean, geometric_mean, harmonic_mean, median)]
    if min(means) * (1 - SLACK) <= stated <= max(means) * (1 + SLACK):
        return None
    return (
        f"the text says {stated:g}x on average; the mean of `{columns[0].heading}` is {fmean(others):.3g}, its "
        f"geometric mean {geometric_mean(others):.3g}"
    )


def _last_place(text: str) -> float:
    return 10.0 ** -len(text.partition(".")[2])
