"""Group the runs of a report by equal work, as configurations with names and numbers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from testbed.analysis.runs.arms import (
    Arm,
    arm_name,
    device_of,
    differing_settings,
    group_into_arms,
    strategies_of,
)
from testbed.analysis.runs.comparability import differing_work
from testbed.analysis.runs.load import Run, on_one_peak
from testbed.config.run_types import REFERENCE
from testbed.errors import InputError
from testbed.sweep.state import Sweep, sweeps_above

LONGEST_TITLE_IN_A_NAME = 30


@dataclass(frozen=True, eq=False)
class Entry(Arm):
    """One configuration: an arm as reports show it.

    `look` is the number of its strategy among all: pictures show a strategy in one colour.
    """

    number: int
    strategy: str
    name: str
    look: int

    @property
    def median_run(self) -> Run:
        """The run of median throughput; without a measured one, the first."""
        runs = sorted(self.measured_runs, key=lambda run: run.tokens_per_s or 0.0)
        return runs[(len(runs) - 1) // 2] if runs else self.runs[0]

    @property
    def is_instrumented(self) -> bool:
        return bool(self.example.instrumented)

    @property
    def is_synchronised(self) -> bool:
        """Return whether it ran without --skip_gradient_sync: a mean over steps of both kinds is of neither."""
        return not self.example.synchronisation

    def values(self, name: str) -> list[float]:
        """Return the attribute `name` of every measured run that has it."""
        found = [getattr(run, name) for run in self.measured_runs]
        return [value for value in found if value is not None]


@dataclass(frozen=True, eq=False)
class Workload:
    """Configurations that did equal work, the seed aside; `title` says what sets them apart from the other groups."""

    title: str
    entries: tuple[Entry, ...]

    @property
    def measured(self) -> tuple[Entry, ...]:
        return tuple(entry for entry in self.entries if entry.tokens_per_s)

    @property
    def reference(self) -> Entry | None:
        """Return what speed-ups are against: the baseline on the fewest ranks, or else the fewest ranks' first.

        Unknown ranks are not few: such a run is the reference only where no other is there.
        """
        return min(
            self.measured,
            key=lambda entry: (entry.example.run_type != REFERENCE, entry.ranks or math.inf),
            default=None,
        )


@dataclass(frozen=True, eq=False)
class Subject:
    """Everything that the report is made of."""

    entries: tuple[Entry, ...]
    workloads: tuple[Workload, ...]
    sweeps: dict[Path, Sweep] = field(default_factory=dict)  # by out_dir

    @property
    def runs(self) -> list[Run]:
        return [run for entry in self.entries for run in entry.runs]

    @property
    def measured(self) -> list[Entry]:
        return [entry for workload in self.workloads for entry in workload.measured]

    def number_of(self, run: Run) -> int:
        return self.runs.index(run) + 1

    @property
    def protocols(self) -> list[str]:
        return sorted({sweep.protocol for sweep in self.sweeps.values()})

    @property
    def target_loss(self) -> float | None:
        """Return the loss that the sweep aimed at; None without one, or where sweeps differ."""
        targets = {sweep.target_val_loss for sweep in self.sweeps.values()} - {None}
        return targets.pop() if len(targets) == 1 else None


def subject_of(runs: Sequence[Run]) -> Subject:
    """Group, name and number `runs`, as `load_run` gives them. InputError without any."""
    if not runs:
        raise InputError("a report needs at least one run")
    runs, _ = on_one_peak(runs)
    arms = group_into_arms(runs)
    groups = _groups_of_equal_work(arms)
    strategies = {arm: name for group in groups for arm, name in _strategy_names(group).items()}
    rates: dict[tuple, list[float]] = {}
    for arm in arms:
        rates.setdefault((strategies[arm], arm.ranks), []).extend(arm.tokens_per_s)
    order = sorted(set(strategies.values()), key=lambda strategy: (not strategy.startswith(REFERENCE), strategy))
    names, titles = _names_and_titles(groups, strategies)
    entries: list[Entry] = []
    workloads = []
    for group, title in zip(groups, titles, strict=True):
        before = len(entries)
        for arm in sorted(group, key=lambda arm: _order(arm, strategies[arm], rates)):
            look = order.index(strategies[arm])
            entries.append(Entry(arm.label, arm.runs, len(entries) + 1, strategies[arm], names[arm], look))
        workloads.append(Workload(title, tuple(entries[before:])))
    return Subject(tuple(entries), tuple(workloads), sweeps_above(run.path for run in runs))


def _groups_of_equal_work(arms: Sequence[Arm]) -> list[list[Arm]]:
    """Return the arms by their work, the group with the most measured runs first."""
    groups: list[list[Arm]] = []
    for arm in arms:
        alike = (group for group in groups if _did_equal_work(group[0].example, arm.example))
        if group := next(alike, None):
            group.append(arm)
        else:
            groups.append([arm])
    return sorted(groups, key=lambda group: -sum(len(arm.measured_runs) for arm in group))


def _names_and_titles(groups: Sequence[Sequence[Arm]], strategies: dict[Arm, str]) -> tuple[dict[Arm, str], list[str]]:
    """Return a name for each arm, no two alike, and a title for each group. A name that two groups have gets the title,
    or the group's number where the title is long."""
    with_device = len({device_of(arm.runs[0]) for arm in strategies}) > 1
    names = {arm: _name(arm, strategies[arm], with_device) for arm in strategies}
    titles = _titles(groups)
    for number, group in enumerate(groups):
        elsewhere = {names[arm] for other in groups if other is not group for arm in other}
        if any(names[arm] in elsewhere for arm in group) and len(titles[number]) > LONGEST_TITLE_IN_A_NAME:
            titles[number] = f"work {number + 1}: {titles[number]}"
    counts = Counter(names.values())
    for group, title in zip(groups, titles, strict=True):
        added = title if len(title) <= LONGEST_TITLE_IN_A_NAME else title.partition(":")[0]
        for arm in group:
            names[arm] += f", {added}" if counts[names[arm]] > 1 and title else ""
    return _numbered(names), titles


def _did_equal_work(one: Run, other: Run) -> bool:
    """Return whether work is equal, the seed aside. How far an unfinished run came does not count: it enters no
    figure."""
    ignored = {"seed"}
    if "complete" not in (one.status, other.status) or one.status != other.status:
        ignored |= {"optimizer_steps", "tokens"}
    return all(difference.field in ignored for difference in differing_work((one, other)))


def _strategy_names(group: Sequence[Arm]) -> dict[Arm, str]:
    """Return the strategy of each arm of a group of equal work.

    Arms at equal ranks under one name get what their settings differ in: how a run is looked at, how much is validated.
    """
    found = strategies_of([arm.runs[0] for arm in group])
    names = {arm: strategy.name for arm, strategy in zip(group, found, strict=True)}
    alike: dict[tuple, list[Arm]] = {}
    for arm in group:
        place = (arm_name(names[arm], arm.runs[0]), arm.runs[0].label, _is_said_to_be_instrumented(arm.runs[0]))
        alike.setdefault(place, []).append(arm)
    for arms in alike.values():
        ignored = frozenset(("profile",)) if arms[0].runs[0].instrumented else frozenset()  # "instrumented" says it
        added = differing_settings([arm.runs[0] for arm in arms], ignored)
        names |= {arm: ", ".join(filter(None, (names[arm], more))) for arm, more in zip(arms, added, strict=True)}
    return names


def _numbered(names: dict[Arm, str]) -> dict[Arm, str]:
    """Add a number to names that are still equal: a sentence is about one configuration."""
    counts = Counter(names.values())
    seen: Counter[str] = Counter()
    numbered = {}
    for arm, name in names.items():
        seen[name] += 1
        numbered[arm] = f"{name} [{seen[name]}]" if counts[name] > 1 else name
    return numbered


def _name(arm: Arm, strategy: str, with_device: bool) -> str:
    device = f" ({device_of(arm.runs[0])})" if with_device else ""
    return f"{arm_name(strategy, arm.runs[0])}{device}" + (
        ", instrumented" if _is_said_to_be_instrumented(arm.runs[0]) else ""
    )


def _is_said_to_be_instrumented(run: Run) -> bool:
    """Return whether a name says "instrumented". A run of --skip_gradient_sync is marked as such too, but its name says
    why: the word is left for those that a profiler looked at."""
    settings = run.section("settings")
    is_looked_at = bool(settings.get("profile") or settings.get("profile_mode"))  # files that name no instruments
    is_looked_at |= any(name != "--skip_gradient_sync" for name in run.instruments)
    return bool(run.instrumented) and (is_looked_at or not run.synchronisation)


def _order(arm: Arm, strategy: str, rates: dict[tuple, list[float]]) -> tuple:
    """Sort few ranks first, then the highest median throughput. A profiled arm stands where its strategy does."""
    known = arm.tokens_per_s or rates[strategy, arm.ranks]
    return (bool(arm.runs[0].instrumented), arm.ranks or math.inf, -float(np.median(known or [0.0])), strategy)


def _titles(groups: Sequence[Sequence[Arm]]) -> list[str]:
    """Return for each group of equal work the fields in which the groups differ; empty where there is one group."""
    if len(groups) == 1:
        return [""]
    examples = [group[0].example for group in groups]
    shown = [
        difference
        for difference in differing_work(examples)
        if difference.field not in ("seed", "tokens") and not difference.is_unknown_only
    ]
    return [
        "; ".join(f"{difference.field.replace('_', ' ')} {difference.values[index]}" for difference in shown[:6])
        + (f"; and {len(shown) - 6} more fields" if len(shown) > 6 else "")
        for index in range(len(groups))
    ]
