"""Warn if the step times of a run scatter. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NOISY = 0.1  # p95 above the median by more than this: the machine may not have been quiet
ENOUGH_STEPS = 20  # of fewer the 95th percentile is close to the slowest one, which says little


def words_on_scatter(timing: Mapping[str, Any]) -> str | None:
    """Return a warning for the end of a run; None if its steps do not scatter, or too few were measured.

    Args:
        timing: the section of training_metrics.json.
    """
    above = timing["step_time_p95_above_median"]
    if above is None or above <= NOISY or timing["num_measured_steps"] < ENOUGH_STEPS:
        return None
    return (
        f"its steps scatter: p95 is {1 + above:.2f} times the median, over {1 + NOISY:.2f}, perhaps from other "
        "work on the machine; repeat the run before you quote its times"
    )
