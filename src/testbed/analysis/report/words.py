"""What a report says in sentences: verdicts on pairs of configurations, and what a reader must know before quoting."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from testbed.analysis.comparability import differing_work
from testbed.analysis.comparison.two_arms import Comparison, compare_arms
from testbed.analysis.report.subject import Entry, Subject, Workload
from testbed.analysis.runs import Run
from testbed.analysis.statistics import FASTER, MIN_REPEATS, NO_DIFFERENCE, NOT_ENOUGH, SLOWER, Ratio

NOISY = 0.1  # p95 above the median by more than this: the machine was not quiet
SHOWN = 6  # names in one sentence, before "and 4 more"

WORSE = "learns worse"
NO_CLAIM, NOT_COMPARED = "no claim", "not compared"


@dataclass(frozen=True)
class Verdict:
    """One sentence of the summary and the numbers behind it; `kind` is what it comes to."""

    kind: str
    claim: str
    numbers: str = ""

    @property
    def sentence(self) -> str:
        return f"{self.claim} ({self.numbers})." if self.numbers else f"{self.claim}."


@dataclass(frozen=True)
class Caution:
    """What keeps a number from being quoted as it stands; `runs` are numbers of the appendix."""

    title: str
    text: str
    runs: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Pair:
    """A configuration beside another, as comparison.py compares them; a faster one that learns worse is not faster."""

    entry: Entry
    reference: Entry
    found: Comparison

    @property
    def ratio(self) -> Ratio:
        return self.found.ratio

    @property
    def kind(self) -> str:
        if self.ratio.verdict == NOT_ENOUGH:
            return NO_CLAIM
        is_worse = self.found.learns_worse == self.entry.name
        return WORSE if is_worse and self.ratio.verdict == FASTER else self.ratio.verdict

    @property
    def interval(self) -> str:
        if self.ratio.low is None or self.ratio.high is None:
            return ""
        return f"{times(self.ratio.low)} to {times(self.ratio.high)}"

    @property
    def losses(self) -> str:
        """What of the losses a claim must say; empty where they agree as far as seeds let them."""
        unequal = [losses for losses in self.found.losses if losses.is_unequal]
        if not unequal or not self.found.learns_worse:
            return ""
        last = unequal[-1]
        medians = f"{np.median(last.a):.4f} against {np.median(last.b):.4f}"
        return f"{last.name.lower()} {medians}, apart by more than {last.noise:.4f} ({last.noise_source})"


@functools.lru_cache(maxsize=1024)  # tables, pictures and words ask for the same pairs
def compared(entry: Entry, reference: Entry) -> Pair:
    """The two arms by throughput, one number per run, and their losses beside it."""
    return Pair(entry, reference, compare_arms(entry.arm, reference.arm, (entry.name, reference.name)))


def verdicts(subject: Subject) -> list[Verdict]:
    """The summary: every configuration against its group's reference, then those on equal ranks among themselves."""
    found = []
    for workload in subject.workloads:
        found += _among_equal_ranks(workload)
        found += _against_reference(workload)
    if len(subject.workloads) > 1:
        titles = "; ".join(workload.title or workload.entries[0].name for workload in subject.workloads[:SHOWN])
        but = ", except as weak scaling relates them" if "weak" in subject.protocols else ""
        text = f"{len(subject.workloads)} groups of configurations did unequal work and are compared only within"
        found.append(Verdict(NOT_COMPARED, f"{text}{but}: {titles}"))
    idle = [entry for entry in subject.entries if not entry.tokens_per_s]
    for title, entries in (
        ("instrumented: they serve the attribution alone", [entry for entry in idle if entry.is_instrumented]),
        ("not complete", [entry for entry in idle if not entry.is_instrumented]),
    ):
        if entries:
            count = f"{len(entries)} configuration{'s' * (len(entries) > 1)}"
            found.append(Verdict(NOT_COMPARED, f"No throughput is quoted of {count} whose runs are {title}"))
    return in_order(found)


def in_order(found: Sequence[Verdict]) -> list[Verdict]:
    """What spoils a claim first, then claims, then what is none."""
    order = (WORSE, FASTER, NO_DIFFERENCE, SLOWER, NO_CLAIM, NOT_COMPARED)
    return sorted(found, key=lambda verdict: order.index(verdict.kind))


def verdict_of(pair: Pair) -> Verdict:
    """`ddp on 2 ranks is 1.61x as fast as baseline on 1 rank (95 % interval 1.55 to 1.66, n = 5 and 5).`"""
    ratio, entry, reference = pair.ratio, pair.entry.name, pair.reference.name
    numbers = f"95 % interval {pair.interval}, " if pair.interval else ""
    numbers += f"n = {ratio.n_a} and {ratio.n_b}"
    losses = f"; their losses differ, {pair.losses}" if pair.losses else ""
    speed = times(ratio.ratio)
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


def times(ratio: float) -> str:
    """Two decimals; three near 1, where two would not show on which side a bound lies."""
    return f"{ratio:.3f}" if 0.9 < ratio < 1.1 else f"{ratio:.2f}"


def warnings_of(subject: Subject) -> list[Caution]:
    """What makes runs unfit or keeps them apart, the gravest first."""
    found = [
        _about(
            subject,
            "Instrumented",
            lambda run: bool(run.instrumented),
            "had a profiler or a debug switch on and are slower than the real ones: no headline and no speed-up is "
            "from them.",
        ),
        _about(
            subject,
            "Not complete",
            lambda run: run.status != "complete",
            "did not finish (failed, killed or still running): they enter no figure.",
        ),
        _about(
            subject,
            "Dirty checkout",
            lambda run: bool(run.record.get("git_dirty")),
            "were made with files that differ from the commit they name: the code that ran cannot be looked up.",
        ),
        _about(
            subject,
            "Commit unknown",
            lambda run: run.git_commit in (None, "unknown"),
            "do not say which commit they ran.",
        ),
        _several(subject, "Several commits", lambda run: (run.git_commit or "unknown")[:10], "The code differs"),
        _several(subject, "Several machines", machine, "The hardware differs"),
        _several(subject, "Several versions", _torch, "PyTorch differs"),
        _in_blocks(subject),
        *_unequal_work(subject),
        *_too_few(subject),
        *_copies(subject),
        _about(
            subject,
            "Unquiet machine",
            lambda run: ((run.record.get("timing") or {}).get("step_time_p95_above_median") or 0) > NOISY,
            f"have steps that scatter: their 95th percentile is more than {NOISY:.0%} above the median.",
        ),
    ]
    return [warning for warning in found if warning is not None]


def machine(run: Run) -> str:
    """The machine of rank 0 in words, as far as the file records it."""
    hardware, host = run.record.get("hardware", {}), run.record.get("host", {})
    device = hardware.get("gpu_name") or hardware.get("cpu_name") or "device unknown"
    cores = hardware.get("cpu_cores_visible")
    return f"{host.get('hostname', 'host unknown')}, {device}" + (f", {cores} cores" if cores else "")


def _torch(run: Run) -> str:
    return (run.record.get("env") or {}).get("torch_version") or "unknown"


def joined(items: Sequence[str]) -> str:
    """`a, b and c`; a long list ends in `and 4 more`."""
    items = [*items[:SHOWN], f"{len(items) - SHOWN} more"] if len(items) > SHOWN + 1 else list(items)
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def _against_reference(workload: Workload) -> list[Verdict]:
    reference = workload.reference
    found, unclaimed = [], []
    for entry in workload.measured:
        if entry is reference:
            continue
        pair = compared(entry, reference)
        if pair.kind == NO_CLAIM:
            unclaimed.append(pair)
        else:
            found.append(verdict_of(pair))
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


def _among_equal_ranks(workload: Workload) -> list[Verdict]:
    """At each number of ranks: the fastest, and which others cannot be told from it."""
    found = []
    for ranks in sorted({entry.ranks for entry in workload.measured if entry.ranks}):
        peers = [entry for entry in workload.measured if entry.ranks == ranks]
        if len(peers) < 2 or min(len(entry.tokens_per_s) for entry in peers) < MIN_REPEATS:
            continue
        if len(peers) == 2 and workload.reference in peers:
            continue  # said already
        leader, *others = sorted(peers, key=lambda entry: -np.median(entry.tokens_per_s))
        pairs = [compared(leader, other) for other in others]
        level = joined([leader.strategy, *(each.reference.strategy for each in pairs if each.kind == NO_DIFFERENCE)])
        behind = [each for each in pairs if each.kind in (FASTER, WORSE)]
        where = f"On {ranks} rank{'s' * (ranks > 1)}"
        if any(each.kind == WORSE for each in behind):
            better = joined([each.reference.strategy for each in behind if each.kind == WORSE])
            claim = f"{where} {leader.strategy} has the highest throughput but learns worse than {better}"
            found.append(Verdict(WORSE, f"{claim}: it is not the fastest"))
            continue
        if not behind:
            found.append(Verdict(NO_DIFFERENCE, f"{where} no detectable difference between {level}"))
            continue
        ahead = joined([f"{each.reference.strategy} by {times(each.ratio.ratio)}x" for each in behind])
        intervals = joined([each.interval for each in behind])
        if len(behind) < len(pairs):
            text = f"{where} {level} cannot be told apart at the top; {leader.strategy} beats {ahead}"
        else:
            text = f"{where} {leader.strategy} is the fastest; it beats {ahead}"
        found.append(Verdict(FASTER, text, f"95 % interval{'s' * (len(behind) > 1)} {intervals}"))
    return found


def _about(subject: Subject, title: str, applies: Callable[[Run], bool], text: str) -> Caution | None:
    numbers = tuple(number for number, run in enumerate(subject.runs, start=1) if applies(run))
    if not numbers:
        return None
    which = "All runs" if len(numbers) == len(subject.runs) else f"{len(numbers)} of {len(subject.runs)} runs"
    return Caution(title, f"{which} {text}", numbers)


def _several(subject: Subject, title: str, value: Callable[[Run], str], text: str) -> Caution | None:
    values = [value(run) for run in subject.runs]
    distinct = list(dict.fromkeys(values))
    if len(distinct) < 2:
        return None
    counted = [f"{each} ({values.count(each)} run{'s' * (values.count(each) > 1)})" for each in distinct]
    return Caution(title, f"{text} between runs: {joined(counted)}. A difference in speed may come from that.")


def _unequal_work(subject: Subject) -> list[Caution]:
    examples = [workload.entries[0].example for workload in subject.workloads]
    differences = [each for each in differing_work(examples) if each.field not in ("seed", "tokens")]
    differing = [each for each in differences if not each.is_unknown_only]
    unknown = [each.field.replace("_", " ") for each in differences if each.is_unknown_only]
    found = []
    if differing:
        texts = [f"{each.field.replace('_', ' ')} {' / '.join(dict.fromkeys(each.values))}" for each in differing]
        found.append(Caution("Unequal work", f"Not all runs did the same work: {joined(texts)}."))
    if unknown:
        found.append(
            Caution("Work not known", f"Not recorded in every file: {joined(unknown)}. Equal work is not shown.")
        )
    seeds = [{run.work.get("seed") for run in entry.measured} for entry in subject.measured]
    if any(one != seeds[0] for one in seeds):
        found.append(Caution("Seeds", "The configurations were not repeated with the same seeds."))
    return found


def _too_few(subject: Subject) -> list[Caution]:
    few = [entry for entry in subject.measured if len(entry.tokens_per_s) < MIN_REPEATS]
    if not few:
        return []
    counts = [f"{entry.name} (n = {len(entry.tokens_per_s)})" for entry in few]
    text = f"A claim takes {MIN_REPEATS} repeats: {joined(counts)} {'have' if len(few) > 1 else 'has'} fewer."
    return [Caution(f"n < {MIN_REPEATS}", text)]


def _in_blocks(subject: Subject) -> Caution | None:
    """Configurations measured one after the other: a drift of the machine in between would look like a difference."""
    blocks = []
    for workload in subject.workloads:
        others = [entry for entry in workload.measured if entry is not workload.reference]
        pairs = [compared(entry, workload.reference) for entry in others]
        blocks += [pair.entry for pair in pairs if any("not interleaved" in text for text in pair.found.warnings)]
    if not blocks:
        return None
    names = joined([entry.name for entry in blocks])
    text = f"The runs of {names} were not made in turn with those that they are compared with"
    return Caution("Not interleaved", f"{text}: a drift of the machine in between counts as a difference.")


def _copies(subject: Subject) -> list[Caution]:
    identifiers = [run.run_id for run in subject.runs if run.run_id]
    copies = sorted({each for each in identifiers if identifiers.count(each) > 1})
    if not copies:
        return []
    text = f"One run appears more than once, under the run id {joined(copies)}: a copy is no repeat."
    numbers = tuple(number for number, run in enumerate(subject.runs, start=1) if run.run_id in copies)
    return [Caution("Copied files", text, numbers)]
