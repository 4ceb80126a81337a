"""plan.json: a plan as a file. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from testbed.planner.command import command_of
from testbed.planner.plan import Budget, PlannedRun, name_of

FORMAT = 1


def plan_record(
    runs: Sequence[PlannedRun], budget: Budget, work: Sequence[str] | None, command_line: str
) -> dict[str, Any]:
    """Return the content of the file. Bytes and seconds.

    Args:
        work: flags of the model and the batch as they were typed; None where no command trains the model.
    """
    machine = runs[0].machine
    return {
        "format": FORMAT,
        "command_line": command_line,
        "label": runs[0].time.label,
        "machine": dataclasses.asdict(machine),
        "budget": dataclasses.asdict(budget),
        "runs": [_run_record(run, budget, work) for run in runs],
    }


def _run_record(run: PlannedRun, budget: Budget, work: Sequence[str] | None) -> dict[str, Any]:
    return {
        "name": name_of(run.job),
        "command": None if work is None else command_of(run.job, run.machine, work),
        "job": dataclasses.asdict(run.job),
        "fits": run.fits,
        "needs_bytes": run.needs_bytes,
        "spare_bytes": run.spare_bytes,
        "memory_bytes": run.memory_by_kind,
        "peak_moment": run.memory.peak_moment,
        "host_bytes": run.host_bytes,
        "checkpoint_bytes": run.checkpoint_bytes,
        "allocated_bytes": run.memory.allocated,
        "reserved_bytes": run.memory.reserved,
        "steady_bytes": run.memory.steady,
        "step_s": {"estimate": run.time.seconds, "low": run.time.low, "high": run.time.high},
        "parts_s": dict(run.time.parts),
        "tokens_per_s": run.tokens_per_s,
        "mfu": run.mfu,
        "days": budget.days(run),
        "cost": budget.cost(run),
        "goodput": budget.goodput(run),
        "limited_by": run.limited_by,
    }
