"""network_study.json, which scripts/network_study.py writes: its fields, and how it is made of the runs' files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

from testbed.errors import InputError
from testbed.experiments.network_lab.bounds import BYTES_PER_NUMBER
from testbed.experiments.network_lab.results import results
from testbed.metrics.fields.types import AboveZero, Amount, Count, OneOrMore, Positive, Rule
from testbed.metrics.file import read_metrics
from testbed.metrics.result_file import ResultFile


class ArmRecord(TypedDict):
    part: Literal["strategies", "levers"]
    strategy: str
    hosts: Positive
    link: str
    lever: str | None
    name: str
    title: str
    changes_work: bool


class LinkRecord(TypedDict):
    rate_bit_per_s: Positive | None
    delay_s: Amount | None
    name: str
    title: str
    reference: str | None  # the link that it is compared to


class Work(TypedDict):
    num_parameters: Positive
    model_name: str
    model_size: str
    vocab_size: Positive
    seq_len: Positive
    precision: str
    gradient_bytes: Positive
    steps: Positive
    warmup_steps: Count


class Traced(TypedDict):
    """Lists hold a number per profiled step, of the rank that waits least or has most collectives."""

    exposed_s: OneOrMore[Amount]
    communication_s: OneOrMore[Amount]
    idle_s: OneOrMore[Amount]
    num_collectives: list[Amount]
    bus_bytes_per_step: Amount | None
    bus_bandwidth_bytes_per_s: Amount | None
    source: str | None


class Run(TypedDict):
    arm: str
    kind: Literal["timed", "profiled"]
    repeat: Positive
    started_utc: str | None
    seconds: Amount | None
    run_id: str
    git_commit: str | None
    tokens_per_step: Positive
    step_times_s: OneOrMore[AboveZero]
    last_loss: float
    traced: Traced | None


class Content(TypedDict):
    schema_version: str
    status: Literal["complete", "interrupted"]
    timestamp_utc: str
    command_line: str
    repeats: Positive
    arms: OneOrMore[ArmRecord]
    links: OneOrMore[LinkRecord]
    git_commits: OneOrMore[str]
    git_dirty: bool
    env: dict[str, str | None]
    hardware: Annotated[dict, Rule("required", ["cpu_name", "cpu_cores_visible", "backend"])]
    work: Work
    runs: OneOrMore[Run]
    not_measured: dict[str, str]
    results: dict


def study_of(head: Mapping[str, Any], cells: Sequence[Mapping[str, Any]], out_dir: Path) -> dict[str, Any]:
    """Return what network_study.json holds, made of the runs that are complete.

    Args:
        head: command_line, repeats, arms and links as records.
        cells: rows of sweep.json.
    """
    runs, not_measured, first = [], {}, None
    for cell in cells:
        if cell["status"] == "complete":
            metrics = read_metrics(out_dir / cell["folder"] / "training_metrics.json")
            first = first or metrics
            runs.append(_row(cell, metrics))
        elif cell["status"] == "failed":
            not_measured[cell["folder"]] = cell["reason"] or "unknown"
    if first is None:
        raise InputError(f"{out_dir} holds no finished run of a network study")
    is_whole = all(cell["status"] in ("complete", "failed") for cell in cells)
    is_dirty = [run.pop("git_dirty") for run in runs]
    commits = sorted({run["git_commit"] or "unknown" for run in runs})
    config = first["training_config"]
    names = ("num_parameters", "model_name", "model_size", "vocab_size", "seq_len", "precision")
    return {
        **STUDY_FILE.head(head["command_line"]),
        "status": "complete" if is_whole else "interrupted",
        **head,
        "git_commits": commits,
        "git_dirty": any(is_dirty),
        "env": first["env"],
        "hardware": {name: first["hardware"][name] for name in ("cpu_name", "cpu_cores_visible", "backend")},
        "work": {
            **{name: config[name] for name in names},
            "gradient_bytes": BYTES_PER_NUMBER * config["num_parameters"],
            "steps": len(first["steps"]),
            "warmup_steps": sum(step["is_warmup"] for step in first["steps"]),
        },
        "runs": runs,
        "not_measured": not_measured,
    }


def _row(cell: Mapping[str, Any], metrics: Mapping[str, Any]) -> dict[str, Any]:
    rows = metrics["steps"]
    return {
        "arm": cell["name"],
        "kind": "profiled" if cell["profiled"] else "timed",
        "repeat": cell["repeat"],
        "started_utc": cell["started_utc"],
        "seconds": cell["seconds"],
        "run_id": metrics["run_id"],
        "git_commit": metrics["git_commit"],
        "git_dirty": bool(metrics["git_dirty"]),
        "tokens_per_step": metrics["training_config"]["global_batch_size"] * metrics["training_config"]["seq_len"],
        "step_times_s": [row["step_time_s"] for row in rows],
        "last_loss": rows[-1]["loss"],
        "traced": _traced(metrics) if cell["profiled"] else None,
    }


def _traced(metrics: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what the profiled steps waited for; None where a trace could not be read."""
    found = metrics["attribution"]
    if found is None:
        return None
    steps = list(zip(*(rank["steps"] for rank in found["per_rank"]), strict=True))
    bound = found["bound"]
    return {
        "exposed_s": [min(rank["exposed_communication_s"] for rank in step) for step in steps],
        "communication_s": [min(rank["communication_s"] for rank in step) for step in steps],
        "idle_s": [min(rank["idle_s"] for rank in step) for step in steps],
        "num_collectives": [max(rank["num_collectives"] for rank in step) for step in steps],
        "bus_bytes_per_step": None if bound is None else bound["bus_bytes_per_step"],
        "bus_bandwidth_bytes_per_s": None if bound is None else bound["bus_bandwidth_bytes_per_s"],
        "source": None if bound is None else bound["source"],
    }


def _check_rows(content: Mapping[str, Any]) -> None:
    known = {each["name"] for each in (*content["arms"], *content["links"])}
    named = {run["arm"] for run in content["runs"]} | {arm["link"] for arm in content["arms"]}
    if named - known:
        raise InputError(f"{min(named - known)!r} is neither an arm nor a link of this file")
    for run in content["runs"]:
        if len(run["step_times_s"]) <= content["work"]["warmup_steps"]:
            raise InputError(f"the run {run['repeat']} of {run['arm']} has no step after warm-up")


STUDY_FILE = ResultFile(
    "network_study.json", "1.0", Content, lambda content: {"results": results(content)}, _check_rows
)
