"""Print summaries of profiles and their differences: a page that fits in a terminal, the rest is in the file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from testbed.analysis.document import terminal
from testbed.analysis.document.model import Block, Cell, Document, Section, Statement, Table, plain
from testbed.analysis.document.words import Number, counted
from testbed.analysis.profiles.diff import COMPARED
from testbed.analysis.profiles.summary import PER_STEP

_NAME_WIDTH = 58


def summary_text(summary: dict[str, Any], num_rows: int = 5) -> str:
    """Return the summary in short: what a step consists of, collectives, the first rows of each table, warnings."""
    ranks, steps = summary["ranks_in_profile"], summary["num_optimizer_steps"]
    about = (
        f"{summary['run_type'] or 'run'} on {_counted(summary['world_size'], 'rank')}, "
        f"from {', '.join(summary['sources'])}; "
        f"the profile covers {_counted(ranks, 'rank')} x {_counted(steps, 'optimizer step')}"
    )
    blocks: list[Block] = [about]
    if phases := summary["phases"]:
        rows = [
            [part["name"], _milliseconds(part["ns"]), Number(part["percent_of_step"], ".1f", unit=" %")]
            for part in phases["parts"]
        ]
        title = f"An optimizer step on one rank, exclusive ({phases['source']})"
        blocks.append(_table(["", "ms", "of the step"], rows, title))
    if device := summary["device_steps"]:
        named = {
            "step": "step_ns",
            "computation": "compute_ns",
            "NCCL": "nccl_ns",
            "NCCL not covered by computation": "exposed_nccl_ns",
        }
        rows = [[name, _milliseconds(device["mean"][key])] for name, key in named.items()]
        title = f"On the device, mean of {len(device['rows'])} steps (unions of kernels)"
        blocks.append(_table(["", "ms"], rows, title))
    if collectives := summary["nccl"]["instances"]:
        rows = [[f"{row['kind']}  {row['name']}", _count(row["count"]), _count(row[PER_STEP])] for row in collectives]
        percent = summary["nccl"]["percent_of_kernel_time"]
        note = "" if percent is None else f"NCCL is {percent:.1f} % of the sum of kernel times"
        blocks.append(_table(["", "instances", "per rank and step"], rows, "Collectives", note))
    for report, title in COMPARED.items():
        if table := summary["tables"].get(report):
            is_known = all(row[PER_STEP] for row in table["rows"])
            shown = [(row["name"], row[PER_STEP] if is_known else row) for row in table["rows"][:num_rows]]
            rows = [[name, _milliseconds(values["total_ns"]), _count(values["count"])] for name, values in shown]
            title = f"{title}, {'per rank and step' if is_known else 'whole profile'}"
            blocks.append(_table(["", "ms", "count"], rows, title))
    share = summary["likely_bottleneck"].get("allreduce_gradients_percent_of_outermost_ranges")
    if share is not None:
        blocks.append(
            f"allreduce_gradients takes {share:.1f} % of the outermost training ranges that are marked here; "
            "diff_profiles.py gives two profiles' shares of the same ranges"
        )
    return terminal.text(
        Document(sections=[Section(blocks=blocks)], notes=[[f"Note: {text}" for text in summary["warnings"]]])
    )


def _counted(number: int | None, noun: str) -> str:
    return counted(number, noun) if number else f"? {noun}s"


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
        rows = [[row["name"], *map(_milliseconds, row["ns"]), _change(row["ns"], 1e-6)] for row in changes["phases"]]
        only = [row["name"] for row in changes["phases"] if None in row["ns"]]
        note = f"{', '.join(only)}: in one profile only, and there no part of the range around it" if only else ""
        blocks.append(_table(["", "A", "B", "B - A"], rows, "An optimizer step on one rank, exclusive, ms", note))
    if shares := changes["shares"]["rows"]:
        rows = [
            [row["name"], *(Number(each, ".1f") for each in row["percent"]), _change(row["percent"], form="+,.1f")]
            for row in shares[:num_rows]
        ]
        title = f"Share of {' + '.join(changes['shares']['of'])}, which both mark, %"
        blocks.append(_table(["", "A", "B", "B - A"], rows, title, "Nested ranges: shares do not add up"))
    if changes["nccl"]:
        rows = [
            [f"{row['kind']}  {row['name']}", *map(_count, row[PER_STEP]), _change(row[PER_STEP], form="+,.2f")]
            for row in changes["nccl"]
        ]
        shares, note = changes["nccl_percent_of_kernel_time"], ""
        if None not in shares:
            note = f"NCCL's share of the sum of kernel times: {shares[0]:.1f} % and {shares[1]:.1f} %"
        title = "Collectives, instances per rank and step"
        blocks.append(_table(["", "A", "B", "B - A"], rows, title, note))
    for report, changed in changes["tables"].items():
        rows = [
            [row["name"], *map(_milliseconds, row["ns"]), _change(row["ns"], 1e-6), *map(_count, row["count"])]
            for row in changed[:num_rows]
        ]
        only = [sum(row["ns"][number] is None for row in changed) for number in (1, 0)]
        note = (
            f"{only[0]} ranges are marked in A alone and {only[1]} in B alone: no change of time" if any(only) else ""
        )
        header = ["", "A ms", "B ms", "B - A", "A count", "B count"]
        blocks.append(_table(header, rows, f"{COMPARED[report]}, per rank and step", note))
    return terminal.text(Document(sections=[Section(blocks=blocks)]))


def _table(header: Sequence[str], rows: Iterable[Sequence[Cell]], title: str, note: str = "") -> Table:
    """Make a table of names and numbers. Long names are cut."""
    return Table(header, [[_cut(plain(name)), *rest] for name, *rest in rows], title, (0,), note)


def _cut(name: str) -> str:
    return name if len(name) <= _NAME_WIDTH else name[: _NAME_WIDTH - 1] + "…"


def _milliseconds(nanoseconds: float | None) -> Number:
    return Number(None if nanoseconds is None else nanoseconds / 1e6, ",.3f")


def _count(value: float | None) -> Number:
    """Write a count, or a mean of counts with two decimals."""
    return Number(value, ",d" if isinstance(value, int) else ",.2f")


def _change(values: Sequence[float | None], factor: float = 1, form: str = "+,.3f") -> Number:
    before, after = values
    return Number(None if before is None or after is None else (after - before) * factor, form)
