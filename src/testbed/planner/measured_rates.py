"""Rates of a machine from its calibration.json, and the factors of its whole steps. No torch.

Times between measured sizes are interpolated where they are smooth: rates (work per second) over the logarithm of the
sizes. On a CPU a rank's work for a message adds to its computing, since the cores do both; what a slow link makes it
wait does not.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from testbed.errors import InputError
from testbed.memory_model.job import Job, Machine
from testbed.memory_model.model_states import FP32
from testbed.planner.calibration import COLLECTIVES, OPERATIONS, Calibration
from testbed.planner.collectives import Traffic, share_sent
from testbed.planner.parts import step_parts
from testbed.planner.rates import Pass, Rates
from testbed.planner.residuals import GROUPS, Residuals, fitted, kind_of

GATHER_OF_TWO = 1.5  # gloo's two ranks both send before they receive: measured over 100 Mbit/s, see docs/planner.md
HEADERS = 1448 / 1514  # share of an Ethernet frame that is payload: IP and TCP headers take the rest
Times = list[tuple[tuple[float, ...], float]]  # size and seconds, the smallest first


class Tables:
    """A calibration's operations for a number of ranks that work at once: that number, or the nearest one."""

    def __init__(self, calibration: Calibration, ranks: int) -> None:
        self.calibration = calibration
        self.operations: dict[str, Times] = {}
        self.collectives = [each for each in calibration.timings if each.operation in COLLECTIVES]
        for name in OPERATIONS:
            found = [each for each in calibration.timings if each.operation == name]
            if not found and name != "copy":  # which is in the device's bandwidth
                raise InputError(f"the calibration has no {name}; make it again with scripts/plan.py --calibrate")
            numbers = {each.ranks for each in found}
            nearest = min(numbers, key=lambda number: (abs(math.log(number / ranks)), number), default=0)
            self.operations[name] = sorted((each.size, each.seconds) for each in found if each.ranks == nearest)

    def product_seconds(self, role: str, *size: float) -> float:
        """Return the seconds of one of a linear layer's products. `size`: m, n, k."""
        rates = [(known, math.prod(known) / seconds) for known, seconds in self.operations[role]]
        return math.prod(size) / interpolated(rates, size)

    def attention_seconds(self, way: str, heads: float, length: float, head_dim: float) -> float:
        """Return the seconds of causal attention of so many heads of all sequences. `way`: forward or backward."""
        rates = [
            ((known, width), count * known**2 * width / seconds)
            for (count, known, width), seconds in self.operations[f"attention_{way}"]
        ]
        return heads * length**2 * head_dim / interpolated(rates, (length, head_dim))

    def seconds_along(self, operation: str, size: float) -> float:
        """Return the seconds of an operation whose size is one number."""
        return along([(known, seconds) for (known,), seconds in self.operations[operation]], size)


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
    """Speed of a calibrated machine, each group of parts times its factor."""

    straggling = 0.0  # in what was measured with all ranks at work

    def __init__(self, tables: Tables, factors: Mapping[str, float]) -> None:
        super().__init__(tables.calibration.device)
        self.tables, self.calibration, self.factors = tables, tables.calibration, factors

    def layer_seconds(self, tokens: float, inputs: float, outputs: float, job: Job) -> tuple[Pass, Pass]:
        factor, product = self.factors["compute"], self.tables.product_seconds
        forward = product("forward", tokens, outputs, inputs)
        backward = product("input_gradient", tokens, inputs, outputs)
        backward += product("weight_gradient", outputs, inputs, tokens)
        return (factor * forward, 0.0), (factor * backward, 0.0)

    def attention_seconds(self, job: Job) -> tuple[float, float]:
        model, factor = job.model, self.factors["compute"]
        heads = job.micro_batch * model.heads / job.layout.tensor / job.layout.context
        size = (heads, model.seq_length, model.head_dim)
        return (
            factor * self.tables.attention_seconds("forward", *size),
            factor * self.tables.attention_seconds("backward", *size),
        )

    def elementwise_seconds(self, job: Job) -> float:
        tensor, along = job.layout.tensor, self.tables.seconds_along
        wide = FP32 * job.tokens_per_pass * job.model.hidden / (tensor if job.layout.sequence_parallel else 1)
        inner = FP32 * job.tokens_per_pass * job.model.ffn / tensor
        seconds = 2 * along("layer_norm", wide) + 2 * along("add", wide) + along("gelu", inner)
        return self.factors["elementwise"] * seconds

    def weights_seconds(self, matrices: float, table: float, job: Job) -> float:
        return 0.0  # in the factors of its whole steps

    def loss_seconds(self, logits: float, job: Job) -> float:
        return self.factors["compute"] * self.tables.seconds_along("cross_entropy", FP32 * logits)

    def optimizer_seconds(self, elements: float, job: Job) -> float:
        return self.factors["optimizer"] * self.tables.seconds_along("update", elements)

    def host_seconds(self, blocks: float, computing: float, job: Job) -> float:
        steps = self.tables.operations["small_step"]
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
        measured = {each.link for each in self.tables.collectives}
        is_measured = not crosses or link.name in measured
        within = calibration.links[0].name if calibration.links else ""
        name = link.name if link.name in measured else within
        rows = [each for each in self.tables.collectives if each.link == name]
        most = max((each.ranks for each in rows), default=0)
        known = sorted(
            (each.size[0], each.seconds) for each in rows if each.ranks == most and each.operation == traffic.kind
        )
        if not known:
            return 0.0, 0.0
        messages = max(1.0, traffic.messages)
        scale = share_sent(traffic.kind, traffic.ranks) / share_sent(traffic.kind, most)
        own = self.factors["communication"] * messages * scale * along(known, traffic.size / messages)
        waiting = 0.0
        if not is_measured:
            rate = link.bytes_per_s * HEADERS
            takes_turns = calibration.backend == "gloo" and traffic.kind == "all_gather" and traffic.ranks == 2
            turns = GATHER_OF_TWO if takes_turns else 1.0
            sent = turns * traffic.moved(calibration.backend) / rate + messages * link.latency_s
            waiting = max(0.0, sent - own)
        return (0.0, own + waiting) if calibration.backend == "nccl" else (own, waiting)


@dataclass(frozen=True)
class Calibrated:
    """A calibration with its fitted residual factors.

    Attributes:
        tables: by the number of ranks at work.
    """

    calibration: Calibration
    residuals: Residuals
    tables: Callable[[int], Tables]

    @classmethod
    def of(cls, calibration: Calibration) -> Calibrated:
        """Fit the factors. InputError where the calibration lacks a table."""
        tables = functools.cache(lambda ranks: Tables(calibration, ranks))

        def grouped(job: Job) -> dict[str, float]:
            rates = MeasuredRates(tables(ranks_at_work(job)), dict.fromkeys(GROUPS, 1.0))
            parts, idle, _ = step_parts(job, calibration.machine(job.layout.devices), rates)
            groups = {**dict.fromkeys(GROUPS, 0.0), "compute": idle}
            for part, seconds in parts.items():
                group = "communication" if part.endswith("links") else part if part in GROUPS else "compute"
                groups[group] += seconds
            return groups

        return cls(calibration, fitted(calibration, grouped), tables)

    def rates(self, job: Job) -> MeasuredRates:
        """Return what a job's ranks reach: as those of the calibrated machine when as many are at work."""
        return MeasuredRates(self.tables(ranks_at_work(job)), self.residuals.of(kind_of(job), job.layout.devices))


def ranks_at_work(job: Job) -> int:
    """Return how many ranks compute at once: one where a pipeline passes one micro batch at a time."""
    layout = job.layout
    return 1 if layout.pipeline == layout.devices and job.schedule is None else layout.devices
