"""Count what the ranks of a job send to each other, by axis: bytes, ranks, messages. No torch.

Ranks are laid out tensor, context, data, pipeline from the nearest to the farthest, as Megatron does.
"""

from __future__ import annotations

from dataclasses import dataclass

from testbed.memory_model.job import Job, Machine


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
    window: float = 1.0  # passes of a micro batch that hide it

    def moved(self, backend: str = "nccl") -> float:
        """Bytes that a rank sends, by rings: (n - 1) / n of the message, twice for an all-reduce.

        gloo has no reduce-scatter of its own: PyTorch makes it from an all-reduce, so it moves twice as much. ZeRO 1
        and 2 of two ranks then send 1.5 times what an all-reduce would.
        """
        if self.kind == "p2p":
            return self.size
        is_twice = self.kind == "all_reduce" or (self.kind == "reduce_scatter" and backend == "gloo")
        return (2 if is_twice else 1) * (self.ranks - 1) / self.ranks * self.size

    def neighbours(self, machine: Machine) -> int:
        """Return how many of its ranks are in one node."""
        return max(1, min(self.ranks, machine.joined // self.stride))

    def crosses_nodes(self, machine: Machine) -> bool:
        return self.ranks * self.stride > machine.joined


def tensor_traffic(job: Job, blocks: float) -> list[Traffic]:
    """All-reduces of activations: two per block and pass (Shoeybi et al. 2019, arXiv:1909.08053).

    With sequence parallelism each is a reduce-scatter and an all-gather of the same bytes, and backward gathers once
    more (Korthikanti et al. 2022, arXiv:2205.05198).
    """
    layout = job.layout
    if layout.tensor == 1:
        return []
    passes = 4.0 + (2.0 * job.recompute_share if job.recompute == "full" else 0.0) + 1.0 * layout.sequence_parallel
    width = 4 if job.precision in ("fp32", "tf32") else 2
    size = width * job.micro_batch * job.model.seq_length / layout.context * job.model.hidden
    exposed = 0.5 if job.tensor_overlap else 1.0
    count = passes * blocks
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
    """Activations to the next stage and gradients back, once per piece of the rank.

    Stages are the outermost axis, and all wait for the slowest hop: it leaves the node as soon as the whole pipeline
    does, however little of a node one stage fills. So the ranks are those of the pipeline.
    """
    layout = job.layout
    if layout.pipeline == 1:
        return []
    across = layout.tensor if layout.sequence_parallel or layout.virtual_stages > 1 else 1
    size = _wide(job) * job.micro_batch * job.model.seq_length / layout.context * job.model.hidden / across
    count = 2.0 * layout.virtual_stages
    stride = layout.devices // layout.pipeline
    return [Traffic(kind="p2p", size=size * count, ranks=layout.pipeline, stride=stride, messages=count)]


def data_traffic(job: Job, blocks: float) -> list[Traffic]:
    """Gradients, and weights where they are sharded (Rajbhandari et al. 2020, arXiv:1910.02054).

    `blocks` are those of the fullest stage. Gradients go once per step, or per micro batch where they are sharded;
    weights go twice per micro batch where they are sharded, else once per step. In a pipeline, whose micro batches
    alternate, both wait for the step's end.
    """
    layout, model = job.layout, job.model
    ranks = layout.data * layout.context
    if ranks == 1:
        return []
    held = model.parameters / (layout.tensor * layout.pipeline)
    weights = held * _wide(job)
    reduces_in_fp32 = job.strategy is not None and job.strategy.sends == "shards"  # FSDP, however it is mixed
    is_narrow = job.has_16_bit_weights and not reduces_in_fp32
    gradients = held * (_wide(job) if is_narrow else 4.0)
    stride = layout.tensor
    passes = job.accumulation if layout.pipeline == 1 else 1.0
    buckets = max(1.0, blocks)

    def one(kind: str, size: float, times: float, window: float, ranks: int = ranks, apart: int = 1) -> Traffic:
        return Traffic(
            kind=kind, size=size, ranks=ranks, stride=stride * apart, messages=buckets, times=times, window=window
        )

    if layout.zero_stage == 0:
        return [one("all_reduce", gradients, 1.0, 2 / 3)]
    shards = max(2, layout.shard)
    if layout.zero_stage == 3:
        gathers = one("all_gather", 2 * weights, passes, 2 / 3, shards)
        found = [gathers, one("reduce_scatter", gradients, passes, 1 / 3, shards)]
    else:
        often = passes if layout.zero_stage == 2 else 1.0
        found = [one("reduce_scatter", gradients, often, 2 / 3), one("all_gather", weights, 1.0, 1 / 3)]
    if shards < ranks and layout.zero_stage == 3:  # copies of the shards agree; a shard is a neighbour of no copy
        found.append(one("all_reduce", gradients / shards, 1.0, 1 / 3, ranks // shards, apart=shards))
    return found


def _wide(job: Job) -> float:
    """Return the bytes of a weight that is gathered, and of an activation between stages.

    src/gpt2.py keeps weights and the residual stream in fp32 under autocast. Other programs send 16 bits.
    """
    is_autocast = job.run_type is not None and not job.has_16_bit_weights
    return 4.0 if is_autocast or job.precision in ("fp32", "tf32") else 2.0
