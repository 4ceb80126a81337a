"""Predict the configurations of a race before they run. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from testbed.config.settings import RunSettings
from testbed.memory_model.memory import fits, memory_of, needs
from testbed.planner.automatic import job_on
from testbed.planner.constants import Constants
from testbed.planner.machines import as_measured, machine_here
from testbed.planner.step_time import step_time
from testbed.sweep.plan import Cell

GIB = 2**30


@dataclass(frozen=True)
class Prediction:
    """Seconds of an optimizer step with a 90 % interval.

    `is_scored`: the interval is of this kind of device. One without is an order to race in, and excludes nothing.
    """

    seconds: float
    low: float
    high: float
    label: str  # "calibrated ..." or "uncalibrated ..."
    does_not_fit: str | None = None  # why the memory does not suffice
    is_scored: bool = True


def predictions_of(
    cells: Sequence[Cell], settings: Mapping[str, RunSettings], constants: Constants
) -> dict[str, Prediction]:
    """Return the plan's prediction of each configuration on this computer, by its name.

    Raises:
        InputError: the planner does not know the GPU.
    """
    found = {}
    for cell in cells:
        machine = as_measured(machine_here(cell.ranks, None, None), constants.calibration)
        job = job_on(settings[cell.name], machine)
        time, memory, device = step_time(job, machine, constants), memory_of(job), machine.device
        lack = None
        if not fits(memory, device):
            lack = f"needs {needs(memory, device) / GIB:.1f} GiB of {device.memory_bytes / GIB:.1f}"
        # the published runs, which widths without a calibration come from, are of GPUs
        is_scored = constants.predictor is not None or device.kind == "cuda"
        found[cell.name] = Prediction(time.seconds, time.low, time.high, time.label, lack, is_scored)
    return found
