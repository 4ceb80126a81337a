"""Compare two profiles, per rank and optimizer step: what is called more often, and what takes longer.

Totals of profiles of different lengths compare the lengths, and percentages of nested ranges compare the nesting, so
neither is used. Each profile is one instrumented run: a difference is what these two runs did, and no verdict.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypedDict

from msgspec import Meta

from testbed.analysis.document import terminal
from testbed.analysis.document.model import Block, Document, Section, Statement
from testbed.analysis.document.words import Number, counted
from testbed.analysis.profiles.summary import (
    COMPARED,
    PER_STEP,
    PROFILES,
    SUMMARY_FILE,
    milliseconds,
    occurrences,
    table_of_names,
)
from testbed.errors import InputError
from testbed.typed_json import check, read_checked

PARSER = "scripts/profiling/parse_nsys_stats.py"
_SHOULD_AGREE = (
    *("world_size", "ranks_in_profile", "gpu", "seq_length", "micro_batch_size_per_gpu", "grad_accum_steps"),
    *("global_batch_size", "model_size", "precision", "torch", "cuda", "deepspeed", "deepspeed_config_sha256"),
    *("git_commit", "hosts", "cpu", "instance_type"),
)
SHOWN = 8  # rows of a table
_CUT_AT = 99  # nsys cuts a kernel's name here and adds an ellipsis; its SQLite export does not


TITLES = {"phases": "Parts of an optimizer step, exclusive"} | COMPARED
Rows = dict[str, tuple[float | None, float | None]]  # nanoseconds and count per rank and step, by name


class _Nccl(TypedDict):
    percent_of_kernel_time: float | None


class _Summary(TypedDict):
    """What is compared of a profile_summary.json. Those of earlier tools have neither `tables` nor `nccl`."""

    tables: dict[str, dict[str, Any]]
    nccl: _Nccl
    num_optimizer_steps: Annotated[int, Meta(ge=1)]
    ranks_in_profile: Annotated[int, Meta(ge=1)]
    phases: dict[str, Any] | None
    sources: list[str]
    warnings: list[str]
    run_dir: str | None
    run_id: str | None


def read_summary(path: Path) -> dict[str, Any]:
    """Read a profile_summary.json, or that of a run's folder. InputError: there is none, or an earlier tool's."""
    path = Path(path)
    if path.is_dir():
        candidates = [path / PROFILES / SUMMARY_FILE, path / SUMMARY_FILE]
        path = next((found for found in candidates if found.exists()), candidates[0])
    if not path.exists():
        raise InputError(f"{path} does not exist; {PARSER} --run_dir writes it")
    try:
        return read_checked(path, lambda content: check(content, _Summary, may_hold_more=True))
    except InputError as error:
        raise InputError(
            f"{error}; write it again with {PARSER}, with --optimizer_steps and --ranks_in_profile where they are null"
        ) from None


def diff(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """Return what changed from summary `a` to `b`, per rank and step. InputError when no table is in both."""
    shared = [report for report in COMPARED if report in a["tables"] and report in b["tables"]]
    if not shared:
        raise InputError(
            f"the profiles have no table in common: one has {', '.join(a['tables']) or 'none'}, the other "
            f"{', '.join(b['tables']) or 'none'}"
        )
    sides = (a, b)
    told = ("run_dir", "run_id", "num_optimizer_steps", "ranks_in_profile", "sources")
    return {
        "compared": [{name: side[name] for name in told} for side in sides],
        "notes": _notes(a, b),
        "tables": {
            "phases": _rows(_phases(a, b), "phases"),
            **{report: _rows([_by_name(side["tables"][report]) for side in sides], report) for report in shared},
        },
    }


def _phases(a: dict, b: dict) -> list[Rows]:
    """Return the parts of a step of both; nothing where they were not measured in one way."""
    if not a["phases"] or not b["phases"] or a["phases"]["source"] != b["phases"]["source"]:
        return [{}, {}]
    return [{part["name"]: (part["ns"], None) for part in summary["phases"]["parts"]} for summary in (a, b)]


def _rows(sides: Sequence[Rows], table: str) -> list[dict[str, Any]]:
    """Join the rows of both sides by name, the largest change first.

    A kernel or call that a profile lacks took no time there. A range that it lacks was not marked there, which says
    nothing about time: None.
    """
    absent = (None, None) if table in ("phases", "nvtx_sum") else (0.0, 0.0)
    found = []
    for name in sides[0] | sides[1]:
        ns, count = zip(*(side.get(name, absent) for side in sides), strict=True)
        found.append({"name": name, "ns": ns, "count": count})
    return sorted(found, key=lambda row: -abs(_change(row["ns"]) or 0.0))


def _change(values: Sequence[float | None]) -> float | None:
    before, after = values
    return None if before is None or after is None else after - before


def _notes(a: dict, b: dict) -> list[str]:
    found = ["Both are single runs under a profiler: what differs is what these two did; no difference is significant."]
    steps = [summary["num_optimizer_steps"] for summary in (a, b)]
    if steps[0] != steps[1]:
        found.append(f"Unequal length: {steps[0]:,} and {steps[1]:,} optimizer steps; everything is per step.")
    for name in _SHOULD_AGREE:
        if a.get(name) != b.get(name):
            values = [_in_words(summary.get(name)) for summary in (a, b)]
            found.append(f"NOT THE SAME: {name.replace('_', ' ')} {values[0]} and {values[1]}.")
    if a["sources"] != b["sources"]:
        found.append(f"NOT THE SAME: made from {', '.join(a['sources'])} and {', '.join(b['sources'])}.")
    only = sorted(set(a["tables"]) ^ set(b["tables"]))
    if only:
        found.append(f"In one profile only, so not compared: {', '.join(only)}.")
    shares = [summary["nccl"]["percent_of_kernel_time"] for summary in (a, b)]
    if None not in shares:
        found.append(f"NCCL's share of the sum of kernel times: {shares[0]:.1f} % and {shares[1]:.1f} %.")
    for name, summary in (("A", a), ("B", b)):
        found += [
            f"{name}: {warning}" for warning in summary["warnings"] if "was on:" in warning or "covers" in warning
        ]
    return found


def _in_words(value: Any) -> str:
    if value is None:
        return "unknown"
    if isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value):
        return value[:8]  # eight digits tell two files apart
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _by_name(table: dict) -> Rows:
    """Return nanoseconds and count per rank and step by name, cut as nsys cuts it."""
    found: Rows = {}
    for row in table["rows"]:
        name = row["name"] if len(row["name"]) <= _CUT_AT else row["name"][:_CUT_AT] + "…"
        ns, count = found.get(name, (0.0, 0.0))
        found[name] = ((ns or 0.0) + row[PER_STEP]["total_ns"], (count or 0.0) + row[PER_STEP]["count"])
    return found


def diff_text(changes: dict[str, Any]) -> str:
    """Return the largest changes of each table, and what keeps them from being a comparison."""
    blocks: list[Block] = [
        (
            *(
                Statement(
                    f"{name}: ",
                    f"{side['run_dir']} ({counted(side['ranks_in_profile'], 'rank')} x "
                    f"{counted(side['num_optimizer_steps'], 'step')})",
                )
                for name, side in zip("AB", changes["compared"], strict=True)
            ),
            *(Statement("Note: ", note) for note in changes["notes"]),
        )
    ]
    for table, rows in changes["tables"].items():
        cells = [
            [
                row["name"],
                *map(milliseconds, row["ns"]),
                milliseconds(_change(row["ns"]), "+,.3f"),
                *map(occurrences, row["count"]),
                Number(_change(row["count"]), "+,.2f"),
            ]
            for row in rows[:SHOWN]
        ]
        only = [sum(row["ns"][number] is None for row in rows) for number in (1, 0)]
        note = f"{only[0]} are marked in A alone and {only[1]} in B alone: no change of time" if any(only) else ""
        if rows:
            header = ["", "A ms", "B ms", "B - A ms", "A count", "B count", "B - A count"]
            blocks.append(table_of_names(header, cells, f"{TITLES[table]}, per rank and step", note))
    return terminal.text(Document(sections=[Section(blocks=blocks)]))
