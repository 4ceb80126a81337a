"""Predict the time of an optimizer step, what it is made of, and how sure that is. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from testbed.memory_model.job import Job, Machine
from testbed.planner.constants import Constants
from testbed.planner.fit import nominal_of
from testbed.planner.parts import PARTS, step_parts
from testbed.planner.rates import Rates

WITHIN, BETWEEN = "exposed communication within a node", "exposed communication between nodes"
BUBBLE = "bubble"


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step of the whole job.

    Attributes:
        parts: seconds by part; they add up to `seconds`.
        low, high: the 90 % interval.
        label: "calibrated ..." or "uncalibrated ...".
        uneven: seconds, part of `parts`, that the slowest stage of a pipeline computes beyond the mean of all.
    """

    parts: Mapping[str, float]
    seconds: float
    low: float
    high: float
    label: str
    uneven: float = 0.0


def step_time(job: Job, machine: Machine, constants: Constants) -> StepTime:
    """Predict one step of a job on a machine."""
    calibrated = constants.calibrated
    rates = Rates(machine.device) if calibrated is None else calibrated.rates(job)
    by_part, idle, uneven = step_parts(job, machine, rates)
    whole = sum(by_part.values()) + idle
    if calibrated is not None:
        taken, seconds = np.array(list(by_part.values())), whole
        low, high = (end * seconds for end in calibrated.residuals.interval())
    else:
        nominal = nominal_of(by_part, idle, job, machine)
        taken = constants.fit.parts(nominal)
        log_time, deviation = constants.fit.predict(nominal)
        seconds, half = math.exp(log_time), constants.width * deviation
        low, high = math.exp(log_time - half), math.exp(log_time + half)
    bubble = seconds * idle / whole
    taken = taken * ((seconds - bubble) / taken.sum())
    parts: dict[str, float] = {}
    shown = {"operands": "matrix products", **_links(job, machine)}
    for part, took in zip(PARTS, taken, strict=True):
        name = shown.get(part, part)
        parts[name] = parts.get(name, 0.0) + float(took)
    parts[BUBBLE] = bubble
    kept = {part: took for part, took in parts.items() if took > 0}
    return StepTime(kept, seconds, low, high, constants.label, seconds * uneven / whole)


def _links(job: Job, machine: Machine) -> dict[str, str]:
    """Return for each axis of ranks the link that the farthest of them reach each other by."""
    layout = job.layout
    near = layout.tensor * layout.context
    reach = {"tensor links": layout.tensor, "context links": near, "data links": near * layout.data}
    reach["pipeline links"] = layout.devices
    return {part: BETWEEN if devices > machine.joined else WITHIN for part, devices in reach.items()}
