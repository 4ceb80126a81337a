"""The report's later sections: collectives, pipelines, how busy the machine was, and on what it all ran."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from testbed.analysis.charts.style import digits
from testbed.analysis.report.cautions import machine
from testbed.analysis.report.entries import Entry, Subject
from testbed.analysis.report.sections import MIB, Picture, RunNumbers, Section, Table
from testbed.analysis.report.words import joined
from testbed.analysis.runs.load import Run

GB = 1e9
FIRST_ATTRIBUTED = "Of each configuration the first profiled run; the bars of a step are a mean over all of them."


def communication(subject: Subject) -> Section | None:
    """Collectives per optimizer step: number, bytes, time, and their bus bandwidth against the bound."""
    parts: list[Table | Picture] = []
    rows, totals = [], []
    for entry, attribution in _attributions(subject):
        for item in attribution["collectives"]:
            seconds = item["seconds_per_step"]
            moved = item["bus_bytes_per_step"]  # null where several groups of ranks could be meant
            bandwidth = f"{moved / seconds / GB:.3g}" if seconds and moved is not None else "n/a"
            rows.append(
                [
                    entry,
                    item["name"],
                    f"{item['num_per_step']:g}",
                    "n/a" if item["bytes_per_step"] is None else _mib(item["bytes_per_step"]),
                    "n/a" if moved is None else _mib(moved),
                    digits(seconds * 1e3),
                    bandwidth,
                ]
            )
        bound = attribution["bound"]
        if bound:
            steps = [step for rank in attribution["per_rank"] for step in rank["steps"]]
            in_trace = float(np.mean([step["communication_s"] for step in steps])) if steps else None
            exposed = float(np.mean([step["exposed_communication_s"] for step in steps])) if steps else None
            least = bound["seconds_per_step"]
            totals.append(
                [
                    entry,
                    _mib(bound["bus_bytes_per_step"]),
                    f"{bound['bus_bandwidth_bytes_per_s'] / GB:.3g}",
                    digits(least * 1e3),
                    "n/a" if in_trace is None else digits(in_trace * 1e3),
                    "n/a" if not in_trace else f"{least / in_trace:.0%}",
                    "n/a" if exposed is None else digits(exposed * 1e3),
                    bound["source"],
                ]
            )
    if rows:
        parts.append(
            Table(
                "Collectives per optimizer step",
                ["configuration", "collective", "number", "MiB", "bus MiB", "time (ms)", "bus bandwidth (GB/s)"],
                rows,
                (0, 1),
                f"{FIRST_ATTRIBUTED} As the trace has them. "
                "Bus MiB: what one rank moves, for a ring all-reduce 2 (N-1)/N times the bytes. "
                "GB is 10^9 bytes, MiB 2^20.",
            )
        )
    if totals:
        columns = ["configuration", "bus MiB", "link (GB/s)", "bound (ms)"]
        columns += ["in the trace (ms)", "bound over trace", "exposed (ms)", "link's bandwidth from"]
        words = (
            f"{FIRST_ATTRIBUTED} The bound is the least time that these bytes take at the bandwidth of the link. "
            "Exposed: all of the synchronisation after backward counts to it, the packing of gradients included."
        )
        parts.append(Table("Communication against its bound", columns, totals, (0, 7), words))
    return Section("communication", "Communication", [], parts) if parts else None


def pipelines(subject: Subject) -> Section | None:
    """Measured bubble against the ideal of stages of equal cost."""
    rows, words = [], []
    for entry, attribution in _attributions(subject):
        found = attribution["pipeline"]
        if not found:
            continue
        measured, ideal = found["bubble_fraction"], found["ideal_bubble_fraction"]
        per_rank = ", ".join(f"{fraction:.1%}" for fraction in found["per_rank_bubble_fraction"])
        least = "n/a" if ideal is None else f"{ideal:.1%}"
        rows.append([entry, str(found["stages"]), str(found["micro_batches"]), least, f"{measured:.1%}", per_rank])
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
    table = Table("", columns, rows, (0, 5), note)
    return Section("pipeline", "Pipeline bubble", words, [table])


def machine_use(subject: Subject) -> Section | None:
    """MFU with the source of its peak, and what was sampled of processors and memory while training."""
    parts: list[Table | Picture] = []
    rows = []
    for entry in subject.measured:
        mfu, flops = entry.values("mfu"), entry.example.section("flops")
        peak = flops.get("peak_flops_per_s_per_device")
        if not mfu or not peak:
            continue
        rates = [run.record["flops"]["model_flops_per_s"] for run in entry.measured]
        peaks = [run.record["flops"]["peak_flops_per_s_per_device"] for run in entry.measured]
        rates, peaks = ([value for value in values if value] for values in (rates, peaks))
        rows.append(
            [
                entry,
                f"{np.median(mfu):.1%}",
                digits(float(np.median(rates)) / 1e9) if rates else "n/a",
                digits(float(np.median(peaks)) / 1e9),
                joined(sorted({str(run.record["flops"]["peak_source"]) for run in entry.measured})),
            ]
        )
    if rows:
        columns = ["configuration", "MFU", "model GFLOP/s", "peak per device (GFLOP/s)", "source of the peak"]
        note = "Model FLOPs of the step over time x peak x devices; recomputation is not counted."
        parts.append(Table("Model FLOPs utilization (MFU)", columns, rows, (0, 4), note))
    sampled = [row for entry in subject.entries for row in _utilization_rows(entry)]
    if sampled:
        columns = ["configuration", "rank", "CPU (%)", "memory, mean (MiB)", "memory, largest (MiB)", "GPU (%)"]
        columns += ["GPU memory (MiB)", "samples per run"]
        note = "Sampled while training, off the step's thread; medians over runs. CPU: 100 % is one core."
        parts.append(Table("Processors and memory", *without_unknown(columns, sampled), note=note))
    return Section("use", "Use of the machine", [], parts) if parts else None


def environment(subject: Subject) -> Section:
    """Machines and versions, each distinct one once."""
    runs_on: dict[tuple[str, ...], list[Run]] = {}
    for run in subject.runs:
        runs_on.setdefault((machine(run), _spread(run), _versions(run)), []).append(run)
    rows = []
    for (where, spread, versions), runs in runs_on.items():
        numbers = [subject.number_of(run) for run in runs]
        backends = sorted({str(run.section("hardware").get("backend") or "none") for run in runs})
        rows.append([where, spread, ", ".join(backends), versions, RunNumbers(tuple(numbers))])
    columns = ["machine", "per rank", "backend", "versions", "runs"]
    return Section("environment", "Environment", [], [Table("", columns, rows, text_columns=(0, 1, 2, 3, 4))])


def ranges(numbers: Sequence[int]) -> str:
    """`1-5, 8`: the numbers of runs, neighbours together."""
    starts = [number for number in numbers if number - 1 not in numbers]
    ends = [number for number in numbers if number + 1 not in numbers]
    return ", ".join(str(start) if start == end else f"{start}-{end}" for start, end in zip(starts, ends, strict=True))


def _spread(run: Run) -> str:
    hardware = run.section("hardware")
    threads, nodes = hardware.get("cpu_threads_per_rank"), hardware.get("num_nodes") or 1
    told = [f"{threads} CPU thread{'s' * (threads > 1)}"] if threads else []
    return ", ".join([*told, *([f"{nodes} nodes"] if nodes > 1 else [])]) or "n/a"


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
        attributed = [run.record.get("attribution") for run in entry.runs]
        attributed = [each for each in attributed if each]
        found += [(entry, attributed[0])] if attributed else []
    return found


def _utilization_rows(entry: Entry) -> list[list]:
    sampled = [run.record.get("utilization") for run in entry.runs]
    ranks: dict[int, list[dict]] = {}
    for utilization in filter(None, sampled):
        for row in utilization["per_rank"]:
            ranks.setdefault(row["rank"], []).append(row)

    def median(rows: list[dict], name: str, size: float = 1) -> str:
        values = [row[name] / size for row in rows if row[name] is not None]
        return f"{np.median(values):,.0f}" if values else "n/a"

    return [
        [
            entry,
            str(rank),
            median(rows, "cpu_percent_mean"),
            median(rows, "rss_bytes_mean", MIB),
            median(rows, "rss_bytes_max", MIB),
            median(rows, "gpu_percent_mean"),
            median(rows, "gpu_memory_used_bytes_max", MIB),
            median(rows, "num_samples"),
        ]
        for rank, rows in sorted(ranks.items())
    ]


def without_unknown(columns: list[str], rows: list[list]) -> tuple[list[str], list[list]]:
    """Columns in which at least one row knows something: a machine without a GPU has no column for it."""
    kept = [number for number in range(len(columns)) if any(row[number] != "n/a" for row in rows)]
    return [columns[number] for number in kept], [[row[number] for number in kept] for row in rows]


def _mib(size: float) -> str:
    return digits(size / MIB)
