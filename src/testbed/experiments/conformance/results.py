"""Keep a line for each combination, and draw the tables of what agrees. No torch."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from testbed.analysis.document.markdown import table_text
from testbed.analysis.document.model import Table
from testbed.config.device_name import cpu_name
from testbed.distributed.launch import usable_cores
from testbed.errors import InputError, as_lines, counted, one_line
from testbed.experiments.conformance.trials import STAGES, TOLERANCES, Trial
from testbed.io import read_whole, write_text

FILE = "conformance.jsonl"
Line = dict[str, Any]
Row = tuple[str, ...]
WHERE = ("DeepSpeed", "PyTorch", "through", "ZeRO", "precision", "which")
DIFFERING = ("loss", "norm", "weights", "repeats in fp32, other initial weights in bf16")
FAILING = ("what it says",)
DIFFERS = "Differs from the single process: distance (allowed)"
PLACES = {"plain": "DeepSpeed alone", "program": "src/gpt2.py"}


def read(path: Path) -> list[Line]:
    """Return the lines of a file, without an incomplete last line; an empty list if the file does not exist.

    A line with a command says what made those after it; every other one is a combination.
    """
    lines = []
    texts = read_whole(path, str(path)).splitlines(keepends=True) if os.path.lexists(path) else []
    for number, text in enumerate(texts, start=1):
        try:
            line = json.loads(text)
            if "command" not in line:
                key(line)
            lines.append(line)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            if number == len(texts) and not text.endswith(b"\n"):
                break
            raise InputError(f"{path}, line {number}: is none of this program's; remove it, and call again") from None
    return lines


def add(path: Path, line: Line) -> None:
    """Append a line, and write the file whole."""
    write_text(path, "".join(f"{json.dumps(each)}\n" for each in [*read(path), line]))


def made_by(command: str, commit: str, is_dirty: bool | None) -> Line:
    """Return the line before those that a command makes."""
    return {"command": command, "commit": commit, "is_dirty": is_dirty, "cpu": cpu_name(), "cores": usable_cores()}


def key(line: Line) -> tuple[str, str, str]:
    """Return the releases and the combination of a line; "+cpu" and its like belong to a build, not to a release."""
    trial = Trial(*(line[name] for name in ("through", "stage", "accumulation", "clipping", "precision")))
    return line["torch"].partition("+")[0], line["deepspeed"], trial.name


def combinations(lines: Iterable[Line]) -> list[Line]:
    return [line for line in lines if "command" not in line]


def version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.partition("+")[0].split(".") if part.isdigit())


def tables(lines: Sequence[Line]) -> str:
    """Return Markdown: what made the lines, how many combinations agree, and those that do not, with the reason."""
    found = combinations(lines)
    counted_columns = ("PyTorch", "DeepSpeed", "through", *(f"ZeRO {stage}" for stage in STAGES))
    parts = [
        as_lines(dict.fromkeys(_made(line) for line in lines if "command" in line)),
        table_text(Table(counted_columns, counted_rows(found))),
    ]
    failing = [line for line in found if "error" in line]
    differing = [line for line in found if not line["agrees"] and "error" not in line]
    for title, columns, rows in (
        (DIFFERS, DIFFERING, _rows(differing, ("stage", "precision", "note"), _distances)),
        ("Does not run", FAILING, _rows(failing, ("error",), _error)),
    ):
        if rows:
            table = Table((*WHERE, *columns), rows, text_columns=range(len(WHERE) + len(columns)))
            parts += [f"**{title}**", table_text(table)]
    return "\n\n".join(parts)


def _made(head: Line) -> str:
    changes = " with changes" if head["is_dirty"] else ""
    return f"- `{head['command']}`, commit `{head['commit']}`{changes}, {head['cores']} cores ({head['cpu']})"


def counted_rows(found: Sequence[Line]) -> list[Row]:
    """Return a row for each pair and way: for each stage, how many combinations agree."""
    rows = []
    for group in _groups(found, ("torch", "deepspeed"), ()):
        cells = [_cell([line for line in group if line["stage"] == stage]) for stage in STAGES]
        rows.append((group[0]["torch"], group[0]["deepspeed"], PLACES[group[0]["through"]], *cells))
    return rows


def _groups(found: Sequence[Line], releases: tuple[str, str], same: Sequence[str]) -> list[list[Line]]:
    """Return the lines of each pair and way that are the `same` in these fields, sorted by `releases`."""
    groups: dict[Any, list[Line]] = {}
    for line in sorted(found, key=lambda line: (*(version(line[name]) for name in releases), line["through"])):
        groups.setdefault(tuple(line.get(name) for name in (*releases, "through", *same)), []).append(line)
    return list(groups.values())


def _cell(lines: Sequence[Line]) -> str:
    if not lines:
        return ""
    agree, failed = (
        sum(is_one(line) for line in lines) for is_one in (lambda line: line["agrees"], lambda line: "error" in line)
    )
    if agree == len(lines):
        return f"all {agree} agree"
    if failed == len(lines):
        return "does not run"
    return f"{agree} of {len(lines)} agree" + (f", {failed} do not run" if failed else "")


def _rows(found: Sequence[Line], same: Sequence[str], said: Callable[[Sequence[Line]], Sequence[str]]) -> list[Row]:
    """Return a row for each of `_groups`, with what is `said` of it."""
    return [(*_where(group), *said(group)) for group in _groups(found, ("deepspeed", "torch"), same)]


def _where(group: Sequence[Line]) -> Row:
    first = group[0]
    stages, precisions = (
        ", ".join(dict.fromkeys(str(line[name]) for line in group)) for name in ("stage", "precision")
    )
    which = dict.fromkeys(
        f"accumulation {line['accumulation']}, {'' if line['clipping'] else 'not '}clipping" for line in group
    )
    short = "all" if len(which) == 4 else "; ".join(which)
    return first["deepspeed"], first["torch"], PLACES[first["through"]], stages, precisions, short


def _error(group: Sequence[Line]) -> Sequence[str]:
    return [one_line(group[0]["error"], 200)]


def _distances(group: Sequence[Line]) -> Sequence[str]:
    if "note" in group[0]:
        return group[0]["note"], "", "", ""
    far = []
    for name in TOLERANCES:
        pairs = [(line["distances"][name], line["allowed"][name]) for line in group]
        distance, allowed = max(pairs, key=lambda pair: pair[0] / pair[1])
        far.append(f"{distance:.1e} ({allowed:.0e})")
    return *far, _again(group)


def _again(group: Sequence[Line]) -> str:
    """Return what repeats came to: in fp32 with the same initial weights, in bf16 with others."""
    again = [times for line in group for times in line.get("again", ())]
    if group[0]["precision"] == "fp32":
        differing = sum(not times <= 1 for times in again)  # not a number differs
        return f"{differing} of {counted(len(again), 'repeat')} differ" if again else "not repeated"
    return f"{min(again):.2g} to {max(again):.2g} times what is allowed" if again else ""
