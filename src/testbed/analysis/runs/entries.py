"""What a report is about: configurations with names and numbers, grouped by equal work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from testbed.analysis.runs.arms import (
    Arm,
    arm_name,
    device_of,
    differing_settings,
    group_into_arms,
    rank_count,
    strategies_of,
)
from testbed.analysis.runs.comparability import differing_work
from testbed.analysis.runs.load import Run
from testbed.analysis.runs.sweep_file import SWEEP_FILE, read_sweep

FOLDERS_ABOVE_A_RUN = 3  # <out_dir>/<cell>/run_<k>/training_metrics.json

LONGEST_TITLE_IN_A_NAME = 30


@dataclass(frozen=True, eq=False)
class Entry:
    """One configuration: an arm as reports show it. Runs are numbered through the whole report, from 1.

    `look` is the number of its strategy among all: pictures show a strategy in one colour.
    """

    number: int
    first_run: int
    arm: Arm
    strategy: str
    name: str
    look: int

    @property
    def runs(self) -> tuple[Run, ...]:
        return self.arm.runs

    @property
    def measured(self) -> tuple[Run, ...]:
        """Runs that may enter a headline."""
        return self.arm.measured_runs

    @property
    def example(self) -> Run:
        """The run that stands for the work of all."""
        return (*self.measured, *self.runs)[0]

    @property
    def median_run(self) -> Run:
        """The run of median throughput; without a measured one, the first."""
        runs = sorted(self.measured, key=lambda run: run.tokens_per_s or 0.0)
        return runs[(len(runs) - 1) // 2] if runs else self.runs[0]

    @property
    def ranks(self) -> int | None:
        return rank_count(self.example)

    @property
    def tokens_per_s(self) -> list[float]:
        return self.arm.tokens_per_s

    @property
    def is_instrumented(self) -> bool:
        return bool(self.example.instrumented)

    @property
    def is_synchronised(self) -> bool:
        """Not --skip_gradient_sync: a mean over steps of both kinds is of neither."""
        return not self.example.synchronisation

    @property
    def run_numbers(self) -> list[int]:
        return [self.first_run + index for index in range(len(self.runs))]

    def values(self, name: str) -> list[float]:
        """The attribute `name` of every measured run that has it."""
        found = [getattr(run, name) for run in self.measured]
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
        """What speed-ups are against: the baseline on the fewest ranks, without one the fewest ranks' first."""
        return min(
            self.measured, key=lambda entry: (entry.example.run_type != "baseline", entry.ranks or 0), default=None
        )


@dataclass(frozen=True, eq=False)
class Subject:
    """Everything that the report is made of."""

    entries: tuple[Entry, ...]
    workloads: tuple[Workload, ...]
    sweeps: dict[Path, dict[str, Any]] = field(default_factory=dict)  # out_dir -> its sweep.json

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
        return sorted({sweep["protocol"] for sweep in self.sweeps.values() if sweep.get("protocol")})

    @property
    def target_loss(self) -> float | None:
        """What the sweep aimed at; None without one, or where sweeps differ."""
        targets = {sweep.get("target_val_loss") for sweep in self.sweeps.values()} - {None}
        return targets.pop() if len(targets) == 1 else None


def subject_of(runs: Sequence[Run]) -> Subject:
    """Group, name and number `runs`, as `load_run` gives them. ValueError without any."""
    if not runs:
        raise ValueError("a report needs at least one run")
    arms = group_into_arms(runs)
    groups: list[list[Arm]] = []
    for arm in arms:
        alike = (group for group in groups if _did_equal_work(_example(group[0]), _example(arm)))
        group = next(alike, None)
        groups.append([arm]) if group is None else group.append(arm)
    groups.sort(key=lambda group: -sum(len(arm.measured_runs) for arm in group))
    strategies = {arm: name for group in groups for arm, name in _strategy_names(group).items()}
    rates: dict[tuple, list[float]] = {}
    for arm in arms:
        rates.setdefault((strategies[arm], rank_count(_example(arm))), []).extend(arm.tokens_per_s)
    order = sorted(set(strategies.values()), key=lambda strategy: (not strategy.startswith("baseline"), strategy))
    with_device = len({device_of(arm.runs[0]) for arm in arms}) > 1
    names = {arm: _name(arm, strategies[arm], with_device) for arm in arms}
    titles = _titles(groups)
    for number, group in enumerate(groups):
        elsewhere = {names[arm] for other in groups if other is not group for arm in other}
        if any(names[arm] in elsewhere for arm in group) and len(titles[number]) > LONGEST_TITLE_IN_A_NAME:
            titles[number] = f"work {number + 1}: {titles[number]}"
    counts = Counter(names.values())
    names = {
        arm: names[arm] + (f", {_short(title)}" if counts[names[arm]] > 1 and title else "")
        for group, title in zip(groups, titles, strict=True)
        for arm in group
    }
    names = _numbered(names)
    entries: list[Entry] = []
    workloads, first_run = [], 1
    for group, title in zip(groups, titles, strict=True):
        members = []
        for arm in sorted(group, key=lambda arm: _order(arm, strategies[arm], rates)):
            members.append(
                Entry(
                    number=len(entries) + 1,
                    first_run=first_run,
                    arm=arm,
                    strategy=strategies[arm],
                    name=names[arm],
                    look=order.index(strategies[arm]),
                )
            )
            entries.append(members[-1])
            first_run += len(arm.runs)
        workloads.append(Workload(title, tuple(members)))
    return Subject(tuple(entries), tuple(workloads), _sweeps(runs))


def _example(arm: Arm) -> Run:
    return (*arm.measured_runs, *arm.runs)[0]


def _did_equal_work(one: Run, other: Run) -> bool:
    """How far an unfinished run came is left out: it stands beside its peers, and enters no figure."""
    ignored = {"seed"}
    if "complete" not in (one.status, other.status) or one.status != other.status:
        ignored |= {"optimizer_steps", "tokens"}
    return all(difference.field in ignored for difference in differing_work((one, other)))


def _strategy_names(group: Sequence[Arm]) -> dict[Arm, str]:
    """The strategies of arms of equal work; arms at equal ranks that bear one name get what their settings differ in.

    Such settings say how a run is looked at, or how much is validated.
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
    """Names that are still equal get a number: a sentence is about one configuration."""
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
    """A file of --skip_gradient_sync is marked as instrumented. Its name says so without the word, which is then left
    for those that a profiler looked at."""
    settings = run.section("settings")
    is_looked_at = bool(settings.get("profile") or settings.get("profile_mode"))  # files that name no instruments
    is_looked_at |= any(name != "--skip_gradient_sync" for name in run.instruments)
    return bool(run.instrumented) and (is_looked_at or not run.synchronisation)


def _order(arm: Arm, strategy: str, rates: dict[tuple, list[float]]) -> tuple:
    """Few ranks first, then the highest median throughput; a profiled arm stands where its strategy's other runs do."""
    ranks = rank_count(_example(arm))
    known = arm.tokens_per_s or rates[strategy, ranks]
    return (bool(arm.runs[0].instrumented), ranks or 0, -float(np.median(known or [0.0])), strategy)


def _short(title: str) -> str:
    return title if len(title) <= LONGEST_TITLE_IN_A_NAME else title.partition(":")[0]


def _titles(groups: Sequence[Sequence[Arm]]) -> list[str]:
    """For each group of equal work the fields in which the groups differ; empty where there is one group."""
    if len(groups) == 1:
        return [""]
    examples = [_example(group[0]) for group in groups]
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


def _sweeps(runs: Sequence[Run]) -> dict[Path, dict[str, Any]]:
    """The sweep.json above each run, where there is one. ValueError names a file that is none."""
    found: dict[Path, dict[str, Any]] = {}
    for run in runs:
        for folder in list(run.path.absolute().parents)[:FOLDERS_ABOVE_A_RUN]:
            if folder not in found and (folder / SWEEP_FILE).is_file():
                found[folder] = read_sweep(folder)
    return found
