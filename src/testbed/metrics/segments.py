"""Keep the starts of a run, one segment of training_metrics.json each. No torch."""

from __future__ import annotations

import time
from typing import Any

# Two starts that differ in one of these measured different things: step times of both make no one number.
MEASURED_WHERE = ("git_commit", "git_dirty", "torch_version", "hostname", "device", "cpu_threads_per_rank")
SPREAD_HOW = ("world_size", "run_type")
_OF_EARLIER_STARTS = ("from step ", "steps 1 to ")  # how the entries of math_changes begin that a start adds


class Starts:
    """The earlier starts of a run, and this one.

    Attributes:
        current: segment of this start.
        earlier: segments of the starts before it.
        resumed_step: optimizer steps done before this start; its first steps are warm-up again.
        elapsed_before_s: training time up to that step, lost time included.
    """

    def __init__(self, facts: dict[str, Any]):
        """Begin with the facts of facts_of_run."""
        self.current = new_segment(facts)
        self.earlier: list[dict] = []
        self.resumed_step = 0
        self.elapsed_before_s = 0.0
        self._earlier_wall_s = 0.0
        self._started_s = time.perf_counter()

    @property
    def wall_s(self) -> float:
        """Wall seconds of all starts."""
        return self._earlier_wall_s + time.perf_counter() - self._started_s

    @property
    def useful_wall_s(self) -> float:
        """Wall seconds of all starts, without those that were lost."""
        return self.wall_s - sum(segment["lost_s"] or 0.0 for segment in [*self.earlier, self.current])

    def begin_after(self, step: int) -> None:
        """Begin this start with the step after `step`."""
        self.resumed_step = step
        self.current["first_step"] = step + 1

    def resume(
        self, earlier: dict[str, Any], step: int, steps_done: int, elapsed_s: float, useful_wall_s: float
    ) -> None:
        """Continue the run of a file after `step`. Later steps are lost and trained again.

        Args:
            steps_done: optimizer steps done by the start before, whether or not their rows were written.
            elapsed_s, useful_wall_s: of the recorder when that step was saved.
        """
        self.begin_after(step)
        self._earlier_wall_s = earlier["summary"]["total_wall_time_sec"]  # lost steps included: they took their time
        self.earlier = earlier.get("segments") or [segment_of(earlier)]
        kept_s = kept_validation_s(earlier, step, elapsed_s)
        self.current["lost_steps"] = lost_steps(earlier, step, steps_done)
        has_lost = self.current["lost_steps"] or self.earlier[-1]["ended"] not in ("complete", "stopped", "preempted")
        self.current["lost_s"] = max(0.0, self.useful_wall_s - useful_wall_s - kept_s) if has_lost else 0.0
        # a time to a loss includes what was lost on the way
        self.elapsed_before_s = elapsed_s + kept_s + self.current["lost_s"]

    def is_as_before(self, earlier: dict[str, Any], facts: dict[str, Any]) -> bool:
        """Return whether this start has the code, machine, ranks and settings of the one before."""
        is_spread_alike = all(self.earlier[-1][name] == self.current[name] for name in SPREAD_HOW)
        is_same_place = measured_where(earlier) == measured_where(facts)
        return is_spread_alike and is_same_place and not self.current["setting_changes"]

    def as_recorded(self, ended: str | None, last_step: int) -> list[dict[str, Any]]:
        """Return the section `segments`.

        Args:
            ended: how this start ended; None: it is running.
            last_step: optimizer steps done so far.
        """
        done = last_step if last_step > self.resumed_step else None
        wall_s = time.perf_counter() - self._started_s
        return [*self.earlier, self.current | {"last_step": done, "ended": ended, "wall_time_s": wall_s}]


def take_over_facts(facts: dict[str, Any], earlier: dict[str, Any]) -> None:
    """Copy identity, instruments and other work from an earlier start's file."""
    facts["run_id"], facts["timestamp_utc"] = earlier["run_id"], earlier["timestamp_utc"]
    facts["instrumented"] |= earlier["instrumented"]  # its rows stay in the file
    facts["instruments"] = sorted({name for each in (facts, earlier) for name in each.get("instruments", [])})
    changes = earlier["training_config"].get("math_changes", [])
    facts["training_config"]["math_changes"] += [words for words in changes if words.startswith(_OF_EARLIER_STARTS)]


def new_segment(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the segment of a start that begins with the first step."""
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
    """Return the only segment of a run whose file has none."""
    steps = [row["step"] for row in earlier["steps"]]
    return new_segment(earlier) | {
        "last_step": steps[-1] if steps else None,
        "ended": earlier["status"] if earlier["status"] != "running" else None,
        "wall_time_s": earlier["summary"]["total_wall_time_sec"],
    }


def closed_as_failed(metrics: dict[str, Any], reason: str) -> dict[str, Any]:
    """Return the file of a killed rank 0, marked as failed."""
    last = metrics["steps"][-1]["step"] if metrics["steps"] else None
    segments = metrics["segments"]
    ended = [*segments[:-1], segments[-1] | {"ended": "failed"}] if segments else segments
    return metrics | {"status": "failed", "failure": {"reason": reason, "step": last}, "segments": ended}


def measured_where(facts: dict[str, Any]) -> dict[str, Any]:
    """Return code, machine and device of a start, as rank 0 sees them."""
    hardware = facts["hardware"]
    values = (
        facts["git_commit"],
        facts["git_dirty"],
        facts["env"]["torch_version"],
        facts["host"]["hostname"],
        hardware["gpu_name"] or hardware["cpu_name"],
        hardware["cpu_threads_per_rank"],
    )
    return dict(zip(MEASURED_WHERE, values, strict=True))


def lost_steps(earlier: dict[str, Any], step: int, steps_done: int) -> int:
    """Return the optimizer steps beyond `step` that are trained again.

    Args:
        steps_done: by rank 0's progress file, which is newer than the last written rows.
    """
    return max(sum(row["step"] > step for row in earlier["steps"]), steps_done - step)


def kept_validation_s(earlier: dict[str, Any], step: int, elapsed_s: float) -> float:
    """Return the seconds of validation after the save at `step`, whose row stays.

    Args:
        elapsed_s: training time at that save.
    """
    rows = earlier["evaluations"]
    return sum(row["wall_time_s"] for row in rows if row["step"] == step and row["elapsed_s"] > elapsed_s)


def larger_peaks(before: list[dict[str, Any]], now: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each rank's peak memory over two starts on the same ranks; None if one is unknown."""

    def larger(name: str, old: Any, new: Any) -> Any:
        return new if name == "rank" or None in (old, new) else max(old, new)

    return [
        {name: larger(name, old.get(name), value) for name, value in new.items()}
        for old, new in zip(before, now, strict=True)
    ]
