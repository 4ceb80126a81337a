"""plan.json: a plan as a file, which the report, the race and --run_type auto read. No torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict

from testbed.errors import InputError
from testbed.io import read_json, write_json
from testbed.memory_model.job import Job, Machine
from testbed.memory_model.memory import largest_micro_batch
from testbed.planner.calibration import Amount, NotNegative
from testbed.planner.command import command_of
from testbed.planner.plan import Budget, PlannedRun, name_of
from testbed.planner.step_time import StepTime
from testbed.typed_json import check, check_finite

NAME, FORMAT = "plan.json", 1


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


def write_plan(path: Path, record: dict[str, Any]) -> None:
    """Replace `path` in one move. OSError from the disk."""
    write_json(path, record, f"--json {path}")


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
        "days": _finite(budget.days(run)),
        "cost": _finite(budget.cost(run)),
        "goodput": budget.goodput(run),
        "largest_micro_batch": largest_micro_batch(run.job, run.machine.device),
        "limited_by": run.limited_by,
    }


def _finite(number: float | None) -> float | None:
    """Return a number as JSON can have it: None for a run that never ends, whose goodput is 0."""
    return number if number is not None and math.isfinite(number) else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """A plan's prediction of one run."""

    job: Job
    time: StepTime
    allocated_bytes: float
    reserved_bytes: float
    needs_bytes: float


def prediction_of(run: PlannedRun) -> Prediction:
    """Return the same of a run that was planned in this process."""
    return Prediction(
        job=run.job,
        time=run.time,
        allocated_bytes=run.memory.allocated,
        reserved_bytes=run.memory.reserved,
        needs_bytes=run.needs_bytes,
    )


class _Step(TypedDict):
    estimate: Amount
    low: Amount
    high: Amount


class _Run(TypedDict):
    job: Job
    step_s: _Step
    parts_s: dict[str, NotNegative]
    allocated_bytes: Amount
    reserved_bytes: Amount
    needs_bytes: Amount


class _Plan(TypedDict):
    label: str
    machine: Machine
    runs: list[_Run]


def read_plan(path: Path) -> tuple[Machine, list[Prediction]]:
    """Return the machine of a plan and what it says of each run.

    Raises:
        InputError: the file cannot be read, or is of another format.
    """
    content = read_json(path, str(path))
    found = content.get("format") if isinstance(content, dict) else None
    if found != FORMAT:
        raise InputError(f"{path} is of format {found!r}, and this program reads {FORMAT}; make it with plan.py --json")
    try:
        check_finite(content)
        plan: _Plan = check(content, _Plan, may_hold_more=True)
        if not all(run["step_s"]["low"] <= run["step_s"]["estimate"] <= run["step_s"]["high"] for run in plan["runs"]):
            raise InputError("a step lies outside of its own interval")
    except InputError as error:
        raise InputError(f"{path} is not a plan ({error}); make it again with plan.py --json") from None
    return plan["machine"], [_prediction(run, plan["label"]) for run in plan["runs"]]


def _prediction(run: _Run, label: str) -> Prediction:
    step = run["step_s"]
    return Prediction(
        job=run["job"],
        time=StepTime(run["parts_s"], step["estimate"], step["low"], step["high"], label),
        allocated_bytes=run["allocated_bytes"],
        reserved_bytes=run["reserved_bytes"],
        needs_bytes=run["needs_bytes"],
    )
