"""The report's sections on configurations: speed, time to loss, losses, the parts of a step, memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from testbed.analysis.charts.bars import MEANING_OF_MARKS
from testbed.analysis.comparison.document import interval, within
from testbed.analysis.comparison.two_arms import NO_CLAIM, NOT_COMPARED
from testbed.analysis.document.model import Block, Cell, Picture, Section, Table, table_of
from testbed.analysis.document.words import Number, counted, digits, joined, rate, times
from testbed.analysis.report.breakdown import Breakdown, breakdown
from testbed.analysis.report.figures import (
    breakdown_figure,
    link_to,
    links_to,
    loss_figure,
    loss_time_figure,
    repeats_figure,
)
from testbed.analysis.report.verdicts import EntryPair, compared
from testbed.analysis.runs.entries import Entry, Subject, Workload
from testbed.analysis.scaling.time_to_loss import time_to_loss_of_arm
from testbed.analysis.statistics import NOT_ENOUGH, equality

MIB = 2**20
OVERVIEW = "overview"
MOST_RANKS = 8  # columns of the table of memory per rank
ABOUT_THE_NUMBERS = (
    "Each number is the median over runs; a run counts once, with all ranks together. A ratio takes the seeds that "
    "both sides have. Step: median of measured steps on the slowest rank. Memory: the largest rank's peak. All "
    "intervals and verdicts are at 95 %: of many, some are wrong by chance. Only the lines that say who leads on a "
    "number of ranks are corrected for that: what the leader beats, it beats at 95 % over all pairs that the lines "
    "choose from (Bonferroni; intervals widened on the log scale by the ratio of Student's quantiles). Equal within a "
    "margin: the whole interval is; no detectable difference alone does not say that. A name leads to its runs and "
    "commands."
)
ATTRIBUTED = (
    "Attributed: every millisecond has one cause",
    "From a profiler's trace; the parts exclude one another. Exposed communication is the part that no computation "
    "covers, and all of the synchronisation after backward, the packing of gradients included. The profiler slows the "
    "step: shares, not speeds. ",
)
TIMED = (
    "Timed: the phases of a step",
    "From the clock on the host, not from a trace: under ddp, fsdp and optimized, backward contains their "
    "communication, hidden and exposed. ",
)


def median(entry: Entry, name: str, form: str | Callable[[float], str], factor: float = 1) -> Number:
    """Return the median over the measured runs of an attribute, times `factor`."""
    values = entry.values(name)
    return Number(float(np.median(values)) * factor if values else None, form)


def overview(subject: Subject, margin: float) -> Section | None:
    """Return one row per configuration, a table for each group of equal work.

    `margin` is the fraction within which throughputs count as equal.
    """
    tables = [_overview_table(workload, margin) for workload in subject.workloads if workload.measured]
    return Section("Strategies against each other", [ABOUT_THE_NUMBERS, *tables], OVERVIEW) if tables else None


def _overview_table(workload: Workload, margin: float) -> Table:
    reference, pair_of = workload.reference, _pairs(workload)
    assert reference is not None  # something was measured

    def speed_up(entry: Entry) -> Cell:
        if entry is reference:
            return "1.00x"
        pair = pair_of[entry]
        return Number(None if pair.kind == NOT_COMPARED else pair.ratio.ratio, times, unit="x")

    def interval_cell(entry: Entry) -> Cell:
        return "" if entry is reference or pair_of[entry].kind == NOT_COMPARED else interval(pair_of[entry].ratio)

    def verdict(entry: Entry) -> Cell:
        kind = "reference" if entry is reference else pair_of[entry].kind
        return NOT_ENOUGH if kind == NO_CLAIM else kind

    def equal(entry: Entry) -> Cell:
        pair = pair_of.get(entry)
        return "" if pair is None or pair.kind == NOT_COMPARED else equality(pair.ratio, margin)

    columns: dict[str, Callable[[Entry], Cell]] = {
        "configuration": link_to,
        "n": lambda entry: str(len(entry.tokens_per_s)),
        "tokens/s": lambda entry: median(entry, "tokens_per_s", rate),
        "speed-up": speed_up,
        "95 % interval": interval_cell,
        "verdict": verdict,
        f"equal within {within(margin)}": equal,
        "validation loss": lambda entry: median(entry, "final_validation_loss", ".4f"),
        "MFU": lambda entry: median(entry, "mfu", ".1%"),
        "step (ms)": lambda entry: median(entry, "step_time_median_s", digits, 1e3),
        "peak memory (MiB)": lambda entry: median(entry, "peak_memory_bytes", ",.0f", 1 / MIB),
    }
    note = f"Speed-up: over {reference.name}."
    return table_of(
        workload.measured,
        columns,
        _work_caption(workload),
        note,
        ("configuration", "verdict", f"equal within {within(margin)}"),
    )


def throughput(subject: Subject) -> Section | None:
    """Return a picture of the rates of each group, one for each meaning of the rate."""
    pictures: list[Block] = []
    for number, workload in enumerate(subject.workloads, start=1):
        pair_of = _pairs(workload)

        def text(entry: Entry, pair_of: dict[Entry, EntryPair] = pair_of) -> str:
            pair = pair_of.get(entry)
            ratio = f"  {times(pair.ratio.ratio)}x" if pair and pair.kind != NOT_COMPARED else ""
            return f"{rate(float(np.median(entry.tokens_per_s)))}{ratio}"

        for meaning, entries in _by_meaning(workload.measured, "tokens_per_s_meaning").items():
            caption = f"Tokens per second: {meaning}. {MEANING_OF_MARKS}{_group(workload)}"
            draw = functools.partial(
                repeats_figure, entries, lambda entry: entry.tokens_per_s, text, "tokens/s, higher is better"
            )
            pictures.append(Picture(f"throughput_{number}", "Training throughput", caption, links_to(entries), draw))
    return Section("Throughput", pictures, "throughput") if pictures else None


def time_to_loss(subject: Subject, target: float | None) -> Section | None:
    """Return seconds of training until the validation loss reached the target, or else the lowest that all reached."""
    parts: list[Block] = []
    # Batch and schedule may be what a time to loss compares; without that protocol only equal work is compared.
    groups = (
        [subject.measured] if "time_to_loss" in subject.protocols else [each.measured for each in subject.workloads]
    )
    for number, group in enumerate(groups, start=1):
        entries = [entry for entry in group if any(run.validation_losses for run in entry.measured_runs)]
        chosen = _reachable(entries) if target is None else target
        if entries and chosen is not None:
            why = "the lowest that every run reached; no target was set" if target is None else "the target"
            parts += _time_to_loss_of_group(entries, chosen, why, number)
    return Section("Time to loss", parts, "time-to-loss") if parts else None


def _time_to_loss_of_group(entries: list[Entry], target: float, why: str, number: int) -> list[Block]:
    reached = {entry: time_to_loss_of_arm(entry.measured_runs, target) for entry in entries}
    timed = [entry for entry in entries if reached[entry]["train_time_s"]["values"]]
    drawn = [entry for entry in entries if any(len(run.train_times_s) for run in entry.measured_runs)]

    def of(name: str) -> Callable[[Entry], Cell]:
        def cell(entry: Entry) -> Cell:
            found = reached[entry][name]
            return Number(found["median"], digits, found["low"], found["high"])

        return cell

    blocks: list[Block] = []
    if drawn:
        caption = (
            "Seconds of training steps, evaluation and saving excluded; of each configuration the run of median "
            "throughput. Lines: training loss. Marks: validation loss. Grey: the loss that time is measured to."
        )
        draw = functools.partial(loss_time_figure, drawn, target)
        blocks.append(
            Picture(f"loss_against_time_{number}", "Loss against training time", caption, links_to(drawn), draw)
        )
    if timed:
        caption = f"Seconds of training steps, evaluation and saving excluded. {MEANING_OF_MARKS}"
        draw = functools.partial(
            repeats_figure,
            timed,
            lambda entry: reached[entry]["train_time_s"]["values"],
            lambda entry: str(Number(reached[entry]["train_time_s"]["median"], digits, unit=" s")),
            "seconds of training, lower is better",
        )
        title = f"Time until validation loss {target:.4f}"
        blocks.append(Picture(f"time_to_loss_{number}", title, caption, links_to(timed), draw))
    columns: dict[str, Callable[[Entry], Cell]] = {
        "configuration": link_to,
        "runs that reached it": lambda entry: f"{reached[entry]['num_reached']} of {reached[entry]['n']}",
        "training (s)": of("train_time_s"),
        "wall (s)": of("elapsed_s"),
        "tokens": of("tokens"),
        "step": of("step"),
    }
    note = (
        f"Validation loss {target:.4f} is {why}. Read off a straight line between two validations; in brackets the "
        "95 % interval of the median."
    )
    return [*blocks, table_of(entries, columns, "" if timed else "Time to loss", note)]


def learning(subject: Subject) -> Section | None:
    """Return a picture of the losses of each group of equal work."""
    pictures: list[Block] = []
    for number, workload in enumerate(subject.workloads, start=1):
        entries = tuple(
            entry for entry in workload.measured if any(len(r.train_losses) or r.validation_losses for r in entry.runs)
        )
        if not entries:
            continue
        shown, reference = Workload(workload.title, entries), workload.reference
        assert reference is not None  # something was measured
        caption = (
            "Lines: training loss of the run of median throughput. Marks: its validation loss. Equal work makes the "
            "curves fall on top of each other, so the second panel shows what is left: each run's final validation "
            f"loss minus the median of {reference.name}; the grey band is what seeds explain in published runs."
        )
        draw = functools.partial(loss_figure, shown)
        title = "Loss against optimizer steps"
        pictures.append(Picture(f"loss_{number}", title, caption + _group(workload), links_to(entries), draw))
    return Section("Learning", pictures, "loss") if pictures else None


def memory(subject: Subject) -> Section | None:
    """Return the peak of the largest rank as pictures, and a table of all ranks."""
    parts: list[Block] = []
    entries = [entry for entry in subject.measured if entry.values("peak_memory_bytes")]
    for number, (meaning, alike) in enumerate(_by_meaning(entries, "memory_meaning").items(), start=1):
        caption = f"{meaning[0].upper()}{meaning[1:]}. {MEANING_OF_MARKS}"
        draw = functools.partial(
            repeats_figure,
            alike,
            lambda entry: [value / MIB for value in entry.values("peak_memory_bytes")],
            lambda entry: str(median(entry, "peak_memory_bytes", ",.0f", 1 / MIB)),
            "MiB",
        )
        parts.append(Picture(f"memory_{number}", "Peak memory of the largest rank", caption, links_to(alike), draw))
    ranked = [entry for entry in entries if max(len(run.memory_bytes_per_rank) for run in entry.measured_runs) > 1]
    if ranked:
        most = max(len(run.memory_bytes_per_rank) for entry in ranked for run in entry.measured_runs)
        columns: dict[str, Callable[[Entry], Cell]] = {"configuration": link_to}
        columns |= {f"rank {rank}": functools.partial(_memory_of, rank) for rank in range(min(most, MOST_RANKS))}
        left = f"; of {most} ranks the first {MOST_RANKS}" if most > MOST_RANKS else ""
        parts.append(table_of(ranked, columns, f"Peak memory per rank in MiB, median over runs{left}"))
    return Section("Memory", parts, "memory") if parts else None


def _memory_of(rank: int, entry: Entry) -> str:
    peaks = [run.memory_bytes_per_rank for run in entry.measured_runs if len(run.memory_bytes_per_rank) > rank]
    return f"{np.median([each[rank] for each in peaks]) / MIB:,.0f}" if peaks else ""


def step_breakdown(subject: Subject) -> Section | None:
    """Return stacked bars of the mean step, the attributed ones apart from those that only the clock describes."""
    found = [
        (entry, breakdown(entry.measured_runs or entry.runs)) for entry in subject.entries if entry.is_synchronised
    ]
    parts: list[Block] = []
    for is_attributed in (True, False):
        groups: dict[tuple, list[tuple[Entry, Breakdown]]] = {}
        for entry, each in found:
            if each is not None and each.is_attributed == is_attributed:
                groups.setdefault(_step_work(entry), []).append((entry, each))
        for number, group in enumerate(groups.values(), start=1):
            title, meaning = ATTRIBUTED if is_attributed else TIMED
            sources = joined(sorted({each.source for _, each in group}))
            batch = f" Global batch {group[0][0].example.work.get('global_batch_size')}." if len(groups) > 1 else ""
            caption = f"{meaning}Mean over steps, ranks and runs, because means add up. Source: {sources}.{batch}"
            name = f"{'attribution' if is_attributed else 'phases'}_{number}"
            draw = functools.partial(breakdown_figure, [(entry.name, each) for entry, each in group])
            parts.append(Picture(name, title, caption, links_to([entry for entry, _ in group]), draw))
    return Section("Where a step's time goes", parts, "breakdown") if parts else None


def _pairs(workload: Workload) -> dict[Entry, EntryPair]:
    reference = workload.reference
    return {entry: compared(entry, reference) for entry in workload.measured if entry is not reference}


def _by_meaning(entries: Sequence[Entry], name: str) -> dict[str, list[Entry]]:
    """Return entries by what their number means: two meanings on one axis would compare."""
    found: dict[str, list[Entry]] = {}
    for entry in entries:
        found.setdefault(getattr(entry.example, name), []).append(entry)
    return found


def _reachable(entries: Sequence[Entry]) -> float | None:
    """Return the lowest validation loss that every measured run reached."""
    losses = [run.validation_losses for entry in entries for run in entry.measured_runs if run.validation_losses]
    if not losses or any(len(each) < 2 for each in losses):
        return None  # a single validation at the end would give the whole run's time
    return max(min(point.loss for point in each) for each in losses)


def _step_work(entry: Entry) -> tuple[Any, ...]:
    names = ("num_layers", "embedding_size", "vocab_size", "seq_len", "global_batch_size", "precision")
    return tuple(entry.example.work.get(name) for name in names)


def _work_caption(workload: Workload) -> str:
    run = workload.entries[0].example
    work, config = run.work, run.section("training_config")
    batch, length = work.get("global_batch_size"), work.get("seq_len")
    told = [
        config.get("model_name"),
        f"{config['num_parameters']:,} parameters" if config.get("num_parameters") else "",
        counted(work["optimizer_steps"], "step") if work.get("optimizer_steps") else "",
        f"global batch {batch} x {length} tokens" if batch and length else "",
        work.get("precision"),
    ]
    words = ", ".join(str(part) for part in told if part)
    return f"Equal work: {words}" if words else "Work not recorded"


def _group(workload: Workload) -> str:
    return f" This group: {workload.title}." if workload.title else ""
