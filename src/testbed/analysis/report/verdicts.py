"""Put verdicts on pairs of configurations into sentences."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from testbed.analysis.comparison.document import interval, verdict_of, within
from testbed.analysis.comparison.two_arms import NO_CLAIM, NOT_COMPARED, WORSE, Comparison, compare_arms
from testbed.analysis.document.model import Verdict
from testbed.analysis.document.words import SHOWN, counted, joined, times
from testbed.analysis.runs.comparability import differing_work
from testbed.analysis.runs.entries import Entry, Subject, Workload
from testbed.analysis.statistics import (
    DEFAULT_MARGIN,
    EQUAL,
    FASTER,
    MIN_REPEATS,
    NO_DIFFERENCE,
    SLOWER,
    Ratio,
    equality,
)


@dataclass(frozen=True, eq=False)
class EntryPair:
    """Two configurations, and how comparison/two_arms.py compares them."""

    entry: Entry
    reference: Entry
    found: Comparison

    @property
    def ratio(self) -> Ratio:
        return self.found.ratio

    @property
    def kind(self) -> str:
        return self.found.kind

    @property
    def worse(self) -> Entry | None:
        """The side that learns worse than seeds explain; by side, since two sides may bear one name."""
        return {"a": self.entry, "b": self.reference, None: None}[self.found.worse_side]


@functools.lru_cache(maxsize=1024)  # tables, pictures and words ask for the same pairs
def compared(entry: Entry, reference: Entry) -> EntryPair:
    """Return the two arms by throughput, one number per run, and by their losses."""
    return EntryPair(entry, reference, compare_arms(entry, reference, (entry.name, reference.name)))


def verdicts(subject: Subject, margin: float = DEFAULT_MARGIN) -> list[Verdict]:
    """Return the summary: configurations against their reference, and those on equal ranks among themselves.

    `margin` is the fraction within which throughputs count as equal.
    """
    found = []
    peers = [each for workload in subject.workloads for each in _peers(workload)]
    comparisons = sum(math.comb(len(each), 2) for _, each, _ in peers)  # the leader is chosen: every pair counts
    for of_ranks in peers:
        found += _among_equal_ranks(*of_ranks, comparisons)
    for workload in subject.workloads:
        found += _against_reference(workload, margin)
    if len(subject.workloads) > 1:
        titles = "; ".join(workload.title or workload.entries[0].name for workload in subject.workloads[:SHOWN])
        but = ", except as weak scaling relates them" if "weak" in subject.protocols else ""
        why = _work_of_groups(subject.workloads)
        text = f"{len(subject.workloads)} groups of configurations {why} and are compared only within"
        found.append(Verdict(NOT_COMPARED, f"{text}{but}: {titles}"))
    idle = Counter(_why_idle(entry) for entry in subject.entries if not entry.tokens_per_s)
    for why, number in idle.items():
        claim = f"No throughput is quoted of {counted(number, 'configuration')} whose runs are {why}"
        found.append(Verdict(NOT_COMPARED, claim))
    return in_order(found)


def _work_of_groups(workloads: Sequence[Workload]) -> str:
    """Return what is known of the work of groups that are kept apart: it differs, or some file does not record it."""
    pairs = itertools.combinations((workload.entries[0].example for workload in workloads), 2)
    kinds = {any(not each.is_unknown_only for each in differing_work(pair) if each.field != "seed") for pair in pairs}
    if kinds == {False}:
        return "did work that their files do not show to be equal"
    return "did unequal work" + (", or work that their files do not show to be equal," if False in kinds else "")


def _why_idle(entry: Entry) -> str:
    if not entry.is_synchronised:
        return "without synchronisation in some steps"
    return "instrumented: they serve the attribution alone" if entry.is_instrumented else "not complete"


def in_order(found: Sequence[Verdict]) -> list[Verdict]:
    """Sort: caveats, then claims, then comparisons without a claim."""
    order = (WORSE, FASTER, NO_DIFFERENCE, SLOWER, NO_CLAIM, NOT_COMPARED)
    return sorted(found, key=lambda verdict: order.index(verdict.kind))


def _against_reference(workload: Workload, margin: float) -> list[Verdict]:
    reference = workload.reference
    found, unclaimed, level = [], [], []
    if reference is None:  # nothing was measured
        return []
    for entry in workload.measured:
        if entry is reference:
            continue
        pair = compared(entry, reference)
        if pair.kind == NO_CLAIM:
            unclaimed.append(pair)
        elif pair.kind == NO_DIFFERENCE and pair.worse is None:
            level.append(pair)
        else:
            found.append(verdict_of(pair.found))
    if len(level) == 1:
        alone = verdict_of(level[0].found)
        found.append(replace(alone, numbers=f"{alone.numbers}; {_equal(level, margin)}"))
    elif level:
        told = joined(
            [f"{pair.entry.name} ({times(pair.ratio.ratio)}, {interval(pair.ratio)})" for pair in level], len(level)
        )
        effect = max(pair.ratio.minimum_detectable_effect or 0.0 for pair in level)
        found.append(
            Verdict(
                NO_DIFFERENCE,
                f"No detectable difference between {reference.name} and each of {told}",
                f"ratio and 95 % interval; differences below {effect:.1%} would go unnoticed; {_equal(level, margin)}",
            )
        )
    if len(unclaimed) == 1:
        found.append(verdict_of(unclaimed[0].found))
    elif unclaimed:
        repeats = sorted({pair.ratio.n_a for pair in unclaimed} | {unclaimed[0].ratio.n_b})
        counts = f"n = {repeats[0]}" + (f" to {repeats[-1]}" if len(repeats) > 1 else "")
        names = joined([pair.entry.name for pair in unclaimed])
        found.append(
            Verdict(
                NO_CLAIM,
                f"Not enough repeats for a claim about {names} against {reference.name}",
                f"{counts}, a claim takes {MIN_REPEATS} of each; the ratios below are what these runs gave",
            )
        )
    return found


def _equal(level: Sequence[EntryPair], margin: float) -> str:
    """Return which of the pairs without a detectable difference are shown to be equal within the margin."""
    equal = [pair for pair in level if equality(pair.ratio, margin) == EQUAL]
    if len(equal) == len(level):
        return f"{'equal' if len(level) == 1 else 'each is equal'} within {within(margin)}"
    if not equal:
        return f"not shown to be equal within {within(margin)}"
    others = joined([pair.entry.name for pair in level if pair not in equal])
    return f"equal within {within(margin)}: {joined([pair.entry.name for pair in equal])}; not shown for {others}"


def _peers(workload: Workload) -> list[tuple[int, list[Entry], list[Entry]]]:
    """Return for each number of ranks those to choose a leader from, the fastest first, and those with few repeats."""
    found = []
    for ranks in sorted({entry.ranks for entry in workload.measured if entry.ranks}):
        peers = [entry for entry in workload.measured if entry.ranks == ranks]
        if len(peers) == 2 and workload.reference in peers:
            continue  # said already
        short = [entry for entry in peers if len(entry.tokens_per_s) < MIN_REPEATS]
        enough = sorted((entry for entry in peers if entry not in short), key=lambda entry: -_median(entry))
        if len(enough) > 1:
            found.append((ranks, enough, short))
    return found


def _among_equal_ranks(ranks: int, peers: list[Entry], short: list[Entry], comparisons: int) -> list[Verdict]:
    """Return who has the highest throughput and learns worse, then who leads among those that learn alike."""
    where = f"On {counted(ranks, 'rank')}"
    worse_than = {
        entry: [other for other in peers if other is not entry and compared(entry, other).worse is entry]
        for entry in peers
    }
    found = []
    if better := worse_than[peers[0]]:
        claim = f"{where} {peers[0].strategy} has the highest throughput but learns worse than {_strategies(better)}"
        found.append(Verdict(WORSE, f"{claim}: it is not the fastest"))
    alike = [entry for entry in peers if not worse_than[entry]]
    left_out = [("learn worse", [entry for entry in peers if worse_than[entry]]), (f"n < {MIN_REPEATS}", short)]
    return found + (_lead(where, alike, left_out, comparisons) if len(alike) > 1 else [])


def _lead(where: str, alike: list[Entry], left_out: list[tuple[str, list[Entry]]], comparisons: int) -> list[Verdict]:
    """Return the fastest, which others it beats, and which cannot be told from it.

    "Beats" holds for all `comparisons` of the report together at 95 %.
    """
    leader, *others = alike
    pairs = [pair for other in others if (pair := compared(leader, other)).kind not in (NOT_COMPARED, NO_CLAIM)]
    bounds = {pair: pair.ratio.interval_among(comparisons) or (0.0, 0.0) for pair in pairs}
    behind = [pair for pair in pairs if bounds[pair][0] > 1]
    best_beaten = max([_median(pair.reference) for pair in pairs if pair.kind == FASTER], default=0.0)
    level = [pair.reference for pair in pairs if pair.kind == NO_DIFFERENCE and _median(pair.reference) > best_beaten]
    unplaced = [pair.reference for pair in pairs if pair not in behind and pair.reference not in level]
    compared_with = [pair.reference for pair in pairs]
    left_out = [*left_out, ("unequal work or seeds", [entry for entry in others if entry not in compared_with])]
    together = f"at 95 % over {comparisons} comparisons together" if comparisons > 1 else "at 95 %"
    if not pairs:
        return []
    if not behind:
        # A difference that the table calls detectable, one comparison by itself, need not hold among all of them.
        none = "no lead is sure among" if best_beaten else "no detectable difference between"
        names = _strategies([leader, *compared_with])
        return [Verdict(NO_DIFFERENCE, f"{where} {none} {names}{_left_out(left_out)}", together)]
    ahead = joined([f"{pair.reference.strategy} by {times(pair.ratio.ratio)}x" for pair in behind])
    if level:
        claim = f"{_strategies([leader, *level])} cannot be told apart at the top; {leader.strategy} beats {ahead}"
    else:
        rank = "has the highest throughput" if unplaced else "is the fastest"
        claim = f"{leader.strategy} {rank}; it beats {ahead}"
    left_out = [("not to be placed: scatter or differ too little", unplaced), *left_out]
    intervals = joined([" to ".join(map(times, bounds[pair])) for pair in behind])
    numbers = f"interval{'s' * (len(behind) > 1)} {intervals}, {together}"
    return [Verdict(FASTER, f"{where} {claim}{_left_out(left_out)}", numbers)]


def _strategies(entries: Sequence[Entry]) -> str:
    return joined([entry.strategy for entry in entries])


def _left_out(groups: Sequence[tuple[str, list[Entry]]]) -> str:
    told = [f"{_strategies(entries)} ({why})" for why, entries in groups if entries]
    return f"; left out: {', '.join(told)}" if told else ""


def _median(entry: Entry) -> float:
    return float(np.median(entry.tokens_per_s))
