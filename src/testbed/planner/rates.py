"""Tell how fast a device computes, moves and sends: from its data sheet. No torch.

The shares of peak below are what kernels of each generation reach at best, as their libraries' papers and makers'
guides say; what a program reaches of them is fitted (fit.py). Measured rates: calibration.py.
"""

from __future__ import annotations

import math

from testbed.memory_model.devices import Device
from testbed.memory_model.job import Job, Machine
from testbed.planner.collectives import Traffic

# Of the peak of its units, in large matrix products: the newer the units, the more power limits them.
PRODUCT_SHARE = {"volta": 0.72, "turing": 0.5, "ampere": 0.84, "ada": 0.7, "hopper": 0.72, "blackwell": 0.72}
NARROW_SHARE = {"fp8": 0.65, "mxfp8": 0.65, "nvfp4": 0.5, "fp4": 0.5}
# Of the peak in 16 bits, in fused causal attention with heads of 128.
ATTENTION_SHARE = {"volta": 0.3, "turing": 0.3, "ampere": 0.55, "ada": 0.5, "hopper": 0.45, "blackwell": 0.42}
OTHER_SHARE = 0.6
MEMORY_SHARE = 0.8  # of the memory's bandwidth, in elementwise kernels
LINK_SHARE = 0.75  # of a link's line rate, in large messages
HALF_SIZE = 2e6  # bytes of a message at which a link reaches half its rate
HOP = (
    2e-6  # seconds of a ring from one device to the next within a node: NCCL's own table (graph/tuning.cc) has 0.6 to 4
)
LAUNCH = 8e-6  # seconds of the host for one kernel, with autograd's share: an estimate
OPTIMIZER_BYTES = 40.0  # per element: AdamW reads and writes 28, the norm for clipping 12


class DataSheetRates:
    """Rates of a device from its data sheet."""

    window = 0.8

    def __init__(self, device: Device) -> None:
        self.device = device

    def product_seconds(self, m: float, n: float, k: float, job: Job) -> tuple[float, float]:
        share = NARROW_SHARE.get(job.precision, PRODUCT_SHARE.get(self.device.architecture, OTHER_SHARE))
        width = _width(job.precision)
        moved = width * (m * k + n * k) + max(2.0, width) * m * n
        at_peak = 2 * m * n * k / (share * self.device.peak_of(job.precision))
        return at_peak, moved / (MEMORY_SHARE * self.device.memory_bytes_per_s)

    def attention_seconds(self, flops: float, square_bytes: float, job: Job) -> float:
        precision = job.precision if job.precision in ("fp32", "tf32", "fp16") else "bf16"
        share = ATTENTION_SHARE.get(self.device.architecture, OTHER_SHARE)
        head_dim = job.model.head_dim
        share *= min(1.0, 1.25 * head_dim / (head_dim + 32))
        return flops / (share * self.device.peak_of(precision)) + self.moving_seconds(square_bytes, job)

    def moving_seconds(self, moved: float, job: Job) -> float:
        return moved / (MEMORY_SHARE * self.device.memory_bytes_per_s)

    def optimizer_seconds(self, elements: float, job: Job) -> float:
        return self.moving_seconds(OPTIMIZER_BYTES * elements, job)

    def launch_seconds(self, kernels: float, job: Job) -> float:
        return kernels * LAUNCH

    def traffic_seconds(self, traffic: Traffic, machine: Machine) -> float:
        return link_seconds(traffic, machine)


def link_seconds(traffic: Traffic, machine: Machine, backend: str = "nccl") -> float:
    """Return seconds of a collective: rings in which every device of a node uses its own way out."""
    near = machine.within_node
    crosses = traffic.crosses_nodes(machine)
    speed, rings = near.bytes_per_s, 1 if traffic.kind == "p2p" else traffic.neighbours(machine)
    if crosses:
        speed = min(speed, machine.between_nodes.bytes_per_s * rings)
    latency = near.latency_s + _hops_s(traffic, machine, rings)
    messages = max(1.0, traffic.messages)
    size = traffic.moved(backend) / messages
    half = machine.between_nodes.half_size if crosses else near.half_size
    return messages * (latency + (size + (half or HALF_SIZE)) / (LINK_SHARE * speed))


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


def _width(precision: str) -> float:
    if precision in ("fp32", "tf32"):
        return 4.0
    return {"fp8": 1.0, "mxfp8": 1.0, "nvfp4": 0.5, "fp4": 0.5}.get(precision, 2.0)
