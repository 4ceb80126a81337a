"""Say which rows the text of a page is about, where it leaves no doubt: all of them, or some that it names.

A footnote is about the rows with its mark. A caption and the paragraphs right beside a table are about all rows. A part
of a sentence is about the rows that it names. What names a row in another way ("the others", "ours") is only quoted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from testbed.audit.reported import STATUS
from testbed.audit.tables.grid import Table, marks_of, sentences_of
from testbed.audit.words import DEVICES, OF_FIGURES_ALONE, value_of

MOST_NAMED = 200  # rows of a table that a text may name
LONGEST_TITLE = 6  # words of a heading that calls its figures a projection
_CUTS = re.compile(r"(?i)(;\s+|,?\s+(?:while|whereas|but)\s+|,\s+(?:and )?)")
# what a sentence claims -> how many times as fast that is, of the number in it
_RATIOS: dict[str, Callable[[float], float]] = {
    r"(?<![\w.])(\d{1,3}(?:[.,]\d{1,3})?)[- ]?(?:x\b|\u00d7|times\b|fold\b)"
    rf"(?! ?(?:(?:NVIDIA|AMD) )?(?:(?:{DEVICES})|GPUs?|nodes?|\d+)\b)": lambda times: times,  # but 8 x A100
    r"\bfactor of (\d{1,3}(?:[.,]\d{1,3})?)\b": lambda times: times,
    r"(?<![\w.])(\d{1,3}) ?% (?:faster|more|higher)": lambda percent: 1 + percent / 100,
    r"\b(?:cut|reduc|shorten|lower)\w* (?:the )?(?:\w+ )?time (?:\w+ ){0,3}?by (\d{1,2}) ?%": lambda percent: (
        1 / (1 - percent / 100)
    ),
    r"\b(?:twice|doubl(?:es?|ed|ing))\b": lambda _: 2,
    r"\b(?:tripl(?:es?|ed|ing))\b": lambda _: 3,
}
_DEVICES = r"(?P<devices>\d{1,5}) ?(?:x ?)?(?:gpus?|devices|ranks|cards|accelerators)\b"
_PERCENT = r"(?P<percent>\d{1,3}(?:\.\d+)?) ?%"
# of no row against the fewest devices: another kind, a bound, against other devices, or of another table
_OF_NO_ROW = re.compile(
    r"(?i)\b(?:memory|network|energy|power|cost|cache|bandwidth|communication|compute|relative to|than"
    r"|at (?:least|most)|over|under|above|below|up to|without|from \d+|papers?|report(?:s|ed)"
    r"|last|previous(?:ly)?|earlier|before)\b"
)
_EFFICIENCIES = (
    rf"efficienc\w+ (?:\w+ ){{0,3}}{_DEVICES} (?:\w+ ){{0,2}}{_PERCENT}",
    rf"{_PERCENT} (?:\w+ ){{0,2}}efficienc\w+ (?:\w+ ){{0,3}}{_DEVICES}",
    rf"{_DEVICES},? (?:\w+ ){{0,4}}{_PERCENT} (?:\w+ ){{0,2}}efficienc",
)
_ALL_FIGURES = re.compile(
    r"(?i)^(?:note:? )?(?:(?:all|these|the|our)(?: of)?(?: the)? )?(?:\w+ )?"
    r"(?:numbers|figures|values|results|timings|times|speed-?ups|throughputs?|rows|data)\b(?! of )"
)
OF_FIGURES = re.compile(
    r"(?i)\b(?:numbers?|figures?|entry|entries|values?|rows?|timings?|timed?|times|clocks?|results?|measur\w+"
    r"|benchmark\w*|throughput|speed-?ups?|tokens/s|read off|ran|runs?|jobs?)\b"
)
# words that mean some of the rows without their names
TELLS_APART = re.compile(
    r"(?i)\b(?:the (?:other|two|rest)|others?|respectively|rows?|entries|columns?|against|versus|vs|while|whereas"
    r"|instead of|rather than|first|second|third|last|former|latter|(?:above|below|beyond|over) \d|ours|theirs"
    r"|base-?line|reference|original\w*|vanilla|upstream|competitor\w*|old|new)\b"
)
_LINK = re.compile(r"!?\[([^\[\]]*)\]\([^()]*\)")
_MARKUP = re.compile(r"\*\*|__|`|^[>\s*!-]+|^\[\^?\w{1,20}\]:?")
# words that name no row
_STOP = frozenset(
    "the and with for per our ours all one two row rows run runs batch size model training train data time step steps "
    "gpu gpus node nodes speed rate table figure figures number numbers full mode large small single default this that "
    "from not was were are has had used uses using only same other others both each than then more less first last "
    "second new old before after off without now yes".split()
)


@dataclass(frozen=True)
class Named:
    """The rows of a table as a text may name them, and the row that a ratio refers to."""

    names: tuple[str, ...] = ()
    figures: tuple[frozenset[str], ...] = ()  # of each row, those that no other row has
    reference: int = 0

    def rows_in(self, text: str) -> frozenset[int]:
        """Return the rows that a text names: by a whole name, a word or a figure that no other row has."""
        numbers = {number.replace(",", "") for number in re.findall(r"(?<![\d.,])\d[\d,]*(?:\.\d+)?(?![\d,]*\d)", text)}
        found = {row for row, each in enumerate(self.figures) if each & numbers}
        for row in sorted(range(len(self.names)), key=lambda at: -len(self.names[at])):
            whole = rf"(?<![\w+]){re.escape(self.names[row])}(?![\w+]|-\w)"
            if len(self.names[row]) > 1 and self.names[row].lower() not in _STOP and re.search(whole, text, re.I):
                found.add(row)
                text = re.sub(whole, " ", text, flags=re.I)
        parts = [_parts_of(name) for name in self.names]
        count = Counter(part for each in parts for part in each)
        words = {word.lower() for word in re.findall(r"[\w.+/-]*\w", text)}
        words |= {part for word in words for part in re.split(r"[-/]", word)}
        return frozenset(found | {row for row, each in enumerate(parts)
                                  if any(count[part] == 1 and part in words for part in each)})  # fmt: skip


def _parts_of(name: str) -> set[str]:
    """Return the words of a name by which a sentence may mean it, and the name without brackets."""
    words = {
        word.lower()
        for word in re.findall(r"[\w.]*\w", f"{name} {name.replace('_', ' ')}")
        if (len(word) > 2 or word.isupper()) and re.search(r"[^\W\d]", word)
    }
    plain = re.sub(r"\s*\([^()]*\)", "", name).strip().lower()
    return {word for word in words if word not in _STOP} | ({plain} if len(plain) > 2 else set())


@dataclass(frozen=True)
class Piece:
    """A part of a sentence, and the rows that it is about."""

    rows: frozenset[int]
    words: str
    is_of_figures: bool  # its sentence is about figures, or a mark in the row leads to it


@dataclass(frozen=True)
class SaidOfTable:
    """What a page says of the rows of a table, and of all of them."""

    named: Named
    pieces: tuple[Piece, ...]  # about some of the rows
    everywhere: str  # what is said of all: captions, headings, sentences that name no row
    warning: str  # a heading that says that the figures were not measured
    claims: tuple[tuple[frozenset[int], float, str], ...]  # rows, and how many times as fast a sentence says one is
    efficiencies: tuple[tuple[int, float, str], ...]  # devices, and the share that a sentence says they reach

    def note(self, row: int) -> str:
        """Return what is said of a row."""
        return " ".join(piece.words for piece in self.pieces if row in piece.rows)

    def of_all(self, name: str) -> str:
        return value_of(name, self.everywhere)

    def told(self, name: str) -> list[str]:
        """Return what is said of a condition for each row; empty: nothing, or two values."""
        found: list[dict[str, None]] = [{} for _ in self.named.names]
        for piece in self.pieces:
            if (piece.is_of_figures or name not in OF_FIGURES_ALONE) and (value := value_of(name, piece.words)):
                for row in piece.rows:
                    found[row][value] = None
        return [next(iter(each), "") if len(each) == 1 or name in OF_FIGURES_ALONE else "" for each in found]


def said_of_table(table: Table, named: Named) -> SaidOfTable:
    """Return what the page of a table says of its rows, by its sentences, footnotes, caption and headings."""
    num_rows = len(named.names)
    if num_rows > MOST_NAMED:  # each sentence is searched for each name
        named = Named(("",) * num_rows, (frozenset(),) * num_rows, named.reference)
    everyone = frozenset(range(num_rows))
    pieces: list[Piece] = []
    everywhere = list(table.titles[:3])
    for mark, text in table.footnotes:
        rows = frozenset(row for row, each in enumerate(table.rows) if mark in marks_of(each))
        sentences = [*map(_plain, sentences_of(text))]
        pieces += [Piece(rows, sentence, True) for sentence in sentences]
        everywhere += sentences if rows == everyone else []
    for place, is_near in ((table.near, True), (table.section, False)):
        for sentence in dict.fromkeys(map(_plain, sentences_of(place))):
            parts = list(_parts(sentence, named))
            pieces += [Piece(rows, words, OF_FIGURES.search(sentence) is not None) for rows, words in parts]
            if is_near and not parts and not TELLS_APART.search(sentence):
                everywhere.append(sentence)
    pieces = [piece for piece in pieces if piece.rows != everyone or len(everyone) == 1]
    near = list(map(_plain, sentences_of(table.near)))
    warnings = [title for title in table.titles[:2] if _is_not_measured(title)]
    warnings += [each for each in near if each in everywhere and _ALL_FIGURES.search(each)
                 and value_of(STATUS, each) not in ("", "calculated")]  # fmt: skip
    return SaidOfTable(
        named,
        tuple(pieces),
        "\n".join(everywhere),
        next(iter(warnings), ""),
        tuple(_claims_in(table, named)),
        tuple(_efficiencies_in(table)),
    )


def _plain(sentence: str) -> str:
    return _MARKUP.sub("", _LINK.sub(r"\1", sentence))


def _parts(sentence: str, named: Named) -> Iterator[tuple[frozenset[int], str]]:
    """Yield the parts of a sentence with the rows of each; nothing where it names none.

    A part that names no row is about the rows before it, or else about the first that the sentence names. Behind
    "while" it is about the other one of two rows; of more, nothing says which.
    """
    everyone = frozenset(range(len(named.names)))
    pieces = _CUTS.split(sentence)
    rows_of = [named.rows_in(piece) for piece in pieces[::2]]
    rows = next(filter(None, rows_of), frozenset())
    for piece, cut, found in zip(pieces[::2], ["", *pieces[1::2]], rows_of, strict=True) if rows else ():
        if not found and (cut.strip(" ,;") in ("while", "whereas", "but") or TELLS_APART.search(piece)):
            found = everyone - rows if len(everyone) == 2 else frozenset()
            yield found, piece
        else:
            rows = found or rows
            yield rows, piece


def _claims_in(table: Table, named: Named) -> Iterable[tuple[frozenset[int], float, str]]:
    """Yield the ratios that sentences claim, with the rows that they name: of two rows both, if they name none."""
    for sentence in dict.fromkeys(sentences_of(f"{table.near}\n\n{table.section}")):
        rows = named.rows_in(_plain(sentence)) or frozenset(range(len(named.names)))
        for pattern, times in _RATIOS.items() if len(rows) < 3 else ():
            for found in re.finditer(pattern, sentence, re.I):
                number = float(found[1].replace(",", ".")) if found.lastindex else 0.0
                if number > 0 or not found.lastindex:
                    yield rows | {named.reference}, times(number), sentence


def _efficiencies_in(table: Table) -> Iterator[tuple[int, float, str]]:
    """Yield (devices, efficiency, sentence) for each scaling efficiency that a sentence beside the table states."""
    for sentence in dict.fromkeys(sentences_of(table.near)):
        if _OF_NO_ROW.search(sentence) or value_of(STATUS, sentence):
            continue
        found = [match for pattern in _EFFICIENCIES if (match := re.search(pattern, sentence, re.I))]
        for match in found[:1]:
            yield int(match["devices"]), float(match["percent"]) / 100, sentence


def _is_not_measured(title: str) -> bool:
    """Return whether a heading calls what is below it a projection, and does not compare it with measurements."""
    is_other = re.search(r"(?i)\bpeak\b|(?<!not )\bmeasured\b|\bvs\b|\boutput\b|\bbehaviou?r\b|\bpredict", title)
    return not is_other and len(title.split()) <= LONGEST_TITLE and bool(value_of(STATUS, title))
