"""Rates of a machine from its calibration.json, and factors: what whole steps take over their parts' sum. No torch.

Times between measured sizes are interpolated where they are smooth: rates (work per second) over the logarithm of the
sizes. On a CPU a rank's work for a message adds to its computing, since the cores do both; what a slow link makes it
wait does not.

A group of parts has one factor that all run types on as many ranks share, and one of each run type on top (fit.py):
four steps alone cannot fix five numbers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from testbed.config.run_types import REFERENCE
from testbed.errors import InputError
from testbed.io import holding_together
from testbed.memory_model.devices import Device
from testbed.memory_model.job import Job, Machine
from testbed.memory_model.model_states import FP32
from testbed.planner.calibration import (
    CALIBRATION,
    COLLECTIVES,
    NAME,
    OPERATIONS,
    Calibration,
    check_machine,
    facts_here,
    read_calibration,
)
from testbed.planner.collectives import Traffic
from testbed.planner.fit import Factor, Fit, Measured, Nominal, conformal_quantile
from testbed.planner.rates import Pass, Rates
from testbed.planner.step_time import BETWEEN, WITHIN, Constants, published_constants, step_parts

GATHER_OF_TWO = 1.5  # gloo's two ranks both send before they receive: measured over 100 Mbit/s, see docs/planner.md
HEADERS = 1448 / 1514  # share of an Ethernet frame that is payload: IP and TCP headers take the rest
Times = list[tuple[tuple[float, ...], float]]  # size and seconds, the smallest first
# Group of a step's parts -> its factor before any whole step was seen, and the deviations of what is shared, and of a
# run type's own. The host's work is partly in the measured operations, which were called by it too.
GROUPS = {
    "compute": (1.1, 0.15, 0.08),
    "elementwise": (1.1, 0.3, 0.2),
    "optimizer": (1.0, 0.3, 0.5),
    "host": (0.7, 1.0, 1.0),
    "communication": (1.0, 0.4, 0.5),
}
STEP_NOISE = 0.03  # relative error of a whole step's median
FEWEST_FOR_INTERVAL, ANY_INTERVAL = 10, (0.7, 1.4)  # errors, and what is said with fewer


def interpolated(known: Sequence[tuple[tuple[float, ...], float]], size: tuple[float, ...]) -> float:
    """Return a rate at a size: the mean of logarithms, weighed by 1 / distance^4 of the sizes' logarithms."""
    weights = values = 0.0
    for at, value in known:
        distance = sum(math.log(one / max(other, 1e-9)) ** 2 for one, other in zip(at, size, strict=True))
        weight = (distance + 1e-6) ** -2
        weights += weight
        values += weight * math.log(value)
    return math.exp(values / weights)


def along(known: Sequence[tuple[float, float]], size: float) -> float:
    """Return seconds at a size on the line through measured (size, seconds); in proportion beyond the last.

    Below the first it is the first's: a call costs something however little it does.
    """
    sizes, seconds = zip(*known, strict=True)
    return float(np.interp(size, sizes, seconds)) * max(1.0, size / sizes[-1])


class MeasuredRates(Rates):
    """Speed of a calibrated machine where so many ranks work at once, or the nearest number that was measured.

    `factors`: of each group of parts.
    """

    straggling = 0.0  # in what was measured with all ranks at work

    def __init__(self, calibration: Calibration, ranks: int, factors: Mapping[str, float]) -> None:
        super().__init__(calibration.device)
        self.calibration, self.factors = calibration, factors
        self.operations: dict[str, Times] = {}
        self.collectives = [each for each in calibration.timings if each.operation in COLLECTIVES]
        for name in OPERATIONS:
            found = [each for each in calibration.timings if each.operation == name]
            if not found and name != "copy":  # which is in the device's bandwidth
                raise InputError(f"the calibration has no {name}; make it again with scripts/plan.py --calibrate")
            numbers = {each.ranks for each in found}
            nearest = min(numbers, key=lambda number: (abs(math.log(number / ranks)), number), default=0)
            self.operations[name] = sorted((each.size, each.seconds) for each in found if each.ranks == nearest)

    def _product(self, role: str, *size: float) -> float:
        """Return the seconds of one of a linear layer's products. `size`: m, n, k."""
        rates = [(known, math.prod(known) / seconds) for known, seconds in self.operations[role]]
        return self.factors["compute"] * math.prod(size) / interpolated(rates, size)

    def _along(self, operation: str, size: float) -> float:
        """Return the seconds of an operation whose size is one number."""
        return along([(known, seconds) for (known,), seconds in self.operations[operation]], size)

    def layer_seconds(self, tokens: float, inputs: float, outputs: float, job: Job) -> tuple[Pass, Pass]:
        forward = self._product("forward", tokens, outputs, inputs)
        backward = self._product("input_gradient", tokens, inputs, outputs)
        backward += self._product("weight_gradient", outputs, inputs, tokens)
        return (forward, 0.0), (backward, 0.0)

    def attention_seconds(self, job: Job) -> tuple[float, float]:
        model, factor = job.model, self.factors["compute"]
        heads = job.micro_batch * model.heads / job.layout.tensor / job.layout.context
        work, size = heads * model.seq_length**2 * model.head_dim, (model.seq_length, model.head_dim)
        forward, backward = (
            [
                ((length, width), count * length**2 * width / took)
                for (count, length, width), took in self.operations[way]
            ]
            for way in ("attention_forward", "attention_backward")
        )
        return factor * work / interpolated(forward, size), factor * work / interpolated(backward, size)

    def elementwise_seconds(self, job: Job) -> float:
        tensor, along = job.layout.tensor, self._along
        wide = FP32 * job.tokens_per_pass * job.model.hidden / (tensor if job.layout.sequence_parallel else 1)
        inner = FP32 * job.tokens_per_pass * job.model.ffn / tensor
        seconds = 2 * along("layer_norm", wide) + 2 * along("add", wide) + along("gelu", inner)
        return self.factors["elementwise"] * seconds

    def weights_seconds(self, matrices: float, table: float, job: Job) -> float:
        return 0.0  # in the factors of its whole steps

    def loss_seconds(self, logits: float, job: Job) -> float:
        return self.factors["compute"] * self._along("cross_entropy", FP32 * logits)

    def optimizer_seconds(self, elements: float, job: Job) -> float:
        return self.factors["optimizer"] * self._along("update", elements)

    def host_seconds(self, blocks: float, computing: float, job: Job) -> float:
        steps = self.operations["small_step"]
        ((few,), few_s), ((many,), many_s) = steps[0], steps[-1]
        of_block = max(many_s - few_s, 0.0) / max(many - few, 1)
        seconds = blocks * of_block + max(few_s - few * of_block, 0.0)
        runs_ahead = self.calibration.device.kind == "cuda"
        return self.factors["host"] * (max(0.0, seconds - computing) if runs_ahead else seconds)

    def window(self, traffic: Traffic) -> float:
        if self.calibration.backend == "nccl":
            return self.calibration.overlap
        return 1.0 if traffic.in_background else 0.0

    def traffic_seconds(self, traffic: Traffic, machine: Machine) -> tuple[float, float]:
        calibration, crosses = self.calibration, traffic.crosses_nodes(machine)
        link = machine.between_nodes if crosses else machine.within_node
        measured = {each.link for each in self.collectives}
        is_measured = not crosses or link.name in measured
        within = calibration.links[0].name if calibration.links else ""
        name = link.name if link.name in measured else within
        rows = [each for each in self.collectives if each.link == name]
        most = max((each.ranks for each in rows), default=0)
        known = sorted(
            (each.size[0], each.seconds) for each in rows if each.ranks == most and each.operation == traffic.kind
        )
        if not known:
            return 0.0, 0.0
        messages = max(1.0, traffic.messages)
        scale = traffic.moved("gloo") / replace(traffic, ranks=most).moved("gloo")
        own = self.factors["communication"] * messages * scale * along(known, traffic.size / messages)
        waiting = 0.0
        if not is_measured:
            rate = link.bytes_per_s * HEADERS
            takes_turns = calibration.backend == "gloo" and traffic.kind == "all_gather" and traffic.ranks == 2
            turns = GATHER_OF_TWO if takes_turns else 1.0
            sent = turns * traffic.moved(calibration.backend) / rate + messages * link.latency_s
            waiting = max(0.0, sent - own)
        return (0.0, own + waiting) if calibration.backend == "nccl" else (own, waiting)


class Calibrated(Constants):
    """What a calibration measured, corrected by the factors of its whole steps.

    Attributes:
        errors: log(measured / predicted) of whole steps that were predicted without themselves.
    """

    def __init__(self, calibration: Calibration, name: str = NAME) -> None:
        """Fit the factors. InputError where the calibration lacks a table."""
        self.calibration: Calibration = calibration
        self.measured = functools.cache(self._measured)
        self.numbers: dict[str, set[int]] = {}  # of ranks, by kind of run
        rows = []
        for step in calibration.steps:
            kind, ranks = kind_of(step.job), step.job.layout.devices
            self.numbers.setdefault(kind, set()).add(ranks)
            nominal = _nominal(self._grouped(step.job), kind, ranks)
            noise = STEP_NOISE + max(step.high - step.low, 0.0) / step.seconds / 2
            rows.append(Measured(nominal, math.log(step.seconds), noise))
        fit = Fit(rows, tuple(GROUPS))
        super().__init__(fit, 0.0, f"calibrated with {name}, {len(rows)} whole steps")
        self.errors = tuple(map(float, fit.left_out()))

    def _grouped(self, job: Job) -> dict[str, float]:
        """Return the seconds of a job by group, before any factor."""
        rates = MeasuredRates(self.calibration, ranks_at_work(job), dict.fromkeys(GROUPS, 1.0))
        parts, idle, _ = step_parts(job, self.calibration.machine(job.layout.devices), rates)
        groups = {**dict.fromkeys(GROUPS, 0.0), "compute": idle}
        for part, seconds in parts.items():
            groups["communication" if part in (WITHIN, BETWEEN) else part if part in GROUPS else "compute"] += seconds
        return groups

    def rates(self, job: Job, device: Device) -> Rates:
        """Return what a job's ranks reach: as those of the calibrated machine when as many are at work."""
        return self.measured(ranks_at_work(job), kind_of(job), job.layout.devices)

    def _measured(self, at_work: int, kind: str, ranks: int) -> MeasuredRates:
        return MeasuredRates(self.calibration, at_work, self.factors(kind, ranks))

    def factors(self, kind: str, ranks: int) -> dict[str, float]:
        """Return a kind's factors by group, on the nearest number of ranks; the plain program's where it has none."""
        kind, numbers = (kind, self.numbers[kind]) if kind in self.numbers else (REFERENCE, {1})
        nearest = min(sorted(numbers), key=lambda number: abs(math.log(number / ranks)))
        seconds = self.fit.parts(_nominal(dict.fromkeys(GROUPS, 1.0), kind, nearest))
        return dict(zip(GROUPS, map(float, seconds), strict=True))

    def corrected(
        self, parts: Mapping[str, float], idle: float, job: Job, machine: Machine
    ) -> tuple[np.ndarray, float, float, float]:
        whole, (low, high) = sum(parts.values()) + idle, interval_of(self.errors)
        return np.array(list(parts.values())), whole, low * whole, high * whole


def interval_of(errors: Sequence[float]) -> tuple[float, float]:
    """Return factors to the ends of the 90 % interval: conformal (Vovk et al. 2005), the errors pooled."""
    if len(errors) < FEWEST_FOR_INTERVAL:
        return ANY_INTERVAL
    half = conformal_quantile([abs(error) for error in errors])
    return math.exp(-half), math.exp(half)


def kind_of(job: Job) -> str:
    """Return the run type, with what else makes it another program: ZeRO's stage, the schedule."""
    if job.sends == "zero":
        return f"{job.run_type} {job.layout.zero_stage}"
    return f"{job.run_type} {job.schedule}" if job.schedule else str(job.run_type)


def _nominal(seconds: dict[str, float], kind: str, ranks: int) -> Nominal:
    """Return a step's groups, and the factors that concern them."""
    shared = [Factor((group,), f"{ranks} ranks", spread) for group, (_, spread, _) in GROUPS.items()]
    own = [Factor((group,), f"{kind} on {ranks}", spread) for group, (*_, spread) in GROUPS.items()]
    usual = np.array([mean * seconds[group] for group, (mean, *_) in GROUPS.items()])
    return Nominal(usual, (*shared, *own))


def ranks_at_work(job: Job) -> int:
    """Return how many ranks compute at once: one where a pipeline passes one micro batch at a time."""
    layout = job.layout
    return 1 if layout.pipeline == layout.devices and job.schedule is None else layout.devices


def constants_here(path: Path | None = None, facts: Mapping[str, Any] | None = None) -> Constants:
    """Return the constants of this machine: its calibration where there is one.

    Args:
        path: a file that was named (default: `CALIBRATION`, if it is there).
        facts: of this machine, as for `check_machine`.

    Raises:
        InputError: the file is not a calibration, or another machine's.
    """
    if path is None and not CALIBRATION.is_file():
        return published_constants()
    path = path or CALIBRATION
    calibration = read_calibration(path)
    check_machine(calibration, facts or facts_here(), path)
    with holding_together(f"--calibration {path}"):
        return Calibrated(calibration, path.name)
