"""What a report says in sentences: verdicts on pairs of configurations."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

from testbed.analysis.comparison.two_arms import Comparison, compare_arms
from testbed.analysis.document.model import Verdict
from testbed.analysis.document.words import SHOWN, between, counted, joined, times
from testbed.analysis.runs.entries import Entry, Subject, Workload
from testbed.analysis.statistics import CONFIDENCE, FASTER, MIN_REPEATS, NO_DIFFERENCE, NOT_ENOUGH, SLOWER, Ratio

WORSE = "learns worse"
NO_CLAIM, NOT_COMPARED = "no claim", "not compared"


@dataclass(frozen=True, eq=False)
class EntryPair:
    """Two configurations, as comparison/two_arms.py compares them; a faster one that learns worse is not faster."""

    entry: Entry
    reference: Entry
    found: Comparison

    @property
    def ratio(self) -> Ratio:
        return self.found.ratio

    @property
    def kind(self) -> str:
        if self.found.mismatches:
            return NOT_COMPARED  # of unequal work, or seeds that no run shares, the losses do not say who learns worse
        if self.ratio.verdict == NOT_ENOUGH:
            return NO_CLAIM
        return WORSE if self.worse is self.entry and self.ratio.verdict == FASTER else self.ratio.verdict

    @property
    def worse(self) -> Entry | None:
        """The side that learns worse than seeds explain; by side, since two sides may bear one name."""
        return {"a": self.entry, "b": self.reference, None: None}[self.found.worse_side]

    @property
    def why_not_compared(self) -> str:
        return "; ".join(
            f"{each.field.replace('_', ' ')} not recorded" if each.is_unknown else str(each)
            for each in self.found.mismatches
        )

    def interval_among(self, comparisons: int) -> tuple[float, float] | None:
        """The interval of the ratio at a confidence of 1 - 0.05 / comparisons: all of so many hold together at 95 %.

        The 95 % interval widened on the log scale by the ratio of Student's quantiles. For their degrees of freedom the
        smaller arm's repeats less one stand, the fewest that Welch's can be: rather too wide than too narrow.
        """
        if self.ratio.low is None or self.ratio.high is None:
            return None
        freedom = min(self.ratio.n_a, self.ratio.n_b) - 1
        tail = (1 - CONFIDENCE) / 2
        wider = special.stdtrit(freedom, 1 - tail / comparisons) / special.stdtrit(freedom, 1 - tail)
        middle = math.log(self.ratio.ratio)
        low, high = (
            math.exp(middle + wider * (math.log(bound) - middle)) for bound in (self.ratio.low, self.ratio.high)
        )
        return low, high

    @property
    def interval(self) -> str:
        return between(self.ratio.low, self.ratio.high, times)

    @property
    def losses(self) -> str:
        """What of the losses a claim must say; empty where they agree as far as seeds let them."""
        unequal = [losses for losses in self.found.losses if losses.is_unequal]
        if not unequal or self.worse is None:
            return ""
        last = unequal[-1]
        medians = f"{np.median(last.a):.4f} against {np.median(last.b):.4f}"
        return f"{last.name.lower()} {medians}, apart by more than {last.noise:.4f} ({last.noise_source})"


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


def verdict_of(pair: EntryPair) -> Verdict:
    """`ddp on 2 ranks is 1.61x as fast as baseline on 1 rank (95 % interval 1.55 to 1.66, n = 5 and 5).`"""
    ratio, entry, reference = pair.ratio, pair.entry.name, pair.reference.name
    numbers = f"95 % interval {pair.interval}, " if pair.interval else ""
    numbers += f"n = {ratio.n_a} and {ratio.n_b}"
    losses = f"; their losses differ, {pair.losses}" if pair.losses else ""
    speed = times(ratio.ratio)
    if pair.kind == NOT_COMPARED:
        return Verdict(NOT_COMPARED, f"{entry} is not compared with {reference}: {pair.why_not_compared}")
    if pair.kind == NO_DIFFERENCE:
        if ratio.minimum_detectable_effect is not None:
            numbers += f"; a difference below {ratio.minimum_detectable_effect:.1%} would go unnoticed"
        claim = f"No detectable difference between {entry} and {reference}"
        return Verdict(NO_DIFFERENCE, claim + losses, f"ratio {speed}, {numbers}")
    if pair.kind == NO_CLAIM:
        claim = f"Not enough repeats for a claim about {entry} against {reference}"
        return Verdict(NO_CLAIM, claim + losses, f"ratio {speed}, {numbers}; a claim takes {MIN_REPEATS} each")
    if pair.kind == WORSE:
        claim = f"{entry} is faster than {reference} but learns worse, so it is not faster: {pair.losses}"
        return Verdict(WORSE, claim, f"{speed}x its throughput, {numbers}")
    slower = "slower: " if pair.kind == SLOWER else ""
    return Verdict(pair.kind, f"{entry} is {slower}{speed}x as fast as {reference}{losses}", numbers)


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
        elif pair.kind == NO_DIFFERENCE and not pair.losses:
            level.append(pair)
        else:
            found.append(verdict_of(pair))
    if len(level) == 1:
        found.append(verdict_of(level[0]))
    elif level:
        told = joined([f"{pair.entry.name} ({times(pair.ratio.ratio)}, {pair.interval})" for pair in level], len(level))
        effect = max(pair.ratio.minimum_detectable_effect or 0.0 for pair in level)
        found.append(
            Verdict(
                NO_DIFFERENCE,
                f"No detectable difference between {reference.name} and each of {told}",
                f"ratio and 95 % interval; differences below {effect:.1%} would go unnoticed",
            )
        )
    if len(unclaimed) == 1:
        found.append(verdict_of(unclaimed[0]))
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
    intervals = {each: interval for each in pairs if (interval := each.interval_among(comparisons)) is not None}
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
