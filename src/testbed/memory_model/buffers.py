"""Bytes that a strategy holds besides model states and activations: casts, gathered weights, buckets. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from testbed.memory_model.activations import keeps_16_bits
from testbed.memory_model.job import Job
from testbed.memory_model.model_states import (
    BUCKET,
    FP32,
    LIVE,
    Held,
    engine_of,
    keeps_table_whole,
    main_gradient_bytes,
    model_state_bytes,
    shards_weights,
    update_copy_bytes,
)

PREFETCH = 5e7  # elements of DeepSpeed's stage3_prefetch_bucket_size
FORWARD = ("forward end", "loss")
BACKWARD = ("backward", "backward end")


@dataclass(frozen=True)
class Buffer:
    """Memory that is held in some moments of a step."""

    name: str
    num_bytes: float
    moments: tuple[str, ...]
    tensor_bytes: float = 0.0  # of the largest tensors that it is made of, if they come and go
    kind: str = "buffers"


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


def casts_weights(job: Job) -> bool:
    """Return whether autocast makes copies of fp32 weights in 16 bits."""
    return job.product_bytes != FP32 and not keeps_16_bits(job) and not job.has_16_bit_weights


def keeps_casts(job: Job) -> bool:
    """Return whether casts stay for all micro batches of a step, as most strategies of src/gpt2.py keep them."""
    keeps = casts_weights(job) and job.accumulation > 1 and job.recompute == "none" and not job.compiled
    is_in_shards = job.sends == "shards"
    return keeps and job.strategy is not None and not is_in_shards and job.strategy.keeps != "shards"


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
