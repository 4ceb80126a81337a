"""Predict the time of an optimizer step from what was measured of the machine. No torch.

A step is the sum of its measured operations, each group times the residual factor of its run type, and the messages'
work and waiting. On a CPU a rank's own work for a message adds to its computing, since the cores do both; what a slow
link makes it wait does not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from testbed.model.shape import ModelShape
from testbed.planner.calibration import Calibration
from testbed.planner.devices import Link
from testbed.planner.job import Job, Machine
from testbed.planner.measured_compute import Tables, along, block_parts, embedding_s, head_s
from testbed.planner.measured_traffic import Collectives, messages, traffic_s
from testbed.planner.model_states import elements_held
from testbed.planner.residuals import Residuals, fitted, kind_of
from testbed.planner.stages import Stage, balanced_stages

WITHIN, BETWEEN = "exposed communication within a node", "exposed communication between nodes"
UNLIMITED = Link(name="as measured", latency_s=0.0, bytes_per_s=math.inf)
ZERO_BUBBLE_LEFT = 1 / 3  # of 1F1B's bubble: weight gradients fill the rest (Qi et al. 2024, arXiv:2401.10241)


@dataclass(frozen=True)
class Prediction:
    """Seconds by part; the 90 % interval of their sum."""

    parts: Mapping[str, float]
    low: float
    high: float


@dataclass(frozen=True)
class Predictor:
    """A calibration with its fitted residual factors."""

    calibration: Calibration
    residuals: Residuals

    @classmethod
    def of(cls, calibration: Calibration) -> Predictor:
        """Fit the factors. InputError where the calibration lacks a table."""

        def grouped(job: Job) -> dict[str, float]:
            parts = _parts(job, calibration, job.layout.devices)
            work_s, _ = _traffic(job, calibration, UNLIMITED, _within(calibration), 0.0)
            return {**_grouped(parts), "communication": work_s}

        return cls(calibration, fitted(calibration, grouped))

    def predict(self, job: Job, machine: Machine) -> Prediction:
        """Return the step of a job on all devices of a machine: this one, or several of them joined by a link."""
        factors = self.residuals.of(kind_of(job), job.layout.devices)
        found = _parts(job, self.calibration, min(job.layout.devices, machine.per_node))
        parts = {name: factors[GROUP_OF[name]] * seconds for name, seconds in found.items()}
        crosses = job.layout.devices > machine.per_node
        names = {each.link for each in self.calibration.collectives}
        is_measured = crosses and machine.between_nodes.name in names
        where = machine.between_nodes.name if is_measured else _within(self.calibration)
        link = machine.between_nodes if crosses and not is_measured else UNLIMITED
        work_s, wait_s = _traffic(job, self.calibration, link, where, sum(parts.values()))
        parts[BETWEEN if crosses else WITHIN] = factors["communication"] * work_s + wait_s
        seconds = sum(parts.values())
        low, high = self.residuals.interval()
        return Prediction({name: took for name, took in parts.items() if took}, low * seconds, high * seconds)


def _within(calibration: Calibration) -> str:
    return calibration.links[0].name if calibration.links else ""


GROUP_OF = {
    "matrix products": "compute",
    "attention": "compute",
    "head": "compute",
    "bubble": "compute",
    "elementwise": "elementwise",
    "optimizer": "optimizer",
    "host": "host",
}


def _grouped(parts: Mapping[str, float]) -> dict[str, float]:
    groups = dict.fromkeys(GROUP_OF.values(), 0.0)
    for name, seconds in parts.items():
        groups[GROUP_OF[name]] += seconds
    return groups


def _parts(job: Job, calibration: Calibration, ranks: int) -> dict[str, float]:
    """Return the seconds of a step's parts on the rank that has most to do, before any factor; no communication.

    Args:
        ranks: of one node, which share its memory.
    """
    works_alone = job.layout.pipeline == ranks and job.run_type == "model_parallel"
    tables = Tables(calibration, 1 if works_alone else ranks)
    stages = _stages(job)
    of_stage = [_stage_parts(job, tables, stage) for stage in stages]
    by_rank = [
        _sum(of_stage[number] for number in range(len(stages)) if _holder(job, number, len(stages)) == rank)
        for rank in range(job.layout.pipeline)
    ]
    slowest = max(by_rank, key=lambda each: sum(each.values()))
    parts = {name: job.accumulation * seconds for name, seconds in slowest.items()}
    waits = sum(sum(each.values()) for each in by_rank) - sum(slowest.values())
    parts["bubble"] = waits * _rounds_of_waiting(job)
    parts["optimizer"] = along(tables.updates, _updated(job, stages))
    return parts


def _stages(job: Job) -> list[Stage]:
    model, number = job.model, job.layout.pipeline * job.layout.virtual_stages
    if number == 1:
        return [Stage(range(model.layers), embeds=True, predicts=True)]
    shape = ModelShape(model.layers, model.heads, model.hidden, model.vocab, model.seq_length)
    return balanced_stages(shape, model.seq_length, number)


def _holder(job: Job, number: int, stages: int) -> int:
    """Return the pipeline rank of a stage; the zero-bubble schedule's second round runs back."""
    ranks = job.layout.pipeline
    return stages - 1 - number if job.schedule == "zero_bubble" and number >= ranks else number % ranks


def _stage_parts(job: Job, tables: Tables, stage: Stage) -> dict[str, float]:
    """Return the seconds of one micro batch in one stage, forward and backward."""
    of_block, (host_of_block, host_of_rest) = block_parts(job, tables), tables.host_s()
    parts = {name: len(stage.blocks) * seconds for name, seconds in of_block.items()}
    parts["elementwise"] += embedding_s(job, tables) * stage.embeds
    parts["head"] = head_s(job, tables) * stage.predicts
    parts["host"] = len(stage.blocks) * host_of_block + host_of_rest
    return parts


def _rounds_of_waiting(job: Job) -> float:
    """Return how often the slowest rank waits for all others to have had a micro batch."""
    if job.run_type == "model_parallel":
        return job.accumulation
    left = ZERO_BUBBLE_LEFT if job.schedule == "zero_bubble" else 1.0
    return left / job.layout.virtual_stages


def _updated(job: Job, stages: Sequence[Stage]) -> float:
    """Return the parameters that the fullest rank updates."""
    layout, model = job.layout, job.model
    if layout.pipeline > 1:
        shape = ModelShape(model.layers, model.heads, model.hidden, model.vocab, model.seq_length)
        held = [
            [stage for number, stage in enumerate(stages) if _holder(job, number, len(stages)) == rank]
            for rank in range(layout.pipeline)
        ]
        return max(elements_held(shape, layout.tensor, each) for each in held)
    sharded = layout.shard if job.run_type == "fsdp" else layout.data if layout.zero_stage else 1
    return model.parameters / layout.tensor / sharded


def _traffic(job: Job, calibration: Calibration, link: Link, where: str, computing_s: float) -> tuple[float, float]:
    found, measured = messages(job), Collectives(calibration, where)
    if not found or not measured.known:
        return 0.0, 0.0
    return traffic_s(found, link, measured, computing_s)


def _sum(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for each in parts:
        for name, seconds in each.items():
            total[name] = total.get(name, 0.0) + seconds
    return total
