"""planner_study.json, which scripts/planner_study.py writes: predicted beside measured. No torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from testbed.errors import InputError
from testbed.experiments.calibration.study import StudyArm, machine_of
from testbed.metrics.fields.types import AboveZero, Amount, OneOrMore, Positive
from testbed.metrics.file import read_metrics
from testbed.metrics.result_file import ResultFile
from testbed.planner.calibration import Calibration
from testbed.planner.constants import constants_of_calibration
from testbed.planner.step_time import step_time

WITHIN_BEST = 0.03  # of the best measured step: the plan chose well
MOST_ERROR = 0.08


class Row(TypedDict):
    work: str
    kind: str
    ranks: Positive
    link: str
    measured_s: OneOrMore[AboveZero]  # the median step of each run
    predicted_s: AboveZero
    low_s: AboveZero
    high_s: AboveZero
    parts: dict[str, float]


class Content(TypedDict):
    schema_version: str
    timestamp_utc: str
    command_line: str
    git_commits: OneOrMore[str]
    calibration: dict[str, Any]  # when and where it was made, its number of whole steps
    hardware: dict[str, Any]
    env: dict[str, Any]
    steps: Positive
    warmup_steps: Amount
    rows: OneOrMore[Row]
    not_measured: dict[str, str]
    results: dict[str, Any]


def content_of(
    head: Mapping[str, Any],
    arms: Sequence[StudyArm],
    cells: Sequence[Mapping[str, Any]],
    out_dir: Path,
    calibration: Calibration,
) -> dict[str, Any]:
    """Return what planner_study.json holds, made of the runs that are complete.

    Args:
        head: command_line, steps and warmup_steps.
        cells: rows of sweep.json.

    Raises:
        InputError: none is complete.
    """
    measured: dict[str, list[float]] = {}
    commits: dict[str, None] = {}
    first: dict[str, Any] | None = None
    for cell in cells:
        if cell["status"] == "complete":
            metrics = read_metrics(out_dir / cell["folder"] / "training_metrics.json")
            first = first or metrics
            commits[str(metrics["git_commit"])] = None
            steps = [row["step_time_s"] for row in metrics["steps"] if not row["is_warmup"]]
            measured.setdefault(cell["name"], []).append(statistics.median(steps))
    if first is None:
        raise InputError(f"{out_dir} holds no finished run of a planner study")
    constants = constants_of_calibration(calibration)
    rows = []
    for arm in arms:
        if arm.name in measured:
            time = step_time(arm.job("fp32"), machine_of(arm, calibration), constants)
            rows.append(
                {
                    "work": arm.work.name,
                    "kind": arm.kind,
                    "ranks": arm.ranks,
                    "link": arm.link,
                    "measured_s": measured[arm.name],
                    "predicted_s": time.seconds,
                    "low_s": time.low,
                    "high_s": time.high,
                    "parts": dict(time.parts),
                }
            )
    return {
        **STUDY_FILE.head(head["command_line"]),
        "steps": head["steps"],
        "warmup_steps": head["warmup_steps"],
        "git_commits": list(commits),
        "calibration": {**calibration.made, "whole_steps": len(calibration.steps)},
        "hardware": first["hardware"],
        "env": first["env"],
        "rows": rows,
        "not_measured": {cell["folder"]: cell["reason"] or "unknown" for cell in cells if cell["status"] == "failed"},
    }


def error_of(row: Mapping[str, Any]) -> float:
    """Return predicted over measured, less one; the runs' median is what was measured."""
    return row["predicted_s"] / statistics.median(row["measured_s"]) - 1


def results(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the study comes to: errors by link and ranks, coverage, and the plan's choice in each set."""
    groups: dict[str, list[float]] = {"all": []}
    for row in content["rows"]:
        for name in ("all", f"{row['ranks']} rank{'s' * (row['ranks'] > 1)}, {row['link']}", row["kind"]):
            groups.setdefault(name, []).append(abs(error_of(row)))
    inside = [row["low_s"] <= statistics.median(row["measured_s"]) <= row["high_s"] for row in content["rows"]]
    chosen = choices(content)
    return {
        "errors": {
            name: {
                "rows": len(errors),
                "median": statistics.median(errors),
                "p90": sorted(errors)[min(len(errors) - 1, math.ceil(0.9 * len(errors)) - 1)],
            }
            for name, errors in groups.items()
        },
        "covered": sum(inside) / len(inside),
        "choices": chosen,
        "chosen_well": sum(each["loss"] <= WITHIN_BEST for each in chosen),
    }


def choices(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return for each set of competing runs what the plan takes, what was best, and how much slower that is."""
    sets: dict[tuple[str, int, str], list[Mapping[str, Any]]] = {}
    for row in content["rows"]:
        sets.setdefault((row["work"], row["ranks"], row["link"]), []).append(row)
    found = []
    for (work, ranks, link), rows in sets.items():
        if len(rows) > 1:
            plan = min(rows, key=lambda row: row["predicted_s"])
            best = min(rows, key=lambda row: statistics.median(row["measured_s"]))
            loss = statistics.median(plan["measured_s"]) / statistics.median(best["measured_s"]) - 1
            place = {"work": work, "ranks": ranks, "link": link, "rows": len(rows)}
            found.append({**place, "chosen": plan["kind"], "best": best["kind"], "loss": loss})
    return found


STUDY_FILE = ResultFile("planner_study.json", "1.0", Content, lambda content: {"results": results(content)})
