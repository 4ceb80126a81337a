"""What a report says in sentences: verdicts on pairs of configurations."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from testbed.analysis.comparison.sentences import interval, verdict_of
from testbed.analysis.comparison.two_arms import NO_CLAIM, NOT_COMPARED, WORSE, Comparison, compare_arms
from testbed.analysis.document.model import Verdict
from testbed.analysis.document.words import SHOWN, counted, joined, times
from testbed.analysis.runs.entries import Entry, Subject, Workload
from testbed.analysis.statistics import FASTER, MIN_REPEATS, NO_DIFFERENCE, SLOWER, Ratio


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
    """The two arms by throughput, one number per run, and their losses beside it."""
    return EntryPair(entry, reference, compare_arms(entry.arm, reference.arm, (entry.name, reference.name)))


def verdicts(subject: Subject) -> list[Verdict]:
    """The summary: every configuration against its group's reference, then those on equal ranks among themselves."""
    found = []
    peers = [each for workload in subject.workloads for each in _peers(workload)]
    comparisons = sum(math.comb(len(each), 2) for _, each, _ in peers)  # the leader is chosen: every pair counts
    for of_ranks in peers:
        found += _among_equal_ranks(*of_ranks, comparisons)
    for workload in subject.workloads:
        found += _against_reference(workload)
    if len(subject.workloads) > 1:
        titles = "; ".join(workload.title or workload.entries[0].name for workload in subject.workloads[:SHOWN])
        but = ", except as weak scaling relates them" if "weak" in subject.protocols else ""
        text = f"{len(subject.workloads)} groups of configurations did unequal work and are compared only within"
        found.append(Verdict(NOT_COMPARED, f"{text}{but}: {titles}"))
    idle = [entry for entry in subject.entries if not entry.tokens_per_s]
    for title, entries in (
        ("without synchronisation in some steps", [entry for entry in idle if not entry.is_synchronised]),
        (
            "instrumented: they serve the attribution alone",
            [entry for entry in idle if entry.is_synchronised and entry.is_instrumented],
        ),
        ("not complete", [entry for entry in idle if entry.is_synchronised and not entry.is_instrumented]),
    ):
        if entries:
            count = counted(len(entries), "configuration")
            found.append(Verdict(NOT_COMPARED, f"No throughput is quoted of {count} whose runs are {title}"))
    return in_order(found)


def in_order(found: Sequence[Verdict]) -> list[Verdict]:
    """What spoils a claim first, then claims, then what is none."""
    order = (WORSE, FASTER, NO_DIFFERENCE, SLOWER, NO_CLAIM, NOT_COMPARED)
    return sorted(found, key=lambda verdict: order.index(verdict.kind))


def _against_reference(workload: Workload) -> list[Verdict]:
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
        found.append(verdict_of(level[0].found))
    elif level:
        told = joined(
            [f"{pair.entry.name} ({times(pair.ratio.ratio)}, {interval(pair.ratio)})" for pair in level], len(level)
        )
        effect = max(pair.ratio.minimum_detectable_effect or 0.0 for pair in level)
        found.append(
            Verdict(
                NO_DIFFERENCE,
                f"No detectable difference between {reference.name} and each of {told}",
                f"ratio and 95 % interval; differences below {effect:.1%} would go unnoticed",
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


def _peers(workload: Workload) -> list[tuple[int, list[Entry], list[Entry]]]:
    """For each number of ranks the configurations to choose a leader from, the fastest first, and those too short."""
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
    """The fastest of those that learn alike, which it beats, and which others cannot be told from it.

    "Beats" holds for all `comparisons` of the report together at 95 %.
    """
    where = f"On {counted(ranks, 'rank')}"
    worse_than = {
        entry: [other for other in peers if other is not entry and compared(entry, other).worse is entry]
        for entry in peers
    }
    found = []
    if worse_than[peers[0]]:
        better = joined([other.strategy for other in worse_than[peers[0]]])
        claim = f"{where} {peers[0].strategy} has the highest throughput but learns worse than {better}"
        found.append(Verdict(WORSE, f"{claim}: it is not the fastest"))
    alike = [entry for entry in peers if not worse_than[entry]]
    if len(alike) < 2:
        return found
    leader = alike[0]
    pairs = [compared(leader, other) for other in alike[1:]]
    pairs = [each for each in pairs if each.kind not in (NOT_COMPARED, NO_CLAIM)]
    intervals = {each: interval for each in pairs if (interval := each.ratio.interval_among(comparisons)) is not None}
    behind = [each for each in pairs if intervals[each][0] > 1]
    best_beaten = max([_median(each.reference) for each in pairs if each.kind == FASTER], default=0.0)
    level = [each for each in pairs if each.kind == NO_DIFFERENCE and _median(each.reference) > best_beaten]
    unplaced = [each for each in pairs if each not in behind and each not in level]
    left_out = [
        ("not to be placed: scatter or differ too little", [each.reference for each in unplaced]),
        ("learn worse", [entry for entry in peers if worse_than[entry]]),
        (f"n < {MIN_REPEATS}", short),
        ("unequal work or seeds", [entry for entry in alike[1:] if entry not in [each.reference for each in pairs]]),
    ]
    if not behind and pairs:
        names = joined([entry.strategy for entry in (leader, *(each.reference for each in pairs))])
        # A difference that the table calls detectable, one comparison by itself, need not hold among all of them.
        none = "no lead is sure among" if best_beaten else "no detectable difference between"
        claim = f"{where} {none} {names}{_left_out(left_out[1:])}"
        found.append(Verdict(NO_DIFFERENCE, claim, _corrected(comparisons)))
    if not behind:
        return found
    without = _left_out(left_out)
    names = joined([leader.strategy, *(each.reference.strategy for each in level)])
    ahead = joined([f"{each.reference.strategy} by {times(each.ratio.ratio)}x" for each in behind])
    if level:
        text = f"{where} {names} cannot be told apart at the top; {leader.strategy} beats {ahead}{without}"
    elif unplaced:
        text = f"{where} {leader.strategy} has the highest throughput; it beats {ahead}{without}"
    else:
        text = f"{where} {leader.strategy} is the fastest; it beats {ahead}{without}"
    bounds = joined([" to ".join(map(times, intervals[each])) for each in behind])
    found.append(Verdict(FASTER, text, f"interval{'s' * (len(behind) > 1)} {bounds}, {_corrected(comparisons)}"))
    return found


def _left_out(groups: Sequence[tuple[str, list[Entry]]]) -> str:
    told = [f"{joined([entry.strategy for entry in entries])} ({why})" for why, entries in groups if entries]
    return f"; left out: {', '.join(told)}" if told else ""


def _corrected(comparisons: int) -> str:
    return f"at 95 % over {comparisons} comparisons together" if comparisons > 1 else "at 95 %"


def _median(entry: Entry) -> float:
    return float(np.median(entry.tokens_per_s))
