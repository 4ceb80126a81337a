"""List the cautions about quoting a number: unfit runs, and runs that differ in more than their strategy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from testbed.analysis.comparison.confounders import differing_choices, made_first
from testbed.analysis.document.model import Caution
from testbed.analysis.document.words import counted, joined
from testbed.analysis.report.verdicts import compared
from testbed.analysis.runs.comparability import cores_of, differing_work
from testbed.analysis.runs.entries import Subject
from testbed.analysis.runs.load import Run
from testbed.analysis.statistics import MIN_REPEATS
from testbed.metrics.busy_machine import LEAST_USED, NOISY, signs_of_other_work

Unfit = tuple[str, Callable[[Run], bool], str]  # title, the runs that it is about, what is said of them
UNFIT: tuple[Unfit, ...] = (
    (
        "Instrumented",
        lambda run: bool(run.instrumented) and not run.synchronisation,
        "had a profiler or a debug switch on and are slower than the real ones: no headline and no speed-up is from "
        "them.",
    ),
    (
        "Not synchronised",
        lambda run: bool(run.synchronisation),
        "left gradients unsynchronised in some or all steps (--skip_gradient_sync), and no mean over such steps is "
        "that of a step of training: they are left out of every headline and speed-up, of the breakdown of a step, "
        "the collectives and their bound.",
    ),
    (
        "Not complete",
        lambda run: run.status != "complete",
        "did not finish (failed, preempted, killed or still running): they enter no figure.",
    ),
    (
        "Dirty checkout",
        lambda run: bool(run.record.get("git_dirty")),
        "were made with files that differ from the commit they name: the code that ran cannot be looked up.",
    ),
    ("Commit unknown", lambda run: run.git_commit in (None, "unknown"), "do not say which commit they ran."),
)
UNQUIET: Unfit = (
    "Unquiet machine",
    lambda run: bool(signs_of_other_work(run.record)),
    f"have steps that scatter (their 95th percentile is more than {NOISY:.0%} above the median), or used less than "
    f"{LEAST_USED:.0%} of their cores: other work may have slowed them.",
)


def cautions(subject: Subject) -> list[Caution]:
    """Return what makes runs unfit or keeps them apart, the gravest first."""
    return [
        *_unfit(subject, UNFIT),
        *_crowded(subject),
        *_several(subject),
        *_choices(subject),
        *_in_blocks(subject),
        *_unequal_work(subject),
        *_too_few(subject),
        *_copies(subject),
        *_unfit(subject, [UNQUIET]),
    ]


def machine(run: Run) -> str:
    """Return the machine of rank 0 in words, as far as the file records it."""
    hardware, host = run.section("hardware"), run.section("host")
    device = hardware.get("gpu_name") or hardware.get("cpu_name") or "device unknown"
    cores = hardware.get("cpu_cores_visible")
    return f"{host.get('hostname', 'host unknown')}, {device}" + (f", {counted(cores, 'core')}" if cores else "")


def _unfit(subject: Subject, kinds: Sequence[Unfit]) -> list[Caution]:
    found, runs = [], subject.runs
    for title, applies, text in kinds:
        numbers = tuple(number for number, run in enumerate(runs, start=1) if applies(run))
        which = "All runs" if len(numbers) == len(runs) else f"{len(numbers)} of {len(runs)} runs"
        found += [Caution(title, f"{which} {text}", numbers)] if numbers else []
    return found


def _crowded(subject: Subject) -> list[Caution]:
    """Name the runs whose ranks took turns on the cores of a machine."""
    crowds: dict[int, str] = {}
    for number, run in enumerate(subject.runs, start=1):
        threads, hardware = cores_of(run), run.section("hardware")
        cores = hardware.get("cpu_cores_visible", 0) * (hardware.get("num_nodes") or 1)
        if threads and 0 < cores < threads:
            crowds[number] = f"{hardware.get('num_devices', run.world_size)} ranks share {counted(cores, 'core')}"
    if not crowds:
        return []
    text = (
        f"{joined(list(dict.fromkeys(crowds.values())))} in {counted(len(crowds), 'run')}: they take turns, and these "
    )
    return [Caution("Ranks share cores", f"{text}times do not compare strategies.", tuple(crowds))]


def _several(subject: Subject) -> list[Caution]:
    """Return in what runs differ that a configuration does not say. Values that a file lacks are "unknown"."""
    found = []
    for title, what, value in (
        ("Several commits", "The code differs", lambda run: (run.git_commit or "unknown")[:10]),
        ("Several machines", "The hardware differs", machine),
        ("Several versions", "PyTorch differs", lambda run: str(run.section("env").get("torch_version") or "unknown")),
    ):
        counts = Counter(map(value, subject.runs))
        if len(counts) > 1:
            shares = joined([f"{each} ({counted(number, 'run')})" for each, number in counts.items()])
            found.append(Caution(title, f"{what} between runs: {shares}. A difference in speed may come from that."))
    return found


def _choices(subject: Subject) -> list[Caution]:
    """Return what the program chose differently, within a configuration or between those that are compared."""
    found = []
    for workload in subject.workloads:
        sides = [entry.measured_runs for entry in workload.measured]
        choices = {item.what: item for entry in workload.entries for item in differing_choices(entry.runs)}
        for other in sides[1:]:
            choices |= {item.what: item for item in differing_choices(sides[0], other)}
        found += [
            Caution("Automatic choices", f"The {each.what} differs: {' and '.join(sorted({*each.a, *each.b}))}. A "
                    "difference in speed may come from that; set it by hand to compare.")
            for each in choices.values()
        ]  # fmt: skip
    return list(dict.fromkeys(found))


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
    seeds = [{run.work.get("seed") for run in entry.measured_runs} for entry in subject.measured]
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


def _in_blocks(subject: Subject) -> list[Caution]:
    """Name what was measured one after the other: a drift of the machine in between would look like a difference."""
    blocks = [
        entry.name
        for workload in subject.workloads
        for entry in workload.measured
        if entry is not workload.reference
        and made_first((pair := compared(entry, workload.reference)).found.a.runs, pair.found.b.runs)
    ]
    if not blocks:
        return []
    text = f"The runs of {joined(blocks)} were not made in turn with those that they are compared with"
    return [Caution("Not interleaved", f"{text}: a drift of the machine in between counts as a difference.")]


def _copies(subject: Subject) -> list[Caution]:
    counts = Counter(run.run_id for run in subject.runs if run.run_id)
    copies = sorted(run_id for run_id, number in counts.items() if number > 1)
    text = (
        f"One run appears more than once, under the run id {joined(copies)}: a copy is not a repeat." if copies else ""
    )
    numbers = tuple(number for number, run in enumerate(subject.runs, start=1) if run.run_id in copies)
    return [Caution("Copied files", text, numbers)] if copies else []
