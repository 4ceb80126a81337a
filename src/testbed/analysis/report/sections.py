"""The report's sections: what each shows, in words, pictures and tables."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from testbed.analysis.charts.repeats import MEANING_OF_MARKS
from testbed.analysis.document.model import Block, Cell, Look, Picture, Section, Table
from testbed.analysis.document.words import Number, digits, joined, rate, times
from testbed.analysis.report.breakdown import Breakdown, breakdown
from testbed.analysis.report.figures import (
    breakdown_figure,
    link_to,
    links_to,
    loss_figure,
    loss_time_figure,
    repeats_figure,
)
from testbed.analysis.report.verdicts import NO_CLAIM, NOT_COMPARED, EntryPair, compared
from testbed.analysis.runs.entries import Entry, Subject, Workload
from testbed.analysis.runs.load import Run

MIB = 2**20
OVERVIEW = "overview"


def overview(subject: Subject) -> Section | None:
    """One row per configuration, grouped by equal work."""
    tables = []
    for workload in subject.workloads:
        pair_of = _pairs(workload)
        reference = workload.reference
        rows: list[list[Cell]] = [
            [
                link_to(entry),
                str(len(entry.tokens_per_s)),
                _median(entry.tokens_per_s, rate),
                *_speed_up_cells(entry, reference, pair_of),
                _median(entry.values("final_validation_loss"), ".4f"),
                _median(entry.values("mfu"), ".1%"),
                _median(entry.values("step_time_median_s"), digits, 1e3),
                _median(entry.values("peak_memory_bytes"), ",.0f", 1 / MIB),
            ]
            for entry in workload.measured
        ]
        if not rows:
            continue
        assert reference is not None  # something was measured
        columns = [
            *("configuration", "n", "tokens/s", "speed-up", "95 % interval", "verdict"),
            *("validation loss", "MFU", "step (ms)", "peak memory (MiB)"),
        ]
        tables.append(Table(columns, rows, _work_caption(workload), (0, 5), f"Speed-up: over {reference.name}."))
    words = (
        "Each number is the median over runs; a run counts once, with all ranks together. A ratio takes the seeds that "
        "both sides have. Step: median of measured steps on the slowest rank. Memory: the largest rank's peak. All "
        "intervals and verdicts are at 95 %: of many, some are wrong by chance. Only the lines that say who leads on a "
        "number of ranks are corrected for that: what the leader beats, it beats at 95 % over all pairs that the lines "
        "choose from (Bonferroni; intervals widened on the log scale by the ratio of Student's quantiles). A name "
        "leads to its runs and commands."
    )
    return Section("Strategies against each other", [words, *tables], OVERVIEW) if tables else None


def throughput(subject: Subject) -> Section | None:
    pictures: list[Block] = []
    for number, workload in enumerate(subject.workloads, start=1):
        if not workload.measured:
            continue
        pair_of = _pairs(workload)

        def text(entry: Entry, pair_of: dict[Entry, EntryPair] = pair_of) -> str:
            pair = pair_of.get(entry)
            ratio = f"  {times(pair.ratio.ratio)}x" if pair and pair.kind != NOT_COMPARED else ""
            return f"{rate(float(np.median(entry.tokens_per_s)))}{ratio}"

        for meaning, entries in _by_meaning(workload.measured, "tokens_per_s_meaning").items():
            pictures.append(
                Picture(
                    f"throughput_{number}",
                    _throughput_title(workload, pair_of),
                    f"Tokens per second: {meaning}. {MEANING_OF_MARKS}" + _group(workload),
                    links_to(entries),
                    _repeats(entries, lambda entry: entry.tokens_per_s, text, "tokens/s, higher is better"),
                )
            )
    return Section("Throughput", pictures, "throughput") if pictures else None


def time_to_loss(subject: Subject, target: float | None) -> Section | None:
    """Seconds of training until the validation loss reached the target, or else the lowest loss that all reached."""
    from testbed.analysis.scaling.time_to_loss import time_to_loss_of_arm

    parts: list[Block] = []
    # Batch and schedule may be what a time to loss compares; without that protocol only equal work is put side by side.
    groups = (
        [subject.measured] if "time_to_loss" in subject.protocols else [each.measured for each in subject.workloads]
    )
    for number, group in enumerate(groups, start=1):
        entries = [entry for entry in group if any(run.validation_losses for run in entry.measured)]
        if not entries:
            continue
        chosen = _reachable(entries) if target is None else target
        if chosen is None:
            continue
        reached = {entry: time_to_loss_of_arm(entry.measured, chosen) for entry in entries}
        timed = tuple(entry for entry in entries if reached[entry]["train_time_s"]["values"])
        rows: list[list[Cell]] = [
            [
                link_to(entry),
                f"{reached[entry]['num_reached']} of {reached[entry]['n']}",
                *(_summary(reached[entry][name]) for name in ("train_time_s", "elapsed_s", "tokens", "step")),
            ]
            for entry in entries
        ]
        columns = ["configuration", "runs that reached it", "training (s)", "wall (s)", "tokens", "step"]
        drawn = tuple(entry for entry in entries if any(len(run.train_times_s) for run in entry.measured))
        if drawn:
            caption = (
                "Seconds of training steps, evaluation and saving excluded; of each configuration the run of median "
                "throughput. Lines: training loss. Marks: validation loss. Grey: the loss that time is measured to."
            )
            parts.append(
                Picture(
                    f"loss_against_time_{number}",
                    "Loss against training time",
                    caption,
                    links_to(drawn),
                    functools.partial(loss_time_figure, drawn, chosen),
                )
            )
        why = "the lowest that every run reached; no target was set" if target is None else "the target"
        note = (
            f"Validation loss {chosen:.4f} is {why}. Read off a straight line between two validations; in brackets the "
            "95 % interval of the median."
        )
        if timed:
            parts.append(
                Picture(
                    f"time_to_loss_{number}",
                    f"Time until validation loss {chosen:.4f}",
                    f"Seconds of training steps, evaluation and saving excluded. {MEANING_OF_MARKS}",
                    links_to(timed),
                    _repeats(
                        timed,
                        functools.partial(_seconds_to_loss, reached),
                        functools.partial(_median_to_loss, reached),
                        "seconds of training, lower is better",
                    ),
                )
            )
        parts.append(Table(columns, rows, "" if timed else "Time to loss", (0,), note))
    return Section("Time to loss", parts, "time-to-loss") if parts else None


def _seconds_to_loss(reached: dict[Entry, dict[str, Any]], entry: Entry) -> list[float]:
    return reached[entry]["train_time_s"]["values"]


def _median_to_loss(reached: dict[Entry, dict[str, Any]], entry: Entry) -> str:
    return str(Number(reached[entry]["train_time_s"]["median"], digits, unit=" s"))


def learning(subject: Subject) -> Section | None:
    pictures: list[Block] = []
    for number, workload in enumerate(subject.workloads, start=1):
        entries = tuple(
            entry for entry in workload.measured if any(len(r.train_losses) or r.validation_losses for r in entry.runs)
        )
        if not entries:
            continue
        shown, reference = Workload(workload.title, entries), workload.reference
        assert reference is not None  # something was measured
        pictures.append(
            Picture(
                f"loss_{number}",
                "Loss against optimizer steps",
                "Lines: training loss, median over runs, with a band from the lowest to the highest. Marks: validation "
                "loss. Equal work makes the curves fall on top of each other, so the second panel shows what is left: "
                f"each run's final validation loss minus the median of {reference.name}; the grey band is "
                "what seeds explain in published runs." + _group(workload),
                links_to(entries),
                functools.partial(loss_figure, shown),
            )
        )
    return Section("Learning", pictures, "loss") if pictures else None


def memory(subject: Subject) -> Section | None:
    parts: list[Block] = []
    entries = tuple(entry for entry in subject.measured if entry.values("peak_memory_bytes"))
    for number, (meaning, alike) in enumerate(_by_meaning(entries, "memory_meaning").items(), start=1):
        parts.append(
            Picture(
                f"memory_{number}",
                "Peak memory of the largest rank",
                f"{meaning[0].upper()}{meaning[1:]}. {MEANING_OF_MARKS}",
                links_to(alike),
                _repeats(
                    alike,
                    lambda entry: [value / MIB for value in entry.values("peak_memory_bytes")],
                    lambda entry: f"{np.median(entry.values('peak_memory_bytes')) / MIB:,.0f}",
                    "MiB",
                ),
            )
        )
    ranked = [entry for entry in entries if max(len(run.memory_bytes_per_rank) for run in entry.measured) > 1]
    if ranked:
        most = max(len(run.memory_bytes_per_rank) for entry in ranked for run in entry.measured)
        shown = min(most, 8)
        rows: list[list[Cell]] = [[link_to(entry), *_memory_cells(entry, shown)] for entry in ranked]
        left = f"; of {most} ranks the first {shown}" if most > shown else ""
        parts.append(
            Table(
                ["configuration", *(f"rank {rank}" for rank in range(shown))],
                rows,
                f"Peak memory per rank in MiB, median over runs{left}",
                (0,),
            )
        )
    return Section("Memory", parts, "memory") if parts else None


def step_breakdown(subject: Subject) -> Section | None:
    """Stacked bars of the mean step, the attributed ones apart from those that only the clock's phases describe."""
    found = [(entry, breakdown(entry.measured or entry.runs)) for entry in subject.entries if entry.is_synchronised]
    parts: list[Block] = []
    for is_attributed in (True, False):
        shown = [(entry, each) for entry, each in found if each is not None and each.is_attributed == is_attributed]
        groups: dict[tuple, list[tuple[Entry, Breakdown]]] = {}
        for pair in shown:
            groups.setdefault(_step_work(pair[0].example), []).append(pair)
        for number, group in enumerate(groups.values(), start=1):
            batch = f" Global batch {group[0][0].example.work.get('global_batch_size')}." if len(groups) > 1 else ""
            parts.append(_breakdown_picture(group, f"{'attribution' if is_attributed else 'phases'}_{number}", batch))
    return Section("Where a step's time goes", parts, "breakdown") if parts else None


def _breakdown_picture(group: list[tuple[Entry, Breakdown]], name: str, batch: str) -> Picture:
    sources = joined(sorted({each.source for _, each in group}))
    if group[0][1].is_attributed:
        title = "Attributed: every millisecond has one cause"
        meaning = (
            "From a profiler's trace; the parts exclude one another. Exposed communication is the part that no "
            "computation covers, and all of the synchronisation after backward, the packing of gradients included. The "
            "profiler slows the step: shares, not speeds. "
        )
    else:
        title = "Timed: the phases of a step"
        meaning = (
            "From the clock on the host, not from a trace: under ddp, fsdp and optimized, backward contains their "
            "communication, hidden and exposed. "
        )
    caption = f"{meaning}Mean over steps, ranks and runs, because means add up. Source: {sources}.{batch}"
    bars = [(entry.name, each) for entry, each in group]
    links = links_to([entry for entry, _ in group])
    return Picture(name, title, caption, links, lambda look: breakdown_figure(bars, look))


def _pairs(workload: Workload) -> dict[Entry, EntryPair]:
    reference = workload.reference
    return {entry: compared(entry, reference) for entry in workload.measured if entry is not reference}


def _speed_up_cells(entry: Entry, reference: Entry | None, pair_of: dict[Entry, EntryPair]) -> list[str]:
    if entry is reference:
        return ["1.00x", "", "reference"]
    pair = pair_of[entry]
    if pair.kind == NOT_COMPARED:
        return ["n/a", "", NOT_COMPARED]
    verdict = "not enough repeats" if pair.kind == NO_CLAIM else pair.kind
    return [f"{times(pair.ratio.ratio)}x", pair.interval, verdict]


def _throughput_title(workload: Workload, pair_of: dict[Entry, EntryPair]) -> str:
    """What happened, where a claim can be made; else what is shown."""
    faster = [each for each in pair_of.values() if each.kind == "faster"]
    if not faster or workload.reference is None:
        return "Training throughput"
    best = max(faster, key=lambda each: each.ratio.ratio)
    return f"{best.entry.name}: {times(best.ratio.ratio)}x the throughput of {workload.reference.name}"


def _by_meaning(entries: Sequence[Entry], name: str) -> dict[str, tuple[Entry, ...]]:
    """Entries by what their number means: two meanings on one axis would compare."""
    found: dict[str, list[Entry]] = {}
    for entry in entries:
        found.setdefault(getattr(entry.example, name), []).append(entry)
    return {meaning: tuple(alike) for meaning, alike in found.items()}


def _repeats(
    entries: Sequence[Entry], values: Callable[[Entry], Sequence[float]], text: Callable[[Entry], str], axis_label: str
) -> Callable[[Look], Figure]:
    return lambda look: repeats_figure(entries, values, text, axis_label, look)


def _reachable(entries: Sequence[Entry]) -> float | None:
    """The lowest validation loss that every measured run reached."""
    lowest = [
        min(point.loss for point in run.validation_losses)
        for entry in entries
        for run in entry.measured
        if run.validation_losses
    ]
    several = all(len(run.validation_losses) > 1 for entry in entries for run in entry.measured)
    return max(lowest) if several else None  # a single validation at the end would give the whole run's time


def _memory_cells(entry: Entry, shown: int) -> list[str]:
    runs = [run.memory_bytes_per_rank for run in entry.measured if run.memory_bytes_per_rank]
    cells = []
    for rank in range(shown):
        values = [peaks[rank] / MIB for peaks in runs if len(peaks) > rank]
        cells.append(f"{np.median(values):,.0f}" if values else "")
    return cells


def _step_work(run: Run) -> tuple:
    names = ("num_layers", "embedding_size", "vocab_size", "seq_len", "global_batch_size", "precision")
    return tuple(run.work.get(name) for name in names)


def _median(values: Sequence[float], form: str | Callable[[float], str], factor: float = 1) -> Number:
    return Number(float(np.median(values)) * factor if len(values) else None, form)


def _summary(summary: dict) -> Number:
    return Number(summary["median"], digits, summary["low"], summary["high"])


def _work_caption(workload: Workload) -> str:
    run = workload.entries[0].example
    work, config = run.work, run.record.get("training_config", {})
    told = [
        f"{config.get('model_name')}" if config.get("model_name") else "",
        f"{config['num_parameters']:,} parameters" if config.get("num_parameters") else "",
        f"{work['optimizer_steps']:,} steps" if work.get("optimizer_steps") else "",
        f"global batch {work['global_batch_size']} x {work['seq_len']} tokens"
        if work.get("global_batch_size") and work.get("seq_len")
        else "",
        str(work.get("precision") or ""),
    ]
    words = ", ".join(part for part in told if part)
    return f"Equal work: {words}" if words else "Work not recorded"


def _group(workload: Workload) -> str:
    return f" This group: {workload.title}." if workload.title else ""
