"""The report's later sections: collectives, pipelines, MFU, and on what it all ran."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from testbed.analysis.document.model import Block, Cell, RunLinks, Section, table_of
from testbed.analysis.document.words import UNKNOWN, Number, counted, digits, joined
from testbed.analysis.report.breakdown import mean_of_steps
from testbed.analysis.report.cautions import machine
from testbed.analysis.report.figures import link_to
from testbed.analysis.report.sections import MIB, median
from testbed.analysis.runs.entries import Entry, Subject
from testbed.analysis.runs.load import Run, attribution_of

GB = 1e9
FIRST_ATTRIBUTED = "Of each configuration the first profiled run; the bars of a step are a mean over all of them."
Attributed = tuple[Entry, dict[str, Any]]
OUTSIDE_STEPS = ("between", "start_up")  # phases of watched collectives
VERSIONS = {"Python": "python", "PyTorch": "torch", "CUDA": "cuda", "DeepSpeed": "deepspeed", "NumPy": "numpy"}


def communication(subject: Subject) -> Section | None:
    """Return collectives per optimizer step: number, bytes, time, and their bus bandwidth against the bound."""
    attributed = _attributions(subject)
    collectives = [(entry, item) for entry, found in attributed for item in found["collectives"]]
    bounds = [(entry, found) for entry, found in attributed if found["bound"]]
    parts: list[Block] = []
    if collectives:
        columns: dict[str, Callable[[Attributed], Cell]] = {
            "configuration": lambda pair: link_to(pair[0]),
            "collective": lambda pair: pair[1]["name"],
            "number": lambda pair: f"{pair[1]['num_per_step']:g}",
            "MiB": lambda pair: _scaled(pair[1]["bytes_per_step"], 1 / MIB),
            "bus MiB": lambda pair: _scaled(pair[1]["bus_bytes_per_step"], 1 / MIB),
            "time (ms)": lambda pair: _scaled(pair[1]["seconds_per_step"], 1e3),
            "bus bandwidth (GB/s)": lambda pair: _share(
                pair[1]["bus_bytes_per_step"], pair[1]["seconds_per_step"] * GB, ".3g"
            ),
        }
        note = (
            f"{FIRST_ATTRIBUTED} As the trace has them. "
            "Bus MiB: what one rank moves, for a ring all-reduce 2 (N-1)/N times the bytes. "
            "GB is 10^9 bytes, MiB 2^20."
        )
        text = ("configuration", "collective")
        parts.append(table_of(collectives, columns, "Collectives per optimizer step", note, text))
    if bounds:
        columns = {
            "configuration": lambda pair: link_to(pair[0]),
            "bus MiB": lambda pair: _scaled(pair[1]["bound"]["bus_bytes_per_step"], 1 / MIB),
            "link (GB/s)": lambda pair: _scaled(pair[1]["bound"]["bus_bandwidth_bytes_per_s"], 1 / GB, ".3g"),
            "bound (ms)": lambda pair: _scaled(pair[1]["bound"]["seconds_per_step"], 1e3),
            "in the trace (ms)": lambda pair: _scaled(mean_of_steps(pair[1], "communication_s"), 1e3),
            "bound over trace": lambda pair: _share(
                pair[1]["bound"]["seconds_per_step"], mean_of_steps(pair[1], "communication_s"), ".0%"
            ),
            "exposed (ms)": lambda pair: _scaled(mean_of_steps(pair[1], "exposed_communication_s"), 1e3),
            "link's bandwidth from": lambda pair: pair[1]["bound"]["source"],
        }
        note = (
            f"{FIRST_ATTRIBUTED} The bound is the least time that these bytes take at the bandwidth of the link. "
            "All of the synchronisation after backward counts to communication, the packing of gradients included, and "
            "is exposed."
        )
        text = ("configuration", "link's bandwidth from")
        parts.append(table_of(bounds, columns, "Communication against its bound", note, text))
    if by_axes := [row for entry in subject.entries for row in _by_axes(entry)]:
        parts.append(_table_by_axes(by_axes))
    return Section("Communication", parts, "communication") if parts else None


@dataclass
class _OnAxes:
    """Communication of a configuration along some axes of the mesh: means over steps and ranks."""

    entry: Entry
    axes: str
    phases: set[str] = field(default_factory=set)
    num: float = 0.0
    num_bytes: float = 0.0
    blocked_s: float = 0.0


def _by_axes(entry: Entry) -> list[_OnAxes]:
    """Return a row for all axes along which the configuration's first watched run communicated in its steps."""
    watched = next((run.record["watched"] for run in entry.runs if run.record.get("watched")), None)
    ranks = [rank for rank in watched["per_rank"] if rank["num_steps"]] if watched else []
    rows: dict[str, _OnAxes] = {}
    for rank in ranks:
        share = 1 / rank["num_steps"] / len(ranks)
        for found in rank["collectives"]:
            if found["axes"] and found["phase"] not in OUTSIDE_STEPS:
                row = rows.setdefault(found["axes"], _OnAxes(entry, found["axes"]))
                row.phases.add(found["phase"])
                row.num += found["num"] * share
                row.num_bytes += found["bytes"] * share
                row.blocked_s += found["blocked_s"] * share
    return sorted(rows.values(), key=lambda row: -row.blocked_s)


def _table_by_axes(rows: list[_OnAxes]) -> Block:
    columns: dict[str, Callable[[_OnAxes], Cell]] = {
        "configuration": lambda row: link_to(row.entry),
        "axes": lambda row: row.axes,
        "phases": lambda row: joined(sorted(row.phases)),
        "collectives": lambda row: Number(row.num, ".1f"),
        "MiB": lambda row: _scaled(row.num_bytes, 1 / MIB),
        "blocked (ms)": lambda row: _scaled(row.blocked_s, 1e3),
    }
    note = (
        "Axes of the mesh along which the ranks of a group differ, and the phases in which they communicate. Per step, "
        "mean over ranks, of each configuration the first run that recorded it (--watch_collectives), with warm-up. "
        "MiB: inputs and outputs. Blocked: the rank could not go on, so what computation hides is not in it."
    )
    return table_of(rows, columns, "Communication by axis", note, ("configuration", "axes", "phases"))


def pipelines(subject: Subject) -> Section | None:
    """Return the measured bubble and the ideal of stages of equal cost."""
    found = [(entry, each["pipeline"]) for entry, each in _attributions(subject) if each["pipeline"]]
    if not found:
        return None
    words = [
        f"{entry.name}: a rank idles {each['bubble_fraction']:.1%} of the schedule on average; with {each['stages']} "
        f"equal stages, {each['micro_batches']} micro batches and free communication it would be "
        f"{each['ideal_bubble_fraction']:.1%}."
        for entry, each in found
        if each["ideal_bubble_fraction"] is not None
    ]
    columns: dict[str, Callable[[Attributed], Cell]] = {
        "configuration": lambda pair: link_to(pair[0]),
        "stages": lambda pair: str(pair[1]["stages"]),
        "micro batches": lambda pair: str(pair[1]["micro_batches"]),
        "ideal bubble": lambda pair: Number(pair[1]["ideal_bubble_fraction"], ".1%"),
        "measured bubble": lambda pair: Number(pair[1]["bubble_fraction"], ".1%"),
        "per rank": lambda pair: ", ".join(f"{fraction:.1%}" for fraction in pair[1]["per_rank_bubble_fraction"]),
    }
    note = (
        f"{FIRST_ATTRIBUTED} "
        "Bubble: share of the pipeline's schedule in which a rank has nothing to compute. Ideal, for p pipeline ranks, "
        "m micro batches and v stages on a rank: (p - 1) / (v m + p - 1); n/a for the zero-bubble schedule."
    )
    table = table_of(found, columns, "", note, ("configuration", "per rank"))
    return Section("Pipeline bubble", [*words, table], "pipeline")


def machine_use(subject: Subject) -> Section | None:
    """Return MFU with the source of its peak."""
    peak = "peak_flops_per_s_per_device"
    with_mfu = [each for each in subject.measured if each.values("mfu") and each.example.section("flops").get(peak)]
    if not with_mfu:
        return None
    columns: dict[str, Callable[[Any], Cell]] = {
        "configuration": link_to,
        "MFU": lambda entry: median(entry, "mfu", ".1%"),
        "model GFLOP/s": lambda entry: _median_flops(entry, "model_flops_per_s"),
        "peak per device (GFLOP/s)": lambda entry: _median_flops(entry, peak),
        "source of the peak": lambda entry: joined(
            sorted({str(run.record["flops"]["peak_source"]) for run in entry.measured_runs})
        ),
    }
    note = (
        "Model FLOPs of the step over time x peak x devices; recomputation is not counted. Of peaks that runs "
        "measured, the largest per GPU or thread counts for all."
    )
    text = ("configuration", "source of the peak")
    table = table_of(with_mfu, columns, "Model FLOPs utilization (MFU)", note, text)
    return Section("Use of the machine", [table], "use")


def environment(subject: Subject) -> Section:
    """Return machines and versions, each distinct one once."""
    runs_on: dict[tuple[str, ...], list[Run]] = {}
    for run in subject.runs:
        runs_on.setdefault((machine(run), _spread(run), _versions(run)), []).append(run)
    columns: dict[str, Callable[[tuple[tuple[str, ...], list[Run]]], Cell]] = {
        "machine": lambda item: item[0][0],
        "per rank": lambda item: item[0][1],
        "backend": lambda item: ", ".join(
            sorted({str(run.section("hardware").get("backend") or "none") for run in item[1]})
        ),
        "versions": lambda item: item[0][2],
        "runs": lambda item: RunLinks(tuple(map(subject.number_of, item[1]))),
    }
    return Section("Environment", [table_of(list(runs_on.items()), columns, text=columns)], "environment")


def _spread(run: Run) -> str:
    hardware = run.section("hardware")
    threads, nodes = hardware.get("cpu_threads_per_rank"), hardware.get("num_nodes") or 1
    told = [counted(threads, "CPU thread")] if threads else []
    return ", ".join([*told, *([f"{nodes} nodes"] if nodes > 1 else [])]) or UNKNOWN


def _versions(run: Run) -> str:
    env, system = run.section("env"), run.section("host").get("os")
    found = [f"{name} {env[f'{key}_version']}" for name, key in VERSIONS.items() if env.get(f"{key}_version")]
    return ", ".join([*found, *([str(system)] if system else [])]) or "not recorded"


def _attributions(subject: Subject) -> list[Attributed]:
    """Return the first attributed run of each configuration whose steps are all alike."""
    found = [(entry, attribution_of(run.record)) for entry in subject.entries for run in entry.runs]
    first: dict[Entry, dict[str, Any]] = {}
    for entry, attribution in found:
        if attribution and entry.is_synchronised:
            first.setdefault(entry, attribution)
    return list(first.items())


def _median_flops(entry: Entry, name: str) -> Number:
    values = [run.record["flops"][name] for run in entry.measured_runs if run.record["flops"][name]]
    return Number(float(np.median(values)) / 1e9 if values else None, digits)


def _scaled(value: float | None, factor: float, form: str | Callable[[float], str] = digits) -> Number:
    return Number(None if value is None else value * factor, form)


def _share(part: float | None, whole: float | None, form: str) -> Number:
    """Return part / whole; unknown where one of them is, or the whole is nothing."""
    return Number(part / whole if part is not None and whole else None, form)
