"""Predict the time of an optimizer step, what it is made of, and how sure that is. No torch.

One micro batch on one device: matrix products (2 M N K FLOPs each; backward twice forward), causal attention (forward
2 T^2 h FLOPs, backward 2.5 times that; Dao 2023, FlashAttention-2, arXiv:2307.08691), elementwise kernels by the bytes
that they move, the head. Once per step: the optimizer, what is left of the gradients' collectives. All of it on the
slowest stage of a pipeline, which idles for (p - 1) / v micro batches (Narayanan et al. 2021, arXiv:2104.04473).
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from testbed.memory_model.devices import Device
from testbed.memory_model.job import Job, Machine, framework_of
from testbed.memory_model.model_states import Held, held_by_rank
from testbed.planner.calibration import Calibration
from testbed.planner.collectives import (
    Traffic,
    busiest_seconds,
    context_traffic,
    data_traffic,
    far_boundaries,
    pipeline_traffic,
    tensor_traffic,
)
from testbed.planner.fit import NOISE, Factor, Fit, Measured, Nominal
from testbed.planner.rates import Rates, layer_widths
from testbed.planner.rows import Row, own_rows

BUBBLE = "bubble"
SCORE_FILE = Path(__file__).parent / "published_score.json"  # made by score.py
WEAK = 2.0  # times the noise, of rows graded weak or flagged
ELEMENTWISE_FORWARD = 1 / 3  # of the bytes of both passes
OFFLOAD_EXPOSED, OFFLOAD_SPEED = 0.1, 100e9  # of activations to the host and back, an estimate
# ZeRO's offload (Ren et al. 2021, arXiv:2101.06840): a device's way to the host, and the host's memory, which bounds
# AdamW there and which the devices of a node share. Both rates are estimates.
HOST_LINK, HOST_MEMORY, HOST_UPDATE_BYTES = 25e9, 100e9, 28.0
OFFLOAD_WINDOW = 0.8  # share of a pass behind which weights come from the host, an estimate
FLOOR = 0.05  # of a collective's time that nothing hides: the first and the last bucket

WITHIN, BETWEEN = "exposed communication within a node", "exposed communication between nodes"
PARTS = (
    "matrix products",
    "operands",
    "attention",
    "elementwise",
    "head",
    "optimizer",
    "offload",
    "stragglers",
    "host",
    WITHIN,
    BETWEEN,
)


def block_seconds(job: Job, rates: Rates) -> tuple[dict[str, float], dict[str, float]]:
    """Return seconds by part of one block and micro batch on one device: of both passes, and of what is repeated."""
    layers = [rates.layer_seconds(job.tokens_per_pass, *widths, job) for widths in layer_widths(job)]
    forward, backward = ([sum(seconds) for seconds in zip(*way, strict=True)] for way in zip(*layers, strict=True))
    attention, elementwise = rates.attention_seconds(job), rates.elementwise_seconds(job)
    products, operands = map(sum, zip(forward, backward, strict=True))
    both = {"matrix products": products, "operands": operands, "attention": sum(attention), "elementwise": elementwise}
    repeated = {
        "matrix products": forward[0],
        "operands": forward[1],
        "attention": attention[0],
        "elementwise": ELEMENTWISE_FORWARD * elementwise,
    }
    often = repeated_shares(job)
    return both, {part: often.get(part, 0.0) * job.recompute_share * repeated[part] for part in repeated}


def repeated_shares(job: Job) -> Mapping[str, float]:
    """Return by part how much of a block's forward pass is computed again.

    selective_op keeps the products of linear layers and fused attention, selective_attention all but attention. Where
    all is computed again, src/gpt2.py (non-reentrant) stops as soon as what backward needs is there, and nothing needs
    the block's last product.
    """
    if job.recompute == "none":
        return {}
    if job.recompute == "selective_attention":
        return {"attention": 1.0}
    if job.recompute == "selective_op":
        return {"elementwise": 1.0, "attention": float(job.attention == "eager")}
    last = job.model.hidden * job.model.ffn / job.model.block_matrix_parameters if job.run_type is not None else 0.0
    return {"matrix products": 1 - last, "operands": 1 - last, "attention": 1.0, "elementwise": 1.0}


def micro_batch_seconds(
    job: Job, machine: Machine, rates: Rates, held: Held, of_block: Mapping[str, float]
) -> dict[str, float]:
    """Return seconds by part of both passes of one micro batch on one device, without the data ranks' collectives.

    Args:
        of_block: seconds by part of one block, with what is repeated.
    """
    model, tensor, tokens = job.model, job.layout.tensor, job.tokens_per_pass
    parts = dict.fromkeys(PARTS, 0.0) | {part: held.blocks * seconds for part, seconds in of_block.items()}
    if held.predicts:
        head = rates.layer_seconds(tokens, model.hidden, model.vocab / tensor, _as_the_head_computes(job))
        parts["head"] = sum(map(sum, head)) + rates.loss_seconds(tokens * model.vocab / tensor, job)
    matrices = held.blocks * model.block_matrix_parameters / tensor
    table = model.head_parameters / tensor if held.predicts else 0.0
    parts["elementwise"] += rates.weights_seconds(matrices, table, job)
    if job.offload == "activations":
        layers = min(held.blocks, job.offload_layers or held.blocks)
        kept = 34.0 * model.hidden * tokens * layers / tensor
        parts["offload"] = OFFLOAD_EXPOSED * kept / OFFLOAD_SPEED
    for one in (*tensor_traffic(job, held.blocks), *context_traffic(job, held.blocks)):
        parts[_link(one, machine)] += one.exposed * sum(rates.traffic_seconds(one, machine))
    parts["host"] = rates.host_seconds(held.blocks, sum(parts.values()), job)
    return parts


def _as_the_head_computes(job: Job) -> Job:
    """Return the job in the precision of its head: 8- and 4-bit recipes leave that in bf16."""
    return replace(job, precision="bf16") if job.precision.endswith(("fp8", "fp4")) else job


def step_parts(job: Job, machine: Machine, rates: Rates) -> tuple[dict[str, float], float, float]:
    """Return seconds of a step by part, those of the slowest stage's micro batches; the seconds that it idles; and how
    many of the parts' seconds are more than the mean stage's.

    The idle seconds of a pipeline are not among the parts: a stage waits while the others pass one micro batch each.
    """
    ranks = held_by_rank(job)
    like = {(held.blocks, held.predicts): held for held in ranks}
    both, repeated = block_seconds(job, rates)
    of_block = {part: seconds + repeated[part] for part, seconds in both.items()}
    by_kind = {kind: micro_batch_seconds(job, machine, rates, held, of_block) for kind, held in like.items()}
    slowest = max(by_kind.values(), key=lambda parts: sum(parts.values()))
    one_pass, passes = sum(slowest.values()), job.accumulation
    parts = {part: passes * seconds for part, seconds in slowest.items()}
    hidden = one_pass if job.overlap else 0.0
    for traffic in pipeline_traffic(job):
        parts[_link(traffic, machine)] += _pipeline_seconds(traffic, job, machine, rates, one_pass)
    for traffic in data_traffic(job):
        busy, waiting = rates.traffic_seconds(traffic, machine)
        exposed = max(FLOOR * waiting, waiting - rates.window(traffic) * traffic.window * hidden)
        parts[_link(traffic, machine)] += traffic.times * (busy + exposed)
    own = max(held.elements for held in ranks) / (job.layout.shard if job.layout.zero_stage else 1)
    if job.offload in ("optimizer", "parameters"):
        parts["offload"] = offloaded_seconds(job, machine, own, OFFLOAD_WINDOW * hidden)
    else:
        parts["optimizer"] = rates.optimizer_seconds(own, job)
    parts["stragglers"] = rates.straggling * straggling(machine.devices) * passes * one_pass
    stage_seconds = [sum(by_kind[held.blocks, held.predicts].values()) for held in ranks]
    uneven = passes * (one_pass - sum(stage_seconds) / len(stage_seconds)) if job.schedule else 0.0
    return parts, bubble_seconds(job, stage_seconds), uneven


def _link(traffic: Traffic, machine: Machine) -> str:
    """Return the part of a step that a collective belongs to: that of the slowest link that it crosses."""
    return BETWEEN if traffic.crosses_nodes(machine) else WITHIN


def _pipeline_seconds(traffic: Traffic, job: Job, machine: Machine, rates: Rates, one_pass: float) -> float:
    """Return seconds of a step for what pipeline ranks send each other. `one_pass`: of a micro batch's passes."""
    busy, waiting = rates.traffic_seconds(traffic, machine)
    if traffic.kind != "p2p":
        return busy + waiting
    near = sum(rates.traffic_seconds(replace(traffic, ranks=2, stride=1), machine)) - busy
    hops = [waiting if is_far else min(near, waiting) for is_far in far_boundaries(job, machine)]
    exposed = exposed_hops_seconds(job, hops, rates.window(traffic) * one_pass)
    return job.accumulation * traffic.times * busy + exposed


def offloaded_seconds(job: Job, machine: Machine, own: float, hidden: float) -> float:
    """Return seconds of a step for ZeRO's offload: gradients to the host, AdamW there, weights back.

    With "parameters" each pass of each micro batch brings the weights again, partly behind it.

    Args:
        own: elements that a device updates.
        hidden: seconds of a micro batch's passes that a transfer can run behind.
    """
    width = 2.0 if job.has_16_bit_weights else 4.0
    sharing = min(machine.devices, machine.per_node)
    sent = width * own / HOST_LINK
    seconds = 2 * sent + HOST_UPDATE_BYTES * own * sharing / HOST_MEMORY
    if job.layout.zero_stage >= 2:  # the host adds up what each micro batch brings (stage_1_and_2.py, stage3.py)
        seconds += (job.accumulation - 1) * max(FLOOR * sent, sent - hidden)
    if job.offload == "parameters":
        brought = 2 * width * own / HOST_LINK
        seconds += job.accumulation * max(FLOOR * brought, brought - hidden)
    return seconds


def exposed_hops_seconds(job: Job, hops: Sequence[float], hidden: float) -> float:
    """Return what a step waits for the hops between pipeline stages.

    Filling and draining the pipeline waits for a hop of each boundary, there and back. In between a hop travels behind
    the passes of other micro batches, as far as the link of the busiest rank keeps up. GPipe sends all activations
    first, behind forward passes, then all gradients. The hops of the first micro batch are those that fill and drain.
    In 1F1B's order n + 1 micro batches go round over n boundaries in turn, so that each waits for its share of the hops
    there and back. Without a schedule each micro batch crosses every boundary alone.

    Args:
        hops: seconds for one activation from each rank to the next, the last one's next being the first.
        hidden: seconds of a micro batch's passes that hops can travel behind.
    """
    between, others = hops[:-1], job.layout.pipeline - 1
    ends = 2 * sum(between)
    if job.schedule is None:
        return job.accumulation * ends
    if job.schedule == "gpipe":
        slowest = max(between)
        ways = [slowest - hidden / 3, slowest - 2 * hidden / 3]  # a backward pass takes twice as long as a forward pass
        return ends + (job.accumulation - 1) * sum(max(FLOOR * slowest, exposed) for exposed in ways)
    sent = busiest_seconds(job, hops)
    steady = ends + (job.accumulation - 1) * max(FLOOR * sent, sent - hidden)
    if job.schedule == "1f1b":
        passed = [0.0, *itertools.accumulate(between)]
        round_trips = (
            2 * (passed[end] - passed[begin]) / (end - begin + 1)
            for begin, end in itertools.combinations(range(others + 1), 2)
        )
        # a boundary takes all micro batches forward, and then back those that wait for the last one
        waits = (job.accumulation + min(job.accumulation, others - place) for place in range(others))
        crossed = (wait * max(FLOOR * hop, hop - hidden) for wait, hop in zip(waits, between, strict=True))
        return max(steady, ends + (job.accumulation - 1) * max(round_trips), *crossed)
    return steady


def bubble_seconds(job: Job, stage_seconds: list[float]) -> float:
    """Return how long the slowest stage of a pipeline idles in a step."""
    if len(stage_seconds) == 1:
        return 0.0
    others = sum(stage_seconds) - max(stage_seconds)
    if job.schedule is None:  # one stage computes at a time
        return others * job.accumulation
    return others / job.layout.virtual_stages * (1 / 3 if job.schedule == "zero_bubble" else 1.0)


def straggling(devices: int) -> float:
    """Return by how many standard deviations the slowest of so many devices lags: about sqrt(2 ln N)."""
    return math.sqrt(2 * math.log(devices)) if devices > 1 else 0.0


def factors_of(job: Job, machine: Machine) -> tuple[Factor, ...]:
    """Return all factors of a job, whether fitted or not: of the family of programs, of the architecture's products,
    and of the family's attention."""
    framework, device = framework_of(job.stack), machine.device
    architecture = device.architecture or device.name
    return (
        Factor(PARTS, framework, 0.15),
        Factor(("matrix products",), architecture, 0.15),
        Factor(("attention",), framework, 0.2),
    )


def nominal_of(seconds: Mapping[str, float], idle: float, job: Job, machine: Machine) -> Nominal:
    """Return a step before any factor. A pipeline's idle time is shared out: it idles while others compute the same.

    Args:
        seconds: by part.
    """
    by_part = np.array([seconds[part] for part in PARTS])
    whole = float(by_part.sum())
    return Nominal(by_part * (1 + idle / whole) if whole else by_part, factors_of(job, machine))


def measured(row: Row) -> Measured:
    """Return what the fit needs of a published row."""
    parts, idle, _ = step_parts(row.job, row.machine, Rates(row.machine.device))
    return Measured(
        nominal=nominal_of(parts, idle, row.job, row.machine),
        log_time=float(np.log(row.step_time_s)) if row.step_time_s else float("nan"),
        noise=NOISE * (WEAK if row.is_weak else 1.0),
    )


class Constants:
    """What data sheets say, corrected by the fit to published runs. `Calibrated` has the same methods.

    Attributes:
        width: of the interval of log time, in standard deviations of the fit.
        label: "calibrated ..." or "uncalibrated ...".
        calibration: what was measured in place of data sheets.
    """

    calibration: Calibration | None = None

    def __init__(self, fit: Fit, width: float, label: str) -> None:
        self.fit, self.width, self.label = fit, width, label

    def rates(self, job: Job, device: Device) -> Rates:
        """Return how fast a job's ranks compute and send."""
        return Rates(device)

    def corrected(
        self, parts: Mapping[str, float], idle: float, job: Job, machine: Machine
    ) -> tuple[np.ndarray, float, float, float]:
        """Return the seconds of a step's parts in their true proportion, and of the step with its 90 % interval."""
        nominal = nominal_of(parts, idle, job, machine)
        taken, log_time, deviation = self.fit.predict(nominal)
        half = self.width * deviation
        seconds, low, high = (math.exp(log_time + off) for off in (0.0, -half, half))
        return taken, seconds, low, high


@cache
def published_constants() -> Constants:
    """Return the constants of a machine that was not calibrated: data sheets and the project's published runs."""
    width = json.loads(SCORE_FILE.read_text(encoding="utf-8"))["width"]
    fitted = [measured(row) for row in own_rows() if row.is_fitted]
    return Constants(Fit(fitted, PARTS), width, f"uncalibrated: data sheet and {len(fitted)} published runs")


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
    by_part, idle, uneven = step_parts(job, machine, constants.rates(job, machine.device))
    whole = sum(by_part.values()) + idle
    taken, seconds, low, high = constants.corrected(by_part, idle, job, machine)
    bubble = seconds * idle / whole
    taken = taken * ((seconds - bubble) / taken.sum())
    parts: dict[str, float] = {}
    for part, took in zip(PARTS, taken, strict=True):
        name = "matrix products" if part == "operands" else part
        parts[name] = parts.get(name, 0.0) + float(took)
    parts[BUBBLE] = bubble
    kept = {part: took for part, took in parts.items() if took > 0}
    return StepTime(kept, seconds, low, high, constants.label, seconds * uneven / whole)
