"""The audit's rules about the conditions of a comparison: one code, equal devices."""

from __future__ import annotations

from collections.abc import Iterator

from testbed.analysis.comparison.confounders import CHANGED_FILES, COMMIT, DEVICE, Confounder, confounders
from testbed.analysis.runs.arms import configuration
from testbed.analysis.runs.comparability import cores_of
from testbed.audit.finding import FAILS, NOTE, Finding, Rule
from testbed.audit.sides import Claim

_THREADS = "cpu threads per rank"
# of the runs of one side that say it
_DIRTY: dict[tuple[str, ...], str] = {("True",): "in every run", ("False",): "in no run"}


def code_is_the_same(claim: Claim) -> Iterator[Finding]:
    """Compare commits. Two are one change, and may be what is compared; with other settings too, they are two."""
    found = {item.kind: item for item in confounders(*claim.measured_runs) if item.a != item.b}
    if commit := found.get(COMMIT):
        one, other = (" / ".join(each[:10] for each in side) for side in (commit.a, commit.b))
        message = f"commit {one} against {other}"
    elif changed := found.get(CHANGED_FILES):
        one, other = (_DIRTY.get(values, "in some runs") for values in (changed.a, changed.b))
        message = f"files that differ from the commit: {claim.names[0]} {one}, {claim.names[1]} {other}"
    else:
        return
    is_two_changes = not _is_set_alike(claim)
    if is_two_changes:
        message += ", and other settings: two changes at once, so neither explains the difference"
    yield claim.finds(Rule.TRACEABLE, FAILS if is_two_changes else NOTE, message)


def _is_set_alike(claim: Claim) -> bool:
    """Return whether both arms have one configuration but for their devices, whose threads are a setting too."""
    found = []
    for run in (runs[0] for runs in claim.measured_runs):
        each = configuration(run)
        each["settings"].pop("threads_per_rank", None)
        found.append({name: value for name, value in each.items() if name != "devices"})
    return found[0] == found[1]


def devices_are_the_same(claim: Claim) -> Iterator[Finding]:
    """Compare devices. Others refute a claim; another machine of the same devices, or other software, is a note."""
    for item in confounders(*claim.measured_runs):
        if item.kind == DEVICE and item.a != item.b:
            if item.what != _THREADS:
                yield claim.fails(Rule.DEVICES, f"{item.what} {item.against}")
            elif not _cores_are_equal(claim):
                yield _other_threads(claim, item)
        elif item.kind not in (COMMIT, CHANGED_FILES):
            said = f"{item.what} {item.against}: it may explain the difference"
            yield claim.notes(Rule.DEVICES, said)


def _cores_are_equal(claim: Claim) -> bool:
    """Return whether both arms compute on the same number of cores, however many ranks share them."""
    one, other = ({cores_of(run) for run in runs} for runs in claim.measured_runs)
    return len(one) == 1 and one == other and None not in one


def _other_threads(claim: Claim, item: Confounder) -> Finding:
    """Return a note where the number of threads is all that differs, so that it is what is compared."""
    message = f"{item.what} {item.against}"
    if _is_set_alike(claim):
        return claim.notes(Rule.DEVICES, f"{message}: a ratio of the two is what more cores do")
    return claim.fails(Rule.DEVICES, message)
