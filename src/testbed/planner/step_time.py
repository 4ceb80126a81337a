"""Predict the time of an optimizer step, what it is made of, and how sure that is. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from testbed.memory_model.job import Job, Machine
from testbed.planner.collectives import Traffic, context_traffic, data_traffic, pipeline_traffic, tensor_traffic
from testbed.planner.constants import Constants
from testbed.planner.fit import nominal_of
from testbed.planner.parts import PARTS
from testbed.planner.rates import DataSheetRates

WITHIN, BETWEEN = "exposed communication within a node", "exposed communication between nodes"
SHOWN = {  # under which name a part is shown; "... links" are named by the link that they cross
    "products": "matrix products",
    "operands": "matrix products",
    "attention": "attention",
    "elementwise": "elementwise",
    "quantization": "elementwise",
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
    """

    parts: Mapping[str, float]
    seconds: float
    low: float
    high: float
    label: str


def step_time(job: Job, machine: Machine, constants: Constants) -> StepTime:
    """Predict one step of a job on a machine."""
    if constants.predictor is not None:
        found = constants.predictor.predict(job, machine)
        return StepTime(found.parts, sum(found.parts.values()), found.low, found.high, constants.label)
    nominal = nominal_of(job, machine, DataSheetRates(machine.device))
    log_time, deviation = constants.fit.predict(nominal)
    half = constants.width * deviation
    by_part = constants.fit.parts(nominal)
    seconds = math.exp(log_time)
    scale = seconds / float(by_part.sum())
    idle = nominal.idle / (nominal.idle + float(nominal.seconds.sum()))
    parts: dict[str, float] = {}
    for part, took in zip(PARTS, by_part, strict=True):
        shown = SHOWN.get(part) or _link_of(part, job, machine)
        parts[shown] = parts.get(shown, 0.0) + float(took) * scale * (1 - idle)
    if idle:
        parts[BUBBLE] = idle * seconds
    kept = {part: took for part, took in parts.items() if took > 0}
    return StepTime(kept, seconds, math.exp(log_time - half), math.exp(log_time + half), constants.label)


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
