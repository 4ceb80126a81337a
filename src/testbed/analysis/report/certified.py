"""The report's section on the machine's noise: what its certificate says, and whether the runs are as quiet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from scipy import special

from testbed.analysis.certificate import REPEATS, certificates_above, largest, machine_in_words, machine_of
from testbed.analysis.document.model import Block, Caution, Cell, Section, table_of
from testbed.analysis.document.words import Number, times
from testbed.analysis.runs.entries import Subject
from testbed.analysis.statistics import noise_of

SHOWN_EFFECTS = (0.01, 0.02, 0.05)
EQUAL_WITHIN = (0.02,)
Row = tuple[Mapping[str, Any], Mapping[str, Any]]  # a configuration, and what was found
TOO_NOISY = 0.01  # chance of scatter like this on a machine as quiet as the certificate says
MEANING = (
    "Noise: standard deviation of the throughput of one run, and its upper 80 % confidence limit. Outliers: runs "
    "far from all others. The figures after them are planned with that limit, without the outliers: a comparison is "
    "of medians, which a single run hardly moves; among five runs of each it can hide more. 5 runs find: the "
    "difference that 5 runs of each find in 80 % of comparisons. 1 % takes: runs of each to find a difference of 1 "
    "%. Equal takes: runs of each to show that two are equal within it, if they are."
)
MEANING_OF_PAIRS = (
    "Both runs of a pair have the same command. Claims: comparisons of five pairs in a row that report a difference, "
    "which is false. a / b: throughput of one side over the other's, with its 95 % interval."
)


def blocks(certificate: Mapping[str, Any], name: str) -> list[Block]:
    """Return what a certificate says, as a sentence and a table. `name`: of its file."""
    commit, changed = certificate["git_commit"], certificate["git_dirty"]
    code = f"commit {commit[:12]}{' + CHANGED FILES' if changed else ''}" if commit else "commit not recorded"
    lead = (
        f"{name}, {certificate['timestamp_utc'][:10]}: {machine_in_words(certificate['machine'])}, {code}, PyTorch "
        f"{certificate['torch_version'] or 'not recorded'}."
    )

    def ratio(row: Row) -> Cell:
        found = row[1]["a_against_b"]
        return Number(found["ratio"], times, found["low"], found["high"])

    def difference(number: int) -> Callable[[Row], Cell]:
        return lambda row: f"{row[1]['detectable'][str(number)]:.1%}"

    def repeats(effect: float) -> Callable[[Row], Cell]:
        return lambda row: f"{row[1]['repeats'][f'{effect:g}']:,}"

    def to_show(margin: float) -> Callable[[Row], Cell]:
        return lambda row: f"{row[1]['repeats_to_show_equal'][f'{margin:g}']:,}"

    columns: dict[str, Callable[[Row], Cell]] = {
        "configuration": lambda row: row[0]["name"],
        "noise": lambda row: f"{row[1]['noise']:.2%} (below {row[1]['noise_below']:.2%})",
        "outliers": lambda row: f"{row[1]['outliers']} of {2 * len(row[0]['pairs'])}",
        **{f"{number} runs find": difference(number) for number in REPEATS},
        **{f"{effect:.0%} takes": repeats(effect) for effect in SHOWN_EFFECTS},
        **{f"equal within {margin:.0%} takes": to_show(margin) for margin in EQUAL_WITHIN},
    }
    of_pairs: dict[str, Callable[[Row], Cell]] = {
        "configuration": lambda row: row[0]["name"],
        "work": lambda row: row[0]["work"],
        "pairs": lambda row: str(len(row[0]["pairs"])),
        "claims": lambda row: f"{row[1]['claims']} of {row[1]['sessions']}",
        "a / b": ratio,
    }
    rows = list(zip(certificate["configurations"], certificate["found"], strict=True))
    return [
        lead,
        table_of(rows, columns, "What it can show", MEANING),
        table_of(rows, of_pairs, "Pairs of equal runs", MEANING_OF_PAIRS, ("configuration", "work")),
    ]


def certified(subject: Subject) -> Section | None:
    """Return what the certificates of these machines say; None without one."""
    found = [each for path, content in _own(subject)[0] for each in blocks(content, path)]
    return Section("How noisy the machine is", found, "noise") if found else None


def cautions_on_noise(subject: Subject) -> list[Caution]:
    """Return where a certificate is of another machine, or the runs scatter more than it says."""
    own, others = _own(subject)
    found = [
        Caution("Other machine", f"{path} is the certificate of {machine_in_words(content['machine'])}, on which none "
                "of these runs was made: it is not quoted.")
        for path, content in others
    ]  # fmt: skip
    arms = [entry.tokens_per_s for entry in subject.measured if len(entry.tokens_per_s) > 1]
    noise = noise_of(arms)[0]
    freedom = sum(len(rates) - 1 for rates in arms)
    if own and noise:
        path, content = max(own, key=lambda each: largest(each[1], "noise_below"))
        below = largest(content, "noise_below")
        if special.chdtrc(freedom, freedom * (noise / below) ** 2) < TOO_NOISY:
            text = (
                f"Runs of one configuration scatter by {noise:.1%}, and the machine's certificate ({path}) has less "
                f"than {below:.1%}: something else was at work, or these runs are of another kind."
            )
            found.append(Caution("Noisier than certified", text))
    return found


def _own(subject: Subject) -> tuple[list[tuple[str, Any]], list[tuple[str, Any]]]:
    """Return the certificates above the runs, by name of the file: those of the runs' machines, and others."""
    machines = [machine_of(run) for run in subject.runs]
    found = certificates_above(run.path for run in subject.runs)
    copies = {content["timestamp_utc"]: (path.name, content) for path, content in found.items()}  # one in each sweep
    own = [each for each in copies.values() if each[1]["machine"] in machines]
    return own, [each for each in copies.values() if each not in own]
