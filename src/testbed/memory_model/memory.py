"""Predict the memory of a run on each device: by kind, in the moments of a step at which it may peak. No torch.

The peak is the largest moment, not the sum of what is largest in each kind: activations are gone when the optimizer
works. docs/planner.md has the formulas in one table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from testbed.memory_model.activations import (
    Saved,
    block_tensors,
    casts_weights,
    gradients_inside,
    head_of,
    keeps_16_bits,
    keeps_casts,
    kept_tensors,
    residual_bytes,
)
from testbed.memory_model.devices import Device
from testbed.memory_model.job import Job
from testbed.memory_model.model_states import (
    BUCKET,
    FP32,
    LIVE,
    Held,
    ends_of_each,
    engine_of,
    held_by_rank,
    keeps_table_whole,
    main_gradient_bytes,
    model_state_bytes,
    shards_weights,
    update_copy_bytes,
)

PREFETCH = 5e7  # elements of DeepSpeed's stage3_prefetch_bucket_size
FORWARD = ("forward end", "loss")
BACKWARD = ("backward", "backward end")
KINDS = ("weights", "gradients", "optimizer", "activations", "logits", "buffers")
START = "start"  # of DeepSpeed, which puts the whole model on each device before it cuts it
MOMENTS = (*FORWARD, *BACKWARD, "update")
PASSES = (*FORWARD, "backward")  # while activations are alive
WORKSPACE = 32 * 2**20  # cuBLAS's own, from PyTorch's allocator: 8 MiB, on Hopper 32 MiB
RESERVED = 1.20  # reserved / allocated, PyTorch's caching allocator; measured on GPUs: 1.02 to 1.41
SPARE = 1.02  # of which a device that is nearly full cannot do without: the allocator frees what it cached, and retries
# On a CPU
HEAP = 1.05  # of what the heap holds at its largest, for what lies between blocks in use; measured
LIBRARIES = 60 * 2**20  # what PyTorch loads with the first optimizer, passes and threads


@dataclass(frozen=True)
class Buffer:
    """Memory that is held in some moments of a step."""

    name: str
    num_bytes: float
    moments: tuple[str, ...]
    tensor_bytes: float = 0.0  # of the largest tensors that it is made of, if they come and go
    kind: str = "buffers"


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on the fullest device.

    Attributes:
        moments: moment -> kind -> bytes.
        allocated: in tensors, at the peak.
        reserved: with what the caching allocator holds between tensors.
        steady: in tensors between two steps.
        resident: peak growth of the process where the device is a CPU, from just before the model is built.
    """

    moments: Mapping[str, Mapping[str, float]]
    peak_moment: str
    allocated: float
    reserved: float
    steady: float
    resident: float
    states: float  # weights, gradients and optimizer state alone


@lru_cache(2**14)  # of one question many others have the same runs
def memory_of(job: Job) -> MemoryEstimate:
    """Predict the device that needs most.

    Of the ranks of a pipeline that hold alike stages the first and the last are looked at: what is in flight grows or
    falls from one to the next.
    """
    by_rank, blocks = held_by_rank(job), _BlockBytes.of(job)
    ends = ends_of_each([held.kind for held in by_rank])
    return max((_on_rank(job, rank, by_rank[rank], blocks) for rank in ends), key=lambda found: found.allocated)


def memory_of_ranks(job: Job) -> list[MemoryEstimate]:
    """Predict each rank of a pipeline, from the first stage on; without one, the rank that all are like."""
    blocks = _BlockBytes.of(job)
    return [_on_rank(job, rank, held, blocks) for rank, held in enumerate(held_by_rank(job))]


def taken(estimate: MemoryEstimate, kind: str) -> float:
    """Return the bytes that a run must have besides the context of its process, on a device of a kind: with what
    fragments, on a CPU the resident set."""
    return estimate.resident if kind == "cpu" else SPARE * estimate.allocated


def needs(estimate: MemoryEstimate, device: Device) -> float:
    """Return the bytes that a device must have: with the context."""
    return taken(estimate, device.kind) + device.context_bytes


def fits(estimate: MemoryEstimate, device: Device) -> bool:
    """Return whether a run fits: never where model states alone do not."""
    return needs(estimate, device) <= device.memory_bytes


@dataclass(frozen=True)
class _BlockBytes:
    """Bytes of what one block keeps of a pass on one tensor rank; with each sum the largest tensor of it."""

    kept: tuple[float, float]  # with the job's recomputation
    all: tuple[float, float]  # without
    again: tuple[float, float]  # of `all` what is computed again
    inside: float  # gradients while the block goes backward

    @classmethod
    def of(cls, job: Job) -> _BlockBytes:
        def bytes_of(tensors: list[Saved]) -> tuple[float, float]:
            sizes = [_bytes_of_pass(job, tensor) for tensor in tensors]
            return sum(sizes), max(sizes, default=0.0)

        kept, all_of_them = kept_tensors(job), list(block_tensors(job))
        names = {tensor.name for tensor in kept}
        again = [tensor for tensor in all_of_them if tensor.name not in names] if job.recompute != "none" else []
        inside = _bytes_of_pass(job, Saved("gradients inside", gradients_inside(job), is_cut=True))
        return cls(bytes_of(kept), bytes_of(all_of_them), bytes_of(again), inside)


def _on_rank(job: Job, rank: int, held: Held, of_block: _BlockBytes) -> MemoryEstimate:
    """Predict one pipeline rank."""
    states = list(_states(job, held))
    alive = [*states, *_activations(job, rank, held, of_block), *buffers_of(job, held)]
    alive += _logits(job, rank) if held.predicts else []
    moments = {name: dict.fromkeys(KINDS, 0.0) for name in MOMENTS}
    for buffer in alive:
        for name in buffer.moments:
            moments[name][buffer.kind] += buffer.num_bytes
    of_step = max(sum(kinds.values()) for kinds in moments.values()) + WORKSPACE
    if job.strategy is not None and job.strategy.engine == "deepspeed" and not job.on_cpu:
        weights = (2 if job.has_16_bit_weights else FP32) * job.model.parameters
        moments[START] = {**dict.fromkeys(KINDS, 0.0), "weights": weights}
    peak_moment = max(moments, key=lambda name: sum(moments[name].values()))
    peak = sum(moments[peak_moment].values())
    allocated = peak + WORKSPACE
    # src/gpt2.py drops its gradients between steps; most programs free them only before the next pass
    drops_gradients = job.strategy is not None and job.strategy.engine != "deepspeed"
    between = ("weights", "optimizer") if drops_gradients else ("weights", "optimizer", "gradients")
    # On a CPU freed memory stays in glibc's heap. A hole that smaller tensors have moved into is too small for the next
    # large one, so the heap has room for one of the largest more than are ever alive.
    largest = max(buffer.tensor_bytes for buffer in alive)
    return MemoryEstimate(
        moments=moments,
        peak_moment=peak_moment,
        allocated=allocated,
        reserved=max(RESERVED * of_step, allocated),  # a fresh process has no holes
        steady=sum(moments["update"][kind] for kind in between) + WORKSPACE,
        resident=LIBRARIES + HEAP * (peak + largest),
        states=sum(state.num_bytes for state in states),
    )


def _states(job: Job, held: Held) -> Iterator[Buffer]:
    """Yield weights, gradients and optimizer state with the moments in which they live on the device.

    DeepSpeed's offload has some of them on the host, and adds gradients up there.
    """
    sizes, is_offloaded = model_state_bytes(job, held), job.offload in ("optimizer", "parameters")
    # of earlier micro batches, or in a buffer for good
    are_there_before = job.accumulation > 1 or engine_of(job) == "megatron"
    late = MOMENTS if are_there_before else ("backward end", "update")
    if job.offload != "parameters":
        yield Buffer("weights", sizes["parameters"], MOMENTS, kind="weights")
    if not (is_offloaded and job.layout.zero_stage >= 2):
        yield Buffer("gradients", sizes["gradients"], late, kind="gradients")
    if not is_offloaded:
        yield Buffer("optimizer", sizes["optimizer"], MOMENTS, kind="optimizer")


def _in_flight(job: Job, rank: int) -> list[float]:
    """Return for each stage of a rank how many micro batches it keeps activations of.

    GPipe (Huang et al. 2019) keeps all; 1F1B (Narayanan et al. 2021, arXiv:2104.04473, section 2.2) as many as there
    are stages from here on; interleaved, chunks of (v - 1) p + 2 (p - 1 - s) + 1 warm-up passes over v stages; the V
    of zero bubbles (Qi et al. 2024, arXiv:2405.15362) 2 p - s of its first stage and s + 1 of its second.
    """
    ranks, virtual, batches = job.layout.pipeline, job.layout.virtual_stages, job.accumulation
    if ranks == 1 or (job.schedule is None and job.run_type is not None):
        return [1.0] * virtual
    if job.schedule == "gpipe":
        return [batches] * virtual
    if job.schedule == "zero_bubble" and virtual == 2:
        return [min(batches, 2 * ranks - rank), min(batches, rank + 1)]
    if virtual == 1:
        return [min(batches, ranks - rank)]
    warm_up = (virtual - 1) * ranks + 2 * (ranks - 1 - rank) + 1
    return [min(batches, warm_up / virtual)] * virtual


def _activations(job: Job, rank: int, held: Held, of_block: _BlockBytes) -> Iterator[Buffer]:
    """Yield what blocks keep, and one block's recomputation and gradients while it goes backward."""
    in_flight = sum(
        len(stage.blocks) * flying for stage, flying in zip(held.stages, _in_flight(job, rank), strict=True)
    )
    here = 1 - (job.offload_layers or 0) / job.model.layers  # the others' activations wait in host memory
    computed_again = job.recompute_share if job.recompute != "none" else 0.0
    for share, (size, largest) in ((computed_again, of_block.kept), (1 - computed_again, of_block.all)):
        if share:
            yield Buffer("of blocks", share * here * in_flight * size, PASSES, largest, "activations")
    if in_flight == 0:
        return
    size, largest = of_block.again
    yield Buffer("computed again", size, ("backward",), largest, "activations")
    yield Buffer("gradients inside", of_block.inside, ("backward",), of_block.inside / 2, "activations")


def _bytes_of_pass(job: Job, tensor: Saved) -> float:
    """Return a tensor's bytes on one tensor rank in a pass of one micro batch."""
    is_cut = tensor.is_cut or job.layout.sequence_parallel
    return job.tokens_per_pass * tensor.bytes_per_token / (job.layout.tensor if is_cut else 1)


def _logits(job: Job, rank: int) -> Iterator[Buffer]:
    """Yield the logits, the final norm and the head's input; of micro batches that wait, what each of them keeps."""
    tokens, head, logits = job.tokens_per_pass, head_of(job), job.product_bytes
    entries = tokens * job.model.vocab / job.layout.tensor
    inputs = tokens * job.model.hidden * (residual_bytes(job) + logits)
    inputs /= job.layout.tensor if job.layout.sequence_parallel else 1
    # interleaved, the last stage goes backward as soon as it has gone forward: what waits is of the rank's first stages
    is_interleaved = job.layout.virtual_stages > 1 and job.schedule != "zero_bubble"
    waiting = 0.0 if is_interleaved else max(0.0, _in_flight(job, rank)[-1] - 1)
    # torch.distributed.pipelining keeps the logits that the loss goes back to, of those that wait what the loss saved
    kept = logits if job.layout.pipeline > 1 and job.run_type else 0
    peaks = {
        "forward end": head.forward_peak,
        "loss": head.backward_peak + (logits if job.label_smoothing else 0),
        "backward": logits,
    }
    for moment, peak in peaks.items():
        size = (waiting * head.saved + kept + peak) * entries
        yield Buffer("logits", size, (moment,), FP32 * entries, "logits")
    yield Buffer("head's input", (waiting + 1) * inputs, PASSES, inputs / 2, "logits")


def buffers_of(job: Job, held: Held) -> Iterator[Buffer]:
    """Yield the buffers of one rank."""
    yield from _casts(job, held)
    yield from _gradients_of_tables(job, held)
    engine = engine_of(job)
    if engine == "deepspeed":
        yield from _of_deepspeed(job, held)
    elif shards_weights(job):
        yield from _of_fsdp(job, held)
    elif engine != "megatron" and _is_ddp(job):
        # src/gpt2.py's gradients are views of the buckets, which stay when the gradients are dropped
        moments = (*FORWARD, *(BACKWARD if job.run_type is None else ("backward",)))
        yield Buffer("ddp buckets", FP32 * held.elements, moments, BUCKET)
    elif engine != "megatron" and job.layout.data * job.layout.context > 1:
        yield Buffer("averaged buckets", 2 * BUCKET, ("update",), BUCKET)
    if job.optimizer == "muon" and job.model.layers:
        largest = FP32 * job.model.hidden * job.model.ffn
        yield Buffer("orthogonalised", 4 * largest, ("update",), largest)


def _is_ddp(job: Job) -> bool:
    return job.layout.data > 1 if job.strategy is None else job.sends == "buckets"


def _casts(job: Job, held: Held) -> Iterator[Buffer]:
    """Yield the weights that autocast casts; autograd keeps them, unless the block is computed again."""
    if not casts_weights(job):
        return
    table = held.table if held.predicts else 0
    cast = held.matrices + table if job.recompute == "none" else held.block + table
    moments = (*FORWARD, "backward", *(("backward end",) if keeps_casts(job) else ()))
    yield Buffer("weights in 16 bits", 2 * cast, moments, 2 * held.table)
    if keeps_casts(job):
        # all micro batches share the first one's casts, whose gradients autograd completes at the end of a pass
        yield Buffer("gradients in 16 bits", 2 * held.matrices, ("backward end",), 2 * held.block / 3)


def _gradients_of_tables(job: Job, held: Held) -> Iterator[Buffer]:
    """Yield the gradients of embedding and head that are not yet in their place.

    A tied head's waits through the whole backward pass for the embedding's; both and their sum are alive at its end.
    """
    if engine_of(job) == "megatron" or not held.table:
        return
    size = (2 if keeps_16_bits(job) else FP32) * held.table
    is_tied = job.model.tied and held.embeds and held.predicts
    if held.predicts and (job.model.tied or not shards_weights(job)):
        yield Buffer("gradient of the head", size, ("backward",), size)
    if held.embeds:
        waits = is_tied and job.schedule != "zero_bubble"  # whose gradients of weights are made one after the other
        at_end = (2 if waits else 0) + (1 if job.accumulation > 1 else 0)
        at_end += job.schedule is not None and not held.predicts  # one more in a first stage, as measured
        yield Buffer("gradients of the embedding", at_end * size, ("backward end",), size)


def _of_fsdp(job: Job, held: Held) -> Iterator[Buffer]:
    """Yield the units that FSDP gathers, and gradients on their way into shards.

    What forward ends with stays gathered, a tied embedding with it. A block's weights are there with the next one's,
    which are on their way; its gradients lie whole once more, as wide as they are reduced, while they are reduced.
    """
    width = 2 if keeps_16_bits(job) else FP32
    reduces_in = main_gradient_bytes(job) if engine_of(job) == "megatron" else FP32
    is_elsewhere = not job.model.tied or keeps_table_whole(job, held)
    root = held.elements - held.blocks * held.block - (held.table if is_elsewhere else 0)
    # in a pipeline micro batches alternate, and no stage frees what the next one needs again (torchtitan); src/gpt2.py
    # does so where it is told to
    reshards = job.reshards and job.layout.zero_stage == 3 and (job.layout.pipeline == 1 or job.run_type is not None)
    blocks = min(held.blocks, 3) if reshards else held.blocks
    yield Buffer("gathered embeddings", width * root, (*FORWARD, *BACKWARD), width * held.table)
    yield Buffer("gathered blocks", width * blocks * held.block, (*FORWARD, "backward"), width * held.block)
    yield Buffer("reduced blocks", (width + reduces_in) * held.block, ("backward",), FP32 * held.block)
    reduced = FP32 * (root + root / max(1, job.layout.shard))  # with the shard that comes out
    yield Buffer("reduced embeddings", reduced, ("backward end",), FP32 * held.table)
    if job.run_type is not None and job.layout.pipeline > 1:  # a schedule reduces once, after all micro batches
        yield Buffer("whole gradients", FP32 * (held.elements - root), (*FORWARD, *BACKWARD), FP32 * held.block)


def _of_deepspeed(job: Job, held: Held) -> Iterator[Buffer]:
    """Yield the buckets of DeepSpeed and what its update converts.

    Buckets are as large as they are said to be, however small the model: two for each backward pass of stages 1 and 2
    (overlap_comm), one for good in stage 3, which keeps up to max_live_parameters (10^9) of its weights gathered. A
    process on a CPU has only the part that is written to.
    """
    stage, elements = job.layout.zero_stage, held.elements
    width = 2 if job.has_16_bit_weights else FP32
    bucket = min(elements, job.bucket_elements) if job.on_cpu or stage == 0 else job.bucket_elements
    if stage == 0:
        if job.layout.data > 1:
            yield Buffer("averaged buckets", width * bucket, ("update",), width * bucket)
        return
    if stage < 3:
        # on a CPU a bucket is there once it is written to, the second once the first is full
        buckets = 1 if job.on_cpu and elements <= bucket else 2
        moments = BACKWARD if job.on_cpu else ("loss", *BACKWARD)
        yield Buffer("reduce buckets", buckets * width * bucket, moments, width * job.bucket_elements)
    else:
        yield Buffer("reduce bucket", width * bucket, (*FORWARD, *BACKWARD, "update"), width * bucket)
        # of weights that are gathered, a rank's own part is copied; of gradients that are reduced, all
        copies = min(elements, PREFETCH) / job.layout.shard + min(elements, job.bucket_elements)
        yield Buffer("copies of what is gathered and reduced", width * copies, ("backward",), width * bucket)
        yield Buffer("gathered weights", width * min(elements, LIVE), (*FORWARD, "backward"), width * held.table)
    if stage == 1 and job.accumulation > 1:
        mine = model_state_bytes(job)["gradients"]
        yield Buffer("whole gradients", max(0, width * elements - mine), (*FORWARD, *BACKWARD), width * held.table)
    if job.offload in ("optimizer", "parameters"):  # the host updates
        return
    copy = update_copy_bytes(job.model, job.layout.shard, stage)
    yield Buffer("fp32 gradients for the update", copy, ("update",), copy)
