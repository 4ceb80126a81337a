"""What the plan says of the configurations of a race, before any of them has run. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from testbed.config.settings import RunSettings
from testbed.sweep.plan import Cell
from testbed.sweep.request import Machine


@dataclass(frozen=True)
class Prediction:
    """Seconds of an optimizer step with a 90 % interval."""

    seconds: float
    low: float
    high: float
    label: str  # "calibrated ..." or "uncalibrated ..."
    does_not_fit: str | None = None  # why the memory does not suffice


def predictions_of(
    cells: Sequence[Cell], settings: Mapping[str, RunSettings], machine: Machine
) -> dict[str, Prediction]:
    """Return the plan's prediction of each configuration by its name; without a plan none.

    The one place where the race asks the planner.
    """
    return {}
