"""Find what else may explain a difference between two sides of a comparison: code, machine, software, order.

One list for everybody who compares: compare_runs and the report warn of each, the audit lets a claim fall where the
devices differ and notes the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from testbed.analysis.runs.arms import DEVICE_FIELDS, automatic_choices, conditions, hardware_of
from testbed.analysis.runs.load import Run
from testbed.analysis.statistics import all_known
from testbed.metrics.busy_machine import signs_of_other_work

COMMIT, CHANGED_FILES, DEVICE, MACHINE, SOFTWARE = "commit", "changed files", "device", "machine", "software"
CHOICE = "automatic choice"
_MACHINE = ("cpu_cores_visible", "num_nodes")
_SOFTWARE = ("torch_version", "deepspeed_version", "cuda_version", "python_version")


@dataclass(frozen=True)
class Confounder:
    """Something beside the configuration in which runs differ: `kind` is one of the words above, `what` its name.

    `a` and `b` are the values on the two sides, sorted; what a file does not record is in neither.
    """

    kind: str
    what: str
    a: tuple[str, ...]
    b: tuple[str, ...]

    @property
    def against(self) -> str:
        """ "node1 against node0", and whether the difference is within a side only."""
        inside = " (within one side)" if self.a == self.b else ""
        return f"{', '.join(self.a)} against {', '.join(self.b)}{inside}"


def confounders(a: Sequence[Run], b: Sequence[Run]) -> list[Confounder]:
    """Return in what the runs of two sides differ, between the sides or within one, except their configuration."""
    found = []

    def look(kind: str, what: str, read: Callable[[Run], Any]) -> None:
        one, other = (
            tuple(sorted({str(value) for run in runs if (value := read(run)) is not None})) for runs in (a, b)
        )
        if one and other and len({*one, *other}) > 1:
            found.append(Confounder(kind, what, one, other))

    look(COMMIT, "commit", lambda run: None if run.git_commit in ("", "unknown") else run.git_commit)
    look(CHANGED_FILES, "changed files", lambda run: run.record.get("git_dirty"))
    look(MACHINE, "machine", lambda run: run.section("host").get("hostname"))
    for field in DEVICE_FIELDS:
        look(DEVICE, field.replace("_", " "), partial(hardware_of, name=field))
    for kind, group, fields in ((MACHINE, "hardware", _MACHINE), (SOFTWARE, "env", _SOFTWARE)):
        for field in fields:
            look(kind, field.replace("_", " "), partial(_recorded, group, field))
    return [*found, *differing_choices(a, b)]


def differing_choices(a: Sequence[Run], b: Sequence[Run] = ()) -> list[Confounder]:
    """Return in what the program chose differently, from run to run or between the sides.

    What one side was given is a setting of it: that it differs from the other's is what is compared.
    """
    found = []
    for name in sorted({name for run in (*a, *b) for name in automatic_choices(run)}):
        sides = [run_side for run_side in (a, b) if run_side]
        values = [tuple(conditions(side, name)) for side in sides]
        is_chosen = all(any(name in automatic_choices(run) for run in side) for side in sides)
        if any(len(each) > 1 for each in values) or (is_chosen and values[0] != values[-1]):
            found.append(Confounder(CHOICE, f"automatically chosen {name}", values[0], values[-1]))
    return found


def other_explanations(names: Sequence[str], a: Sequence[Run], b: Sequence[Run]) -> list[str]:
    """Return the confounders of two sides in sentences, and whether their runs were made in turn."""
    found = []
    for item in confounders(a, b):
        if item.kind == COMMIT:
            commits = (", ".join(commit[:12] for commit in side) for side in (item.a, item.b))
            found.append(f"commits differ: {' against '.join(commits)}; the code may explain the ratio")
        elif item.kind != CHANGED_FILES:  # said below, also where both sides have some
            found.append(f"{item.what} differs: {item.against}; it may explain the ratio")
    for name, runs in zip(names, (a, b), strict=True):
        busy = [signs for run in runs if (signs := signs_of_other_work(run.record))]
        if busy:
            found.append(f"{len(busy)} of {len(runs)} runs of {name} met a busy machine: of the first, {busy[0][-1]}")
    if any(run.record.get("git_dirty") for run in (*a, *b)):
        found.append("made with uncommitted changes: the commit does not say which code ran")
    if first := made_first(a, b):
        before, after = names if first == "a" else reversed(names)
        found.append(
            f"not interleaved: the runs of {before} were made before those of {after}, so a drift of the machine in "
            "between counts as a difference, and a verdict supposes a quiet machine; run them in turn (A B A B ...)"
        )
    return found


def _recorded(group: str, name: str, run: Run) -> Any:
    return run.section(group).get(name)


def made_first(a: Sequence[Run], b: Sequence[Run]) -> str | None:
    """Return "a" or "b" when nearly all runs of that side began before the other's: a drift looks like a difference.

    None: made in turn, a side with one run, or not recorded.
    """
    of_a, of_b = (all_known(run.record.get("timestamp_utc") for run in runs) for runs in (a, b))
    if of_a is None or of_b is None or min(len(of_a), len(of_b)) < 2:
        return None
    # timestamps are ISO 8601 in UTC, so text order is time order
    order = [(one > other) - (one < other) for one in of_a for other in of_b]
    if abs(sum(order)) < 0.9 * len(order):
        return None
    return "a" if sum(order) < 0 else "b"
