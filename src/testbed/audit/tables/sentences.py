"""Take the text of a page apart, and find the sentences that bear on a comparison of its rows.

"With AMP there was room for 24 sequences" decides more than any column does, and no pattern reads it safely.
So such a sentence is quoted beside the ratio, with what it is about, and nothing is concluded from it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass

from testbed.audit.reported import DEVICE
from testbed.audit.tables.columns import Grid
from testbed.audit.tables.figures import plain
from testbed.audit.tables.words import IN_WORDS

LONGEST_SENTENCE = 500
MOST_QUOTED = 5
NEAR = 15  # lines of a table
SHORTEST_NAME = 3  # characters, of a row in a text
_NUMBERS = r"(?:\d[\d,.]*k?|one|two|three|four|eight|sixteen|single)"
_ANY = r"\d[\d,.]*"
# what a sentence may be about -> the phrases that say so; "*": any ending, "#": a number, " ": a hyphen too
_PHRASES: dict[str, tuple[str, ...]] = {
    "batch": ("batch*", "minibatch*", "microbatch*", "mini batch*", "micro batch*", "accumulat*",
              "sequences per step", "samples per step", "sequences per gpu",
              "samples per gpu", "images per gpu", "examples per step", "tokens per step", "tokens per update"),
    "length": ("seq* len*", "sequence length*", "context length", "context window", "context of", "tokens long",
               "truncated", "packed", "padd*", "seqlen"),
    "resolution": ("#px", "# px", "# pixels", "#x#", "# x #", "resolution*", "crop*"),
    "devices": ("p3*", "p4d*", "p5*", "another machine", "other machine", "older gpu*", "other gpu*", "another gpu",
                "another cluster", "laptop", "workstation", "infiniband", "ethernet", "nvlink", "# gbe"),
    "number of devices": ("# gpu*", "# node*", "# device*", "# worker*", "# host*", "# machine*", "# card*",
                          "per gpu", "per device", "per rank", "per node", "sum over",
                          "summed over", "sums over", "whole node", "each rank", "each gpu", "each device"),
    "precision": ("fp8", "fp16", "fp32", "bf16", "tf32", "amp", "mixed precision", "half precision",
                  "full precision", "single precision", "quantiz*"),
    "what was learned": ("loss*", "perplexit*", "ppl", "accurac*", "bleu", "f1", "nan", "diverg*", "converg*",
                         "quality", "underfit*", "top 1", "top 5", "auc", "plateau*",
                         "early stop*", "stopped at", "stopped after"),
    "where a figure is from": ("quoted", "taken from", "copied", "reported by", "reported in", "paper", "blog*",
                               "previous *", "old*", "older *", "last version", "last release", "earlier version",
                               "commit", "comes from", "come from", "prints", "v#",
                               "last year", "last month", "reuse*"),
    "whether it was measured": ("estimat*", "extrapolat*", "projected", "projection", "simulat*", "expected",
                                "theoretical*", "assum*", "predict*", "derived", "divid*", "follows from",
                                "follow from", "computed from", "not measured", "not been measured", "not run",
                                "modelled", "scaled up", "scaled from", "scaled by", "multiplied"),
    "what the time holds": ("includ*", "exclud*", "warm up", "warmup", "warmed up", "compil*", "validation",
                            "evaluation", "data load*", "dataload*", "checkpoint*", "start up", "profil*", "debug*",
                            "cuda_launch_blocking", "anomaly",
                            "first epoch*", "first step*", "forward only", "forward pass only", "frozen", "freez*",
                            "lora"),
    "a run that failed": ("oom", "out of memory", "crash*", "failed", "fails", "timeout*", "time outs", "timed out",
                          "killed", "stall*", "throttl*", "shared with", "shared machine", "shared node", "busy"),
}  # fmt: skip


def _pattern(phrases: Iterable[str]) -> str:
    found = (re.escape(phrase).replace(r"\*", r"[\w.-]*").replace(r"\ ", "[ -]") for phrase in phrases)
    joined = rf"(?<!\w)(?<!\w-)(?:{'|'.join(found)})(?!\w)"
    return joined.replace(r"v\#", r"v\d+\.\d[\w.]*").replace(r"\#x", rf"{_ANY}x").replace(r"\#", _NUMBERS)


_ABOUT = {name: re.compile(_pattern(phrases), re.I) for name, phrases in _PHRASES.items()}
_ABOUT["devices"] = re.compile(f"{_ABOUT['devices'].pattern}|{IN_WORDS[DEVICE].pattern}", re.I)
DECISIVE = re.compile("|".join(pattern.pattern for pattern in _ABOUT.values()), re.I)
_ALONE = ("where a figure is from", "whether it was measured", "a run that failed")  # that say enough of any figure
# a row without its name
_ROW = re.compile(
    r"(?i)\b(?:baseline|reference|ours|former|latter|the (?:other|first|last|second|two|rest)|both|each|respectively"
    r"|rows?|entries|columns?|against|versus|vs|while|whereas|instead of|rather than|only)\b"
)
_FIGURE = re.compile(
    r"(?i)\b(?:numbers?|figures?|rows?|times?|timings?|rates?|results?|speed-?ups?|throughput|measure\w*|baseline|runs?"
    r"|ran|table|column|job)\b"
)
_NOTE = re.compile(r"[*†‡§¹²³⁴]|\[\^?\w{1,20}\]")
_VALUE = re.compile(rf"(?i)\b{_NUMBERS}\b")


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
    lines_of = [_lines_by_name(grid) for grid in grids]
    for line, sentence in _sentences_in(text):
        if not DECISIVE.search(sentence):
            continue
        about = {name: {match[0].lower() for match in pattern.finditer(sentence)} for name, pattern in _ABOUT.items()}
        about = {name: values for name, values in about.items() if values}
        words = sentence.lower()
        named = frozenset(row for names in lines_of for row in _named(words, names))
        is_of_rows = bool(named) or _ROW.search(sentence) is not None or _NOTE.match(sentence) is not None
        tells_apart = len(_VALUE.findall(sentence)) > 1 or any(len(values) > 1 for values in about.values())
        says_enough = bool({*about} & {*_ALONE})
        is_of_figures = says_enough and (is_of_rows or _FIGURE.search(sentence) is not None)
        is_of_figures |= bool(named) and _FIGURE.search(sentence) is not None
        if is_of_figures or (is_of_rows and tells_apart):
            is_near = any(grid.lines[0] - NEAR <= line <= grid.lines[-1] + NEAR for grid in grids)
            weight = 2 * len(named) + len(about) + 2 * tells_apart + is_of_figures + 3 * is_near
            found.append((weight, Quote(line, sentence, tuple(about), named, is_near)))
    return [quote for _, quote in sorted(found, key=lambda each: -each[0])]


def quotes_on(quotes: Iterable[Quote], meant: Set[int] | None = None) -> list[str]:
    """Return in words, in their order, the first quotes on the rows of these lines, or on any row, near a table."""
    kept = [quote for quote in quotes if (quote.is_near if meant is None else not quote.rows or quote.rows & meant)]
    kept = kept[:MOST_QUOTED]
    return [
        f'line {quote.line}, on {" and ".join(quote.about[:3])}: "{quote.words}"'
        for quote in sorted(kept, key=lambda quote: quote.line)
    ]


def _sentences_in(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the words of each sentence outside tables and code, without its markup."""
    if "<table" in text.lower():  # its cells are no sentences; the lines stay
        text = re.sub(r"(?is)<table\b.*?</table>", lambda found: "|" + "\n|" * found[0].count("\n"), text)
    begin, is_code = 1, False
    parts: list[str] = []
    for number, line in enumerate([*text.splitlines(), ""], start=1):
        stripped = line.strip()
        is_fence = stripped.startswith("```")
        is_code ^= is_fence
        ends = not stripped or is_code or is_fence or "|" in line
        begins = ends or re.match(r"(?:[-*+>#]|\d+\.) ?", stripped) is not None
        if begins and parts:
            yield from _of_paragraph(parts, begin)
            parts = []
        if not ends and not stripped.startswith("#"):
            begin = begin if parts else number
            parts.append(stripped)


def _of_paragraph(parts: Sequence[str], begin: int) -> Iterator[tuple[int, str]]:
    text = "\n".join(parts)
    start, line, counted = 0, begin, 0
    for end in re.finditer(r"(?<!\bvs)(?<!\bincl)(?<!\bapprox)[.!?](?=\s|$)|$", text):
        raw = text[start : end.end()]
        if raw.strip() and len(raw) <= LONGEST_SENTENCE:
            first = start + len(raw) - len(raw.lstrip())
            line, counted = line + text.count("\n", counted, first), first
            yield line, plain(" ".join(raw.split()))
        start = end.end()


def _lines_by_name(grid: Grid) -> dict[str, int]:
    """Return the line of each name, the first cell, and of each word that stands in the first cell of one row alone."""
    first = grid.columns[0]
    names = ["" if first.figures[row] or first.is_of_words else text.lower() for row, text in enumerate(first.texts)]
    parts = [
        {name, re.sub(r"\s*\([^()]*\)", "", name).strip(), *re.findall(r"[a-z][\w+-]{3,}", name)}
        for name in names
    ]  # fmt: skip
    count = Counter(part for each in parts for part in each)
    return {
        part: grid.lines[row] for row, each in enumerate(parts) for part in each
        if count[part] == 1 and len(part) >= SHORTEST_NAME and re.search("[a-z]", part)
    }  # fmt: skip


def _named(words: str, names: dict[str, int]) -> set[int]:
    """Return the lines of the rows that a sentence names. DDP is not named by DDP-2."""
    return {
        row for name, row in names.items()
        if name in words and re.search(rf"(?<![\w+-]){re.escape(name)}(?!\w|[+-]\w)", words)
    }  # fmt: skip
