"""What a reader must know before quoting a number: runs that are unfit, or kept apart by more than their strategy."""

from __future__ import annotations

from collections.abc import Callable

from testbed.analysis.comparison.confounders import differing_choices
from testbed.analysis.document.model import Caution
from testbed.analysis.document.words import counted, joined
from testbed.analysis.report.verdicts import compared
from testbed.analysis.runs.comparability import differing_work
from testbed.analysis.runs.entries import Subject
from testbed.analysis.runs.load import Run
from testbed.analysis.statistics import MIN_REPEATS
from testbed.metrics.scatter import NOISY


def cautions(subject: Subject) -> list[Caution]:
    """What makes runs unfit or keeps them apart, the gravest first."""
    found = [
        _about(
            subject,
            "Instrumented",
            lambda run: bool(run.instrumented) and not run.synchronisation,
            "had a profiler or a debug switch on and are slower than the real ones: no headline and no speed-up is "
            "from them.",
        ),
        _about(
            subject,
            "Not synchronised",
            lambda run: bool(run.synchronisation),
            "left gradients unsynchronised in some or all steps (--skip_gradient_sync), and no mean over such steps is "
            "that of a step of training: they are left out of every headline and speed-up, of the breakdown of a step, "
            "the collectives and their bound. scripts/exposed_communication.py reads them.",
        ),
        _about(
            subject,
            "Not complete",
            lambda run: run.status != "complete",
            "did not finish (failed, preempted, killed or still running): they enter no figure.",
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
        *_choices(subject),
        _in_blocks(subject),
        *_unequal_work(subject),
        *_too_few(subject),
        *_copies(subject),
        _about(
            subject,
            "Unquiet machine",
            lambda run: (run.section("timing").get("step_time_p95_above_median") or 0) > NOISY,
            f"have steps that scatter: their 95th percentile is more than {NOISY:.0%} above the median.",
        ),
    ]
    return [caution for caution in found if caution is not None]


def machine(run: Run) -> str:
    """The machine of rank 0 in words, as far as the file records it."""
    hardware, host = run.section("hardware"), run.section("host")
    device = hardware.get("gpu_name") or hardware.get("cpu_name") or "device unknown"
    cores = hardware.get("cpu_cores_visible")
    return f"{host.get('hostname', 'host unknown')}, {device}" + (f", {cores} cores" if cores else "")


def _torch(run: Run) -> str:
    return str(run.section("env").get("torch_version") or "unknown")


def _choices(subject: Subject) -> list[Caution]:
    """Within a configuration and between those that are compared."""
    found = []
    for workload in subject.workloads:
        sides = [entry.measured for entry in workload.measured]
        choices = {item.what: item for entry in workload.entries for item in differing_choices(entry.runs)}
        for other in sides[1:]:
            choices |= {item.what: item for item in differing_choices(sides[0], other)}
        found += [
            Caution("Automatic choices", f"The {each.what} differs: {' and '.join(sorted({*each.a, *each.b}))}. A "
                    "difference in speed may come from that; set it by hand to compare.")
            for each in choices.values()
        ]  # fmt: skip
    return list(dict.fromkeys(found))


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
    shares = [f"{each} ({counted(values.count(each), 'run')})" for each in distinct]
    return Caution(title, f"{text} between runs: {joined(shares)}. A difference in speed may come from that.")


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
