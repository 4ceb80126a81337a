"""Compare two profiles, per rank and optimizer step: what is called more often, and what takes longer.

Totals of profiles of different lengths compare the lengths, and percentages of nested ranges compare the nesting, so
neither is used. Each profile is one instrumented run: a difference is what these two runs did, and no verdict.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
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
_CUT_AT = 99  # nsys cuts a kernel's name here and adds an ellipsis; its SQLite export does not


class _Nccl(TypedDict):
    instances: list[dict[str, Any]]
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
    collectives = [{(row["kind"], row["name"]): row[PER_STEP] for row in side["nccl"]["instances"]} for side in (a, b)]
    return {
        "compared": {
            name: {
                key: summary[key] for key in ("run_dir", "run_id", "num_optimizer_steps", "ranks_in_profile", "sources")
            }
            for name, summary in (("a", a), ("b", b))
        },
        "notes": _notes(a, b),
        "phases": [{"name": name, "ns": ns} for name, ns in _beside(_phases(a, b))],
        "nccl": [{"kind": kind, "name": name, PER_STEP: counts} for (kind, name), counts in _beside(collectives, 0.0)],
        "nccl_percent_of_kernel_time": [a["nccl"]["percent_of_kernel_time"], b["nccl"]["percent_of_kernel_time"]],
        "tables": {report: _rows(report, a["tables"][report], b["tables"][report]) for report in shared},
    }


def _beside(sides: Sequence[dict], absent: Any = None) -> Iterator[tuple[Any, list]]:
    """Yield each key of two tables with the values of both."""
    return ((key, [side.get(key, absent) for side in sides]) for key in sides[0] | sides[1])


def _phases(a: dict, b: dict) -> list[dict[str, float]]:
    """Return the parts of a step of both; nothing where they were not measured in one way."""
    if not a["phases"] or not b["phases"] or a["phases"]["source"] != b["phases"]["source"]:
        return [{}, {}]
    return [{part["name"]: part["ns"] for part in summary["phases"]["parts"]} for summary in (a, b)]


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


def _rows(report: str, a: dict, b: dict) -> list[dict]:
    """Join the rows of both tables by name, the largest change of time first.

    A kernel or call that a profile lacks took no time there. A range that it lacks was not marked there, which says
    nothing about time: None.
    """
    absent = (None, None) if report == "nvtx_sum" else (0.0, 0.0)
    found = [
        {"name": name, "ns": [ns for ns, _ in sides], "count": [count for _, count in sides]}
        for name, sides in _beside([_by_name(table) for table in (a, b)], absent)
    ]
    return sorted(found, key=lambda row: (None in row["ns"], -abs((row["ns"][1] or 0) - (row["ns"][0] or 0))))


def _by_name(table: dict) -> dict[str, tuple[float, float]]:
    """Return nanoseconds and count per rank and step by name, cut as nsys cuts it."""
    found: dict[str, tuple[float, float]] = {}
    for row in table["rows"]:
        name = row["name"] if len(row["name"]) <= _CUT_AT else row["name"][:_CUT_AT] + "…"
        ns, count = found.get(name, (0.0, 0.0))
        found[name] = (ns + row[PER_STEP]["total_ns"], count + row[PER_STEP]["count"])
    return found


def diff_text(changes: dict[str, Any], num_rows: int = 8) -> str:
    """Return the largest changes of each table, and what keeps them from being a comparison."""
    sides = [
        Statement(
            f"{name.upper()}: ",
            f"{side['run_dir']} ({counted(side['ranks_in_profile'], 'rank')} x "
            f"{counted(side['num_optimizer_steps'], 'step')})",
        )
        for name, side in changes["compared"].items()
    ]
    blocks: list[Block] = [(*sides, *(Statement("Note: ", note) for note in changes["notes"]))]
    if changes["phases"]:
        rows = [[row["name"], *map(milliseconds, row["ns"]), _change(row["ns"], 1e-6)] for row in changes["phases"]]
        only = [row["name"] for row in changes["phases"] if None in row["ns"]]
        note = f"{', '.join(only)}: in one profile only, and there no part of the range around it" if only else ""
        blocks.append(
            table_of_names(["", "A", "B", "B - A"], rows, "An optimizer step on one rank, exclusive, ms", note)
        )
    if changes["nccl"]:
        rows = [
            [f"{row['kind']}  {row['name']}", *map(occurrences, row[PER_STEP]), _change(row[PER_STEP], form="+,.2f")]
            for row in changes["nccl"]
        ]
        shares, note = changes["nccl_percent_of_kernel_time"], ""
        if None not in shares:
            note = f"NCCL's share of the sum of kernel times: {shares[0]:.1f} % and {shares[1]:.1f} %"
        title = "Collectives, instances per rank and step"
        blocks.append(table_of_names(["", "A", "B", "B - A"], rows, title, note))
    for report, changed in changes["tables"].items():
        rows = [
            [row["name"], *map(milliseconds, row["ns"]), _change(row["ns"], 1e-6), *map(occurrences, row["count"])]
            for row in changed[:num_rows]
        ]
        only = [sum(row["ns"][number] is None for row in changed) for number in (1, 0)]
        note = (
            f"{only[0]} ranges are marked in A alone and {only[1]} in B alone: no change of time" if any(only) else ""
        )
        header = ["", "A ms", "B ms", "B - A", "A count", "B count"]
        blocks.append(table_of_names(header, rows, f"{COMPARED[report]}, per rank and step", note))
    return terminal.text(Document(sections=[Section(blocks=blocks)]))


def _change(values: Sequence[float | None], factor: float = 1, form: str = "+,.3f") -> Number:
    before, after = values
    return Number(None if before is None or after is None else (after - before) * factor, form)
