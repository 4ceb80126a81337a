"""Find the sentences of a page that bear on a comparison of its rows.

"With AMP there was room for 24 sequences" decides more than any column does, and no pattern reads it safely.
So such a sentence is quoted beside the ratio, with what it is about, and nothing is concluded from it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass

from testbed.audit.tables.columns import Grid
from testbed.audit.tables.figures import plain
from testbed.audit.tables.told import OF_FIGURES
from testbed.audit.words import DEVICES, NUMBER

LONGEST_SENTENCE = 500
MOST_QUOTED = 5
NEAR = 15  # lines of a table
# what a sentence may be about -> the words that say so
_ABOUT = {
    name: re.compile(rf"(?<!\w)(?<!\w-)(?:{words})(?!\w)", re.I)
    for name, words in {
        "batch": r"(?:mini|micro)?[- ]?batch[\w-]*|accumulat\w*"
        r"|(?:sequences|samples|images|examples|tokens) per (?:step|gpu|update)",
        "length": r"seq\w*[- ]?len\w*|sequence length\w*|context (?:length|window|of)|truncated|packed|padd\w*",
        "resolution": r"\d+ ?px|\d+ pixels|\d+ ?x ?\d+|resolution\w*|crop\w*",
        "devices": rf"(?:{DEVICES})s?|(?:an)?other (?:machine|cluster|gpus?)|older gpus?|laptop"
        r"|infiniband|ethernet|nvlink",
        "number of devices": rf"{NUMBER}[- ](?:gpu|node|device|worker|host|machine|card)[\w.]*"
        r"|(?:per|each)[- ](?:gpu|device|rank|node)|sum(?:med|s)? over",
        "precision": r"fp8|fp16|fp32|bf16|tf32|amp|(?:mixed|half|full|single) precision|quantiz\w*",
        "what was learned": r"loss\w*|perplexit\w*|ppl|accurac\w*|bleu|f1|nan|diverg\w*|converg\w*|quality|top[- ][15]"
        r"|auc|plateau\w*|early[- ]stop\w*|stopped (?:at|after)",
        "where a figure is from": r"quoted|taken from|copied|reported (?:by|in)|paper|blog\w*|(?:previous|older) \w+"
        r"|old\w*|(?:last|earlier) (?:version|release|year)|commit|comes? from|prints|v\d+\.\d[\w.]*|reuse\w*",
        "whether it was measured": r"estimat\w*|extrapolat\w*|projected|simulat\w*|expected|theoretical\w*"
        r"|assum\w*|predict\w*|derived|divid\w*|follows? from|computed from|not (?:been )?(?:measured|run)|modelled"
        r"|scaled (?:up|from|by)|multiplied",
        "what the time holds": r"includ\w*|exclud\w*|warm(?:ed)?[- ]?up|compil\w*|validation|evaluation"
        r"|data[- ]?load\w*|checkpoint\w*|start[- ]up|profil\w*|debug\w*|cuda_launch_blocking|anomaly"
        r"|first (?:epoch|step)s?|forward (?:pass )?only|frozen|freez\w*|lora",
        "what else a run had": r"num_workers|(?:data|loader) workers|threads|concurren\w*|clients|requests|instances?",
        "a run that failed": r"oom|out of memory|crash\w*|fail(?:ed|s)|time-?outs?|timed out|killed|stall\w*|throttl\w*"
        r"|shared (?:with|machine|node)|busy",
    }.items()
}
DECISIVE = re.compile("|".join(pattern.pattern for pattern in _ABOUT.values()), re.I)
_ALONE = {"where a figure is from", "whether it was measured", "a run that failed"}  # that say enough of any figure
# rows without their names
_ROW = re.compile(
    r"(?i)\b(?:the (?:other|two|rest)|both|each|respectively|rows?|entries|columns?|against|versus|vs|while|whereas"
    r"|instead of|rather than|only)\b"
)
_NOTE = re.compile(r"[*†‡§¹²³⁴]|\[\^?\w{1,20}\]")
_NO_TEXT = re.compile(r"(?ims)<table\b.*?</table>|^[ \t]*```.*?(?:^[ \t]*```|\Z)|^[^\n]*\|[^\n]*$|^[ \t]*#[^\n]*$")
_END = r"\n[ \t]*\n|\n[ \t]*(?:[-*+>]|\d+\.) |\Z"  # of a paragraph, or an item of a list
_SENTENCE = re.compile(rf"(?s)\S.*?(?:(?<!\bvs)(?<!\bincl)(?<!\bapprox)[.!?](?=\s|\Z)|(?={_END}))")
_VALUE = re.compile(rf"(?i)\b{NUMBER}\b")


@dataclass(frozen=True)
class Quote:
    """A sentence of the text, what it is about, and the lines of the rows that it names."""

    line: int
    words: str
    about: tuple[str, ...]
    rows: frozenset[int]
    is_near: bool  # to a table


def quotes_in(text: str, grids: Sequence[Grid]) -> list[Quote]:
    """Return the sentences outside tables that tell rows apart, or say what figures are: those that say most first."""
    found = []
    for line, sentence in _sentences_in(text):
        if not DECISIVE.search(sentence):
            continue
        about = {name: {match[0].lower() for match in pattern.finditer(sentence)} for name, pattern in _ABOUT.items()}
        about = {name: values for name, values in about.items() if values}
        rows = frozenset(grid.lines[row] for grid in grids for row in grid.said.named.rows_in(sentence))
        is_of_rows = bool(rows) or _ROW.search(sentence) is not None or _NOTE.match(sentence) is not None
        tells_apart = len(_VALUE.findall(sentence)) > 1 or any(len(values) > 1 for values in about.values())
        says_enough = bool(rows or _ALONE & {*about}) and OF_FIGURES.search(sentence) is not None
        says_enough |= is_of_rows and bool(_ALONE & {*about})
        if says_enough or (is_of_rows and tells_apart):
            is_near = any(grid.lines[0] - NEAR <= line <= grid.lines[-1] + NEAR for grid in grids)
            weight = 2 * len(rows) + len(about) + 2 * tells_apart + says_enough + 3 * is_near
            found.append((weight, Quote(line, sentence, tuple(about), rows, is_near)))
    return [quote for _, quote in sorted(found, key=lambda each: -each[0])]


def quotes_on(quotes: Iterable[Quote], meant: Set[int] | None = None) -> list[str]:
    """Return in words, in their order, the first quotes on the rows of these lines, or on any row, near a table."""
    kept = [quote for quote in quotes if (quote.is_near if meant is None else not quote.rows or quote.rows & meant)]
    return [
        f'line {quote.line}, on {" and ".join(quote.about[:3])}: "{quote.words}"'
        for quote in sorted(kept[:MOST_QUOTED], key=lambda quote: quote.line)
    ]


def _sentences_in(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the words of each sentence outside tables, code and headings, without its markup."""
    text = _NO_TEXT.sub(lambda found: "\n" * found[0].count("\n"), text)
    line, counted = 1, 0
    for found in _SENTENCE.finditer(text):
        line, counted = line + text.count("\n", counted, found.start()), found.start()
        if len(found[0]) <= LONGEST_SENTENCE:
            yield line, plain(" ".join(found[0].split()))
