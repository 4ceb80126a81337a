"""The starts of a run, one segment of training_metrics.json each: what ran where, and what the next one lost of it."""

from __future__ import annotations

from typing import Any

# Two starts that differ in one of these measured different things: step times of both make no one number.
MEASURED_WHERE = ("git_commit", "git_dirty", "torch_version", "hostname", "device", "cpu_threads_per_rank")
SPREAD_HOW = ("world_size", "run_type")


def new_segment(facts: dict[str, Any]) -> dict[str, Any]:
    """The segment of a start that begins with the first step; `facts` are those of run_facts."""
    return {
        "started_utc": facts["timestamp_utc"],
        "first_step": 1,
        "last_step": None,
        "resumed_from": None,
        "world_size": facts["hardware"]["world_size"],
        "run_type": facts["training_config"]["run_type"],
        **measured_where(facts),
        "ended": None,
        "setting_changes": [],
        "random_numbers": "from the seed",
        "lost_steps": 0,
        "lost_s": 0.0,
        "wall_time_s": 0.0,
    }


def segment_of(earlier: dict[str, Any]) -> dict[str, Any]:
    """The only start of a run whose file is from before starts were listed."""
    steps = [row["step"] for row in earlier["steps"]]
    return new_segment(earlier) | {
        "last_step": steps[-1] if steps else None,
        "ended": earlier["status"] if earlier["status"] != "running" else None,
        "wall_time_s": earlier["summary"]["total_wall_time_sec"],
    }


def failed_in_its_stead(metrics: dict[str, Any], reason: str) -> dict[str, Any]:
    """What a killed rank 0 would have written last, as far as its file tells: how long it ran on is not known."""
    last = metrics["steps"][-1]["step"] if metrics["steps"] else None
    segments = metrics["segments"]
    ended = [*segments[:-1], segments[-1] | {"ended": "failed"}] if segments else segments
    return metrics | {"status": "failed", "failure": {"reason": reason, "step": last}, "segments": ended}


def measured_where(facts: dict[str, Any]) -> dict[str, Any]:
    """Code, machine and device of the start that wrote these facts of a file; rank 0's."""
    hardware = facts["hardware"]
    values = (
        *(facts["git_commit"], facts["git_dirty"], facts["env"]["torch_version"], facts["host"]["hostname"]),
        *(hardware["gpu_name"] or hardware["cpu_name"], hardware["cpu_threads_per_rank"]),
    )
    return dict(zip(MEASURED_WHERE, values, strict=True))


def lost_steps(earlier: dict[str, Any], step: int, steps_done: int) -> int:
    """Optimizer steps beyond `step` that are trained again.

    Args:
        steps_done: by rank 0's progress file, which a kill does not outrun as it does the last write of the rows.
    """
    return max(sum(row["step"] > step for row in earlier["steps"]), steps_done - step)


def kept_validation_s(earlier: dict[str, Any], step: int, elapsed_s: float) -> float:
    """Seconds of the validation that followed the save at `step`, `elapsed_s` after the run began: its row stays."""
    rows = earlier["evaluations"]
    return sum(row["wall_time_s"] for row in rows if row["step"] == step and row["elapsed_s"] > elapsed_s)


def larger_peaks(before: list[dict[str, Any]], now: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each rank's peak memory over two starts on the same ranks; None where one does not know it."""

    def larger(name: str, old: Any, new: Any) -> Any:
        return new if name == "rank" or None in (old, new) else max(old, new)

    return [
        {name: larger(name, old.get(name), value) for name, value in new.items()}
        for old, new in zip(before, now, strict=True)
    ]
