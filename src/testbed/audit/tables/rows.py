"""Take a row of a table as one side of a comparison: its figures, and what its words say."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace

from testbed.audit.finding import FAILS, Finding, Rule
from testbed.audit.printed_setup import plain_precision
from testbed.audit.reported import (
    BATCH,
    DEVICE,
    MODEL,
    PRECISION,
    QUALITY,
    ROW,
    SPEED_UP,
    STATUS,
    STRATEGY,
    Claim,
    Reported,
    Side,
)
from testbed.audit.tables.columns import LEARNT, OTHERS, RATES, RATIOS, RESULTS, TIMES, Grid
from testbed.audit.tables.figures import Figure, plain
from testbed.audit.words import FORMS, value_of
from testbed.errors import InputError

SHOWN = 12  # rows that a refusal lists
COUNTS = {"global_batch_size": "batch", "micro_batch_size": "micro_batch", "accumulation": "accumulation",
          "sequence_length": "length", "num_parameters": "params", "optimizer_steps": "steps"}  # fmt: skip
# in a cell without a figure; of a status; of a note
_FAILED = re.compile(
    r"(?i)\b(?:OOM(?:ed)?|out of memory|fail(?:ed|s)?|crash(?:ed|es)?|did not (?:run|fit|finish|complete|converge)"
    r"|diverged|hung|died|preempted|interrupted)\b"
)
_ENDED = re.compile(rf"{_FAILED.pattern}|\b(?:nan|stopped|killed|cancell?ed|aborted|timed? ?out)\b")
_FAILED_BY_NOTE = re.compile(
    r"(?i)\b(?<!not )(?<!never )(?<!without )(?:diverged|crashed|died|hung|(?:loss|it) (?:became|went|turned|is|was"
    r"|goes)(?: to)? NaN|NaNs?(?= (?:after|from|at|since))|did not (?:finish|converge|complete)|never converged"
    r"|(?:was|were|got|been) (?:killed|aborted|stopped|preempted|interrupted|cancell?ed)|(?:ran|runs|went) (?:out of"
    r" memory|OOM)|(?:dies|stopped|aborted|failed) (?:with|of|after|at|by|because|when))\b"
)
_DENIED = re.compile(r"(?i)\b(?:neither|nor|none)\b[^.;]*$|\b(?:no|not|never|without|0)\W+(?:\w+\W+)?$")
_OF_AN_END = re.compile(
    r"(?:run |job |exit )?(?:status|state|result|outcome|remarks?|notes?|comments?|info|exit|end|finished|completed)"
)
_NO_LOSS = re.compile(r"(?i)[-+]?(?:nan|inf(?:inity)?)")
_SIZE = FORMS[MODEL]
_COUNTS_RUNS = re.compile(r"(?i)#|no\.?|id|run id|job id|job|date|commit")


def side_of(grid: Grid, row: int) -> Side:
    """Return a row as a side with one run."""

    def value(quantity: str) -> float | None:
        figure = grid.figure(quantity, row)
        return figure.value if figure else None

    def count(quantity: str) -> int | None:
        read = value(quantity)
        return round(read) if read else None

    rated = next((name for name in RATES if value(name)), None)
    unit = RATES.get(rated or "", "tokens/s")
    if rated and rated.endswith("sample_rate") and re.search("im(?:age|g)", _heading_of(grid, rated)):
        unit = "images/s"
    rate, is_per_rank = (
        (value(rated), rated.startswith("device_") or grid.is_of_one) if rated else (value("speedup"), False)
    )
    words = {column.word: column.texts[row] for column in grid.columns if column.word and column.texts[row]}
    if (size := _SIZE.search(words.get(MODEL, ""))) and size[0] != words[MODEL]:  # "350M with Adam": a model and a run
        words.setdefault(STRATEGY, words[MODEL])
        words[MODEL] = next(group for group in size.groups() if group)
    model, _, method = words.get(MODEL, "").partition(", ")
    if method:  # "BERT-large, 4-stage pipeline"
        words[STRATEGY], words[MODEL] = words.get(STRATEGY, method), model
    words.setdefault(STRATEGY, _first_words(grid, row))
    words[PRECISION] = plain_precision(words.get(PRECISION, ""))
    failed = failure_of(grid, row)
    said = words.get(STATUS, "").lower()
    words[STATUS] = f"not measured: {failed}" if failed else re.sub("^assum.*", "assumed", said)
    words[BATCH] = str(count("any_batch") or "")
    quality = next((name for name in ("score", "error") if value(name)), None)
    words[QUALITY] = f"{said_of(grid, quality, row)}" if quality else ""
    is_step = value("step_s") is not None and not (grid.is_to_a_loss and value("time_s"))
    ppl = value("perplexity")
    run = Reported(
        path=grid.path,
        name=grid.place(row),
        form=ROW,
        time_s=value("step_s") if is_step else value("time_s"),
        time_meaning="time of one iteration" if is_step else _heading_of(grid, "time_s"),
        protocol="time_to_loss" if grid.is_to_a_loss and not is_step else "weak" if _is_weak(grid) else None,
        rate=rate,
        rate_unit=unit if rated else SPEED_UP,
        rate_is_per_rank=is_per_rank,
        device_name=words.pop(DEVICE, None),
        details={
            "table": grid.place(0),
            "line": grid.lines[row],
            "row": row,  # all rows of a turned table are of one line
            "others": {f"`{column.heading}`": column.texts[row] for column in grid.not_understood},
            "measured": _others(grid, row),
            "is_model": grid.columns[0].word == MODEL and STRATEGY not in {column.word for column in grid.columns},
            "tokens": count("tokens"),
            "is_series": len({*grid.devices} - {None}) == len(grid.lines) > 2,
            "is_in_bits": _of_bits(grid),
            "quality": _quality(grid, quality, value(quality)) if quality else None,
        },
        settings={str(key): text for key, text in words.items() if text},
        world_size=grid.devices[row],
        val_loss=value("val_loss") or (math.log(ppl) if ppl else None),
        train_loss=value("train_loss"),
        mfu=value("mfu"),
        **{field: count(quantity) for field, quantity in COUNTS.items()},  # type: ignore[arg-type]
    )
    return Side(run.name, (run,))


def _others(grid: Grid, row: int) -> dict[str, tuple[float, bool]]:
    """Return the figures under headings that alone say what they are, and whether each is a time."""
    columns = [column for column in grid.columns if column.quantity in OTHERS]
    return {column.heading: (figure.value, column.quantity == "other_time")
            for column in columns if (figure := column.figures[row])}  # fmt: skip


def _is_weak(grid: Grid) -> bool:
    """Return whether a table is of weak scaling: it says so, or rows on more devices have one batch of a device."""
    micro, devices = grid.column("micro_batch"), grid.column("devices")
    is_of_each = micro and devices and len({*micro.texts}) == 1 < len({*devices.texts}) and grid.scaling != "strong"
    return grid.scaling == "weak" or bool(is_of_each and not grid.column("batch") and not grid.column("accumulation"))


def _as_the_page_calls_it(side: Side, grid: Grid) -> Side:
    """Return a row of which the page, or the heading of its result, says that it was not measured, with that."""
    settings = side.first.settings
    result = next((name for name in (*RATES, "speedup", *TIMES) if any(_figures(grid, name))), "")
    marked = value_of(STATUS, said_of(grid, result))
    said = marked.lower() or (f"'{grid.warning}'" if grid.warning else "")
    return Side(side.name, (replace(side.first, settings={STATUS: said} | settings),)) if said else side


def _figures(grid: Grid, quantity: str) -> Sequence[Figure | None]:
    column = grid.column(quantity)
    return column.figures if column else ()


def claim_of(base: Side, other: Side) -> Claim:
    """Return two rows as a claim: of weak scaling where their tables call it that."""
    is_weak = {base.first.protocol, other.first.protocol} == {"weak"}
    return Claim(base, other, "weak" if is_weak else None)


def _of_bits(grid: Grid) -> bool:
    """Return whether losses are in bits per byte, which differ by less between models than nats per token do."""
    return re.search(r"(?i)bpb|bits", said_of(grid, "val_loss")) is not None


def _quality(grid: Grid, quantity: str, value: float | None) -> tuple[str, float]:
    """Return the heading of a score or an error, and its figure: of an error below zero, so that more is better."""
    column = grid.column(quantity)
    return column.heading if column else "", (value or 0.0) * (-1 if quantity == "error" else 1)


def said_of(grid: Grid, quantity: str, row: int | None = None) -> str:
    """Return the heading of a column, with the text of a row."""
    column = grid.column(quantity)
    if column is None:
        return ""
    return column.heading if row is None else f"{column.heading} {column.texts[row]}"


def _heading_of(grid: Grid, quantity: str) -> str:
    column = grid.column(quantity)
    heading = re.sub(r"[(\[].*", "", column.heading).strip().lower() if column else ""
    return heading if heading and not heading.endswith("iteration") else "training time"


def _first_words(grid: Grid, row: int) -> str:
    """Return the first cell of a row where it has no figure and nothing else is known of its column.

    A column of numbers or days of runs before it is passed over."""
    place = next((at for at, column in enumerate(grid.columns) if not _COUNTS_RUNS.fullmatch(column.heading)), 0)
    first = next((each for each in grid.columns[place:] if not each.quantity or not place), grid.columns[0])
    is_name = not first.quantity and not first.word and not first.is_of_words
    text = first.texts[row]
    return text if is_name and text and not text[0].isdigit() else ""


def failure_of(grid: Grid, row: int) -> str | None:
    """Return the cell that says that a row has no result: OOM, failed, a loss of nan."""
    results = [column for column in grid.columns if column.quantity in RESULTS and column.quantity not in RATIOS]
    has_figures = any(column.figures[row] for column in results)
    for column in grid.columns:
        text = column.texts[row]
        if column.quantity in LEARNT and _NO_LOSS.fullmatch(text):
            return f"a loss of {text}"
        if _OF_AN_END.fullmatch(column.heading.lower()) and _says(_ENDED, text):
            return text
        if (not has_figures and _FAILED.search(text)) or (column.quantity is None and "diverged" in text.lower()):
            return text
    return _says(_FAILED_BY_NOTE, grid.said.note(row))


def _says(pattern: re.Pattern[str], text: str) -> str | None:
    """Return what a pattern finds in a text that does not deny it."""
    found = pattern.search(text)
    return found[0] if found and not _DENIED.search(text[: found.start()]) else None


def label_of(grid: Grid, row: int) -> str:
    """Return the words of a row: the cells that hold no figure that is read."""
    texts = [column.texts[row] for column in grid.columns if not column.is_of_words and not column.figures[row]]
    return ", ".join(text for text in texts if text)


def row_named(items: Sequence[Reported], name: str, flag: str) -> Side:
    """Return the row that a name means: a cell is the name, or else one row alone has it among its words.

    Raises:
        InputError: no row or several rows have it; one sentence that lists what there is.
    """
    rows = [(grid, row) for item in items for grid in item.details["grids"] for row in range(len(grid.lines))]
    wanted = " ".join(plain(name).lower().split())

    def cells(grid: Grid, row: int) -> list[str]:
        texts = [" ".join(column.texts[row].lower().split()) for column in grid.columns if not column.is_of_words]
        return [*texts, *(re.sub(r" ?(?:\[\^?\w{1,20}\]|[*†‡§¹²³⁴])+$", "", text) for text in texts)]

    line = re.fullmatch(r".*:(\d{1,9})", name)  # as findings name a row
    if not wanted:
        raise InputError(f"{flag} '' names no row: give a cell of it, words that no other row has, or its line, as :4")
    for is_meant in (
        lambda grid, row: line is not None and grid.lines[row] == int(line[1]),
        lambda grid, row: wanted in cells(grid, row),
        lambda grid, row: wanted in " ".join(cells(grid, row)),
    ):
        found = [(grid, row) for grid, row in rows if is_meant(grid, row)]
        if len(found) == 1:
            grid, row = found[0]
            return _as_the_page_calls_it(side_of(grid, row), grid)
        if found:
            lines = ", ".join(f":{grid.lines[row]}" for grid, row in found[:SHOWN])
            raise InputError(f"{flag} '{name}' is in {len(found)} rows; give the line of one of them: {lines}")
    if line and any(int(line[1]) in item.details["refused"] for item in items):
        raise InputError(f"{flag} '{name}': line {line[1]} is of a table without a known heading of a result")
    labels = ", ".join(f"'{label_of(grid, row)}'" for grid, row in rows[:SHOWN])
    raise InputError(f"{flag} '{name}' is in no row of a table that is read; there are {labels or 'none'}")


def plain_heading(grid: Grid, quantity: str) -> str:
    """Return the heading of a quantity in small letters, a unit per device in one spelling."""
    return said_of(grid, quantity).lower().replace(" per ", "/").replace("device", "gpu")


def fails(grid: Grid, row: int, rule: Rule, message: str, corrected: str | None = None) -> Finding:
    """Return that a row contradicts itself."""
    return Finding(rule, (grid.place(row),), message, FAILS, corrected)
