"""Predict the time of an optimizer step, what it is made of, and how sure that is. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from testbed.memory_model.job import Job, Machine
from testbed.planner.collectives import Traffic, context_traffic, data_traffic, pipeline_traffic, tensor_traffic
from testbed.planner.constants import Constants
from testbed.planner.fit import nominal_of
from testbed.planner.parts import PARTS, step_parts
from testbed.planner.rates import DataSheetRates

WITHIN, BETWEEN = "exposed communication within a node", "exposed communication between nodes"
SHOWN = {  # under which name a part is shown; "... links" are named by the link that they cross
    "products": "matrix products",
    "operands": "matrix products",
    "attention": "attention",
    "elementwise": "elementwise",
    "head": "head",
    "optimizer": "optimizer",
    "offload": "offload",
    "stragglers": "stragglers",
    "host": "host",
}
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
    if calibrated is not None:
        by_name, idle, uneven = step_parts(job, machine, calibrated.rates(job))
        taken, seconds = list(by_name.values()), sum(by_name.values()) + idle
        low, high = (end * seconds for end in calibrated.residuals.interval())
        idle_share = idle / seconds
        uneven_share = uneven / seconds
    else:
        nominal = nominal_of(job, machine, DataSheetRates(machine.device))
        log_time, deviation = constants.fit.predict(nominal)
        seconds, half = math.exp(log_time), constants.width * deviation
        low, high = math.exp(log_time - half), math.exp(log_time + half)
        taken = list(constants.fit.parts(nominal))
        whole = nominal.idle + float(nominal.seconds.sum())
        idle_share, uneven_share = nominal.idle / whole, nominal.uneven / whole
    scale = seconds * (1 - idle_share) / sum(taken)
    parts: dict[str, float] = {}
    for part, took in zip(PARTS, taken, strict=True):
        shown = SHOWN.get(part) or _link_of(part, job, machine)
        parts[shown] = parts.get(shown, 0.0) + float(took) * scale
    parts[BUBBLE] = idle_share * seconds
    kept = {part: took for part, took in parts.items() if took > 0}
    return StepTime(kept, seconds, low, high, constants.label, uneven_share * seconds)


def _link_of(part: str, job: Job, machine: Machine) -> str:
    """Return the link that the ranks of an axis reach each other by."""
    blocks = job.model.layers / job.layout.pipeline
    traffic: list[Traffic] = {
        "tensor links": lambda: tensor_traffic(job, blocks),
        "context links": lambda: context_traffic(job, blocks),
        "pipeline links": lambda: pipeline_traffic(job),
        "data links": lambda: data_traffic(job, blocks),
    }[part]()
    return BETWEEN if any(one.crosses_nodes(machine) for one in traffic) else WITHIN
