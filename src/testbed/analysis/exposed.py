"""Exposed communication found in two ways that share nothing: in a trace, and by leaving the synchronisation out.

`--skip_gradient_sync alternate` averages the gradients of every other step. Within such a run neighbouring steps differ
in nothing else, so that their difference, unlike that of two runs, is free of what the machine does from minute to
minute. It is the exposed communication, and what communication takes from computing that it overlaps (on a CPU gloo's
threads share the cores, on a GPU NCCL's kernels share the multiprocessors):

    step - step without synchronisation  =  exposed communication + slow-down of computing

The left side comes from runs without a profiler, by the wall clock alone; the right side from the attribution of traced
runs. Where nothing overlaps (allreduce) the slow-down is nought, and the trace's exposed communication alone must be
the difference.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from testbed.analysis.arms import configuration
from testbed.analysis.runs import Run
from testbed.analysis.statistics import NOT_ENOUGH, median_interval

AGREE, DISAGREE = "agree", "do not agree"
CANNOT_TELL = "cannot tell: the steps scatter too much"
COMPUTING = ("forward_s", "backward_s", "optimizer_s")


@dataclass(frozen=True)
class Estimate:
    """Median over runs in seconds per optimizer step, with its 95 % interval; bounds are None below five runs."""

    median: float
    low: float | None
    high: float | None
    num_runs: int

    def differs_from(self, other: Estimate) -> bool:
        """Whether the interval of the difference leaves nought out; both intervals are known.

        Of other runs, so errors add in squares. That two intervals overlap would say less: it takes more than 95 %.
        """
        reach = np.hypot(self.high - self.low, other.high - other.low) / 2
        return bool(abs(self.median - other.median) > reach)


@dataclass(frozen=True)
class ExposedCommunication:
    """One run type at one number of ranks, seconds per optimizer step."""

    run_type: str
    ranks: int
    step: Estimate  # with synchronisation, no profiler
    counterfactual: Estimate  # step minus the step without synchronisation next to it, no profiler
    traced: Estimate  # exposed communication of the rank that waits least, in the trace
    slow_down: Estimate  # how much longer the same computing takes in the trace while gradients are synchronised
    predicted: Estimate  # traced + slow-down, each run's own sum: what the counterfactual must meet

    @property
    def verdict(self) -> str:
        """Whether trace and counterfactual agree within their intervals: a check that could have failed, or none.

        Where the counterfactual is so uncertain that it would also fit a trace without any exposed communication,
        agreement says nothing.
        """
        if None in (self.predicted.low, self.counterfactual.low):
            return NOT_ENOUGH
        if self.predicted.differs_from(self.counterfactual):
            return DISAGREE
        return AGREE if self.slow_down.differs_from(self.counterfactual) else CANNOT_TELL


def exposed_communication(runs: Sequence[Run]) -> list[ExposedCommunication]:
    """For each configuration that has runs of --skip_gradient_sync alternate, traced and not. Runs as load_run gives
    them; those that are not complete, or whose trace could not be read, are left out."""
    configurations: dict[str, dict[bool, list[Run]]] = {}
    for run in runs:
        settings = run.record.get("settings", {})
        is_traced = bool(settings.get("profile"))
        is_readable = run.status == "complete" and (run.record.get("attribution") or not is_traced)
        if settings.get("skip_gradient_sync") == "alternate" and is_readable and not settings.get("profile_mode"):
            configurations.setdefault(_configuration(run), {}).setdefault(is_traced, []).append(run)
    found = [_of(kinds[False], kinds[True]) for kinds in configurations.values() if len(kinds) == 2]
    return sorted(found, key=lambda row: (row.run_type, row.ranks))


def _configuration(run: Run) -> str:
    """All that the two kinds of runs share."""
    shared = configuration(run)
    for name in ("profile", "profile_steps"):
        shared["settings"].pop(name, None)
    return json.dumps(shared, sort_keys=True, default=str)


def _of(timed: Sequence[Run], traced: Sequence[Run]) -> ExposedCommunication:
    exposed = [_least_exposed(run) for run in traced]
    slow_down = [_slow_down(run) for run in traced]
    return ExposedCommunication(
        timed[0].run_type,
        timed[0].world_size,
        _estimate([_median_step(run) for run in timed]),
        _estimate([_counterfactual(run) for run in timed]),
        _estimate(exposed),
        _estimate(slow_down),
        _estimate([sum(parts) for parts in zip(exposed, slow_down, strict=True)]),
    )


def is_synchronised(step: int) -> bool:
    """Whether --skip_gradient_sync alternate averaged the gradients of this optimizer step, counted from 1."""
    return step % 2 == 1


def _median_step(run: Run) -> float:
    times = [row["step_time_s"] for row in _measured(run) if is_synchronised(row["step"])]
    return float(np.median(times))


def _counterfactual(run: Run) -> float:
    rows = _measured(run)
    return _difference([row["step"] for row in rows], [row["step_time_s"] for row in rows])


def _measured(run: Run) -> list[dict[str, Any]]:
    return [row for row in run.record["steps"] if not row["is_warmup"]]


def _least_exposed(run: Run) -> float:
    """Of the rank that waits least: what another rank waits beyond that is for a slower rank, not for the network."""
    steps, exposed = _rows(run, ("exposed_communication_s",))
    return float(np.median(exposed.min(axis=0)[[is_synchronised(step) for step in steps]]))


def _slow_down(run: Run) -> float:
    """Of the slowest rank: the step without synchronisation takes as long as its computing."""
    steps, computing = _rows(run, COMPUTING)
    return _difference(steps, computing.max(axis=0))


def _difference(steps: Sequence[int], values: Sequence[float]) -> float:
    """Median over the steps with synchronisation of what each takes beyond the mean of its neighbours without. With
    both neighbours where there are two, a drift from step to step cancels.

    Raises:
        ValueError: no two neighbouring steps.
    """
    of_step = dict(zip(steps, values, strict=True))
    differences = []
    for step, value in of_step.items():
        without = [of_step[near] for near in (step - 1, step + 1) if near in of_step]
        if is_synchronised(step) and without:
            differences.append(value - np.mean(without))
    if not differences:
        raise ValueError("a run of --skip_gradient_sync alternate has no two neighbouring steps that were measured")
    return float(np.median(differences))


def _rows(run: Run, names: Sequence[str]) -> tuple[list[int], np.ndarray]:
    """The traced steps, and the sum of some rows of the attribution, (ranks, steps)."""
    per_rank: list[dict[str, Any]] = run.record["attribution"]["per_rank"]
    sums = np.array([[sum(step[name] for name in names) for step in of_rank["steps"]] for of_rank in per_rank])
    return [step["step"] for step in per_rank[0]["steps"]], sums


def _estimate(values: Sequence[float]) -> Estimate:
    return Estimate(*median_interval(values), len(values))


def exposed_table(found: Sequence[ExposedCommunication]) -> str:
    """In Markdown, milliseconds per optimizer step, medians with 95 % intervals."""
    lines = [
        "| run type | ranks | n | step (ms) | step minus step without synchronisation (ms) | exposed, in the trace (ms)"
        " | computing slowed down by (ms) | the two together (ms) | trace and counterfactual |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in found:
        estimates = (row.step, row.counterfactual, row.traced, row.slow_down, row.predicted)
        n = min(each.num_runs for each in estimates)
        cells = " | ".join(_cell(each) for each in estimates)
        lines.append(f"| {row.run_type} | {row.ranks} | {n} | {cells} | {row.verdict} |")
    return "\n".join(lines)


def _cell(estimate: Estimate) -> str:
    if estimate.low is None:
        return f"{1000 * estimate.median:.1f}"
    return f"{1000 * estimate.median:.1f} ({1000 * estimate.low:.1f} to {1000 * estimate.high:.1f})"
