"""Compute what a step is made of, in seconds by part, from the rates of a machine. No torch.

One micro batch on one device: matrix products (2 M N K FLOPs each; backward twice forward), causal attention (forward
2 T^2 h FLOPs, backward 2.5 times that; Dao 2023, FlashAttention-2, arXiv:2307.08691), elementwise kernels by the bytes
that they move, the head. Once per step: the optimizer, what is left of the gradients' collectives. All of it on the
slowest stage of a pipeline, which idles for (p - 1) / v micro batches (Narayanan et al. 2021, arXiv:2104.04473).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from testbed.memory_model.job import Job, Machine, framework_of
from testbed.memory_model.stages import even_stages, stages_of, stages_of_ranks
from testbed.planner.collectives import Traffic, context_traffic, data_traffic, pipeline_traffic, tensor_traffic

FORWARD, BACKWARD = 1.0, 2.0  # of a matrix product
ATTENTION_BACKWARD = 2.5
ELEMENTWISE_FORWARD = 1 / 3  # of the bytes of both passes
OFFLOAD_EXPOSED, OFFLOAD_SPEED = 0.1, 100e9  # of activations to the host and back, an estimate
# ZeRO's offload (Ren et al. 2021, arXiv:2101.06840): a device's way to the host, and the host's memory, which bounds
# AdamW there and which the devices of a node share. Both rates are estimates.
HOST_LINK, HOST_MEMORY, HOST_UPDATE_BYTES = 25e9, 100e9, 28.0
KERNELS = {False: 80, True: 25}  # of one block, both passes: eager with autocast's casts, compiled; counted by hand
FLOOR = 0.05  # of a collective's time that nothing hides: the first and the last bucket

PARTS = (
    "products",
    "operands",
    "attention",
    "elementwise",
    "quantization",
    "head",
    "optimizer",
    "tensor links",
    "data links",
    "pipeline links",
    "context links",
    "offload",
    "stragglers",
    "host",
)


class Rates(Protocol):
    """Speed of a machine, measured or from its data sheet."""

    window: float  # share of the passes' time in which collectives can run behind them

    def product_seconds(self, m: float, n: float, k: float, job: Job) -> tuple[float, float]:
        """Seconds of one matrix product: at the speed of its units, and moving its operands."""

    def attention_seconds(self, flops: float, square_bytes: float, job: Job) -> float:
        """Seconds of attention: FLOPs of the fused kernel, bytes of the T x T matrices of the eager one."""

    def moving_seconds(self, moved: float, job: Job) -> float:
        """Seconds to read and write so many bytes, elementwise."""

    def optimizer_seconds(self, elements: float, job: Job) -> float:
        """Seconds to update so many elements."""

    def launch_seconds(self, kernels: float, job: Job) -> float:
        """Seconds of the host to launch so many kernels."""

    def traffic_seconds(self, traffic: Traffic, machine: Machine) -> float:
        """Seconds of a collective, nothing else running."""


@dataclass(frozen=True)
class Share:
    """Blocks of a pipeline rank, and the head if it is there."""

    blocks: int
    predicts: bool


def shares_of(job: Job) -> list[Share]:
    """Return each pipeline rank's share; src/gpt2.py balances stages by cost, other programs cut blocks evenly."""
    layout = job.layout
    cut = even_stages if job.run_type is None else stages_of
    stages = cut(job.model, layout.pipeline * (layout.virtual_stages if layout.pipeline > 1 else 1))
    ranks = stages_of_ranks(stages, layout.pipeline, job.schedule)
    return [Share(sum(len(one.blocks) for one in held), any(one.predicts for one in held)) for held in ranks]


def block_seconds(job: Job, rates: Rates) -> tuple[dict[str, float], dict[str, float]]:
    """Return seconds by part of one block and micro batch on one device: of both passes, and of what is repeated."""
    model, tensor = job.model, job.layout.tensor
    tokens = job.micro_batch * model.seq_length / job.layout.context
    heads, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    gates = 2 if model.mlp == "swiglu" else 1
    widths = [
        ((heads + 2 * kv) / tensor, model.hidden),
        (model.hidden, heads / tensor),
        (gates * model.ffn / tensor, model.hidden),
        (model.hidden, model.ffn / tensor),
    ]
    pairs = [rates.product_seconds(tokens, n, k, job) for n, k in widths]
    products, operands = (sum(pair[side] for pair in pairs) for side in (0, 1))
    pass_flops = 2 * job.micro_batch * model.seq_length**2 * heads / tensor / job.layout.context
    square = job.micro_batch * model.heads * model.seq_length**2 / tensor / job.layout.context
    is_eager = job.attention == "eager"
    attention = [
        rates.attention_seconds(share * pass_flops * (2 if is_eager else 1), 10 * share * square * is_eager, job)
        for share in (FORWARD, BACKWARD if is_eager else ATTENTION_BACKWARD)
    ]
    moving = rates.moving_seconds(tokens * elementwise_bytes(job), job)
    cast = rates.moving_seconds(tokens * cast_bytes(job, widths), job)
    both = {
        "products": 3 * products,
        "operands": 3 * operands,
        "attention": sum(attention),
        "elementwise": moving,
        "quantization": cast,
    }
    repeated = {
        "products": products,
        "operands": operands,
        "attention": attention[0],
        "elementwise": ELEMENTWISE_FORWARD * moving,
        "quantization": cast / 2,
    }
    often = REPEATED.get(job.recompute, {})
    return both, {part: often.get(part, 0.0) * job.recompute_share * repeated[part] for part in repeated}


# What activation checkpointing repeats of the forward pass. selective_op: torchtitan keeps every second matrix product.
REPEATED: Mapping[str, Mapping[str, float]] = {
    "full": dict.fromkeys(("products", "operands", "attention", "elementwise", "quantization"), 1.0),
    "selective_attention": {"attention": 1.0},
    "selective_op": {"products": 0.5, "operands": 0.5, "elementwise": 1.0, "quantization": 0.5},
}


def elementwise_bytes(job: Job) -> float:
    """Return the bytes per token that norms, residuals, activations and biases of one block move, both passes.

    Eager, 16 bits: about 182 per token and width for GPT-2. An estimate by counting reads and writes of each kernel.
    """
    model, layout = job.model, job.layout
    across = layout.tensor if layout.sequence_parallel else 1
    kv = 2 * model.kv_heads * model.head_dim
    inner = (24.0 if model.mlp == "swiglu" else 16.0) * model.ffn / layout.tensor
    eager = 70.0 * model.hidden / across + 16.0 * (model.heads * model.head_dim + kv) / layout.tensor + inner
    width = 2.0 if job.precision in ("fp32", "tf32") else 1.0
    return eager * width * (0.55 if _is_fused(job) else 1.0)


def _is_fused(job: Job) -> bool:
    return job.compiled or framework_of(job.stack) in FUSED


FUSED = ("megatron", "llm.c")  # frameworks whose kernels join several elementwise steps


def cast_bytes(job: Job, widths: list[tuple[float, float]]) -> float:
    """Return the bytes per token that bringing operands to 8 or 4 bits moves: both ways round, both passes."""
    steps = {"fp8": 5.0, "mxfp8": 7.0, "nvfp4": 8.0, "fp4": 8.0}.get(job.precision, 0.0)
    return steps * sum(n + k for n, k in widths)


def micro_batch_seconds(job: Job, machine: Machine, rates: Rates, share: Share) -> dict[str, float]:
    """Return seconds by part of both passes of one micro batch on one device, without the data ranks' collectives."""
    model, tensor = job.model, job.layout.tensor
    both, repeated = block_seconds(job, rates)
    parts = dict.fromkeys(PARTS, 0.0)
    for part, seconds in both.items():
        parts[part] = share.blocks * (seconds + repeated[part])
    tokens = job.micro_batch * model.seq_length / job.layout.context
    if share.predicts:
        dense = _as_the_head_computes(job)
        products = rates.product_seconds(tokens, model.vocab / tensor, model.hidden, dense)
        logits = tokens * model.vocab / tensor * (10.0 if _is_fused(job) else 20.0)
        parts["head"] = 3 * sum(products) + rates.moving_seconds(logits, job)
    for part, traffic in (
        ("tensor links", tensor_traffic(job, share.blocks)),
        ("context links", context_traffic(job, share.blocks)),
    ):
        parts[part] = sum(one.exposed * rates.traffic_seconds(one, machine) for one in traffic)
    if job.offload == "activations":
        layers = min(share.blocks, job.offload_layers or share.blocks)
        kept = 34.0 * model.hidden * tokens * layers / tensor
        parts["offload"] = OFFLOAD_EXPOSED * kept / OFFLOAD_SPEED
    kernels = share.blocks * KERNELS[job.compiled] * (4 / 3 if job.recompute == "full" else 1.0)
    parts["host"] = max(0.0, rates.launch_seconds(kernels, job) - sum(parts.values()))
    return parts


def _as_the_head_computes(job: Job) -> Job:
    """Return the job in the precision of its head: 8- and 4-bit recipes leave that in bf16."""
    return replace(job, precision="bf16") if job.precision.endswith(("fp8", "fp4")) else job


def step_parts(job: Job, machine: Machine, rates: Rates) -> tuple[dict[str, float], float]:
    """Return seconds of a step by part, those of the slowest stage's micro batches, and the seconds that it idles.

    The idle seconds of a pipeline are not among the parts: a stage waits while the others pass one micro batch each.
    """
    shares = shares_of(job)
    by_share = {share: micro_batch_seconds(job, machine, rates, share) for share in dict.fromkeys(shares)}
    slowest = max(by_share.values(), key=lambda parts: sum(parts.values()))
    one_pass = sum(slowest.values())
    passes = job.accumulation
    parts = {part: passes * seconds for part, seconds in slowest.items()}
    hops = sum(rates.traffic_seconds(one, machine) for one in pipeline_traffic(job))
    parts["pipeline links"] = exposed_hops_seconds(job, hops, rates.window * one_pass)
    idle = bubble_seconds(job, [sum(by_share[share].values()) for share in shares])
    blocks = max(share.blocks for share in shares)
    hidden = rates.window * one_pass if job.overlap else 0.0
    for traffic in data_traffic(job, blocks):
        seconds = rates.traffic_seconds(traffic, machine)
        window = hidden * traffic.window
        parts["data links"] += traffic.times * max(FLOOR * seconds, seconds - window)
    held = job.model.parameters / (job.layout.tensor * job.layout.pipeline)
    own = held / (job.layout.shard if job.layout.zero_stage else 1)
    if job.offload in ("optimizer", "parameters"):
        parts["offload"] = offloaded_seconds(job, machine, own, hidden)
    else:
        parts["optimizer"] = rates.optimizer_seconds(own, job)
    parts["stragglers"] = 0.01 * straggling(machine.devices) * passes * one_pass
    return parts, idle


def offloaded_seconds(job: Job, machine: Machine, own: float, hidden: float) -> float:
    """Return seconds of a step for ZeRO's offload: gradients to the host, AdamW there, weights back.

    With "parameters" each pass of each micro batch brings the weights again, partly behind it.

    Args:
        own: elements that a device updates.
        hidden: seconds of a micro batch's passes that a transfer can run behind.
    """
    width = 2.0 if job.has_16_bit_weights else 4.0
    sharing = min(machine.devices, machine.per_node)
    seconds = 2 * width * own / HOST_LINK + HOST_UPDATE_BYTES * own * sharing / HOST_MEMORY
    if job.offload == "parameters":
        brought = 2 * width * own / HOST_LINK
        seconds += job.accumulation * max(FLOOR * brought, brought - hidden)
    return seconds


def exposed_hops_seconds(job: Job, hops: float, hidden: float) -> float:
    """Return what a step waits for the hops between pipeline stages.

    1F1B keeps no more micro batches in flight than there are stages, so that each waits for its hops: a stage's next
    forward pass needs what comes back for an earlier one. Other schedules have one to spare, and a hop travels behind
    its passes; only filling and draining the pipeline waits. Without a schedule each micro batch waits for every stage.

    Args:
        hops: seconds of a rank's hops for one micro batch, both ways and for all of its stages.
        hidden: seconds of a micro batch's passes that a hop can travel behind.
    """
    others = job.layout.pipeline - 1
    if job.schedule is None:
        return job.accumulation * others * hops
    if job.schedule == "1f1b":
        return (job.accumulation + others) * hops
    steady = job.accumulation * max(FLOOR * hops, hops - hidden)
    return steady + others * hops / job.layout.virtual_stages


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
