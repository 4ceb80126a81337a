"""Where the time of an optimizer step goes, from a profiler's attribution or else from the clock's cheap phases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from testbed.analysis.runs.load import Run

# In the order in which a step does them. A source that has no such part leaves it out; "other" is what is left over.
PARTS = ("data wait", "forward", "backward", "synchronise", "optimizer", "exposed communication", "idle or other")

_ATTRIBUTED = {
    "data wait": "data_wait_s",
    "forward": "forward_s",
    "backward": "backward_s",
    "optimizer": "optimizer_s",
    "exposed communication": "exposed_communication_s",
    "idle or other": "idle_s",
}
_TIMED = {name: name.replace(" ", "_") for name in ("data wait", "forward", "backward", "synchronise", "optimizer")}


@dataclass(frozen=True)
class Breakdown:
    """Seconds per optimizer step by part; the parts exclude one another and add up to the step's time.

    A mean over `num_steps` steps and all ranks of `num_runs` runs, because means add up and medians do not.
    """

    source: str
    is_attributed: bool
    seconds: dict[str, float]
    num_steps: int
    num_runs: int


def breakdown(runs: Sequence[Run]) -> Breakdown | None:
    """The mean step of these runs: attributed where a run has that, else the timed phases; None without either."""
    for of_run, is_attributed in ((_attributed, True), (_timed, False)):
        tables = [table for table in map(of_run, runs) if table is not None]
        if tables:
            seconds = {part: float(np.mean([table[0][part] for table in tables])) for part in tables[0][0]}
            sources = sorted({table[1] for table in tables})
            return Breakdown("; ".join(sources), is_attributed, seconds, sum(table[2] for table in tables), len(tables))
    return None


def _attributed(run: Run) -> tuple[dict[str, float], str, int] | None:
    attribution: dict[str, Any] = run.record.get("attribution") or {}
    rows = [step for rank in attribution.get("per_rank", []) for step in rank["steps"]]
    if not rows:
        return None
    seconds = {part: float(np.mean([row[name] for row in rows])) for part, name in _ATTRIBUTED.items()}
    source = f"{attribution['source']}, {attribution['timeline']} timeline"
    return seconds, source, len({row["step"] for row in rows})


def _timed(run: Run) -> tuple[dict[str, float], str, int] | None:
    means = run.mean_phases_s
    if not means.keys() >= {"step_time", *_TIMED.values()}:
        return None
    seconds = {part: means[name] for part, name in _TIMED.items()}
    # Each rank's own clock: what no phase covers. Rounding can leave a hair below zero.
    seconds["idle or other"] = max(0.0, means["step_time"] - sum(seconds.values()))
    return seconds, "clock of the phases on the host", len(run.step_times_s)
