"""The three lines that a report begins with: what is best, whether all learn alike, how much of the peak is used."""

from __future__ import annotations

import itertools

import numpy as np

from testbed.analysis.comparison.document import interval
from testbed.analysis.comparison.two_arms import NO_CLAIM, NOT_COMPARED, VALIDATION, Losses
from testbed.analysis.document.model import Statement, Statements
from testbed.analysis.document.words import gap, joined, times
from testbed.analysis.report.verdicts import EntryPair, compared
from testbed.analysis.runs.entries import Subject, Workload
from testbed.analysis.statistics import FASTER, MIN_REPEATS


def headlines(subject: Subject) -> Statements:
    """Return the best configuration, the losses and the MFU of the largest group of equal work; nothing for one."""
    measured = [workload for workload in subject.workloads if len(workload.measured) > 1]
    if not measured:
        return ()
    workload = measured[0]
    of_group = f" ({workload.title})" if len(subject.workloads) > 1 and workload.title else ""
    topics = {"Best": _best, "Learning": _learning, "MFU": _mfu}
    return tuple(Statement(f"{topic}: ", f"{text(workload)}{of_group}.") for topic, text in topics.items())


def _best(workload: Workload) -> str:
    reference = workload.reference
    assert reference is not None  # something was measured
    pairs = [compared(entry, reference) for entry in workload.measured if entry is not reference]
    ahead = [pair for pair in pairs if pair.kind == FASTER]
    if ahead:
        pair = max(ahead, key=lambda pair: pair.ratio.ratio)
        numbers = f"95 % interval {interval(pair.ratio)}, n = {pair.ratio.n_a} and {pair.ratio.n_b}"
        others = f"; the highest of {len(pairs)} ratios" if len(pairs) > 1 else ""
        return f"{pair.entry.name}, {times(pair.ratio.ratio)}x the throughput of {reference.name} ({numbers}{others})"
    if all(pair.kind in (NO_CLAIM, NOT_COMPARED) for pair in pairs):
        return f"no claim; it takes equal work and {MIN_REPEATS} repeats of each configuration"
    return f"none is shown to beat {reference.name}"


def _learning(workload: Workload) -> str:
    pairs = [compared(*two) for two in itertools.combinations(workload.measured, 2)]
    found = [(pair, losses) for pair in pairs if pair.kind != NOT_COMPARED and (losses := _validation(pair))]
    if not found:
        return "not known, since no two configurations of equal work have final validation losses that compare"
    pair, losses = max(found, key=lambda each: abs(each[1].difference))
    without = "" if len(found) == len(pairs) else f"; {len(pairs) - len(found)} of {len(pairs)} pairs do not compare"
    unequal = [each for each in found if each[1].is_unequal]
    if not unequal:
        who = "both configurations" if len(workload.measured) == 2 else "all configurations"
        who = who if len(found) == len(pairs) else "those that compare"
        largest = f"the largest difference of final validation losses is {gap(losses.difference)}"
        return f"{who} learn alike; {largest}, limit {losses.noise:.4f} ({losses.noise_source}){without}"
    pair, losses = max(unequal, key=lambda each: abs(each[1].difference))
    worse, other = (pair.entry, pair.reference) if losses.difference > 0 else (pair.reference, pair.entry)
    above = f"its final validation loss is {gap(losses.difference)} above that of {other.name}"
    return f"not alike; {worse.name} learns worst, {above}, limit {losses.noise:.4f} ({losses.noise_source}){without}"


def _validation(pair: EntryPair) -> Losses | None:
    return next((losses for losses in pair.found.losses if losses.name == VALIDATION), None)


def _mfu(workload: Workload) -> str:
    entries = [entry for entry in workload.measured if entry.values("mfu")]
    if not entries:
        return "not known; the runs record no peak rate of the device"
    medians = [float(np.median(entry.values("mfu"))) for entry in entries]
    flops = [run.record.get("flops") or {} for entry in entries for run in entry.measured_runs if run.mfu is not None]
    sources = sorted({str(each.get("peak_source") or "not recorded") for each in flops})
    source = sources[0]
    if len(sources) > 1:
        source = (
            f"{joined(sorted({each.partition(':')[0] for each in sources}))}, in {len(sources)} ways (table of MFU)"
        )
    low, high = f"{min(medians):.1%}", f"{max(medians):.1%}"
    span = low if low == high else f"{low} to {high}"
    count = f"{len(entries)} of {len(workload.measured)} configurations"
    return f"{span}, medians of {count}; source of the peak: {source}"
