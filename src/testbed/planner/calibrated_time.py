"""Predict the time of an optimizer step from what was measured of the machine. No torch.

A step is the sum of its measured operations, each group times the residual factor of its run type, and the messages'
work and waiting. On a CPU a rank's own work for a message adds to its computing, since the cores do both; what a slow
link makes it wait does not.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from testbed.memory_model.devices import Link
from testbed.memory_model.job import Job, Machine
from testbed.memory_model.model_states import elements_held
from testbed.memory_model.stages import Stage, stages_of, stages_of_ranks
from testbed.planner.calibration import Calibration
from testbed.planner.measured_compute import Tables, along, block_parts, embedding_s, head_s
from testbed.planner.measured_traffic import Collectives, Message, messages, traffic_s
from testbed.planner.parts import offloaded_seconds
from testbed.planner.residuals import Residuals, fitted, kind_of

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
    """A calibration with its fitted residual factors.

    Attributes:
        tables: by the number of ranks at work.
        collectives: by the name of the link.
    """

    calibration: Calibration
    residuals: Residuals
    tables: Callable[[int], Tables]
    collectives: Callable[[str], Collectives]

    @classmethod
    def of(cls, calibration: Calibration) -> Predictor:
        """Fit the factors. InputError where the calibration lacks a table."""
        tables = functools.cache(lambda ranks: Tables(calibration, ranks))
        collectives = functools.cache(lambda link: Collectives(calibration, link))

        def grouped(job: Job) -> dict[str, float]:
            parts = _parts(job, tables, job.layout.devices)
            work_s, _ = _traffic(messages(job), collectives(_within(calibration)), UNLIMITED, 0.0)
            return {**_grouped(parts), "communication": work_s}

        return cls(calibration, fitted(calibration, grouped), tables, collectives)

    def predict(self, job: Job, machine: Machine) -> Prediction:
        """Return the step of a job on all devices of a machine: this one, or several of them joined by a link.

        Its ranks compute as those of the calibrated machine do when as many are at work, at most all of its devices.
        """
        factors = self.residuals.of(kind_of(job), job.layout.devices)
        found = _parts(job, self.tables, job.layout.devices)
        parts = {name: factors[GROUP_OF[name]] * seconds for name, seconds in found.items()}
        computing_s, found_messages = sum(parts.values()), messages(job)
        if job.offload in ("optimizer", "parameters"):  # the ways to the host are not measured
            hidden = self.calibration.overlap * (computing_s - parts.pop("optimizer")) / job.accumulation
            updated = max(_updated(job, stages) for stages in _held(job))
            parts["offload"] = offloaded_seconds(job, machine, updated, hidden)
        for name, crosses in ((WITHIN, False), (BETWEEN, True)):
            here = [each for each in found_messages if each.crosses_nodes(machine.per_node) == crosses]
            work_s, wait_s = self._traffic(here, machine.between_nodes if crosses else UNLIMITED, computing_s)
            parts[name] = factors["communication"] * work_s + wait_s
        seconds = sum(parts.values())
        low, high = self.residuals.interval()
        return Prediction({name: took for name, took in parts.items() if took}, low * seconds, high * seconds)

    def _traffic(self, found: Sequence[Message], link: Link, computing_s: float) -> tuple[float, float]:
        """Return seconds of work and of waiting; of a link that was measured, waiting is in what was measured."""
        if link.name in {each.link for each in self.calibration.collectives}:
            return _traffic(found, self.collectives(link.name), UNLIMITED, computing_s)
        return _traffic(found, self.collectives(_within(self.calibration)), link, computing_s)


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


def _parts(job: Job, tables_of: Callable[[int], Tables], ranks: int) -> dict[str, float]:
    """Return the seconds of a step's parts on the rank that has most to do, before any factor; no communication.

    Args:
        ranks: at work at once.
    """
    works_alone = job.layout.pipeline == ranks and job.schedule is None
    tables = tables_of(1 if works_alone else ranks)
    held = _held(job)
    by_rank = [_sum(_stage_parts(job, tables, stage) for stage in stages) for stages in held]
    slowest = max(by_rank, key=lambda each: sum(each.values()))
    parts = {name: job.accumulation * seconds for name, seconds in slowest.items()}
    waits = sum(sum(each.values()) for each in by_rank) - sum(slowest.values())
    parts["bubble"] = waits * _rounds_of_waiting(job)
    parts["optimizer"] = along(tables.updates, max(_updated(job, stages) for stages in held))
    return parts


def _held(job: Job) -> list[list[Stage]]:
    """Return the stages of each pipeline rank."""
    layout = job.layout
    return stages_of_ranks(stages_of(job.model, layout.pipeline * layout.virtual_stages), layout.pipeline, job.schedule)


def _stage_parts(job: Job, tables: Tables, stage: Stage) -> dict[str, float]:
    """Return the seconds of one micro batch in one stage, forward and backward."""
    of_block, (host_of_block, host_of_rest) = block_parts(job, tables), tables.host_s()
    parts = {name: len(stage.blocks) * seconds for name, seconds in of_block.items()}
    parts["elementwise"] += embedding_s(job, tables) * stage.embeds
    parts["head"] = head_s(job, tables) * stage.predicts
    host_s = len(stage.blocks) * host_of_block + host_of_rest
    parts["host"] = max(0.0, host_s - sum(parts.values())) if tables.host_runs_ahead else host_s
    return parts


def _rounds_of_waiting(job: Job) -> float:
    """Return how often the slowest rank waits for all others to have had a micro batch."""
    if job.schedule is None:
        return job.accumulation
    left = ZERO_BUBBLE_LEFT if job.schedule == "zero_bubble" else 1.0
    return left / job.layout.virtual_stages


def _updated(job: Job, stages: Sequence[Stage]) -> float:
    """Return the parameters that a rank updates."""
    layout = job.layout
    sharded = layout.shard if layout.zero_stage else 1
    return elements_held(job.model, layout.tensor, stages) / sharded


def _traffic(found: Sequence[Message], measured: Collectives, link: Link, computing_s: float) -> tuple[float, float]:
    """Return what `traffic_s` does; nothing where no collective was measured."""
    return traffic_s(found, link, measured, computing_s) if found and measured.known else (0.0, 0.0)


def _sum(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for each in parts:
        for name, seconds in each.items():
            total[name] = total.get(name, 0.0) + seconds
    return total
