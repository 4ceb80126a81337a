"""Break the time of an optimizer step down, from a profiler's attribution or else from the clock's cheap phases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from testbed.analysis.runs.load import Run, attribution_of

_TIMED = {name: name.replace(" ", "_") for name in ("data wait", "forward", "backward", "synchronise", "optimizer")}
_ATTRIBUTED = {
    **{name: f"{name.replace(' ', '_')}_s" for name in ("data wait", "forward", "backward", "optimizer")},
    "exposed communication": "exposed_communication_s",
    "idle or other": "idle_s",
}
# In the order in which a step does them. A source that has no such part leaves it out; "other" is what is left over.
PARTS = (*_TIMED, "exposed communication", "idle or other")


@dataclass(frozen=True)
class Breakdown:
    """Seconds per optimizer step by part; the parts exclude one another and add up to the step's time.

    A mean over steps and all ranks of the runs, because means add up and medians do not.
    """

    source: str
    is_attributed: bool
    seconds: dict[str, float]


def breakdown(runs: Sequence[Run]) -> Breakdown | None:
    """Return the mean step of these runs: attributed where a run has that, else the timed phases; None without either.

    Every run weighs the same, however many steps it has.
    """
    for of_run, is_attributed in ((_attributed, True), (_timed, False)):
        tables = [table for table in map(of_run, runs) if table is not None]
        if tables:
            seconds = {part: float(np.mean([table[part] for table, _ in tables])) for part in tables[0][0]}
            return Breakdown("; ".join(sorted({source for _, source in tables})), is_attributed, seconds)
    return None


def mean_of_steps(attribution: dict[str, Any], name: str) -> float | None:
    """Return the mean over ranks and attributed steps; None where the file has none."""
    values = [step[name] for rank in attribution["per_rank"] for step in rank["steps"]]
    return float(np.mean(values)) if values else None


def _attributed(run: Run) -> tuple[dict[str, float], str] | None:
    attribution: dict[str, Any] = attribution_of(run.record) or {"per_rank": []}
    means = {part: mean_of_steps(attribution, name) for part, name in _ATTRIBUTED.items()}
    seconds = {part: mean for part, mean in means.items() if mean is not None}
    return (seconds, f"{attribution['source']}, {attribution['timeline']} timeline") if seconds else None


def _timed(run: Run) -> tuple[dict[str, float], str] | None:
    means = run.mean_phases_s
    if not means.keys() >= {"step_time", *_TIMED.values()}:
        return None
    seconds = {part: means[name] for part, name in _TIMED.items()}
    # Each rank's own clock: what no phase covers. Rounding can leave a hair below zero.
    seconds["idle or other"] = max(0.0, means["step_time"] - sum(seconds.values()))
    return seconds, "clock of the phases on the host"
