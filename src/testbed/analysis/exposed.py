"""Exposed communication found in two ways that share nothing: in a trace, and by leaving the synchronisation out.

Of an optimizer step with its gradients synchronised and of one without (--skip_gradient_sync) the difference is what
communication costs the step: what is exposed, and what it takes from computing that it overlaps (on a CPU gloo's
threads share the cores, on a GPU NCCL's kernels share the multiprocessors). The first is a row of the attribution, the
second the difference of the computing rows of two traced runs:

    step - step without synchronisation  =  exposed communication + slow-down of computing
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

    median: float | None
    low: float | None
    high: float | None
    num_runs: int

    def overlaps(self, other: Estimate) -> bool | None:
        """Whether the intervals have something in common; None where one is not known."""
        if None in (self.low, self.high, other.low, other.high):
            return None
        return self.low <= other.high and other.low <= self.high


@dataclass(frozen=True)
class ExposedCommunication:
    """One run type at one number of ranks, seconds per optimizer step."""

    run_type: str
    ranks: int
    step: Estimate  # with synchronisation, no profiler
    traced: Estimate  # exposed communication of the rank that waits least, in the trace
    slow_down: Estimate  # how much longer the same computing takes while gradients are synchronised
    counterfactual: Estimate  # step minus step without synchronisation, no profiler in either

    @property
    def predicted(self) -> tuple[float | None, float | None]:
        """The bounds of traced + slow-down, which the counterfactual must meet."""
        bounds = (self.traced.low, self.traced.high, self.slow_down.low, self.slow_down.high)
        if None in bounds:
            return None, None
        # errors of independent runs add in squares
        middle = self.traced.median + self.slow_down.median
        reach = np.hypot(self.traced.high - self.traced.low, self.slow_down.high - self.slow_down.low) / 2
        return float(middle - reach), float(middle + reach)

    @property
    def verdict(self) -> str:
        """Whether trace and counterfactual agree within their intervals: a check that could have failed, or none.

        Where the counterfactual's interval is so wide that it would also fit a trace without any exposed
        communication, agreement says nothing.
        """
        low, high = self.predicted
        if low is None or self.counterfactual.low is None:
            return NOT_ENOUGH
        if high < self.counterfactual.low or self.counterfactual.high < low:
            return DISAGREE
        return CANNOT_TELL if self.slow_down.overlaps(self.counterfactual) else AGREE


def exposed_communication(runs: Sequence[Run]) -> list[ExposedCommunication]:
    """For each configuration that has runs of all four kinds: with and without synchronisation, traced and not. Runs
    as load_run gives them; those that are not complete, or whose trace could not be read, are left out."""
    kinds: dict[str, dict[tuple[bool, bool], list[Run]]] = {}
    for run in runs:
        settings = run.record.get("settings", {})
        is_traced = bool(settings.get("profile"))
        has_no_trace = is_traced and not run.record.get("attribution")
        if run.status != "complete" or settings.get("profile_mode") or has_no_trace:
            continue
        kind = bool(settings.get("skip_gradient_sync")), is_traced
        kinds.setdefault(_configuration(run), {}).setdefault(kind, []).append(run)
    found = []
    for of_kind in kinds.values():
        if {(False, False), (False, True), (True, False), (True, True)} <= of_kind.keys():
            run = of_kind[False, False][0]
            found.append(_of_run_type(run.run_type, run.world_size, of_kind))
    return sorted(found, key=lambda row: (row.run_type, row.ranks))


def _configuration(run: Run) -> str:
    """All that the four kinds of runs share."""
    shared = configuration(run)
    for name in ("skip_gradient_sync", "profile", "profile_steps"):
        shared["settings"].pop(name, None)
    shared["work"].pop("math_changes", None)
    del shared["instrumented"]
    return json.dumps(shared, sort_keys=True, default=str)


def _of_run_type(run_type: str, ranks: int, of_kind: dict[tuple[bool, bool], list[Run]]) -> ExposedCommunication:
    step, without = ([_median_step(run) for run in of_kind[is_skipped, False]] for is_skipped in (False, True))
    computing, alone = ([_computing(run) for run in of_kind[is_skipped, True]] for is_skipped in (False, True))
    return ExposedCommunication(
        run_type,
        ranks,
        _estimate(step),
        _estimate([_least_exposed(run) for run in of_kind[False, True]]),
        _difference(computing, alone),
        _difference(step, without),
    )


def _median_step(run: Run) -> float:
    return float(np.median(run.step_times_s))


def _least_exposed(run: Run) -> float:
    """Of the rank that waits least: what another rank waits beyond that is for a slower rank, not for the network."""
    return float(np.median(_rows(run, ("exposed_communication_s",)).min(axis=0)))


def _computing(run: Run) -> float:
    """Of the slowest rank: the step without synchronisation takes as long as its computing."""
    return float(np.median(_rows(run, COMPUTING).max(axis=0)))


def _rows(run: Run, names: Sequence[str]) -> np.ndarray:
    """The sum of some rows of the attribution, (ranks, steps)."""
    per_rank: list[dict[str, Any]] = run.record["attribution"]["per_rank"]
    return np.array([[sum(step[name] for name in names) for step in of_rank["steps"]] for of_rank in per_rank])


def _estimate(values: Sequence[float]) -> Estimate:
    return Estimate(*median_interval(values), len(values))


def _difference(these: Sequence[float], those: Sequence[float]) -> Estimate:
    """Of medians of independent runs; the intervals of the two add in squares."""
    left, right = _estimate(these), _estimate(those)
    middle = left.median - right.median
    if None in (left.low, right.low):
        return Estimate(middle, None, None, min(left.num_runs, right.num_runs))
    reach = float(np.hypot(left.high - left.low, right.high - right.low)) / 2
    return Estimate(middle, middle - reach, middle + reach, min(left.num_runs, right.num_runs))


def exposed_table(found: Sequence[ExposedCommunication]) -> str:
    """In Markdown, milliseconds per optimizer step, medians with 95 % intervals."""
    lines = [
        "| run type | ranks | n | step (ms) | exposed, in the trace (ms) | computing slowed down by (ms) | step minus "
        "step without synchronisation (ms) | trace and counterfactual |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in found:
        cells = [_cell(each) for each in (row.step, row.traced, row.slow_down, row.counterfactual)]
        n = min(each.num_runs for each in (row.step, row.traced, row.slow_down, row.counterfactual))
        lines.append(f"| {row.run_type} | {row.ranks} | {n} | {' | '.join(cells)} | {row.verdict} |")
    return "\n".join(lines)


def _cell(estimate: Estimate) -> str:
    if estimate.low is None:
        return f"{1000 * estimate.median:.1f}"
    return f"{1000 * estimate.median:.1f} ({1000 * estimate.low:.1f} to {1000 * estimate.high:.1f})"
