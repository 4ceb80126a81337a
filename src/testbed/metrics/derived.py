"""Compute the figures of training_metrics.json that follow from its rows."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from testbed.config.settings import RunSettings
from testbed.model import flops


def measured(rows: Sequence[dict]) -> list[dict]:
    """Return the rows that are not marked as warm-up."""
    return [row for row in rows if not row["is_warmup"]]


def tokens_per_s(rows: Sequence[dict], settings: RunSettings) -> float | None:
    """Return global tokens over the sum of measured step times; None before the first step after warm-up."""
    rows = measured(rows)
    seconds = sum(row["step_time_s"] for row in rows)
    return len(rows) * settings.tokens_per_step / seconds if seconds else None


def timing(
    steps: Sequence[dict], step_end_s: Sequence[float], startup_s: float | None, settings: RunSettings
) -> dict[str, Any]:
    """Return the section `timing`.

    Args:
        step_end_s: the wall moment at which each step of this start of the run ended.
    """
    rows = measured(steps)
    times = [row["step_time_s"] for row in rows]
    # from the first measured step's start to the last one's end; a resumed run has no such stretch
    measured_here = len(step_end_s) - (len(steps) - len(rows))
    wall_clock = None
    if times and len(step_end_s) == len(steps) and measured_here == len(rows):
        wall_s = step_end_s[-1] - step_end_s[-len(rows)] + times[0]
        wall_clock = len(rows) * settings.tokens_per_step / wall_s
    return {
        "warmup_steps": settings.measuring.timing_warmup_steps,
        "num_measured_steps": len(rows),
        **_distribution(times),
        "data_wait_fraction": sum(row["data_wait_s"] for row in rows) / sum(times) if times else None,
        "wall_clock_tokens_per_sec_global": wall_clock,
        "startup_time_s": startup_s,
    }


def speed(rate: float | None, recorded: Mapping[str, Any], num_devices: int) -> dict[str, float | None]:
    """Return model FLOP/s and MFU at `rate` tokens/s, by the FLOPs per token and the peak that were recorded."""
    per_token = recorded["per_token_palm"]
    return {
        "model_flops_per_s": None if rate is None else rate * per_token,
        "mfu": flops.mfu(rate, per_token, recorded["peak_flops_per_s_per_device"], num_devices),
    }


def summary(evaluations: Sequence[dict], rate: float | None, total_wall_s: float) -> dict[str, float | None]:
    """Return the section `summary`."""
    losses = [row["val_loss"] for row in evaluations]
    return {
        "total_wall_time_sec": total_wall_s,
        "best_val_loss": min(losses) if losses else None,
        "final_val_loss": losses[-1] if losses else None,
        "mean_tokens_per_sec_global": rate,
    }


def epoch_figures(
    number: int,
    rows: Sequence[dict],
    evaluations: Sequence[dict],
    wall_time_s: float,
    peaks: Sequence[dict] | None,
    earlier: Mapping[str, Any],
    settings: RunSettings,
) -> dict[str, Any]:
    """Return the row of an epoch.

    Args:
        rows: its optimizer steps, at least one.
        peaks: every rank's peak memory at its end; None: not read in this start of the run.
        earlier: the epoch's row as an earlier start of the run wrote it.
    """
    times = [row["step_time_s"] for row in measured(rows)]
    distribution = _distribution(times)
    validation = [row["val_loss"] for row in evaluations if row["step"] == rows[-1]["step"]]
    micro_steps = len(rows) * settings.batch.grad_accum_steps
    waits = [row["data_wait_s"] for row in measured(rows)]
    return {
        "epoch_idx": number,
        "is_partial": len(rows) < settings.plan.steps_per_epoch,
        "epoch_wall_time_sec": wall_time_s,
        "steps": micro_steps,
        "micro_steps": micro_steps,
        "optimizer_steps": len(rows),
        "skipped_optimizer_steps": sum(row["is_skipped"] for row in rows),
        "tokens_processed_global": len(rows) * settings.tokens_per_step,
        "tokens_per_sec_global": tokens_per_s(rows, settings),
        "train_loss_avg_global": statistics.fmean(row["loss"] for row in rows),
        "val_loss_avg_global": validation[-1] if validation else None,
        "num_measured_steps": len(times),
        "step_time_mean_sec": statistics.fmean(times) if times else None,
        "step_time_p50_sec": distribution["step_time_p50_sec"],
        "step_time_p95_sec": distribution["step_time_p95_sec"],
        "dataload_time_mean_sec": statistics.fmean(waits) if waits else None,
        **_peaks_of_epoch(peaks, earlier),
    }


def _peaks_of_epoch(peaks: Sequence[dict] | None, earlier: Mapping[str, Any]) -> dict[str, int | None]:
    """Return peak CUDA memory of rank 0 and of all ranks; of the earlier row where it was not read again."""
    row = {}
    for kind in ("allocated", "reserved"):
        of_ranks = [peak[f"peak_{kind}_bytes"] for peak in peaks or []]
        known = bool(of_ranks) and None not in of_ranks
        for whose, most in (("rank0", of_ranks[:1]), ("global", of_ranks)):
            name = f"max_cuda_mem_{kind}_bytes_{whose}"
            row[name] = max(most) if known else (None if of_ranks else earlier.get(name))
    return row


def _distribution(times: Sequence[float]) -> dict[str, float | None]:
    if not times:
        return {"step_time_p50_sec": None, "step_time_p95_sec": None, "step_time_p95_above_median": None}
    median, p95 = (float(value) for value in np.percentile(times, [50, 95]))
    return {"step_time_p50_sec": median, "step_time_p95_sec": p95, "step_time_p95_above_median": p95 / median - 1}
