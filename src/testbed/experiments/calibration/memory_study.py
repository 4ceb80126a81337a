"""Compare the predicted resident memory of processes on CPU cores with what they take: planner_memory.json. No torch.

Every run type that a CPU runs, on one, two and four ranks. The C library gives freed memory back at once
(`RETURNED`), so that the resident set is what is alive; usually src/gpt2.py keeps it for the next step.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from testbed.config.settings import RunSettings
from testbed.errors import InputError
from testbed.experiments.calibration.study import UNLIMITED, Asked, Work
from testbed.memory_model.job import job_of_settings
from testbed.memory_model.memory import memory_of
from testbed.metrics.fields.types import AboveZero, OneOrMore, Positive
from testbed.metrics.file import read_metrics
from testbed.metrics.result_file import ResultFile

RETURNED = "MALLOC_MMAP_THRESHOLD_=65536"  # glibc: each larger block is a mapping of its own
WORK = Work(name="memory", layers=6, heads=8, hidden=512, vocab=50257, seq_length=128, batch=8)
RANKS = (1, 2, 4)
STEPS = 3  # the first update makes the moments, and DDP lays its buckets out again for the second step
LEAST_BYTES = 500 * 2**20  # below it the libraries of a process weigh too much
MOST_ERROR = 0.1


class Row(TypedDict):
    kind: str
    ranks: Positive
    measured_bytes: AboveZero  # the largest rank's peak above its resident set before the model
    predicted_bytes: AboveZero


class Content(TypedDict):
    schema_version: str
    timestamp_utc: str
    command_line: str
    git_commits: OneOrMore[str]
    hardware: dict[str, Any]
    env: dict[str, Any]
    rows: OneOrMore[Row]
    not_measured: dict[str, str]
    results: dict[str, Any]


def of_memory(asked: Asked) -> Asked:
    """Return the request with the size, the ranks and the C library of this study in place of its own."""
    return dataclasses.replace(
        asked,
        works=(WORK,),
        links=(UNLIMITED,),
        ranks=RANKS,
        environment=(RETURNED,),
        steps=STEPS,
        warmup_steps=STEPS - 1,
    )


def content_of(
    command_line: str,
    cells: Sequence[Mapping[str, Any]],
    settings: Mapping[str, RunSettings],
    out_dir: Path,
) -> dict[str, Any]:
    """Return what planner_memory.json holds, made of the runs that are complete.

    Args:
        cells: rows of sweep.json.
        settings: of each row, by its name.

    Raises:
        InputError: none is complete.
    """
    rows: list[dict[str, Any]] = []
    commits: dict[str, None] = {}
    first: dict[str, Any] = {}
    for cell in cells:
        if cell["status"] != "complete":
            continue
        metrics = read_metrics(out_dir / cell["folder"] / "training_metrics.json")
        first = first or metrics
        commits[str(metrics["git_commit"])] = None
        ranks = metrics["memory"]["per_rank"]
        grown = max(rank["peak_rss_bytes"] - rank["rss_before_model_bytes"] for rank in ranks)
        predicted = memory_of(job_of_settings(settings[cell["name"]])).returned
        place = {"kind": cell["variant"], "ranks": cell["ranks"]}
        rows.append({**place, "measured_bytes": grown, "predicted_bytes": predicted})
    if not rows:
        raise InputError(f"{out_dir} holds no finished run of a study of memory")
    return {
        **MEMORY_FILE.head(command_line),
        "git_commits": list(commits),
        "hardware": first["hardware"],
        "env": first["env"],
        "rows": rows,
        "not_measured": {cell["folder"]: cell["reason"] or "unknown" for cell in cells if cell["status"] == "failed"},
    }


def error_of(row: Mapping[str, Any]) -> float:
    """Return predicted over measured, less one."""
    return float(row["predicted_bytes"] / row["measured_bytes"] - 1)


def results(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the errors of the runs that are large enough to say something."""
    errors = [abs(error_of(row)) for row in content["rows"] if row["measured_bytes"] >= LEAST_BYTES]
    return {
        "rows": len(errors),
        "median": statistics.median(errors) if errors else None,
        "worst": max(errors, default=None),
        "within": sum(error <= MOST_ERROR for error in errors),
    }


def memory_table(content: Mapping[str, Any]) -> str:
    """Return Markdown: what was measured, and a row for each run."""
    found, hardware = content["results"], content["hardware"]
    commits = ", ".join(f"`{commit}`" for commit in content["git_commits"])
    lines = [
        f"{found['within']} of {found['rows']} runs of {LEAST_BYTES // 2**20} MiB or more within {MOST_ERROR:.0%}, "
        f"median error {found['median']:.1%}, worst {found['worst']:.1%}. {hardware['cpu_cores_visible']} cores "
        f"({hardware['cpu_name']}), PyTorch {content['env'].get('torch_version')}, commit {commits}, "
        f"`{content['command_line']}`.",
        "",
        "| run type | ranks | measured (MiB) | predicted (MiB) | error |",
        "|---|---:|---:|---:|---:|",
    ]
    for row in content["rows"]:
        measured, predicted = row["measured_bytes"] / 2**20, row["predicted_bytes"] / 2**20
        small = "" if row["measured_bytes"] >= LEAST_BYTES else " (small)"
        place = f"| {row['kind']} | {row['ranks']} | {measured:,.0f} | {predicted:,.0f} "
        lines.append(f"{place}| {error_of(row):+.1%}{small} |")
    return "\n".join(lines)


MEMORY_FILE = ResultFile("planner_memory.json", "1.0", Content, lambda content: {"results": results(content)})
