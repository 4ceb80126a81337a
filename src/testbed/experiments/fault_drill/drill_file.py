"""fault_drill.json: the fault, the starts and the verdict of each drill."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

from testbed.errors import InputError
from testbed.experiments.fault_drill.faults import ENDS_IN_ORDER, KINDS
from testbed.experiments.fault_drill.work import Work
from testbed.metrics.fields.types import Amount, Count, Fraction, Name, OneOrMore, Positive, Rule, Sha256
from testbed.metrics.result_file import ResultFile

ASKED = (*ENDS_IN_ORDER, "kill_launcher")  # kinds of faults that the run takes for being asked to end
SAME = ("seed", "run_types", "model", "steps", "save_every", "collective_timeout_s", "grace_s")  # what makes fault N


class Code(TypedDict):
    """The code and the machine of the reference runs."""

    git_commit: str
    git_dirty: bool | None
    python_version: str
    torch_version: str
    deepspeed_version: str | None
    cpu_name: str | None
    cpu_cores_visible: Positive


class ReferenceRecord(TypedDict):
    weights_sha256: Sha256
    losses: list[float]
    timeline: dict[str, Amount]
    needed_bytes: Count
    seconds: Amount


class MomentRecord(TypedDict):
    after: str
    share: Amount


class Struck(TypedDict):
    what: str
    after_s: Amount | None
    saving: bool | None
    newest_saved: Count | None


class Start(TypedDict):
    launcher: str
    exit_codes: OneOrMore[int | None]
    seconds: Amount
    struck: Struck | None
    ended_after_s: Amount | None
    mark: str | None
    begun: Count
    newest_whole: Count | None
    saves: list[Positive]
    said: list[str]


class FaultRecord(TypedDict):
    number: Positive
    kind: str
    run_type: str
    launcher: str
    target: str
    form: str | None
    shares: Annotated[list[Fraction], Rule("minItems", 2), Rule("maxItems", 2)]
    moments: list[MomentRecord]
    tries: Positive
    started_utc: str
    seconds: Amount
    struck: bool
    survived: bool | None
    problems: list[str]
    lost_steps: Count | None
    starts: OneOrMore[Start]


class Content(TypedDict):
    schema_version: str
    status: Literal["running", "complete", "interrupted"]
    timestamp_utc: str
    command_line: str
    code: list[Code]
    seed: Count
    num_faults: Positive
    run_types: OneOrMore[Name]
    model: str
    steps: Positive
    save_every: Positive
    collective_timeout_s: Positive
    grace_s: Positive
    jobs: Positive
    disk_method: Literal["tmpfs", "RLIMIT_FSIZE"]
    wall_s: Amount
    references: dict[str, ReferenceRecord]
    faults: list[FaultRecord]
    summary: list[dict]


def beginning(
    command_line: str, seed: int, num_faults: int, run_types: list[str], work: Work, jobs: int, disk_method: str
) -> dict[str, Any]:
    """Return the file before its first drill."""
    return {
        **DRILL_FILE.head(command_line),
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
        "wall_s": 0.0,  # of all calls, reference runs included
        "references": {},
        "faults": [],
    }


def take_over(wanted: dict[str, Any], path: Path) -> None:
    """Put the rows of an earlier call into `wanted`, which is this call's file before its first drill.

    Raises:
        InputError: the file is of another drill; names what differs.
    """
    if not path.exists():
        return
    earlier = DRILL_FILE.read(path)
    for name in SAME:
        if earlier[name] != wanted[name]:
            raise InputError(
                f"--out_dir holds a drill with {name} {earlier[name]!r}, not {wanted[name]!r}; ask for the same again, "
                "give --overwrite, or another folder"
            )
    for name in ("faults", "code", "references", "wall_s"):
        wanted[name] = earlier[name]


def add_code(content: dict[str, Any], metrics: dict[str, Any]) -> None:
    """Note the code and the machine that a reference run ran on, once each: a drill may be continued later."""
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
    """Count what the faults that ask a run to end met: a run that finished its step and saved it (`in_order`), one
    that was still starting up (`in_start_up`), one that had no step left and completed (`completed`). None: no such
    fault."""
    marks = [row["starts"][0]["mark"] for row in struck if row["kind"] in ASKED]
    if not marks:
        return None
    in_order, completed = marks.count("preempted"), marks.count("complete")
    return {"in_order": in_order, "in_start_up": len(marks) - in_order - completed, "completed": completed}


def _derived(content: dict[str, Any]) -> dict[str, Any]:
    faults = sorted(content["faults"], key=lambda row: row["number"])
    return {"faults": faults, "summary": summary(faults)}


DRILL_FILE = ResultFile("fault_drill.json", "1.0", Content, _derived)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the summary as a text table."""
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
