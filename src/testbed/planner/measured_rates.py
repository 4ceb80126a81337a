"""Rates of a machine from its calibration.json, and the factors of its whole steps. No torch.

Times between measured sizes are interpolated where they are smooth: rates (work per second) over the logarithm of the
sizes. On a CPU a rank's work for a message adds to its computing, since the cores do both; what a slow link makes it
wait does not.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from testbed.errors import InputError
from testbed.memory_model.job import Job, Machine
from testbed.planner.calibration import Calibration
from testbed.planner.collectives import Traffic, share_sent
from testbed.planner.parts import Pass, step_parts
from testbed.planner.residuals import GROUPS, Residuals, fitted, kind_of

FP32 = 4
FORWARD, BACKWARD = ("forward",), ("input_gradient", "weight_gradient")
ELEMENTWISE = (("layer_norm", 2), ("add", 2))  # kernels on the residual stream, in one block
GATHER_OF_TWO = 1.5  # gloo's two ranks both send before they receive: measured over 100 Mbit/s, see docs/planner.md
HEADERS = 1448 / 1514  # share of an Ethernet frame that is payload: IP and TCP headers take the rest
GROUP_OF = {
    "products": "compute",
    "attention": "compute",
    "head": "compute",
    "elementwise": "elementwise",
    "optimizer": "optimizer",
    "host": "host",
    "tensor links": "communication",
    "data links": "communication",
    "pipeline links": "communication",
    "context links": "communication",
}
Entry = TypeVar("Entry")


class Tables:
    """A calibration's tables for a number of ranks that work at once: that number, or the nearest one."""

    def __init__(self, calibration: Calibration, ranks: int) -> None:
        self.calibration = calibration
        self.products = _at(calibration.products, ranks)
        self.attention = _at(calibration.attention, ranks)
        self.small_steps = sorted(_at(calibration.small_steps, ranks), key=lambda step: step.layers)
        self.updates = sorted((each.elements, each.seconds) for each in _at(calibration.updates, ranks))
        self.moving: dict[str, list[tuple[float, float]]] = {}
        for each in sorted(_at(calibration.moving, ranks), key=lambda each: each.num_bytes):
            self.moving.setdefault(each.kind, []).append((each.num_bytes, each.seconds))
        tables = {"products": self.products, "attention": self.attention, "updates": self.updates}
        tables |= {kind: self.moving.get(kind, []) for kind in ("layer_norm", "gelu", "add", "cross_entropy")}
        if empty := [name for name, rows in {**tables, "small_steps": self.small_steps}.items() if not rows]:
            raise InputError(f"the calibration has no {empty[0]}; make it again with scripts/plan.py --calibrate")

    def layer_seconds(self, tokens: float, inputs: float, outputs: float, roles: Sequence[str]) -> float:
        """Return the seconds of a linear layer in some of its products."""
        sizes = {
            "forward": (tokens, outputs, inputs),
            "input_gradient": (tokens, inputs, outputs),
            "weight_gradient": (outputs, inputs, tokens),
        }
        work = tokens * inputs * outputs
        total = 0.0
        for role in roles:
            rows = [((p.m, p.n, p.k), p.m * p.n * p.k / p.seconds) for p in self.products if p.role == role]
            total += work / interpolated(rows, sizes[role])
        return total

    def attention_seconds(self, heads: float, length: float, head_dim: float, name: str) -> float:
        """Return the seconds of causal attention of so many heads of all sequences. `name`: of the measured time."""
        rows = [
            ((a.seq_length, a.head_dim), a.batch * a.heads * a.seq_length**2 * a.head_dim / getattr(a, name))
            for a in self.attention
        ]
        return heads * length**2 * head_dim / interpolated(rows, (length, head_dim))

    def moving_seconds(self, kind: str, elements: float) -> float:
        """Return the seconds of an elementwise kernel on so many numbers, both passes."""
        return along(self.moving[kind], FP32 * elements)


def _at(entries: Sequence[Entry], ranks: int) -> list[Entry]:
    """Return the entries measured with that many ranks at once, or with the nearest number."""
    numbers = {one.ranks for one in entries}  # type: ignore[attr-defined]
    nearest = min(numbers, key=lambda number: (abs(math.log(number / ranks)), number), default=0)
    return [one for one in entries if one.ranks == nearest]  # type: ignore[attr-defined]


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
    if size <= known[0][0]:
        return known[0][1]
    for (low, low_s), (high, high_s) in itertools.pairwise(known):
        if size <= high:
            return low_s + (size - low) / (high - low) * (high_s - low_s)
    return known[-1][1] * size / known[-1][0]


class MeasuredRates:
    """`Rates` of a calibrated machine, each group of parts times its factor."""

    straggling = 0.0  # in what was measured with all ranks at work

    def __init__(self, tables: Tables, factors: Mapping[str, float]) -> None:
        self.tables, self.calibration, self.factors = tables, tables.calibration, factors

    def layer_seconds(self, tokens: float, inputs: float, outputs: float, job: Job) -> tuple[Pass, Pass]:
        factor = self.factors["compute"]
        forward, backward = (self.tables.layer_seconds(tokens, inputs, outputs, roles) for roles in (FORWARD, BACKWARD))
        return (factor * forward, 0.0), (factor * backward, 0.0)

    def attention_seconds(self, job: Job) -> tuple[float, float]:
        model = job.model
        heads, factor = job.micro_batch * model.heads / job.layout.tensor / job.layout.context, self.factors["compute"]
        forward, backward = (
            self.tables.attention_seconds(heads, model.seq_length, model.head_dim, name)
            for name in ("forward_s", "backward_s")
        )
        return factor * forward, factor * backward

    def elementwise_seconds(self, job: Job) -> float:
        model, tensor = job.model, job.layout.tensor
        tokens = job.micro_batch * model.seq_length / job.layout.context
        wide = tokens * model.hidden / (tensor if job.layout.sequence_parallel else 1)
        seconds = sum(count * self.tables.moving_seconds(kind, wide) for kind, count in ELEMENTWISE)
        return self.factors["elementwise"] * (seconds + self.tables.moving_seconds("gelu", tokens * model.ffn / tensor))

    def weights_seconds(self, matrices: float, table: float, job: Job) -> float:
        return 0.0  # in the factors of its whole steps

    def loss_seconds(self, logits: float, job: Job) -> float:
        return self.factors["compute"] * self.tables.moving_seconds("cross_entropy", logits)

    def optimizer_seconds(self, elements: float, job: Job) -> float:
        return self.factors["optimizer"] * along(self.tables.updates, elements)

    def host_seconds(self, blocks: float, computing: float, job: Job) -> float:
        few, many = self.tables.small_steps[0], self.tables.small_steps[-1]
        of_block = max(many.seconds - few.seconds, 0.0) / max(many.layers - few.layers, 1)
        of_rest = max(few.seconds - few.layers * of_block, 0.0)
        seconds = blocks * of_block + of_rest
        runs_ahead = self.calibration.device.kind == "cuda"
        return self.factors["host"] * (max(0.0, seconds - computing) if runs_ahead else seconds)

    def window(self, traffic: Traffic) -> float:
        if self.calibration.backend == "nccl":
            return self.calibration.overlap
        return 1.0 if traffic.in_background else 0.0

    def traffic_seconds(self, traffic: Traffic, machine: Machine, computing: float) -> tuple[float, float]:
        calibration, crosses = self.calibration, traffic.crosses_nodes(machine)
        link = machine.between_nodes if crosses else machine.within_node
        measured = {each.link for each in calibration.collectives}
        is_measured = not crosses or link.name in measured
        within = calibration.links[0].name if calibration.links else ""
        name = link.name if link.name in measured else within
        rows = [each for each in calibration.collectives if each.link == name]
        most = max((each.ranks for each in rows), default=0)
        known = sorted(
            (each.num_bytes, each.seconds) for each in rows if each.ranks == most and each.kind == traffic.kind
        )
        if not known:
            return 0.0, 0.0
        messages = max(1.0, traffic.messages)
        scale = share_sent(traffic.kind, traffic.ranks) / share_sent(traffic.kind, most)
        own = self.factors["communication"] * messages * scale * along(known, traffic.size / messages)
        waiting = 0.0
        if not is_measured:  # a token bucket fills while a rank computes, and lets as much through at once
            rate = link.bytes_per_s * HEADERS
            gaps = messages if traffic.window else 1.0
            free = gaps * min(link.burst_bytes / rate, computing / gaps)
            takes_turns = calibration.backend == "gloo" and traffic.kind == "all_gather" and traffic.ranks == 2
            turns = GATHER_OF_TWO if takes_turns else 1.0
            sent = turns * traffic.moved(calibration.backend) / rate + messages * link.latency_s
            waiting = max(0.0, sent - free - own)
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
                if part in GROUP_OF:
                    groups[GROUP_OF[part]] += seconds
            return groups

        return cls(calibration, fitted(calibration, grouped), tables)

    def rates(self, job: Job) -> MeasuredRates:
        """Return what a job's ranks reach: as those of the calibrated machine when as many are at work."""
        return MeasuredRates(self.tables(ranks_at_work(job)), self.residuals.of(kind_of(job), job.layout.devices))


def ranks_at_work(job: Job) -> int:
    """Return how many ranks compute at once: one where a pipeline passes one micro batch at a time."""
    layout = job.layout
    return 1 if layout.pipeline == layout.devices and job.schedule is None else layout.devices
