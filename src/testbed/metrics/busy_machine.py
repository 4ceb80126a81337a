"""Tell from a metrics file whether other work on the machine slowed the run. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NOISY = 0.1  # p95 above the median by more than this: the machine may not have been quiet
ENOUGH_STEPS = 20  # of fewer the 95th percentile is close to the slowest one, which says little
# Ranks that wait for each other use fewer cores than they have: quiet ones of fsdp used 75 % in docs/results/sweep.
LEAST_USED = 0.7


def signs_of_other_work(metrics: Mapping[str, Any]) -> list[str]:
    """Return what a run's own file says of a busy machine, in words for the run's end; empty if nothing.

    Steps that scatter show work that comes and goes. Work that stays slows every step alike: then the ranks used fewer
    cores than they have threads for.
    """
    timing = _section(metrics, "timing")
    if metrics.get("schema_version") != "2.2" or timing["num_measured_steps"] < ENOUGH_STEPS:
        return []
    found = []
    above = timing.get("step_time_p95_above_median")
    if above is not None and above > NOISY:
        found.append(
            f"its steps scatter: p95 is {1 + above:.2f} times the median, over {1 + NOISY:.2f}, perhaps from other "
            "work on the machine; repeat the run before you quote its times"
        )
    used = cores_used(metrics)
    if used is not None and used[0] < LEAST_USED * used[1]:
        found.append(
            f"it used {used[0]:.1f} of its {used[1]} cores: other work on the machine took the rest, or a step is too "
            "small for so many threads; repeat the run on a quiet machine before you quote its times"
        )
    return found


def cores_used(metrics: Mapping[str, Any]) -> tuple[float, int] | None:
    """Return the cores that all ranks used on average, and those that they have threads for.

    None on GPUs, where nothing was sampled, and of pipelines, whose stages wait for each other.
    """
    hardware, config = _section(metrics, "hardware"), _section(metrics, "training_config")
    threads = hardware.get("cpu_threads_per_rank")
    waits_by_design = _section(config, "mesh").get("pipeline", 1) > 1
    if hardware.get("device_type") != "cpu" or not threads or waits_by_design:
        return None
    rows = _section(metrics, "utilization").get("per_rank") or []
    percents = [row.get("cpu_percent_mean") for row in rows]
    if not percents or None in percents:
        return None
    return sum(percents) / 100, threads * len(percents)


def _section(metrics: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a part of the file that is an object; empty where it is none, as an earlier file may hold anything."""
    found = metrics.get(name)
    return found if isinstance(found, dict) else {}
