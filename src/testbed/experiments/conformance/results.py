"""Keep a line for each combination, and draw the tables of what agrees. No torch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from testbed.analysis.document.markdown import table_text
from testbed.analysis.document.model import Table
from testbed.config.device_name import cpu_name
from testbed.distributed.launch import usable_cores
from testbed.errors import InputError, as_lines, one_line
from testbed.experiments.conformance import Trial
from testbed.experiments.conformance.trials import STAGES
from testbed.io import read_whole, write_text

FILE = "conformance.jsonl"
Line = dict[str, Any]
COUNTED = ("PyTorch", "DeepSpeed", *(f"ZeRO {stage}" for stage in STAGES))
OTHERS = ("DeepSpeed", "PyTorch", "ZeRO", "precision", "which", "distance from the single process (allowed), or why")


def read(path: Path) -> list[Line]:
    """Return the whole lines of a file; an empty list if the file does not exist.

    A line with a command says what made those after it; every other one is a combination.
    """
    texts = read_whole(path, str(path)).split(b"\n")[:-1] if os.path.lexists(path) else []
    lines = []
    for number, text in enumerate(texts, start=1):
        try:
            line = json.loads(text)
            _check(line)
            lines.append(line)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise InputError(f"{path}, line {number}: is none of this program's; remove it, and call again") from None
    return lines


def _check(line: Line) -> None:
    """Raise an error if this program did not write the line."""
    if "command" in line:
        _made(line)
        return
    key(line)
    if not isinstance(line["agrees"], bool):
        raise InputError("it agrees, or it does not")
    if not line["agrees"]:
        _why([line])


def add(path: Path, line: Line) -> None:
    """Append a line, and write the file whole."""
    write_text(path, "".join(f"{json.dumps(each)}\n" for each in [*read(path), line]))


def made_by(command: str, commit: str, is_dirty: bool | None) -> Line:
    """Return the line before those that a command makes."""
    return {"command": command, "commit": commit, "is_dirty": is_dirty, "cpu": cpu_name(), "cores": usable_cores()}


def key(line: Line) -> tuple[str, str, str]:
    """Return the releases and the combination of a line; "+cpu" and its like belong to a build, not to a release."""
    trial = Trial(*(line[name] for name in ("stage", "accumulation", "clipping", "precision")))
    return line["torch"].partition("+")[0], line["deepspeed"], trial.name


def combinations(lines: Iterable[Line]) -> list[Line]:
    return [line for line in lines if "command" not in line]


def tables(lines: Sequence[Line]) -> str:
    """Return Markdown: what made the lines, how many combinations agree, and those that do not, with the reason."""
    found = combinations(lines)
    made = as_lines(dict.fromkeys(_made(line) for line in lines if "command" in line))
    counts = [
        (*pair, *(_count([line for line in group if line["stage"] == stage]) for stage in STAGES))
        for pair, group in _groups(found, "torch", "deepspeed")
    ]
    others = [
        (*map(str, where), _which(group), _why(group))
        for (*where, _), group in _groups(
            [line for line in found if not line["agrees"]], "deepspeed", "torch", "stage", "precision", "error"
        )
    ]
    parts = [made, table_text(Table(COUNTED, counts))]
    if others:
        parts += ["**What does not agree**", table_text(Table(OTHERS, others, text_columns=range(len(OTHERS))))]
    return "\n\n".join(parts)


def _made(head: Line) -> str:
    changes = " with changes" if head["is_dirty"] else ""
    return f"- `{head['command']}`, commit `{head['commit']}`{changes}, {head['cores']} cores ({head['cpu']})"


def _groups(found: Sequence[Line], *names: str) -> list[tuple[tuple[Any, ...], list[Line]]]:
    """Return the lines that have these fields in common, sorted by the numbers of the releases."""
    groups: dict[tuple[Any, ...], list[Line]] = {}
    for line in sorted(found, key=lambda line: [_version(line[name]) for name in names[:2]]):
        groups.setdefault(tuple(line.get(name) for name in names), []).append(line)
    return list(groups.items())


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.partition("+")[0].split(".") if part.isdigit())


def _count(lines: Sequence[Line]) -> str:
    agree, failed = sum(line["agrees"] for line in lines), sum("error" in line for line in lines)
    if not lines or failed == len(lines):
        return "does not run" if lines else ""
    if agree == len(lines):
        return f"all {agree} agree"
    return f"{agree} of {len(lines)} agree" + (f", {failed} do not run" if failed else "")


def _which(group: Sequence[Line]) -> str:
    which = [
        f"accumulation {line['accumulation']}, {'' if line['clipping'] else 'not '}clipping"
        for line in sorted(group, key=lambda line: (line["accumulation"], not line["clipping"]))
    ]
    return "all" if len(which) == 4 else "; ".join(which)


def _why(group: Sequence[Line]) -> str:
    """Return the error, or the largest distances and what runs from other initial weights came to."""
    if reason := group[0].get("error") or group[0].get("note"):
        return one_line(reason, 200)
    far = []
    for name in group[0]["distances"]:
        pairs = [(line["distances"][name], line["allowed"][name]) for line in group]
        distance, allowed = max(pairs, key=lambda pair: pair[0] / pair[1])
        far.append(f"{name} {distance:.1e} ({allowed:.0e})")
    again = [times for line in group for times in line.get("again", ())]
    others = f"from other weights {min(again):.2g} to {max(again):.2g} times what is allowed" if again else ""
    return "; ".join([", ".join(far), *filter(None, [others])])
