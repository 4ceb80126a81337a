"""Exposed communication found in two ways that share nothing: in a trace, and by leaving the synchronisation out.

`--skip_gradient_sync alternate` averages the gradients of every other step. Within such a run neighbouring steps differ
in nothing else, so that their difference, unlike that of two runs, is free of what the machine does from minute to
minute. By the wall clock alone, no profiler:

    step - step without synchronisation  =  exposed communication + what the rest of the step takes longer

Where communication overlaps with computing, the rest does take longer (on a CPU gloo's threads share the cores, on a
GPU NCCL's kernels share the multiprocessors). There a trace must explain the difference by both together, and a trace
that books some of the one as the other would not be noticed; tests/profiling/test_attribution.py looks at that with
planted pauses. allreduce overlaps nothing: the trace's exposed communication alone must be the difference.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from testbed.analysis.document.words import Number
from testbed.analysis.runs.arms import configuration, strategies_of, without_copies
from testbed.analysis.runs.load import Run
from testbed.analysis.statistics import NOT_ENOUGH, median_interval
from testbed.config.run_types import run_types_with

AGREE, DISAGREE, CANNOT_TELL = "agree", "do not agree", "cannot tell"
NOTHING_OVERLAPS = run_types_with(sends="tensors")
EXPOSED = ("exposed_communication_s",)
REST = ("data_wait_s", "forward_s", "backward_s", "optimizer_s", "idle_s")


@dataclass(frozen=True)
class Estimate:
    """Median over runs in seconds per optimizer step, with its 95 % interval; bounds are None below five runs."""

    median: float
    low: float | None
    high: float | None
    num_runs: int

    def error_seen(self, other: Estimate) -> float:
        """Return the smallest difference from an estimate of other runs that would be seen. Both intervals are known.

        It is half the width of the difference's interval: errors add in squares.
        """
        assert self.low is not None and self.high is not None and other.low is not None and other.high is not None
        return float(np.hypot(self.high - self.low, other.high - other.low) / 2)

    def differs_from(self, other: Estimate) -> bool:
        """Return whether the interval of the difference leaves out 0."""
        return abs(self.median - other.median) > self.error_seen(other)


@dataclass(frozen=True)
class ExposedCommunication:
    """One configuration, seconds per optimizer step."""

    name: str
    run_type: str | None
    ranks: int | None
    step: Estimate  # with synchronisation, no profiler
    counterfactual: Estimate  # step minus the step without synchronisation next to it, no profiler
    traced: Estimate  # exposed communication of the rank that waits least, in the trace
    rest: Estimate  # what all else takes longer in the trace while gradients are synchronised
    together: Estimate  # traced + rest, each run's own sum

    @property
    def expected(self) -> Estimate:
        """Return what the counterfactual must be by the trace."""
        return self.traced if self.run_type in NOTHING_OVERLAPS else self.together

    @property
    def verdict(self) -> str:
        """Return whether trace and counterfactual agree within their intervals.

        Where a trace without any exposed communication would fit too, agreement says nothing: "cannot tell".
        """
        if None in (self.expected.low, self.counterfactual.low):
            return NOT_ENOUGH
        if self.expected.differs_from(self.counterfactual):
            return DISAGREE
        explained = Estimate(0.0, 0.0, 0.0, 0) if self.run_type in NOTHING_OVERLAPS else self.rest
        if not explained.differs_from(self.counterfactual):
            return CANNOT_TELL
        return AGREE

    @property
    def verdict_in_words(self) -> str:
        if self.verdict == NOT_ENOUGH:
            return NOT_ENOUGH
        what = "" if self.run_type in NOTHING_OVERLAPS else "the sum: "
        seen = f"an error above {1000 * self.expected.error_seen(self.counterfactual):.0f} ms would have shown"
        return f"{what}{self.verdict}; {seen}"


def exposed_communication(runs: Sequence[Run]) -> tuple[list[ExposedCommunication], list[str]]:
    """Return the estimates of each configuration, and each run that is left out, with the reason.

    A configuration needs runs of --skip_gradient_sync alternate, traced and not.
    """
    alternating = [run for run in runs if run.section("settings").get("skip_gradient_sync") == "alternate"]
    kept, unusable = without_copies(alternating)
    configurations: dict[str, dict[bool, list[Run]]] = {}
    for run in kept:
        if reason := _why_not(run):
            unusable.append((run, reason))
        else:
            configurations.setdefault(_configuration(run), {}).setdefault(_is_traced(run), []).append(run)
    left_out = [f"{run.path}: {reason}" for run, reason in unusable]
    both = [kinds for kinds in configurations.values() if len(kinds) == 2]
    names = [strategy.name for strategy in strategies_of([kinds[False][0] for kinds in both])]
    found = [_of(name, kinds[False], kinds[True]) for name, kinds in zip(names, both, strict=True)]
    return sorted(found, key=lambda row: (row.name, row.ranks)), left_out


def _is_traced(run: Run) -> bool:
    return bool(run.section("settings").get("profile"))


def _why_not(run: Run) -> str | None:
    """Return why a run says nothing; None: it does."""
    if run.status != "complete":
        return f"it is {run.status}"
    if run.section("settings").get("profile_mode"):  # files that name no instruments
        return "--profile_mode changes its timing"
    if others := [name for name in run.instruments if name not in ("--profile", "--skip_gradient_sync")]:
        return f"{', '.join(others)} changes its timing"
    if not _is_traced(run):
        steps = set(run.train_steps[run.num_warmup_steps :])
    elif not run.record.get("attribution"):
        return "its trace could not be read"
    else:
        of_ranks = [{step["step"] for step in rank["steps"]} for rank in run.record["attribution"]["per_rank"]]
        if any(steps != of_ranks[0] for steps in of_ranks):
            return "its ranks traced different steps"
        steps = of_ranks[0]
    has_pair = any(is_synchronised(step) and _neighbour(step) in steps for step in steps)
    return None if has_pair else "no two neighbouring steps of it were measured"


def _configuration(run: Run) -> str:
    """Return all that the traced and the other runs share, as JSON to compare."""
    shared = configuration(run)
    for name in ("profile", "profile_steps"):
        shared["settings"].pop(name, None)
    return json.dumps(shared, sort_keys=True, default=str)


def _of(name: str, timed: Sequence[Run], traced: Sequence[Run]) -> ExposedCommunication:
    exposed = [_least_exposed(run) for run in traced]
    rest = [_rest(run) for run in traced]
    return ExposedCommunication(
        name,
        timed[0].run_type,
        timed[0].world_size,
        _estimate([_median_step(run) for run in timed]),
        _estimate([_difference(*_measured(run)) for run in timed]),
        _estimate(exposed),
        _estimate(rest),
        _estimate([sum(parts) for parts in zip(exposed, rest, strict=True)]),
    )


def is_synchronised(step: Any) -> Any:
    """Return whether --skip_gradient_sync alternate averaged the gradients of this step, or of each, counted from 1."""
    return step % 2 == 1


def _neighbour(step: int) -> int:
    """Return the step without synchronisation to compare one with it to: in turn the next and the one before.

    So a drift from step to step cancels. The mean of both would not do: of two skewed times it has another median.
    """
    return step + 1 if step % 4 == 1 else step - 1


def _measured(run: Run) -> tuple[np.ndarray, np.ndarray]:
    """Return numbers and times of the measured steps."""
    return run.train_steps[run.num_warmup_steps :], run.step_times_s


def _median_step(run: Run) -> float:
    steps, times = _measured(run)
    return float(np.median(times[is_synchronised(steps)]))


def _least_exposed(run: Run) -> float:
    """Return the median of the rank that waits least: what others wait beyond that is for a slower rank."""
    steps, exposed = _rows(run, EXPOSED)
    return float(np.median(exposed.min(axis=0)[is_synchronised(steps)]))


def _rest(run: Run) -> float:
    """Return the difference of the slowest rank: the step without synchronisation takes as long as its computing."""
    steps, rest = _rows(run, REST)
    return _difference(steps, rest.max(axis=0))


def _difference(steps: np.ndarray, values: np.ndarray) -> float:
    """Return the median over the steps with synchronisation of what each takes beyond its neighbour without."""
    of_step = dict(zip(steps, values, strict=True))
    pairs = [(step, _neighbour(step)) for step in of_step if is_synchronised(step)]
    return float(np.median([of_step[step] - of_step[other] for step, other in pairs if other in of_step]))


def _rows(run: Run, names: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the traced steps, and the sum of some rows of the attribution, (ranks, steps)."""
    per_rank: list[dict[str, Any]] = run.record["attribution"]["per_rank"]
    sums = np.array([[sum(step[name] for name in names) for step in of_rank["steps"]] for of_rank in per_rank])
    return np.array([step["step"] for step in per_rank[0]["steps"]]), sums


def _estimate(values: Sequence[float]) -> Estimate:
    median, low, high = median_interval(values, is_signed=True)  # differences may be below 0
    assert median is not None, "every arm has a run"
    return Estimate(median, low, high, len(values))


def exposed_table(found: Sequence[ExposedCommunication]) -> str:
    """Return a Markdown table in milliseconds per step, medians with 95 % intervals; n: runs timed + traced."""
    lines = [
        "| strategy | ranks | n | step (ms) | step minus step without synchronisation (ms) | exposed, in the trace (ms)"
        " | all else longer by (ms) | the two together (ms) | trace and counterfactual |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in found:
        estimates = (row.step, row.counterfactual, row.traced, row.rest, row.together)
        n = f"{row.step.num_runs} + {row.traced.num_runs}"
        cells = " | ".join(str(_milliseconds(each)) for each in estimates)
        lines.append(f"| {row.name} | {row.ranks} | {n} | {cells} | {row.verdict_in_words} |")
    return "\n".join(lines)


def _milliseconds(estimate: Estimate) -> Number:
    low, high = (None if bound is None else 1000 * bound for bound in (estimate.low, estimate.high))
    return Number(1000 * estimate.median, ".1f", low, high)
