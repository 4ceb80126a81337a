"""Messages of a step of each run type, and what they take by a calibration and the rate of a link. No torch.

How many bytes gloo really moves was counted on a machine's interfaces: its reduce-scatter moves those of an all-reduce.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from testbed.memory_model.devices import Link
from testbed.memory_model.job import Job
from testbed.planner.calibration import Calibration
from testbed.planner.measured_compute import along

FP32 = 4
DDP_BUCKET = 25 * 2**20  # bytes, its default
PERSISTS = 100_000  # elements, DeepSpeed's stage3_param_persistence_threshold
LIVE = 10**9  # elements, its stage3_max_live_parameters and stage3_max_reuse_distance
BACKWARD = 2 / 3  # of a step's computing
HEADERS = 1448 / 1514  # share of an Ethernet frame that is payload: IP and TCP headers take the rest
PARAMETERS_OF_BLOCK = 12  # tensors: four matrices with biases, two LayerNorms


@dataclass(frozen=True)
class Message:
    """`count` collectives of one kind and size.

    Attributes:
        is_spread: they lie between computing, not one after the other.
        is_covered: they travel while backward computes.
        is_prefetched: a device with streams computes meanwhile; gloo's callers wait.
        span: devices from the first to the last of its ranks, neighbours being 1; 0: as many as ranks.
        lanes: 2 where half of them travel the other way at the same time.
    """

    kind: str
    bytes: float
    count: float
    ranks: int
    is_spread: bool = False
    is_covered: bool = False
    is_prefetched: bool = False
    lanes: int = 1
    span: int = 0

    def crosses_nodes(self, per_node: int) -> bool:
        return max(self.span, self.ranks) > per_node


def messages(job: Job) -> list[Message]:
    """Return what a rank exchanges in one optimizer step."""
    found, layout = list(_of_passes(job)), job.layout
    if layout.data > 1 and job.strategy is not None and job.strategy.is_distributed:
        found += [replace(each, span=each.span or layout.data * layout.tensor) for each in _of_gradients(job)]
    return found


def _of_gradients(job: Job) -> Iterator[Message]:
    """Yield what the data ranks exchange."""
    layout, micro = job.layout, job.accumulation
    ranks, held = layout.data, job.model.parameters / (layout.tensor * layout.pipeline)
    whole, blocks = FP32 * held, FP32 * job.model.layers * job.model.block_matrix_parameters
    layers = job.model.layers
    assert job.strategy is not None
    match job.strategy.sends:
        case "tensors":
            tensors = layers * PARAMETERS_OF_BLOCK + 4
            yield Message("all_reduce", whole / tensors, tensors, ranks)
        case "shards":
            root, shard = whole - blocks, layout.shard
            for kind, often in (("all_gather", 2), ("reduce_scatter", 1)):
                one = Message(kind, root, micro, shard, is_spread=True, is_prefetched=True, span=shard)
                yield one
                yield replace(one, bytes=blocks / layers, count=often * layers * micro)
            if shard < ranks:  # copies of the shards agree once a step, behind the last backward pass
                yield Message("all_reduce", whole / shard / layers, layers, ranks // shard, is_covered=True)
        case "zero" if layout.zero_stage == 3:
            yield from _of_zero_3(job, whole, ranks)
        case "zero" if layout.zero_stage:
            times = micro if layout.zero_stage == 2 else 1
            yield Message("all_reduce", whole, times, ranks, is_spread=times > 1, is_prefetched=True)
            yield Message("all_gather", whole, 1, ranks)
        case "buckets":
            buckets = max(1, round(whole / DDP_BUCKET))
            last = max(whole / buckets, FP32 * job.model.head_parameters)  # the tied embedding is ready last
            if buckets > 1:
                early = max(whole - last, 0.0) / (buckets - 1)
                yield Message("all_reduce", early, buckets - 1, ranks, is_covered=True)
            yield Message("all_reduce", min(last, whole), 1, ranks)
        case "zero" | "at_end":  # ZeRO 0, and the data ranks of pipelines and tensor ranks, after backward
            yield Message("all_reduce", whole, 1, ranks)


def _of_zero_3(job: Job, whole: float, ranks: int) -> Iterator[Message]:
    """Yield what DeepSpeed's stage 3 moves.

    Tensors below PERSISTS stay whole and are gathered once, after the update; the others in forward. They are kept for
    backward as long as LIVE elements are not exceeded, else gathered again, but for the tied embedding: forward reads
    it last and backward first.
    """
    model, micro = job.model, job.accumulation
    hidden, again = model.hidden, 1 if model.parameters < LIVE else 2
    sizes = [model.head_parameters, model.seq_length * hidden]
    matrices = [3 * hidden**2, hidden**2, hidden * model.ffn, hidden * model.ffn]
    for size, passes, count in [
        (sizes[0], 1, 1),
        (sizes[1], 1, 1),
        *((size, again, model.layers) for size in matrices),
    ]:
        is_whole = size < PERSISTS
        yield Message(
            "all_gather",
            FP32 * size,
            count * (1 if is_whole else passes * micro),
            ranks,
            is_spread=not is_whole,
            is_prefetched=True,
        )
    yield Message("all_gather", FP32 * hidden, 8 * model.layers, ranks)  # biases and LayerNorms
    yield Message("reduce_scatter", whole, micro, ranks, is_spread=True, is_prefetched=True)


def _of_passes(job: Job) -> Iterator[Message]:
    """Yield what passes between pipeline stages, and between tensor ranks."""
    model, layout, micro = job.model, job.layout, job.accumulation
    activations = FP32 * job.micro_batch * model.seq_length * model.hidden
    if layout.tensor > 1:
        count = micro * (4 * model.layers / layout.pipeline + 2)  # 2: embedding, and the gradient of the head's input
        yield Message("all_reduce", activations, count, layout.tensor, is_spread=True)
    if layout.pipeline > 1:
        crossings = layout.pipeline - 1
        if job.schedule == "interleaved_1f1b":
            crossings = 2 * layout.pipeline - 1
        elif job.schedule == "zero_bubble":
            crossings = 2 * layout.pipeline - 2
        count = 2 * micro * crossings / (layout.pipeline - 1)  # there and back over one boundary between ranks
        yield Message(
            "p2p", activations, count, 2, is_spread=True, lanes=1 if job.schedule is None else 2, span=layout.devices
        )
        if job.schedule != "zero_bubble":  # whose first rank has both ends; else the tied embedding's gradient is added
            yield Message("all_reduce", FP32 * model.head_parameters / layout.tensor, 1, 2, span=layout.devices)


class Collectives:
    """Seconds of the collectives that were measured over one link."""

    def __init__(self, calibration: Calibration, link: str) -> None:
        rows = [each for each in calibration.collectives if each.link == link]
        most = max((each.ranks for each in rows), default=0)
        self.ranks, self.backend = most, calibration.backend
        # a GPU computes while it sends, as far as was measured; a CPU's cores do both
        self.overlap = calibration.overlap if calibration.backend == "nccl" else 0.0
        self.known: dict[str, list[tuple[float, float]]] = {}
        for each in sorted(rows, key=lambda each: each.num_bytes):
            if each.ranks == most:
                self.known.setdefault(each.kind, []).append((each.num_bytes, each.seconds))

    def seconds(self, message: Message) -> float:
        """Return the seconds of a message's collectives, in proportion to the bytes moved on other numbers of ranks."""
        scale = share_sent(message.kind, message.ranks) / share_sent(message.kind, self.ranks)
        return message.count * scale * along(self.known[message.kind], message.bytes)


def traffic_s(found: Sequence[Message], link: Link, measured: Collectives, computing_s: float) -> tuple[float, float]:
    """Return seconds that messages take: what the ranks work for them, and what more the link makes them wait.

    A token bucket (`link.burst_bytes`) fills while a rank computes, and lets as much through at once.

    Args:
        computing_s: of the step, in which the spread messages lie.
    """
    work_s = wait_s = 0.0
    window_s = measured.overlap * computing_s
    rate = link.bytes_per_s * HEADERS
    for message in found:
        own_s = measured.seconds(message)
        sent = message.bytes * share_sent(message.kind, message.ranks, measured.backend)
        link_s = message.count * (sent / rate + link.latency_s) / message.lanes
        gaps = max(message.count / message.lanes if message.is_spread else 1.0, 1e-9)
        free_s = gaps * min(link.burst_bytes / rate, computing_s / gaps)
        if message.is_covered:
            free_s = max(free_s, BACKWARD * computing_s)
        hidden_s = min(own_s, window_s) if message.is_covered or message.is_prefetched else 0.0
        window_s -= hidden_s
        work_s += own_s - hidden_s
        wait_s += max(link_s - free_s - own_s, 0.0)
    return work_s, wait_s


def share_sent(kind: str, ranks: int, backend: str = "gloo") -> float:
    """Return the bytes that each rank sends, over those of the whole tensor."""
    if kind == "p2p":
        return 1.0
    is_twice = kind == "all_reduce" or (kind == "reduce_scatter" and backend == "gloo")
    return (2 if is_twice else 1) * (ranks - 1) / ranks
