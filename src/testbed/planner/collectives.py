"""Count what the ranks of a job send to each other, by axis: bytes, ranks, messages. No torch.

Ranks are laid out tensor, context, data, pipeline from the nearest to the farthest, as Megatron does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from testbed.memory_model.job import Job, Machine
from testbed.memory_model.model_states import BUCKET, LIVE, PERSISTENT, held_by_rank

TENSORS_OF_BLOCK, ENDS = 12, 4  # four matrices with biases, two norms; two embeddings, the last norm


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """A collective that a rank takes part in, `times` over."""

    kind: str  # all_reduce, all_gather, reduce_scatter, p2p
    size: float  # bytes of the whole message, before it is cut into shares
    ranks: int
    stride: int = 1  # devices from one of its ranks to the next
    messages: float = 1.0  # that `size` goes in
    times: float = 1.0
    exposed: float = 1.0  # share that nothing hides, of what is not data parallel
    window: float = 1.0  # passes of a micro batch among which it lies, and which can hide it; 0: after them
    in_background: bool = False  # hidden even where no stream sends while another computes: DDP's buckets

    def moved(self, backend: str = "nccl") -> float:
        """Bytes that a rank sends, by rings: (n - 1) / n of the message, twice for an all-reduce.

        gloo has no reduce-scatter of its own: PyTorch makes it from an all-reduce, so it moves twice as much. ZeRO 1
        and 2 of two ranks then send 1.5 times what an all-reduce would.
        """
        is_twice = self.kind == "all_reduce" or (self.kind == "reduce_scatter" and backend == "gloo")
        return self.size * (1.0 if self.kind == "p2p" else (1 + is_twice) * (self.ranks - 1) / self.ranks)

    def neighbours(self, machine: Machine) -> int:
        """Return how many of its ranks are in one node: of groups that nodes cut unevenly, the fewest of any."""
        of_node = max(1, machine.joined // self.stride)
        is_cut = self.crosses_nodes(machine) and machine.joined == machine.per_node
        return math.gcd(self.ranks, of_node) if is_cut else min(self.ranks, of_node)

    def crosses_nodes(self, machine: Machine) -> bool:
        """Return whether some of its groups are not within a node: groups of 3 ranks on nodes of 4 are not. Of a rack
        that joins nodes, jobs take as many as groups divide."""
        span = self.ranks * self.stride
        is_cut = machine.joined == machine.per_node < machine.devices and machine.joined % span > 0
        return span > machine.joined or (is_cut and self.kind != "p2p")


def tensor_traffic(job: Job, blocks: float) -> list[Traffic]:
    """All-reduces of activations: two per block and pass (Shoeybi et al. 2019, arXiv:1909.08053).

    With sequence parallelism each is a reduce-scatter and an all-gather of the same bytes, and backward gathers once
    more (Korthikanti et al. 2022, arXiv:2205.05198).
    """
    layout = job.layout
    if layout.tensor == 1:
        return []
    passes = 4.0 + (2.0 * job.recompute_share if job.recompute == "full" else 0.0) + 1.0 * layout.sequence_parallel
    width = float(job.product_bytes)
    if job.run_type is not None and not job.has_16_bit_weights and not layout.sequence_parallel:
        width = (width + 4) / 2  # forward adds products, backward the gradients of a stream in fp32
    size = width * job.tokens_per_pass * job.model.hidden
    exposed = 0.5 if job.tensor_overlap else 1.0
    count = passes * blocks + 2  # the embedding, and the gradient of the head's input
    return [Traffic(kind="all_reduce", size=size * count, ranks=layout.tensor, messages=count, exposed=exposed)]


def context_traffic(job: Job, blocks: float) -> list[Traffic]:
    """Keys, values and their gradients go round behind attention (Liu et al. 2023, arXiv:2310.01889)."""
    layout, model = job.layout, job.model
    if layout.context == 1:
        return []
    passes = 3.0 + (1.0 if job.recompute == "full" else 0.0)
    held = 2 * 2 * model.kv_heads * model.head_dim / layout.tensor * job.micro_batch * model.seq_length
    size = passes * blocks * held
    return [
        Traffic(
            kind="all_gather",
            size=size,
            ranks=layout.context,
            stride=layout.tensor,
            messages=passes * blocks * (layout.context - 1),
            exposed=0.3,
        )
    ]


def pipeline_traffic(job: Job) -> list[Traffic]:
    """An activation to the next stage, or its gradient back, as often as a rank sends one on average per micro batch.

    Stages are the outermost axis. The slowest hop leaves the node as soon as the whole pipeline does, however little of
    a node one stage fills, so its ranks are those of the pipeline; which hops leave it, `far_boundaries` tells. Once
    per step, ranks that hold the two ends of a tied embedding add up its gradient; in a zero-bubble schedule's V it is
    one rank.
    """
    layout, model = job.layout, job.model
    if layout.pipeline == 1:
        return []
    across = layout.tensor if layout.sequence_parallel or layout.virtual_stages > 1 else 1
    size = _wide(job) * job.tokens_per_pass * model.hidden / across
    stride = layout.devices // layout.pipeline
    hops = 2.0 * (layout.pipeline * layout.virtual_stages - 1 - _is_v(job)) / layout.pipeline
    found = [Traffic(kind="p2p", size=size, ranks=layout.pipeline, stride=stride, times=hops)]
    if model.tied and not _is_v(job):
        shards = layout.shard if layout.zero_stage == 3 else 1
        gradient = _gradient_width(job) * model.head_parameters / layout.tensor / shards
        found.append(Traffic(kind="all_reduce", size=gradient, ranks=2, stride=layout.devices // 2, window=0.0))
    return found


def far_boundaries(job: Job, machine: Machine) -> list[bool]:
    """Return whether each pipeline rank's next one is in another node, the last one's next being the first."""
    stages = job.layout.pipeline
    of_node = max(1, machine.joined // (job.layout.devices // stages))
    return [(stage + 1) % of_node == 0 and stages > of_node for stage in range(stages - 1)] + [stages > of_node]


def busiest_seconds(job: Job, hops: Sequence[float]) -> float:
    """Return how long the rank that sends longest sends for one micro batch.

    Args:
        hops: seconds of a hop from each pipeline rank to the next, the last one's next being the first.
    """
    rounds, *_, last = job.layout.virtual_stages, *hops
    goes_round = rounds > 1 and not _is_v(job)  # from the last rank to the first stage of the next round
    ahead = [rounds * hop for hop in hops[:-1]] + [(rounds - 1) * last * goes_round]
    return max(sent + back for sent, back in zip(ahead, [ahead[-1], *ahead[:-1]], strict=True))


def _is_v(job: Job) -> bool:
    """Return whether the second round of stages runs back, so that one rank has both ends."""
    return job.schedule == "zero_bubble" and job.layout.virtual_stages == 2


def data_traffic(job: Job) -> list[Traffic]:
    """Gradients, and weights where they are sharded (Rajbhandari et al. 2020, arXiv:1910.02054), of the fullest stage.

    Gradients go once per step, or per micro batch where they are sharded; weights go twice per micro batch where they
    are sharded, else once per step. In a pipeline, whose micro batches alternate, both wait for the step's end.
    """
    layout, model, sends = job.layout, job.model, job.sends
    ranks = layout.data * layout.context
    if ranks == 1 or (job.strategy is not None and not job.strategy.is_distributed and layout.data == 1):
        return []
    stages = held_by_rank(job)
    fullest = max(stages, key=lambda held: (held.elements, held.blocks))
    elements = fullest.elements if layout.pipeline > 1 else model.parameters / layout.tensor
    blocks = max(held.blocks for held in stages)
    weights, gradients = elements * _wide(job), elements * _gradient_width(job)
    passes = job.accumulation if layout.pipeline == 1 else 1.0
    one = partial(Traffic, ranks=ranks, stride=layout.tensor, messages=max(1.0, blocks))
    reduce, gather, scatter = (partial(one, kind=kind) for kind in ("all_reduce", "all_gather", "reduce_scatter"))
    if job.strategy is not None and job.strategy.devices == "all":  # DataParallel sends weights and adds up gradients
        return [reduce(size=gradients, times=passes, window=0.0)]  # in each pass: 2 (N - 1) / N of the weights, as here
    if sends == "tensors":
        return [reduce(size=gradients, window=0.0, messages=TENSORS_OF_BLOCK * max(1.0, blocks) + ENDS)]
    if sends == "buckets":
        count = max(1, round(gradients / BUCKET))
        last = min(gradients, max(gradients / count, _gradient_width(job) * model.head_parameters))  # ready last: tied
        found = reduce(size=gradients - last, window=2 / 3, messages=max(1, count - 1), in_background=True)
        return [*([found] if last < gradients else []), reduce(size=last, window=0.0, messages=1.0)]
    if sends == "at_end" or (sends == "zero" and layout.zero_stage == 0):
        return [reduce(size=gradients, window=0.0, messages=1.0)]
    if layout.zero_stage == 0:
        return [reduce(size=gradients, window=2 / 3)]
    if sends == "zero" and layout.zero_stage == 3:
        return _of_zero_3(job, one, blocks, gradients)
    if layout.zero_stage == 3:
        in_layers = fullest.blocks * model.block_parameters / layout.tensor
        return _of_shards(job, one, elements, in_layers)
    often = passes if layout.zero_stage == 2 else 1.0
    if sends == "zero":  # DeepSpeed reduces by all-reduces of its buckets, and gathers after the update
        buckets = max(1.0, elements / job.bucket_elements)
        return [
            reduce(size=gradients, times=often, window=2 / 3, messages=buckets),
            gather(size=weights, window=0.0, messages=buckets),
        ]
    return [scatter(size=gradients, times=often, window=2 / 3), gather(size=weights, window=1 / 3)]


def _of_shards(job: Job, one: partial[Traffic], held: float, in_layers: float) -> list[Traffic]:
    """Return what FSDP moves.

    What forward begins with is waited for, and what backward ends with: the embedding, and with it the rest of FSDP's
    root unit, which stays gathered until its own backward pass. Copies of the shards agree once per step; a shard is a
    neighbour of no copy.

    Args:
        one: a collective of all data and context ranks, a message for each block.
        held: elements of the fullest stage. in_layers: of them in its blocks.
    """
    layout, ranks, buckets = job.layout, one.keywords["ranks"], one.keywords["messages"]
    shards, passes = max(2, layout.shard), job.accumulation if layout.pipeline == 1 else 1.0
    rest = max(0.0, held - in_layers)
    root = rest if job.model.tied or layout.pipeline > 1 else rest / 2
    wide, gradient, in_blocks, twice = _wide(job), _gradient_width(job), held - root, 2 if job.reshards else 1
    gather, scatter = (partial(one, kind=kind, ranks=shards, times=passes) for kind in ("all_gather", "reduce_scatter"))
    found = [
        gather(size=root * wide, window=0.0, messages=1.0),
        gather(size=twice * in_blocks * wide, window=2 / 3, messages=twice * buckets),
        scatter(size=in_blocks * gradient, window=1 / 3),
        scatter(size=root * gradient, window=0.0, messages=1.0),
    ]
    if shards < ranks:
        apart = {"ranks": ranks // shards, "stride": layout.tensor * shards}
        found.append(one(kind="all_reduce", size=held * gradient / shards, window=1 / 3, in_background=True, **apart))
    return found


def _of_zero_3(job: Job, one: partial[Traffic], blocks: float, gradients: float) -> list[Traffic]:
    """Return what DeepSpeed's stage 3 moves.

    Tensors below PERSISTENT stay whole and are gathered once, after the update; the others in forward. They are kept
    for backward as long as LIVE elements are not exceeded, else gathered again, but for the tied embedding: forward
    reads it last and backward first.
    """
    model, wide = job.model, _wide(job)
    again = 1 if model.parameters < LIVE else 2
    block = [math.prod(shape) for shape in model.block_shapes()]
    ends = [model.head_parameters, model.position_parameters]
    small = [size for size in block if size < PERSISTENT]
    large = [size for size in block if size >= PERSISTENT]
    gather, scatter = (partial(one, kind=kind) for kind in ("all_gather", "reduce_scatter"))
    gathered = wide * (again * blocks * sum(large) + sum(ends))
    tensors = again * blocks * len(large) + len(ends)
    buckets = max(1.0, gradients / wide / job.bucket_elements)
    return [
        gather(size=gathered, times=job.accumulation, window=2 / 3, messages=tensors),
        gather(size=wide * blocks * sum(small), window=0.0, messages=blocks * len(small)),
        scatter(size=gradients, times=job.accumulation, window=1 / 3, messages=buckets),
    ]


def _gradient_width(job: Job) -> float:
    """Return the bytes of a gradient that data ranks add up: FSDP's are fp32, however it is mixed."""
    return _wide(job) if job.has_16_bit_weights and job.sends != "shards" else 4.0


def _wide(job: Job) -> float:
    """Return the bytes of a weight that is gathered, and of an activation between stages.

    src/gpt2.py keeps weights and the residual stream in fp32 under autocast. Other programs send 16 bits.
    """
    is_autocast = job.run_type is not None and not job.has_16_bit_weights
    return 4.0 if is_autocast else float(job.product_bytes)
