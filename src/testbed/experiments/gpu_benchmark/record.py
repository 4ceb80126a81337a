"""steps.json: what became of each step, and which of them are still to be run."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

from testbed.experiments.gpu_benchmark.parts import parts
from testbed.experiments.gpu_benchmark.steps import Machine, Step
from testbed.experiments.gpu_benchmark.table import TOLERANCES
from testbed.metrics.fields.types import Amount, Count, Name, OneOrMore
from testbed.metrics.result_file import ResultFile

PENDING, DONE, FAILED, LATE, INTERRUPTED, LEFT_OUT = "pending", "done", "failed", "late", "interrupted", "left out"


class CheckRecord(TypedDict):
    reference: Name
    within: Name
    loss: Amount
    norm: Amount


class StepRecord(TypedDict):
    """`part`: 0 for what is left out. `seconds`, `machine`, `started_utc`: of the last try."""

    name: Name
    shows: str
    part: Count
    status: Literal["pending", "done", "failed", "late", "interrupted", "left out"]
    reason: str | None
    estimate_s: Count
    command: list[str]
    check: CheckRecord | None
    seconds: Amount | None
    exit_code: int | None
    machine: str | None
    started_utc: str | None


class Content(TypedDict):
    schema_version: str
    timestamp_utc: str
    command_line: str
    device: Literal["cuda", "cpu"]
    machine: Name
    steps: OneOrMore[StepRecord]


STEPS_FILE = ResultFile("steps.json", "1.0", Content, lambda content: {})


def beginning(command_line: str, machine: Machine, steps: Sequence[Step]) -> dict[str, Any]:
    """Return the file before its first step."""
    part_of = {step.name: number for number, part in enumerate(parts(steps), start=1) for step in part}
    rows = [
        {
            "name": step.name,
            "shows": step.shows,
            "part": part_of.get(step.name, 0),
            "status": PENDING if step.left_out is None else LEFT_OUT,
            "reason": step.left_out,
            "estimate_s": step.estimate_s(),
            "command": list(step.command),
            "check": _check_record(step),
            "seconds": None,
            "exit_code": None,
            "machine": None,
            "started_utc": None,
        }
        for step in steps
    ]
    return {**STEPS_FILE.head(command_line), "device": machine.device, "machine": str(machine), "steps": rows}


def _check_record(step: Step) -> dict[str, Any] | None:
    if step.check is None:
        return None
    most = TOLERANCES[step.check.within]
    return {"reference": step.check.reference, "within": step.check.within, "loss": most.loss, "norm": most.norm}


def take_over(content: dict[str, Any], earlier: dict[str, Any]) -> list[str]:
    """Put what an earlier call did into this call's file.

    A step counts as done if its command did, on the same kind of machine with the same PyTorch. Whatever else became
    of it, it is run again.

    Returns:
        The steps that are run again though they were done, each with the reason.
    """
    before = {row["name"]: row for row in earlier["steps"]}
    again = []
    for row in content["steps"]:
        old = before.get(row["name"])
        if old is None or old["status"] != DONE or row["status"] == LEFT_OUT:
            continue
        if old["command"] != row["command"]:
            again.append(f"{row['name']} is run again: its command changed")
        elif old["machine"] != content["machine"]:
            again.append(f"{row['name']} is run again: it ran on {old['machine']}, and this is {content['machine']}")
        else:
            row.update({name: old[name] for name in ("status", "reason", "seconds", "exit_code", "machine")})
            row["started_utc"] = old["started_utc"]
    return again


def to_run(
    steps: Sequence[Step], rows: Mapping[str, Mapping[str, Any]], wanted: Collection[str], folder: Path
) -> list[Step]:
    """Return the steps to run, in the order of the plan.

    These are the wanted ones that are not done, and what they read: a step that is done runs again if the file that
    another one reads is gone, as on another machine.
    """
    found: set[str] = set()
    for step in reversed(steps):
        if step.left_out is not None:
            continue
        if step.name in wanted and rows[step.name]["status"] != DONE:
            found.add(step.name)
        if step.name in found:
            found |= {name for name, file in step.needs if not (folder / file).exists()}
    return [step for step in steps if step.name in found]
