"""What else than the configuration may explain that two sides of a comparison differ: code, machine, order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from testbed.analysis.runs import Run

# What the same configuration should be measured on; a difference here is a warning, not a refusal.
_HARDWARE = ("device_type", "gpu_name", "cpu_name", "cpu_cores_visible", "cpu_threads_per_rank", "num_nodes")
_SOFTWARE = ("torch_version", "deepspeed_version", "cuda_version", "python_version")


def other_explanations(names: Sequence[str], a: Sequence[Run], b: Sequence[Run]) -> list[str]:
    """Sentences on what differs between, or within, the runs of two sides beside their configuration."""
    found = []

    def values(runs: Sequence[Run], read: Callable[[Run], Any]) -> list[str]:
        return sorted({str(value) for run in runs if (value := read(run)) is not None})

    def differ(what: str, read: Callable[[Run], Any], consequence: str) -> None:
        one, other = values(a, read), values(b, read)
        if len({*one, *other}) > 1 and one and other:
            inside = " (within one side)" if one == other else ""
            found.append(f"{what}: {', '.join(one)} against {', '.join(other)}{inside}; {consequence}")

    differ("commits differ", lambda run: run.git_commit and run.git_commit[:12], "the code may explain the ratio")
    if any(run.record.get("git_dirty") for run in (*a, *b)):
        found.append("made with uncommitted changes: the commit does not say which code ran")
    differ("machines differ", lambda run: run.record.get("host", {}).get("hostname"), "they may explain the ratio")
    for group, fields in (("hardware", _HARDWARE), ("env", _SOFTWARE)):
        for field in fields:
            differ(f"{field.replace('_', ' ')} differs", lambda run, g=group, f=field: run.record.get(g, {}).get(f),
                   "it may explain the ratio")  # fmt: skip
    if blocks := _in_blocks(names, a, b):
        found.append(blocks)
    return found


def _in_blocks(names: Sequence[str], a: Sequence[Run], b: Sequence[Run]) -> str | None:
    """Words when nearly all runs of one side began before the other's: then drift of the machine looks like a ratio."""
    began = [[run.record.get("timestamp_utc") for run in runs] for runs in (a, b)]
    if any(None in times or len(times) < 2 for times in began):
        return None
    # timestamps are ISO 8601 in UTC, so text order is time order
    order = [(one > other) - (one < other) for one in began[0] for other in began[1]]
    if abs(sum(order)) < 0.9 * len(order):
        return None
    first, second = names if sum(order) < 0 else reversed(names)
    return (
        f"not interleaved: the runs of {first} were made before those of {second}, so a drift of the machine in "
        "between counts as a difference; run them in turn (A B A B ...)"
    )
