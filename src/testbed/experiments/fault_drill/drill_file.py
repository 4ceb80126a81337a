"""fault_drill.json: what struck when, what each start said, and whether anything was lost."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from testbed.experiments.fault_drill.faults import ENDS_IN_ORDER, KINDS
from testbed.experiments.fault_drill.work import Work
from testbed.io import check_schema, read_checked, result_head, write_text

DRILL_FILE = "fault_drill.json"
SCHEMA_VERSION = "1.0"
ASKED = (*ENDS_IN_ORDER, "kill_launcher")  # kinds of faults that the run takes for being asked to end
SAME = ("seed", "run_types", "model", "steps", "save_every", "collective_timeout_s", "grace_s")  # what makes fault N


def read_drill(path: Path) -> dict[str, Any]:
    """A fault_drill.json. ValueError, one sentence that names the file, when it is none."""
    return read_checked(path, check_drill)


def write_drill(path: Path, content: dict[str, Any]) -> None:
    """Work the summary out, check the whole, and replace `path` in one move."""
    faults = sorted(content["faults"], key=lambda row: row["number"])
    content = {**content, "faults": faults, "summary": summary(faults)}
    check_drill(content)
    write_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def check_drill(content: Any) -> None:
    """Raise ValueError, one sentence that names the place, unless `content` is a whole fault_drill.json."""
    check_schema(content, "experiments/fault_drill/fault_drill.schema.json")


def beginning(
    command_line: str, seed: int, num_faults: int, run_types: list[str], work: Work, jobs: int, disk_method: str
) -> dict[str, Any]:
    """The file before its first drill."""
    return {
        **result_head(SCHEMA_VERSION, command_line),
        "status": "running",
        "code": [],
        "seed": seed,
        "num_faults": num_faults,
        "run_types": run_types,
        "model": work.model,
        "steps": work.steps,
        "save_every": work.save_every,
        "collective_timeout_s": work.collective_timeout,
        "grace_s": work.grace,
        "jobs": jobs,
        "disk_method": disk_method,
        "wall_s": 0.0,  # of all calls, undisturbed runs included
        "references": {},
        "faults": [],
    }


def take_over(wanted: dict[str, Any], path: Path) -> None:
    """Put the rows of an earlier call into `wanted`, which is this call's file before its first drill.

    Raises:
        ValueError: the file is of another drill; names what differs.
    """
    if not path.exists():
        return
    earlier = read_drill(path)
    for name in SAME:
        if earlier[name] != wanted[name]:
            raise ValueError(
                f"--out_dir holds a drill with {name} {earlier[name]!r}, not {wanted[name]!r}; ask for the same again, "
                "give --overwrite, or another folder"
            )
    for name in ("faults", "code", "references", "wall_s"):
        wanted[name] = earlier[name]


def add_code(content: dict[str, Any], metrics: dict[str, Any]) -> None:
    """Note the code and the machine that an undisturbed run ran on, once each: a drill may be continued later."""
    code = {
        **{name: metrics[name] for name in ("git_commit", "git_dirty")},
        **{name: metrics["env"][name] for name in ("python_version", "torch_version", "deepspeed_version")},
        **{name: metrics["hardware"][name] for name in ("cpu_name", "cpu_cores_visible")},
    }
    if code not in content["code"]:
        content["code"].append(code)


def summary(faults: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per kind, and one of all. `missed`: the run had ended before; neither survived nor lost."""
    rows = []
    for kind in [*KINDS, "all"]:
        of_kind = [row for row in faults if kind in (row["kind"], "all")]
        struck = [row for row in of_kind if row["struck"]]
        if not of_kind:
            continue
        ended_after_s = [
            start["ended_after_s"] for row in struck for start in row["starts"] if start["ended_after_s"] is not None
        ]
        rows.append(
            {
                "kind": kind,
                "faults": len(of_kind),
                "survived": sum(row["survived"] is True for row in struck),
                "lost": sum(row["survived"] is False for row in struck),
                "missed": len(of_kind) - len(struck),
                "asked": _what_was_asked(struck),
                "while_saving": sum(bool((row["starts"][0]["struck"] or {}).get("saving")) for row in struck),
                "lost_steps": sum(row["lost_steps"] or 0 for row in struck),
                "starts": sum(len(row["starts"]) for row in struck),
                "median_ended_after_s": statistics.median(ended_after_s) if ended_after_s else None,
                "longest_ended_after_s": max(ended_after_s, default=None),
                "median_seconds": statistics.median(row["seconds"] for row in of_kind),
            }
        )
    return rows


def _what_was_asked(struck: Sequence[dict[str, Any]]) -> dict[str, int] | None:
    """Of the faults that ask a run to end, what they met: a run that finished its step and saved it (`in_order`), one
    that was still starting up (`in_start_up`), one that had no step left and completed (`completed`). None: no such
    fault."""
    marks = [row["starts"][0]["mark"] for row in struck if row["kind"] in ASKED]
    if not marks:
        return None
    in_order, completed = marks.count("preempted"), marks.count("complete")
    return {"in_order": in_order, "in_start_up": len(marks) - in_order - completed, "completed": completed}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The summary for a person."""
    titles = {
        "kind": "fault", "faults": "faults", "survived": "survived", "lost": "lost", "missed": "too late",
        "asked": "saved/started/done", "while_saving": "in a save", "lost_steps": "steps again", "starts": "starts",
        "median_ended_after_s": "gone after (s)", "longest_ended_after_s": "at most (s)", "median_seconds": "drill (s)",
    }  # fmt: skip
    lines = [list(titles.values()), *([_cell(row[name]) for name in titles] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(titles))]
    return "\n".join(
        "  ".join(
            [line[0].ljust(widths[0]), *(text.rjust(width) for text, width in zip(line[1:], widths[1:], strict=True))]
        )
        for line in lines
    )


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return "/".join(map(str, value.values()))
    return "-" if value is None else f"{value:.1f}" if isinstance(value, float) else str(value)
