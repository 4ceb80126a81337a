"""Divide the MFU of runs that are shown together by one measured peak."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from testbed.analysis.runs.load import Run

DIFFERENT_PEAKS = 0.05  # measurements of one machine's peak that differ by more are named


def on_one_peak(runs: Sequence[Run]) -> tuple[list[Run], list[str]]:
    """Return the runs with MFU against one peak for each kind of device and precision, and notes.

    A device without a data sheet has its peak measured by each run anew. Two measurements differ by several percent,
    so the faster of two runs can have the lower MFU. The largest measurement counts for all of them: a peak is what a
    device can reach. On CPUs it counts for each thread, because the runs may use other numbers of threads. MFU from a
    data sheet stays.

    Returns:
        The runs in their order, and a sentence for each kind of device whose measured peaks differ by over 5 %.
    """
    peaks: dict[tuple, list[float]] = {}
    for run in runs:
        if (share := _measured_share(run)) is not None:
            peaks.setdefault(_kind(run), []).append(share)
    notes = [
        f"MFU: {len(found)} runs measured peaks of {min(found) / 1e9:,.1f} to {max(found) / 1e9:,.1f} GFLOP/s per "
        f"{'thread' if kind[0] == 'cpu' else 'device'} in {kind[2]}; the largest counts for all."
        for kind, found in peaks.items()
        if max(found) > (1 + DIFFERENT_PEAKS) * min(found)
    ]
    return [_with_peak(run, max(peaks[_kind(run)])) if _kind(run) in peaks else run for run in runs], notes


def _kind(run: Run) -> tuple[Any, Any, Any]:
    hardware = run.section("hardware")
    name = hardware.get("gpu_name") or hardware.get("cpu_name")
    return hardware.get("device_type"), name, run.section("training_config").get("precision")


def _threads(run: Run) -> int:
    """Return on how many threads a peak was measured; 1 on a GPU."""
    hardware = run.section("hardware")
    return hardware.get("cpu_threads_per_rank") or 1 if hardware.get("device_type") == "cpu" else 1


def _measured_share(run: Run) -> float | None:
    """Return the measured peak of a GPU or of one thread in FLOP/s; None where the run has none, or a data sheet's."""
    flops = run.section("flops")
    peak = flops.get("peak_flops_per_s_per_device")
    if not run.mfu or not peak or not str(flops.get("peak_source")).startswith("measured"):
        return None
    return peak / _threads(run)


def _with_peak(run: Run, share: float) -> Run:
    own = _measured_share(run)
    if own is None or run.mfu is None or own == share:
        return run
    section = run.section("flops") | {"peak_flops_per_s_per_device": share * _threads(run)}
    return replace(run, mfu=run.mfu * own / share, record=run.record | {"flops": section})
