"""One arm of a scaling study as a row of the report: its numbers, and its speed-up or the reason why there is none.

One value per run, then the median of the runs with its interval.
"""

from __future__ import annotations

import math
import statistics as plain_statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from testbed.analysis.comparison.two_arms import VALIDATION, losses_of
from testbed.analysis.runs.attributed import attribution_of
from testbed.analysis.runs.load import Run
from testbed.analysis.scaling.strategies import ScalingArm, mismatches, reference_note, reference_of
from testbed.analysis.scaling.time_to_loss import time_to_loss_of_arm
from testbed.analysis.statistics import compare, median_interval


def arm_row(
    arm: ScalingArm,
    arms: Sequence[ScalingArm],
    protocol: str,
    target: float | None,
    allow_mismatch: bool,
    directory: Path | None,
) -> dict[str, Any]:
    reference = reference_of(arm, arms)
    # Without an arm at one rank there is no speed-up, but unequal work is still to be told: against the first arm.
    compared = reference or next(other for other in arms if other.batch_size == arm.series)
    found = mismatches(arm, compared, protocol)
    n = len(arm.runs)
    reached = None if target is None else time_to_loss_of_arm(arm.runs, target, arm.failed)
    row: dict[str, Any] = {
        "name": arm.name,
        "strategy": arm.strategy,
        "strategy_name": arm.label,
        "batch_size": arm.batch_size,
        "batch_size_is": "per rank" if protocol == "weak" else "global",
        "ranks": arm.ranks,
        "n": n,
        "metrics_paths": [relative_path(run.path, directory) for run in arm.runs],
        "run_ids": [run.run_id for run in arm.runs],
        "git_commits": sorted({str(run.git_commit) for run in arm.runs}),
        "seeds": [run.work.get("seed") for run in arm.runs],
        "global_batch_size": arm.runs[0].work.get("global_batch_size"),
        "tokens_per_s": summary([run.tokens_per_s for run in arm.runs]),
        "step_time_s": summary([run.step_time_median_s for run in arm.runs]),
        "step_time_p95_s": summary([run.step_time_p95_s for run in arm.runs]),
        "training_time_s": summary([run.training_time_s for run in arm.runs]),
        "wall_time_s": summary([run.record.get("summary", {}).get("total_wall_time_sec") for run in arm.runs]),
        "epoch_wall_time_s": summary([mean_epoch_wall_time_s(run) for run in arm.runs]),
        "peak_memory_bytes": summary([run.peak_memory_bytes for run in arm.runs]),
        "memory_is": arm.runs[0].memory_meaning,
        "mfu": summary([run.mfu for run in arm.runs]),
        "final_train_loss": summary([run.final_train_loss for run in arm.runs]),
        "final_val_loss": summary([run.final_validation_loss for run in arm.runs]),
        "time_to_loss": reached,
        "attribution": mean_attribution(arm.instrumented),
        "utilization": mean_utilization(arm),
        "mismatches": found,
    }
    return row | _speed_up(arm, reference, protocol, target, bool(found) and not allow_mismatch)


def _speed_up(
    arm: ScalingArm, reference: ScalingArm | None, protocol: str, target: float | None, refused: bool
) -> dict[str, Any]:
    """Return speed-up and efficiency against the reference with 95 % intervals and verdict, or why there is none."""
    none: dict[str, Any] = dict.fromkeys(("speedup", "efficiency", "verdict", "minimum_detectable_effect"))
    none |= dict.fromkeys(("reference", "reference_strategy", "reference_note", "reason", "loss_note"))
    if reference is None:
        return none | {"reason": "no run at one rank, neither of baseline nor of the same strategy"}
    is_same = reference.strategy == arm.strategy
    none["reference"] = reference.name + (" (the same strategy)" if is_same and reference is not arm else "")
    none["reference_strategy"] = reference.strategy
    none["reference_note"] = reference_note(arm, reference)
    if refused:
        return none | {"reason": "unequal work, see mismatches"}
    if protocol == "time_to_loss":
        numbers, reason = _times_to_loss(arm, reference, target)
        if reason:
            return none | {"reason": reason}
    else:
        numbers = [[rate for run in each.runs if (rate := run.tokens_per_s) is not None] for each in (arm, reference)]
    speed_up = {"ratio": 1.0, "low": None, "high": None}
    if arm is not reference:
        ratio = compare(*numbers)
        speed_up = {name: finite(getattr(ratio, name)) for name in ("ratio", "low", "high")}
        none["verdict"] = ratio.verdict
        none["minimum_detectable_effect"] = finite(ratio.minimum_detectable_effect)
    efficiency = {name: None if value is None else value / arm.ranks for name, value in speed_up.items()}
    return none | {"speedup": speed_up, "efficiency": efficiency, "loss_note": _loss_note(arm, reference, protocol)}


def _times_to_loss(
    arm: ScalingArm, reference: ScalingArm, target: float | None
) -> tuple[list[list[float]], str | None]:
    """Return seconds to the target, the reference's first: less time is a larger ratio. Or why there are none."""
    assert target is not None  # the protocol has one
    found = [time_to_loss_of_arm(each.runs, target, each.failed) for each in (reference, arm)]
    for each, times in zip((reference, arm), found, strict=True):
        if times["num_never_reached"] or len(times["train_time_s"]["values"]) < len(each.runs):
            what = times["reason"] or "a run does not record its training time at the target"
            return [], f"{each.name}: {what}"
        if times["num_upper_bounds"]:
            return [], f"{each.name}: the first validation was already at the target"
    return [times["train_time_s"]["values"] for times in found], None


def _loss_note(arm: ScalingArm, reference: ScalingArm, protocol: str) -> str | None:
    """Return in what the losses are unequal, since a faster run that learns worse is not faster; None: in nothing."""
    if arm is reference or protocol != "strong":  # weak scaling trains on more tokens, time to loss ends at one loss
        return None
    if any(run.final_validation_loss is None for run in (*arm.runs, *reference.runs)):
        return "a run has no validation loss: that both learned equally is not shown"
    found = {each.name: each for each in losses_of((arm.name, reference.name), arm.runs, reference.runs)}
    if VALIDATION not in found:
        return "validation losses are over different data or token counts and do not compare"
    losses = found[VALIDATION]
    size = f"{losses.difference:+.4f}, more than {losses.noise:.4f} ({losses.noise_source})"
    return f"median final validation loss differs by {size}" if losses.is_unequal else None


def relative_path(path: Path, directory: Path | None) -> str:
    return str(path.relative_to(directory) if directory and path.is_relative_to(directory) else path)


def mean_attribution(runs: Sequence[Run]) -> dict[str, Any] | None:
    """Return the mean optimizer step over ranks and profiled steps, in seconds; None: not measured."""
    kept = [found for run in runs if (found := attribution_of(run.record))]
    steps = [step for found in kept for per_rank in found["per_rank"] for step in per_rank["steps"]]
    if not steps:
        return None
    names = [name for name in steps[0] if name != "step"]
    source = sorted({found["source"] for found in kept})
    columns = {name: [step[name] for step in steps] for name in names}
    means = {name: None if None in values else mean(values) for name, values in columns.items()}
    return means | {"n_steps": len(steps), "source": source}


def mean_utilization(arm: ScalingArm) -> dict[str, Any] | None:
    """Return the mean over ranks and runs of the sampled utilization in percent; None: not sampled."""
    measured = [run.record["utilization"] for run in arm.runs if run.record.get("utilization")]
    sampled = measured or [run.record["utilization"] for run in arm.instrumented if run.record.get("utilization")]
    rows = [row for each in sampled for row in each["per_rank"]]
    if not rows:
        return None
    names = ("cpu_percent_mean", "gpu_percent_mean")
    return {name: mean([row[name] for row in rows if row[name] is not None]) for name in names}


def summary(values: Sequence[float | None]) -> dict[str, Any]:
    """Return the median with its 95 % interval; low and high are None below 5 runs, all where a run lacks it."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return {"median": None, "low": None, "high": None, "values": known}
    _, low, high = map(finite, median_interval(known))
    return {"median": float(plain_statistics.median(known)), "low": low, "high": high, "values": known}


def mean_epoch_wall_time_s(run: Run) -> float | None:
    times = [epoch.get("epoch_wall_time_sec") for epoch in run.record.get("epochs", [])]
    return None if None in times else mean(times)


def mean(values: Sequence[float]) -> float | None:
    return plain_statistics.fmean(values) if values else None


def stdev(values: Sequence[float]) -> float | None:
    return plain_statistics.stdev(values) if len(values) > 1 else None


def finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)
