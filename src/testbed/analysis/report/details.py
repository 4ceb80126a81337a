"""The report's later sections: collectives, pipelines, how busy the machine was, and on what it all ran."""

from __future__ import annotations

from typing import Any

import numpy as np

from testbed.analysis.document.model import Block, Cell, RunLinks, Section, Table
from testbed.analysis.document.words import UNKNOWN, Number, counted, digits, joined
from testbed.analysis.report.cautions import machine
from testbed.analysis.report.figures import link_to
from testbed.analysis.report.sections import MIB
from testbed.analysis.runs.entries import Entry, Subject
from testbed.analysis.runs.load import Run

GB = 1e9
FIRST_ATTRIBUTED = "Of each configuration the first profiled run; the bars of a step are a mean over all of them."


def communication(subject: Subject) -> Section | None:
    """Collectives per optimizer step: number, bytes, time, and their bus bandwidth against the bound."""
    parts: list[Block] = []
    rows: list[list[Cell]] = []
    totals: list[list[Cell]] = []
    for entry, attribution in _attributions(subject):
        for item in attribution["collectives"]:
            seconds = item["seconds_per_step"]
            moved = item["bus_bytes_per_step"]  # null where several groups of ranks could be meant
            rows.append(
                [
                    link_to(entry),
                    item["name"],
                    f"{item['num_per_step']:g}",
                    _mib(item["bytes_per_step"]),
                    _mib(moved),
                    Number(seconds * 1e3, digits),
                    Number(moved / seconds / GB if seconds and moved is not None else None, ".3g"),
                ]
            )
        bound = attribution["bound"]
        if bound:
            in_trace, exposed = (
                _mean_of_steps(attribution, name) for name in ("communication_s", "exposed_communication_s")
            )
            least = bound["seconds_per_step"]
            totals.append(
                [
                    link_to(entry),
                    _mib(bound["bus_bytes_per_step"]),
                    Number(bound["bus_bandwidth_bytes_per_s"] / GB, ".3g"),
                    Number(least * 1e3, digits),
                    Number(in_trace and in_trace * 1e3, digits),
                    Number(least / in_trace if in_trace else None, ".0%"),
                    Number(exposed and exposed * 1e3, digits),
                    bound["source"],
                ]
            )
    if rows:
        columns = ["configuration", "collective", "number", "MiB", "bus MiB", "time (ms)", "bus bandwidth (GB/s)"]
        note = (
            f"{FIRST_ATTRIBUTED} As the trace has them. "
            "Bus MiB: what one rank moves, for a ring all-reduce 2 (N-1)/N times the bytes. "
            "GB is 10^9 bytes, MiB 2^20."
        )
        parts.append(Table(columns, rows, "Collectives per optimizer step", (0, 1), note))
    if totals:
        columns = ["configuration", "bus MiB", "link (GB/s)", "bound (ms)"]
        columns += ["in the trace (ms)", "bound over trace", "exposed (ms)", "link's bandwidth from"]
        note = (
            f"{FIRST_ATTRIBUTED} The bound is the least time that these bytes take at the bandwidth of the link. "
            "Exposed: all of the synchronisation after backward counts to it, the packing of gradients included."
        )
        parts.append(Table(columns, totals, "Communication against its bound", (0, 7), note))
    return Section("Communication", parts, "communication") if parts else None


def pipelines(subject: Subject) -> Section | None:
    """Measured bubble against the ideal of stages of equal cost."""
    rows: list[list[Cell]] = []
    words: list[str] = []
    for entry, attribution in _attributions(subject):
        found = attribution["pipeline"]
        if not found:
            continue
        measured, ideal = found["bubble_fraction"], found["ideal_bubble_fraction"]
        per_rank = ", ".join(f"{fraction:.1%}" for fraction in found["per_rank_bubble_fraction"])
        sizes = [str(found["stages"]), str(found["micro_batches"])]
        rows.append([link_to(entry), *sizes, Number(ideal, ".1%"), Number(measured, ".1%"), per_rank])
        if ideal is not None:
            words.append(
                f"{entry.name}: a rank idles {measured:.1%} of the schedule on average; with {found['stages']} equal "
                f"stages, {found['micro_batches']} micro batches and free communication it would be {ideal:.1%}."
            )
    if not rows:
        return None
    columns = ["configuration", "stages", "micro batches", "ideal bubble", "measured bubble", "per rank"]
    note = (
        f"{FIRST_ATTRIBUTED} "
        "Bubble: share of the pipeline's schedule in which a rank has nothing to compute. Ideal, for p pipeline ranks, "
        "m micro batches and v stages on a rank: (p - 1) / (v m + p - 1); n/a for the zero-bubble schedule."
    )
    return Section("Pipeline bubble", [*words, Table(columns, rows, "", (0, 5), note)], "pipeline")


def machine_use(subject: Subject) -> Section | None:
    """MFU with the source of its peak, and what was sampled of processors and memory while training."""
    parts: list[Block] = []
    rows: list[list[Cell]] = []
    for entry in subject.measured:
        mfu = entry.values("mfu")
        if not mfu or not entry.example.section("flops").get("peak_flops_per_s_per_device"):
            continue
        flops = [run.record["flops"] for run in entry.measured]
        rates, peaks = (
            [each[name] for each in flops if each[name]]
            for name in ("model_flops_per_s", "peak_flops_per_s_per_device")
        )
        rows.append(
            [
                link_to(entry),
                Number(float(np.median(mfu)), ".1%"),
                Number(float(np.median(rates)) / 1e9 if rates else None, digits),
                Number(float(np.median(peaks)) / 1e9, digits),
                joined(sorted({str(each["peak_source"]) for each in flops})),
            ]
        )
    if rows:
        columns = ["configuration", "MFU", "model GFLOP/s", "peak per device (GFLOP/s)", "source of the peak"]
        note = "Model FLOPs of the step over time x peak x devices; recomputation is not counted."
        parts.append(Table(columns, rows, "Model FLOPs utilization (MFU)", (0, 4), note))
    sampled = [row for entry in subject.entries for row in _utilization_rows(entry)]
    if sampled:
        columns = ["configuration", "rank", "CPU (%)", "memory, mean (MiB)", "memory, largest (MiB)", "GPU (%)"]
        columns += ["GPU memory (MiB)", "samples per run"]
        note = "Sampled while training, off the step's thread; medians over runs. CPU: 100 % is one core."
        parts.append(Table(*without_unknown(columns, sampled), "Processors and memory", (0,), note))
    return Section("Use of the machine", parts, "use") if parts else None


def environment(subject: Subject) -> Section:
    """Machines and versions, each distinct one once."""
    runs_on: dict[tuple[str, ...], list[Run]] = {}
    for run in subject.runs:
        runs_on.setdefault((machine(run), _spread(run), _versions(run)), []).append(run)
    rows: list[list[Cell]] = []
    for (where, spread, versions), runs in runs_on.items():
        numbers = [subject.number_of(run) for run in runs]
        backends = sorted({str(run.section("hardware").get("backend") or "none") for run in runs})
        rows.append([where, spread, ", ".join(backends), versions, RunLinks(tuple(numbers))])
    columns = ["machine", "per rank", "backend", "versions", "runs"]
    return Section("Environment", [Table(columns, rows)], "environment")


def _spread(run: Run) -> str:
    hardware = run.section("hardware")
    threads, nodes = hardware.get("cpu_threads_per_rank"), hardware.get("num_nodes") or 1
    told = [counted(threads, "CPU thread")] if threads else []
    return ", ".join([*told, *([f"{nodes} nodes"] if nodes > 1 else [])]) or UNKNOWN


def _versions(run: Run) -> str:
    env, system = run.section("env"), run.section("host").get("os")
    names = (
        ("Python", "python"),
        ("PyTorch", "torch"),
        ("CUDA", "cuda"),
        ("DeepSpeed", "deepspeed"),
        ("NumPy", "numpy"),
    )
    found = [f"{name} {env[f'{key}_version']}" for name, key in names if env.get(f"{key}_version")]
    return ", ".join([*found, *([str(system)] if system else [])]) or "not recorded"


def _attributions(subject: Subject) -> list[tuple[Entry, dict[str, Any]]]:
    """The first attributed run of each configuration whose steps are all alike."""
    found = []
    for entry in filter(lambda entry: entry.is_synchronised, subject.entries):
        attributed = [each for run in entry.runs if (each := run.record.get("attribution"))]
        found += [(entry, attributed[0])] if attributed else []
    return found


def _mean_of_steps(attribution: dict[str, Any], name: str) -> float | None:
    values = [step[name] for rank in attribution["per_rank"] for step in rank["steps"]]
    return float(np.mean(values)) if values else None


def _utilization_rows(entry: Entry) -> list[list[Cell]]:
    ranks: dict[int, list[dict]] = {}
    for utilization in filter(None, (run.record.get("utilization") for run in entry.runs)):
        for row in utilization["per_rank"]:
            ranks.setdefault(row["rank"], []).append(row)
    columns = {
        "cpu_percent_mean": 1,
        "rss_bytes_mean": MIB,
        "rss_bytes_max": MIB,
        "gpu_percent_mean": 1,
        "gpu_memory_used_bytes_max": MIB,
        "num_samples": 1,
    }

    def median(rows: list[dict], name: str, size: float) -> Number:
        values = [row[name] / size for row in rows if row[name] is not None]
        return Number(float(np.median(values)) if values else None, ",.0f")

    return [
        [link_to(entry), str(rank), *(median(rows, name, size) for name, size in columns.items())]
        for rank, rows in sorted(ranks.items())
    ]


def without_unknown(columns: list[str], rows: list[list[Cell]]) -> tuple[list[str], list[list[Cell]]]:
    """Columns in which at least one row knows something: a machine without a GPU has no column for it."""
    kept = [number for number in range(len(columns)) if any(str(row[number]) != UNKNOWN for row in rows)]
    return [columns[number] for number in kept], [[row[number] for number in kept] for row in rows]


def _mib(size: float | None) -> Number:
    return Number(None if size is None else size / MIB, digits)
