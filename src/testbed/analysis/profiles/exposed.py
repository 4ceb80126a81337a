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
from typing import Any, overload

import numpy as np

from testbed.analysis.document.words import Number
from testbed.analysis.runs.arms import configuration, strategies_of, without_copies
from testbed.analysis.runs.load import Run
from testbed.analysis.statistics import NOT_ENOUGH, median_interval

AGREE, DISAGREE, CANNOT_TELL = "agree", "do not agree", "cannot tell"
NOTHING_OVERLAPS = frozenset({"allreduce"})
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
        """Half the width of the interval of the difference from an estimate of other runs, whose errors add in squares:
        a difference beyond it would be seen. Both intervals are known."""
        assert self.low is not None and self.high is not None and other.low is not None and other.high is not None
        return float(np.hypot(self.high - self.low, other.high - other.low) / 2)

    def differs_from(self, other: Estimate) -> bool:
        """Whether the interval of the difference leaves nought out."""
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
        """What the trace says that the counterfactual must be."""
        return self.traced if self.run_type in NOTHING_OVERLAPS else self.together

    @property
    def verdict(self) -> str:
        """Whether trace and counterfactual agree within their intervals, with the error that would have been seen.

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
        """For the table."""
        if self.verdict == NOT_ENOUGH:
            return NOT_ENOUGH
        what = "" if self.run_type in NOTHING_OVERLAPS else "the sum: "
        seen = f"an error above {1000 * self.expected.error_seen(self.counterfactual):.0f} ms would have shown"
        return f"{what}{self.verdict}; {seen}"


def exposed_communication(runs: Sequence[Run]) -> tuple[list[ExposedCommunication], list[str]]:
    """For each configuration that has runs of --skip_gradient_sync alternate, traced and not; and in words each such
    run that is left out, with the reason. Runs as load_run gives them."""
    kept, copies = without_copies([run for run in runs if _settings(run).get("skip_gradient_sync") == "alternate"])
    left_out = [f"{run.path}: {reason}" for run, reason in copies]
    usable = []
    for run in kept:
        reason = _why_not(run)
        if reason is None:
            usable.append(run)
        else:
            left_out.append(f"{run.path}: {reason}")
    configurations: dict[str, dict[bool, list[Run]]] = {}
    for run in usable:
        configurations.setdefault(_configuration(run), {}).setdefault(_is_traced(run), []).append(run)
    both = [kinds for kinds in configurations.values() if len(kinds) == 2]
    names = [strategy.name for strategy in strategies_of([kinds[False][0] for kinds in both])]
    found = [_of(name, kinds[False], kinds[True]) for name, kinds in zip(names, both, strict=True)]
    return sorted(found, key=lambda row: (row.name, row.ranks)), left_out


def _settings(run: Run) -> dict[str, Any]:
    return run.record.get("settings", {})


def _is_traced(run: Run) -> bool:
    return bool(_settings(run).get("profile"))


def _why_not(run: Run) -> str | None:
    """Why a run says nothing, in words."""
    if run.status != "complete":
        return f"it is {run.status}"
    if _settings(run).get("profile_mode"):  # files that name no instruments
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
    """All that the two kinds of runs share."""
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


@overload
def is_synchronised(step: int) -> bool: ...
@overload
def is_synchronised(step: np.ndarray) -> np.ndarray: ...
def is_synchronised(step: int | np.ndarray) -> bool | np.ndarray:
    """Whether --skip_gradient_sync alternate averaged the gradients of this optimizer step, counted from 1."""
    return step % 2 == 1


def _neighbour(step: int) -> int:
    """The step without synchronisation that one with it is compared to: in turn the next and the one before, so that a
    drift from step to step cancels. One, not the mean of both: a mean of two skewed times has another median."""
    return step + 1 if step % 4 == 1 else step - 1


def _measured(run: Run) -> tuple[np.ndarray, np.ndarray]:
    """Numbers and times of the measured steps."""
    return run.train_steps[run.num_warmup_steps :], run.step_times_s


def _median_step(run: Run) -> float:
    steps, times = _measured(run)
    return float(np.median(times[is_synchronised(steps)]))


def _least_exposed(run: Run) -> float:
    """Of the rank that waits least: what another rank waits beyond that is for a slower rank, not for the network."""
    steps, exposed = _rows(run, EXPOSED)
    return float(np.median(exposed.min(axis=0)[is_synchronised(steps)]))


def _rest(run: Run) -> float:
    """Of the slowest rank: the step without synchronisation takes as long as its computing."""
    steps, rest = _rows(run, REST)
    return _difference(steps, rest.max(axis=0))


def _difference(steps: np.ndarray, values: np.ndarray) -> float:
    """Median over the steps with synchronisation of what each takes beyond its neighbour without."""
    of_step = dict(zip(steps, values, strict=True))
    pairs = [(step, _neighbour(step)) for step in of_step if is_synchronised(step)]
    return float(np.median([of_step[step] - of_step[other] for step, other in pairs if other in of_step]))


def _rows(run: Run, names: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """The traced steps, and the sum of some rows of the attribution, (ranks, steps)."""
    per_rank: list[dict[str, Any]] = run.record["attribution"]["per_rank"]
    sums = np.array([[sum(step[name] for name in names) for step in of_rank["steps"]] for of_rank in per_rank])
    return np.array([step["step"] for step in per_rank[0]["steps"]]), sums


def _estimate(values: Sequence[float]) -> Estimate:
    median, low, high = median_interval(values)
    assert median is not None, "every arm has a run"
    return Estimate(median, low, high, len(values))


def exposed_table(found: Sequence[ExposedCommunication]) -> str:
    """In Markdown, milliseconds per optimizer step, medians with 95 % intervals; n: runs timed + traced."""
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
