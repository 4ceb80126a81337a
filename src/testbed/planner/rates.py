"""Tell how fast a device computes, moves and sends: from its data sheet. No torch.

The shares of peak below are what kernels of each generation reach at best, as their libraries' papers and makers'
guides say; what a program reaches of them is fitted (fit.py). Measured rates: calibration.py.
"""

from __future__ import annotations

import math

from testbed.memory_model.activations import casts_weights, keeps_casts
from testbed.memory_model.devices import Device
from testbed.memory_model.job import Job, Machine, framework_of
from testbed.planner.collectives import Traffic

Pass = tuple[float, float]  # seconds of matrix products: at the speed of their units, and moving their operands
# Of the peak of its units, in large matrix products: the newer the units, the more power limits them.
# AMD's: 620 of 1,307 TFLOP/s of an MI300X, as SemiAnalysis measured in December 2024, before what a program loses.
PRODUCT_SHARE = {"volta": 0.72, "turing": 0.5, "ampere": 0.84, "ada": 0.7, "hopper": 0.72, "blackwell": 0.72}
PRODUCT_SHARE |= {"cdna": 0.45}
NARROW_SHARE = {"fp8": 0.65, "mxfp8": 0.65, "nvfp4": 0.5, "fp4": 0.5}
# Of the peak in 16 bits, in fused causal attention with heads of 128. FlashAttention-2: 50 to 73 % of an A100 (Dao
# 2023, arXiv:2307.08691), 35 % of an H100 (Shah et al. 2024, arXiv:2407.08608).
# AMD's: an MI300X that is 15 % faster than an H100, as its makers claim of FlashAttention-2's forward pass.
ATTENTION_SHARE = {"volta": 0.3, "turing": 0.3, "ampere": 0.55, "ada": 0.5, "hopper": 0.35, "blackwell": 0.42}
ATTENTION_SHARE |= {"cdna": 0.3}
CONTEXT_SHARE = 0.75  # of that on more than two context ranks, whose chunks are short: torchtitan's runs of 2024
OTHER_SHARE = 0.6
MEMORY_SHARE = 0.8  # of the memory's bandwidth, in elementwise kernels
LINK_SHARE = 0.75  # of a link's line rate, in large messages
# Bytes of a message at which a fast link reaches half its rate; a slow one reaches it with what it sends in HALF_TIME.
HALF_SIZE, HALF_TIME = 2e6, 160e-6
HOP = 2e-6  # seconds of a ring from one device to the next within a node: NCCL's table (graph/tuning.cc) has 0.6 to 4
LAUNCH = 8e-6  # seconds of the host for one kernel, with autograd's share: an estimate
OPTIMIZER_BYTES = 40.0  # per element: AdamW reads and writes 28, the norm for clipping 12


ATTENTION_BACKWARD = 2.5  # of the forward pass, where nothing was kept of the T x T matrices
KERNELS = {False: 80, True: 25}  # of one block, both passes: eager with autocast's casts, compiled; counted by hand
SHARD_HOOKS = 50  # kernels that take the host as long as gathering a block, freeing it and sending its gradients
FUSED = ("megatron", "llm.c")  # frameworks whose kernels join several elementwise steps
# Times as many bytes where the maximum, the scale, the clamp and the cast are kernels of their own: a count
EAGER_CASTS = 6.0
OPERAND_BYTES = {"fp8": 1.0, "mxfp8": 1.0, "nvfp4": 0.5, "fp4": 0.5}  # per element, where it is not as in the product
CAST_BYTES = {"fp8": 5.0, "mxfp8": 7.0, "nvfp4": 8.0, "fp4": 8.0}  # to bring an operand to few bits, both ways round


class Rates:
    """Speed of a device from its data sheet. `MeasuredRates` has the same methods.

    Seconds are of one device and one micro batch. `straggling`: share of a pass by which a device varies.
    """

    straggling = 0.01

    def __init__(self, device: Device) -> None:
        self.device = device

    def layer_seconds(self, tokens: float, inputs: float, outputs: float, job: Job) -> tuple[Pass, Pass]:
        """Return the seconds of a linear layer, forward and backward."""
        share = NARROW_SHARE.get(job.precision, PRODUCT_SHARE.get(self.device.architecture, OTHER_SHARE))
        width = OPERAND_BYTES.get(job.precision, job.product_bytes)
        moved = width * (tokens * inputs + inputs * outputs) + max(2.0, width) * tokens * outputs
        at_peak = 2 * tokens * inputs * outputs / (share * self.device.peak_of(job.precision))
        operands = self._moving_seconds(moved)
        return (at_peak, operands), (2 * at_peak, 2 * operands)

    def attention_seconds(self, job: Job) -> tuple[float, float]:
        """Return the seconds of one block's causal attention, forward and backward."""
        precision = job.precision if job.precision in ("fp32", "tf32", "fp16") else "bf16"
        share = ATTENTION_SHARE.get(self.device.architecture, OTHER_SHARE)
        model, head_dim = job.model, job.model.head_dim
        if job.layout.context > 2:
            share *= CONTEXT_SHARE
        peak = share * min(1.0, 1.1 * head_dim / (head_dim + 13)) * self.device.peak_of(precision)
        square = job.micro_batch * model.heads * model.seq_length**2 / job.layout.tensor / job.layout.context
        forward = 2 * square * head_dim / peak
        if job.attention == "eager":  # the whole square, and 10 bytes for each of its elements
            forward = 2 * forward + self._moving_seconds(10 * square)
            return forward, 2 * forward
        return forward, ATTENTION_BACKWARD * forward

    def elementwise_seconds(self, job: Job) -> float:
        """Return the seconds of one block's other kernels, both passes."""
        casts = CAST_BYTES.get(job.precision, 0.0) * sum(map(sum, layer_widths(job)))
        if not job.compiled and framework_of(job.stack) not in FUSED:
            casts *= EAGER_CASTS
        return self._moving_seconds(job.tokens_per_pass * (elementwise_bytes(job) + casts))

    def weights_seconds(self, matrices: float, table: float, job: Job) -> float:
        """Return the seconds of a micro batch for casts of so many weights and for sums of their gradients."""
        return self._moving_seconds(weight_bytes(matrices, table, job))

    def loss_seconds(self, logits: float, job: Job) -> float:
        """Return the seconds of the loss of so many logits, both passes."""
        return self._moving_seconds(logits * (10.0 if _is_fused(job) else 20.0))

    def optimizer_seconds(self, elements: float, job: Job) -> float:
        """Return the seconds to update so many elements."""
        moving = self._moving_seconds(OPTIMIZER_BYTES * elements)
        if job.optimizer != "muon":
            return moving
        share = PRODUCT_SHARE.get(self.device.architecture, OTHER_SHARE)
        dtype = "bf16" if job.precision in ("bf16", "fp8") else "fp32"  # as optim/optimizer.py computes
        return moving + orthogonalisation_flops(job) / (share * self.device.peak_of(dtype))

    def host_seconds(self, blocks: float, computing: float, job: Job) -> float:
        """Return the seconds that the host adds to what the device computes in both passes of so many blocks."""
        kernels = KERNELS[job.compiled] * (4 / 3 if job.recompute == "full" else 1.0)
        if job.strategy is not None and job.layout.zero_stage == 3:
            kernels += SHARD_HOOKS
        return max(0.0, blocks * kernels * LAUNCH - computing)

    def traffic_seconds(self, traffic: Traffic, machine: Machine) -> tuple[float, float]:
        """Return the seconds of a collective, hidden or not: the rank's own work, and what it waits for the link."""
        return 0.0, link_seconds(traffic, machine)

    def window(self, traffic: Traffic) -> float:
        """Return the share of the passes' time in which a collective runs behind them."""
        return 0.8

    def _moving_seconds(self, moved: float) -> float:
        return moved / (MEMORY_SHARE * self.device.memory_bytes_per_s)


def layer_widths(job: Job) -> list[tuple[float, float]]:
    """Return inputs and outputs of each linear layer of a block, as one tensor rank has them."""
    model, tensor = job.model, job.layout.tensor
    heads, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    gates = 2 if model.gated else 1
    return [
        (model.hidden, (heads + 2 * kv) / tensor),
        (heads / tensor, model.hidden),
        (model.hidden, gates * model.ffn / tensor),
        (model.ffn / tensor, model.hidden),
    ]


def orthogonalisation_flops(job: Job) -> float:
    """Return the FLOPs of Muon's five Newton-Schulz rounds (optim/optimizer.py), which every rank computes for all
    matrices of the blocks that it holds, whole: X X^T, its square, and their product with X."""
    flops = 0.0
    for shape in job.model.block_shapes():
        if len(shape) < 2:
            continue
        short, long = sorted(shape)
        flops += 5 * (4 * short * short * long + 2 * short**3)
    return flops * job.model.layers / job.layout.pipeline


def elementwise_bytes(job: Job) -> float:
    """Return the bytes per token that norms, residuals, activations and biases of one block move, both passes.

    Eager, 16 bits: about 182 per token and width for GPT-2. An estimate by counting reads and writes of each kernel.
    """
    model, layout = job.model, job.layout
    across = layout.tensor if layout.sequence_parallel else 1
    kv = 2 * model.kv_heads * model.head_dim
    inner = (24.0 if model.gated else 16.0) * model.ffn / layout.tensor
    eager = 70.0 * model.hidden / across + 16.0 * (model.heads * model.head_dim + kv) / layout.tensor + inner
    return eager * job.product_bytes / 2 * (0.55 if _is_fused(job) else 1.0)


def weight_bytes(matrices: float, table: float, job: Job) -> float:
    """Return the bytes that a micro batch moves for weights outside of products: casts, and sums of gradients.

    autocast casts each weight down and its gradient up, 6 bytes each; a block that is computed again casts again. A
    gradient is added to that of earlier micro batches, two numbers read and one written; where gradients lie in shards
    a shard is. A tied table has two gradients, of which the embedding's begins as zeros. Megatron and llm.c add
    gradients within the product.

    Args:
        matrices, table: elements of the blocks' matrices, and of the embedding or head, that a device computes with.
    """
    if framework_of(job.stack) in FUSED:
        return 0.0
    down = 6.0 * casts_weights(job)
    down *= (1 / job.accumulation if keeps_casts(job) else 1.0) + (job.recompute == "full") * job.recompute_share
    up = 6.0 * casts_weights(job)
    width = 2.0 if job.has_16_bit_weights and job.sends != "shards" else 4.0
    shards = job.layout.shard if job.layout.zero_stage >= 2 else 1
    added = 3 * width * max(0.0, 1 - 1 / job.accumulation) / shards
    second = 4 * width if job.model.tied else 0.0
    return matrices * (down + up + added) + table * (down + up + added + second)


def _is_fused(job: Job) -> bool:
    return job.compiled or framework_of(job.stack) in FUSED


def link_seconds(traffic: Traffic, machine: Machine) -> float:
    """Return seconds of a collective: rings in which every device of a node uses its own way out."""
    near = machine.within_node
    crosses = traffic.crosses_nodes(machine)
    rings = 1 if traffic.kind == "p2p" else traffic.neighbours(machine)
    speed = machine.near_bytes_per_s(rings)
    if crosses:
        speed = min(speed, machine.between_nodes.bytes_per_s * rings)
    latency = near.latency_s + _hops_s(traffic, machine, rings)
    messages = max(1.0, traffic.messages)
    size = traffic.moved() / messages
    half = min(HALF_SIZE, HALF_TIME * speed)
    return messages * (latency + (size + half) / (LINK_SHARE * speed))


def _hops_s(traffic: Traffic, machine: Machine, neighbours: int) -> float:
    """Return the seconds that a message's first byte takes from rank to rank.

    A ring has a hop for each rank, an all-reduce two; an all-reduce may also go up and down a tree of nodes, and NCCL
    takes what is faster. Gathers and reduce-scatters have rings alone ("PAT", arXiv:2506.20252, section 2).
    """
    between = machine.between_nodes.latency_s if traffic.crosses_nodes(machine) else 0.0
    if traffic.kind == "p2p":
        return between
    nodes = max(1.0, traffic.ranks / neighbours)
    within = (neighbours - 1) * HOP
    ring = nodes * within + (nodes - 1) * between
    if traffic.kind != "all_reduce":
        return ring
    return min(2 * ring, 2 * (within + math.ceil(math.log2(nodes)) * between))
