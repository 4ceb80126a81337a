"""Say which rows each piece of a page's text is about: the one path from any place to a condition of a row.

A place is a row's cells, a footnote, a sentence of the section, a caption, a heading above, the name of the file.
What it says is read by words.py. A sentence is cut into clauses: "Ours used a batch of 64 while the baseline used 16".
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from testbed.audit.reported import STATUS
from testbed.audit.tables.english import english
from testbed.audit.tables.grid import Table, marks_of, says_not_measured, sentences_of
from testbed.audit.tables.words import (
    FORMS,
    NUMBER,
    OF_ALL_ROWS,
    OF_ONE_ROW,
    plain_number,
    value_of,
    values_of,
)

MOST_NOTE = 1000  # characters
_CUTS = re.compile(
    r"(?i)(,\s+(?:and |but |while |whereas )?|;\s*|\s+(?:while|whereas|but|and|against|versus|vs\.?|compared (?:to"
    r"|with))\s+)"
)
_COMPARES = re.compile(r"(?i)\b(?:faster|slower|quicker|times as|speed-?up|outperforms?|improv\w+)\b|\d ?x\b")
_CUTS_OF_A_RATIO = re.compile(r"(?i)(;\s*|,\s+(?:while |whereas |but |and )|\s+(?:while|whereas|but|and)\s+|,\s+)")
_BARE = re.compile(
    rf"(?<![\w.,-]){NUMBER}(?![\w-]|[.,]\d| ?(?:[GMKT]i?B\b|%|x\b|ms\b|s\b|h\b|hours?|minutes?|seconds?|steps?"
    rf"|epochs?|times|percent|years?|days?|layers?|k?tokens/s|TFLOP))", re.I,
)  # fmt: skip
_INSTEAD = re.compile(rf"(?i)\s*(?:\w+ )?(?:instead of|rather than|and not|not) {NUMBER}\b")
_RATIO = re.compile(
    r"(?i)(?<![\w.])(\d{1,3}(?:[.,]\d{1,3})?)[- ]?(?:x\b|\u00d7|times\b|fold\b|mal\b|fach\w*|\u500d)"
    r"|(?<![\w.])(\d{1,3}) ?% (?:faster|more|higher)"
)
OF_FIGURES = re.compile(
    r"(?i)\b(?:numbers?|figures?|entry|entries|values?|rows?|timings?|timed?|times|clocks?|results?|measur\w+"
    r"|benchmark\w*|throughput|speed-?ups?|tokens/s|read off|ran|runs?|jobs?)\b"
)
_ON = re.compile(r"\b(?:on|for) (?:the )?([A-Z][\w-]*)")
_LINK = re.compile(r"!?\[([^\[\]]*)\]\([^()]*\)")
_FIRST = {"first": 0, "top": 0, "upper": 0, "second": 1, "third": 2, "last": -1, "bottom": -1, "lower": -1}
_ROW = r"(?:rows?|entry|line|figure|number|value|result|point|run|speed-?up|rate|throughput|it|one|time)"
_ORDINAL = re.compile(
    rf"(?i)\b({'|'.join(_FIRST)}) (?:{_ROW}\b|(?=(?:on|from|with|ran|used|uses|is|was|had|comes|came|needs) ))"
    r"|\b(?:row|line|entry) (\d)\b|\b(first|last) (two|three) rows"
)
_DEVICES = r"(\d[\d,]*)[- ]?(?:gpus?|devices?|cards?|nodes?|ranks?)"
_OF_A_SIZE = re.compile(rf"(?i)\b{_ROW}(?: (?:for|at|on|with|of))? {_DEVICES}\b|\b{_DEVICES}[- ]{_ROW}\b")
_ABOVE = re.compile(r"(?i)\b(?:above|beyond|over|more than) (\d[\d,]*) (?:GPUs?|devices|nodes|cards)\b")
_SWAPPED = re.compile(rf"(?i)\b{NUMBER} (instead of|rather than) {NUMBER} (\w+(?: per \w+)?)")
_OLD = r"(?:old|previous|existing|standard|default|their|plain|dense|uncompressed|unfused|unoptimi[sz]ed|slow|slower)"
_NEW = r"(?:new|newer|fast|faster|sparse|compressed|fused|modified|improved|accelerated|proposed|optimi[sz]ed)"
_CODE = (
    r"(?:code|trainer|implementation|version|run|framework|library|kernels?|path|loader|recipe|setup|script|one|stack"
    r"|pipeline|branch|variant|method|row|figure|number|model|setting|configuration|repo\w*)"
)
_BASELINE = re.compile(
    r"(?i)\b(?:base-?line|(?<!for )reference|competitors?(?:'s)?|upstream|vanilla|stock|theirs|former|original(?:ly)?"
    rf"|naive|other (?:framework|library|trainer|project|system)|{_OLD} {_CODE})\b"
)
_OURS = re.compile(
    r"(?i)\b(?:ours|our(?! (?:\w+ )?(?:cluster|machines?|measure\w*|experiments?|benchmarks?|cost|nodes?|servers?"
    r"|tests?|set-?up|hardware|results|numbers|lab|roofline|model\b|estimate|profile|simulator|team|users|own"
    r"|figures|table))|latter|(?:this |the )(?:fork|port|patch)"
    rf"|this (?:repo\w*|work|library|framework|project|branch|pr)|{_NEW} {_CODE})\b"
)
_OTHERS = re.compile(
    r"(?i)\b(?:(?:all |the )?(?:other|remaining) (?:\w+ )?(?:rows?|runs?|entries|ones?|lines|figures|methods|results"
    r"|settings)|(?:the|all) others?|the rest|everything else|the other)\b"
)
_ALIKE = re.compile(r"(?i)\b(?:as|like)(?: in| for| with)? (?:all |the )+(?:others?|rest|other \w+|remaining \w+)\b")
_ALL = re.compile(
    r"(?i)\b(?:both|all(?! (?:of )?(?:the |its |their )?(?:\d|gpus|cards|nodes|two|four|eight|sixteen))|neither"
    r"|either|everywhere|throughout|same|identical"
    r"|(?:each|every) (?:row|run|entry|method|setting|configuration|figure|number|one|line|measurement))\b"
)
# words that name no row
_STOP = frozenset(
    "the and with for per our ours all one two row rows run runs batch size model training train data time step steps "
    "gpu gpus node nodes speed rate table figure figures number numbers full mode large small single default this that "
    "from not was were are has had used uses using only same other others both each than then more less first last "
    "second new old".split()
)
_PLAIN = frozenset("before after on off with without then now old new yes no".split())  # they do in quotes alone
_WITHOUT = re.compile(r"(?i)\b(?:without|w/o|no)\s+(?:an? |the )?")


@dataclass(frozen=True)
class Named:
    """The rows of a table as a text may name them: their names, their sizes in devices, and the row of reference."""

    names: tuple[str, ...] = ()
    figures: tuple[frozenset[str], ...] = ()  # of each row, those that no other row has
    sizes: tuple[int | None, ...] = ()
    reference: int = 0

    def rows_in(self, text: str) -> set[int]:
        """Return the rows that a text names, by their names, their parts, places, sizes or roles."""
        everyone = set(range(len(self.names)))
        text = _WITHOUT.sub("no ", text)
        numbers = {number.replace(",", "") for number in re.findall(r"(?<![\d.,])\d[\d,]*(?:\.\d+)?(?![\d,]*\d)", text)}
        found = {row for row, each in enumerate(self.figures) if each & numbers}
        for row in sorted(everyone - found, key=lambda at: -len(self.names[at])):
            name = self.names[row]
            pattern = rf"(?<![\w+]){re.escape(name)}(?![\w+]|-\w)"
            pattern = (
                rf"[\"'\u201c\u2018\u201e`]{pattern}[\"'\u201d\u2019\u201c`]" if name.lower() in _PLAIN else pattern
            )
            if len(name) > 1 and re.search(pattern, text, re.I):
                found.add(row)
                text = re.sub(pattern, " ", text, flags=re.I)
        parts = [_parts_of(name) for name in self.names]
        count = Counter(part for each in parts for part in each)
        camel = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", text)  # FlashAttention
        words = {word.lower() for word in re.findall(r"[\w.+/-]*\w", f"{text} {camel}")}
        words |= {part for word in words for part in re.split(r"[-/]", word)}
        words |= {word[:-ending] for word in words for ending in (1, 2) if len(word) > 6}  # kompilierte, caches
        found |= {row for row, each in enumerate(parts) if any(count[part] == 1 and part in words for part in each)}
        for first, at, side, several in _ORDINAL.findall(text):
            if side:
                many = {"two": 2, "three": 3}[several.lower()]
                found |= {*sorted(everyone)[:many]} if side.lower() == "first" else {*sorted(everyone)[-many:]}
            else:
                found.add(_FIRST[first.lower()] % len(self.names) if first else int(at) - 1)
        for one, other in _OF_A_SIZE.findall(re.sub(r"\bfrom\b[^,.;]*", " ", text)):
            size = int((one or other).replace(",", ""))
            found |= {row for row, each in enumerate(self.sizes) if each == size}
        if above := _ABOVE.search(text):
            found |= {row for row, size in enumerate(self.sizes) if size and size > int(above[1].replace(",", ""))}
        found &= everyone
        others = everyone - {self.reference}
        if found:
            return found
        if _BASELINE.search(text):
            found.add(self.reference)
        if _OURS.search(text):
            marked = {row for row in others if re.search(r"(?i)\b(?:ours?|we|this|new|proposed)\b", self.names[row])}
            found |= others if len(others) == 1 else marked
        return found

    def without_names(self, text: str) -> str:
        """Return a text without whole names of rows, whose numbers are no values."""
        for name in sorted(self.names, key=len, reverse=True):
            if len(name) > 1:
                text = re.sub(rf"(?<![\w+]){re.escape(name)}(?![\w+]|-\w)", " ", text, flags=re.I)
        return re.sub(r"\s+", " ", _ORDINAL.sub(" ", _OTHERS.sub(" ", text)))


def _parts_of(name: str) -> set[str]:
    """Return the words of a name by which a sentence may mean it, and the name without brackets."""
    words = {
        word.lower()
        for word in re.findall(r"[\w.]*\w", _WITHOUT.sub("no-", name))
        if (len(word) > 2 or word.isupper()) and re.search(r"[^\W\d]", word)
    }
    plain = re.sub(r"\s*\([^()]*\)", "", name).strip().lower()
    return {word for word in words if word not in _STOP} | ({plain} if len(plain) > 2 else set())


@dataclass(frozen=True)
class Said:
    """A clause, the rows that it is about, and its sentence. `is_of_all`: it is about the whole table."""

    rows: frozenset[int]
    words: str
    sentence: str
    is_of_all: bool = False
    is_note: bool = False  # a mark in the row leads to it


def said_of_rows(sentences: Iterable[str], named: Named, default: set[int] | None = None) -> Iterator[Said]:
    """Yield the clauses of sentences with their rows: of a footnote, `default` where a clause names none."""
    everyone = frozenset(range(len(named.names)))
    for raw in sentences:
        sentence = re.sub(r"\*\*|__|`|^[>\s*!-]+|^\[\^?\w{1,20}\]:?", "", english(_LINK.sub(r"\1", raw)))
        sentence = _SWAPPED.sub(r"\1 \4 \2 \3", sentence)
        for rows, words in _clauses(sentence, named, default):
            yield Said(everyone if rows is None else frozenset(rows), words, raw, rows is None)


def _clauses(sentence: str, named: Named, default: set[int] | None) -> list[tuple[set[int] | None, str]]:
    """Return the parts of a sentence with the rows of each; None: it names no row, so it is about all.

    A part without rows is of the rows before it, or else behind it; rows without a value are of the next part's value.
    """
    everyone = set(range(len(named.names)))
    sentence = re.sub(
        r"\s*\(([^()]*)\)", lambda inside: f"; {inside[1]}; " if _is_of_a_row(inside[1], named) else inside[0], sentence
    )
    pieces = (_CUTS_OF_A_RATIO if _COMPARES.search(sentence) else _CUTS).split(sentence)
    found: list[tuple[set[int] | None, str]] = []
    waiting: set[int] = set()
    last: set[int] | None
    lead, before = "", set(default or ())
    for at in range(0, len(pieces), 2):
        text, cut = pieces[at], pieces[at + 1] if at + 1 < len(pieces) else ""
        rows = named.rows_in(text)
        if _OTHERS.search(text) and not _ALIKE.search(text) and (before or rows):
            rows = (everyone - (rows or before)) or everyone
        elif _ALIKE.search(text) or (_ALL.search(text) and not rows):
            rows = everyone
        before |= rows
        if rows and cut and (cut.strip() in ("and", ", and") or len(text.split()) <= 4) and not _has_value(text, named):
            waiting |= rows
            continue
        rows |= waiting
        waiting = set()
        words = named.without_names(text)
        if rows:
            is_behind = bool(lead) and (
                _BARE.search(words) is not None or re.match(r"\W*(?:we|all|every)\b", lead, re.I)
            )
            found += [(default, lead)] if is_behind else []
            found.append((rows, words if is_behind else f"{lead} {words}".strip()))
            lead = ""
        elif found:
            found[-1] = (found[-1][0], f"{found[-1][1]}, {words}")
        else:
            lead = f"{lead}, {words}" if lead else words
    if waiting:
        last, words = found.pop() if found else (set(), lead)
        found.append(((last or set()) | waiting, words))
    return found or [(default, sentence)]


def _is_of_a_row(text: str, named: Named) -> bool:
    return re.search(r"\d", text) is not None and bool(named.rows_in(text))


def _has_value(text: str, named: Named) -> bool:
    text = named.without_names(text)
    return _BARE.search(text) is not None or any(form.search(text) for form in FORMS.values())


@dataclass(frozen=True)
class SaidOfTable:
    """What a page says of the rows of a table, clause by clause, and of all of them."""

    named: Named
    clauses: tuple[Said, ...]  # about some of the rows
    everywhere: str  # what is said of all: captions, headings, sentences that name no row
    warning: str  # a sentence that the figures were not measured
    claims: tuple[tuple[frozenset[int], float, str], ...]  # rows, and how many times as fast a sentence says one is

    def note(self, row: int) -> str:
        """Return what is said of a row, and not of all rows."""
        num_rows = len(self.named.names)
        said = (each.words for each in self.clauses if row in each.rows and len(each.rows) < max(num_rows, 2))
        return " ".join(said)[:MOST_NOTE]

    def of_all(self, name: str) -> str:
        return value_of(name, self.everywhere)

    def told(self, name: str) -> list[str]:
        """Return what clauses about some rows say of a condition, for each row; empty: nothing, or two values."""
        num_rows = len(self.named.names)
        found: list[list[str]] = [[] for _ in range(num_rows)]
        by_sentence: dict[str, list[Said]] = {}
        for clause in self.clauses:
            if name in (*OF_ALL_ROWS, STATUS) and len(clause.rows) == num_rows:
                continue  # of_all has it
            by_sentence.setdefault(clause.sentence, []).append(clause)
        for of_one in by_sentence.values():
            if name in OF_ONE_ROW and not any(each.is_note or OF_FIGURES.search(each.sentence) for each in of_one):
                continue  # of the method, and not of its figure
            for row, value in _in_one_sentence(name, of_one, num_rows):
                found[row].append(value)
        return [each[0] if len({*each}) == 1 or (each and name in OF_ONE_ROW) else "" for each in found]


def said_of_table(table: Table, named: Named) -> SaidOfTable:
    """Return what the page of a table says of its rows, by its sentences, footnotes, caption and headings."""
    clauses: list[Said] = []
    everywhere = [english(title) for title in table.titles[:3]]
    warnings = [title for title in table.titles[:2] if _is_not_measured(title)]
    places: list[tuple[str, set[int]]] = [(text, set()) for text in (table.near, table.section, table.intro)]
    for mark, text in table.footnotes:
        places.append((text, {row for row, each in enumerate(table.rows) if mark in marks_of(each)}))
    places += _of_symbols(table)
    read: set[str] = set()
    for at, (place, default) in enumerate(places):
        sentences = [each for each in sentences_of(place) if each not in read]
        for clause in said_of_rows(sentences, named, default or None):
            if not clause.is_of_all:
                clauses.append(replace(clause, is_note=bool(default)))
            if len(clause.rows) == len(named.names):
                everywhere += [clause.words] * (not clause.is_of_all or at != 1)  # a section may be about more
                warnings += [clause.sentence] * (at not in (1, 2) and says_not_measured(clause.sentence))
        read |= {*sentences}
    warning = " ".join(re.sub(r"\*\*|__|`|^[#*>\s]+", "", warnings[0]).split()) if warnings else ""
    of_all = re.sub(r"\*\*|__|`", "", "\n".join(everywhere))
    return SaidOfTable(named, tuple(clauses), of_all, warning, _claims_in(table, named))


def _claims_in(table: Table, named: Named) -> tuple[tuple[frozenset[int], float, str], ...]:
    """Return the ratios that sentences claim, with the rows that they name: of two rows both, if they name none."""
    found = []
    for sentence in dict.fromkeys(sentences_of(f"{table.near}\n\n{table.section}")):
        text = english(sentence)
        for ratio, share in _RATIO.findall(text):
            rows = named.rows_in(re.sub(r"\*\*|__|`", "", text)) or {*range(len(named.names))}
            if len(rows) < 3:
                value = float(ratio.replace(",", ".")) if ratio else 1 + float(share) / 100
                found.append((frozenset(rows | {named.reference}), value, sentence))
    return tuple(found)


def _of_symbols(table: Table) -> Iterator[tuple[str, set[int]]]:
    """Yield what a legend on the page says of a symbol, and the rows that have it in a cell."""
    rows_of: dict[str, set[int]] = {}
    for at, row in enumerate(table.rows):
        for cell in {
            cell.strip() for cell in row.cells if re.fullmatch(r"[^\w\s.,:%$|+*/<>=()\[\]-]{1,3}", cell.strip())
        }:
            rows_of.setdefault(cell, set()).add(at)
    if not rows_of:
        return
    symbols = "|".join(map(re.escape, rows_of))
    for symbol, words in re.findall(
        rf"({symbols})\s*(?:=|:|means|is)?\s*([^\n]*?)(?=[,;.]?\s*(?:{symbols}|$|\n))", f"{table.near}\n{table.page}"
    ):
        if words and len(rows_of[symbol]) < len(table.rows):
            yield words, rows_of[symbol]


def _is_not_measured(title: str) -> bool:
    """Return whether a heading calls what is below it a projection: no peak, and no comparison with measurements."""
    if re.search(r"(?i)\bpeak\b|(?<!not )\bmeasured\b|\bvs\b|\boutput\b|\bbehaviou?r\b|\bpredict", english(title)):
        return False
    return says_not_measured(title) or (len(title.split()) <= 6 and bool(value_of(STATUS, english(title))))


def _in_one_sentence(name: str, clauses: Sequence[Said], num_rows: int) -> Iterator[tuple[int, str]]:
    if name in ("score", "error") and len({on for clause in clauses for on in _ON.findall(clause.words)}) > 1:
        return  # of two data sets
    read = [(clause, value_of(name, clause.words)) for clause in clauses]
    is_number = any(value[:1].isdigit() for _, value in read)
    for clause, value in read:
        if clause.is_of_all:
            continue
        if not value and is_number and not values_of(name, clause.words):
            rest = _without_values(clause.words, name)
            rest = re.sub(r"(?<=\d) ?%", "", rest) if name in ("score", "error") else rest
            numbers = [each[1] for each in _BARE.finditer(rest)]
            bare = [number for number in numbers if number[0].isdigit()] or numbers
            value = plain_number(bare[0]) if len(bare) == 1 else ""
        for row in clause.rows if value else ():
            yield row, value
        match = FORMS[name].search(clause.words) if value else None
        instead = _INSTEAD.match(clause.words, match.end()) if match else None
        for row in set(range(num_rows)) - clause.rows if instead and len(clause.rows) < num_rows else ():
            yield row, plain_number(instead[1])  # type: ignore[index]


def _without_values(text: str, name: str) -> str:
    """Return a clause without what it says of other conditions, whose numbers are not of this one."""
    for other, form in FORMS.items():
        text = form.sub(" ", text) if other != name else text
    return text
