"""Predict the memory of a run on each device: by kind, in the moments of a step at which it may peak. No torch.

The peak is the largest moment, not the sum of what is largest in each kind: activations are gone when the optimizer
works. docs/planner.md has the formulas in one table.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from testbed.config.mesh import check_schedule
from testbed.distributed.mesh import MeshSizes
from testbed.errors import InputError
from testbed.memory_model.activations import (
    FP32,
    Saved,
    block_tensors,
    gradients_inside,
    head_of,
    kept_tensors,
    product_bytes,
    residual_bytes,
)
from testbed.memory_model.buffers import buffers_of, held_by
from testbed.memory_model.devices import Device
from testbed.memory_model.job import Job
from testbed.memory_model.model_states import engine_of, model_state_bytes
from testbed.memory_model.stages import Stage, stages_by_rank

KINDS = ("weights", "gradients", "optimizer", "activations", "logits", "buffers")
START = "start"  # of DeepSpeed, which puts the whole model on each device before it cuts it
MOMENTS = ("forward end", "loss", "backward", "backward end", "update")
WORKSPACE = 32 * 2**20  # cuBLAS's own, from PyTorch's allocator: 8 MiB, on Hopper 32 MiB
RESERVED = 1.20  # reserved / allocated, PyTorch's caching allocator; measured on GPUs: 1.02 to 1.41
SPARE = 1.02  # of which a device that is nearly full cannot do without: the allocator frees what it cached, and retries
# On a CPU
HEAP = 1.05  # of what the heap holds at its largest, for what lies between blocks in use; measured
LIBRARIES = 60 * 2**20  # what PyTorch loads with the first optimizer, passes and threads


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
    pipeline_rank: int = 0
    states: float = 0.0  # weights, gradients and optimizer state alone


def memory_of(job: Job) -> MemoryEstimate:
    """Predict the device that needs most.

    Of the ranks of a pipeline that hold alike stages the first and the last are looked at: what is in flight grows or
    falls from one to the next.
    """
    alike: dict[tuple[tuple[int, bool, bool], ...], list[int]] = {}
    by_rank = stages_by_rank(job)
    for rank, stages in enumerate(by_rank):
        alike.setdefault(tuple((len(one.blocks), one.embeds, one.predicts) for one in stages), []).append(rank)
    ends = dict.fromkeys(rank for ranks in alike.values() for rank in (ranks[0], ranks[-1]))
    return max((_on_rank(job, rank, by_rank[rank]) for rank in ends), key=lambda found: found.allocated)


def memory_of_ranks(job: Job) -> list[MemoryEstimate]:
    """Predict each rank of a pipeline, from the first stage on; without one, the rank that all are like."""
    return [_on_rank(job, rank, stages) for rank, stages in enumerate(stages_by_rank(job))]


def needs(estimate: MemoryEstimate, device: Device) -> float:
    """Return the bytes that a device must have: with the context and what fragments, on a CPU the resident set."""
    taken = estimate.resident if device.kind == "cpu" else SPARE * estimate.allocated
    return taken + device.context_bytes


def fits(estimate: MemoryEstimate, device: Device) -> bool:
    """Return whether a run fits: never where model states alone do not."""
    return needs(estimate, device) <= device.memory_bytes


def largest_micro_batch(job: Job, device: Device) -> int:
    """Return the largest micro batch that fits, or 0.

    It divides a data rank's share of the global batch, and leaves a pipeline's schedule the micro batches it needs.
    """
    share = round(job.micro_batch * job.accumulation)
    small = [size for size in range(1, math.isqrt(share) + 1) if share % size == 0]
    sizes = sorted({*small, *(share // size for size in small)})
    jobs = [dataclasses.replace(job, micro_batch=size, accumulation=share // size) for size in sizes]
    possible = [(size, it) for size, it in zip(sizes, jobs, strict=True) if _fills_its_schedule(it)]
    return max((size for size, it in possible if fits(memory_of(it), device)), default=0)


def _fills_its_schedule(job: Job) -> bool:
    """Return whether a step has the micro batches that a pipeline's schedule asks for."""
    values = {"pipeline_schedule": job.schedule, "grad_accum_steps": round(job.accumulation)}
    try:
        check_schedule(values, MeshSizes(pipeline=job.layout.pipeline))
    except InputError:
        return False
    return True


def smallest_number_of_devices(
    jobs_on: Callable[[int], Iterable[Job]], device: Device, per_node: int, most: int = 2**16
) -> int | None:
    """Return the smallest number of devices on which a job fits: each number up to a node, then twice as many again.

    Args:
        jobs_on: the runs to choose from on a number of devices.
    """
    numbers = list(range(1, per_node + 1))
    while numbers[-1] * 2 <= most:
        numbers.append(numbers[-1] * 2)
    for number in numbers:
        if any(fits(memory_of(job), device) for job in jobs_on(number)):
            return number
    return None


@dataclass
class _Moment:
    """Bytes of a moment by kind, and the bytes of the largest tensor that comes and goes."""

    kinds: dict[str, float] = dataclasses.field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))
    largest: float = 0.0

    def add(self, kind: str, num_bytes: float, tensor_bytes: float = 0.0) -> None:
        """Args: tensor_bytes: of one of the tensors that these bytes are made of, if they come and go."""
        self.kinds[kind] += num_bytes
        self.largest = max(self.largest, tensor_bytes)

    @property
    def total(self) -> float:
        return sum(self.kinds.values())


def _on_rank(job: Job, rank: int, stages: Sequence[Stage]) -> MemoryEstimate:
    """Predict one pipeline rank."""
    moments = {name: _Moment() for name in MOMENTS}
    held = held_by(job, stages)
    states = _add_states(job, stages, moments)
    _add_activations(job, rank, stages, moments)
    if held.predicts:
        _add_head(job, rank, moments)
    for buffer in buffers_of(job, held):
        for name in buffer.moments:
            moments[name].add("buffers", buffer.num_bytes, buffer.tensor_bytes)
    if job.strategy is not None and job.strategy.engine == "deepspeed" and not job.on_cpu:
        moments[START] = _Moment()
        moments[START].add("weights", (2 if job.has_16_bit_weights else FP32) * job.model.parameters)
    peak_moment = max(moments, key=lambda name: moments[name].total)
    allocated = moments[peak_moment].total + WORKSPACE
    of_step = max(moment.total for name, moment in moments.items() if name != START) + WORKSPACE
    between = ("weights", "optimizer") if _drops_gradients(job) else ("weights", "optimizer", "gradients")
    return MemoryEstimate(
        moments={name: dict(moment.kinds) for name, moment in moments.items()},
        peak_moment=peak_moment,
        allocated=allocated,
        reserved=max(RESERVED * of_step, allocated),  # a fresh process has no holes
        steady=sum(moments["update"].kinds[kind] for kind in between) + WORKSPACE,
        resident=_resident(moments),
        pipeline_rank=rank,
        states=states,
    )


def _drops_gradients(job: Job) -> bool:
    """Return whether no gradients are alive between steps. Most programs free them only before the next pass."""
    return job.strategy is not None and job.strategy.engine != "deepspeed"


def _add_states(job: Job, stages: Sequence[Stage], moments: Mapping[str, _Moment]) -> float:
    """Add weights, gradients and optimizer state to every moment in which they live; return their sum."""
    whole = stages if job.layout.pipeline > 1 else None
    states = model_state_bytes(job, whole)
    if job.offload in ("optimizer", "parameters"):
        states["optimizer"] = 0
        if job.layout.zero_stage >= 2:  # DeepSpeed adds them up on the host
            states["gradients"] = 0
    if job.offload == "parameters":
        states["parameters"] = 0
    for name, moment in moments.items():
        for kind, of_states in (("weights", "parameters"), ("optimizer", "optimizer"), ("gradients", "gradients")):
            if kind == "gradients" and name in ("forward end", "loss", "backward") and not _has_gradients_before(job):
                continue
            moment.add(kind, states[of_states])
    return sum(states.values())


def _has_gradients_before(job: Job) -> bool:
    """Return whether gradients are there while a micro batch is computed: of earlier ones, or in a buffer for good."""
    if engine_of(job) in ("megatron", "llm.c"):
        return True
    return job.accumulation > 1


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


def _add_activations(job: Job, rank: int, stages: Sequence[Stage], moments: Mapping[str, _Moment]) -> None:
    """Add what blocks keep, and one block's recomputation and gradients while it goes backward."""
    tokens = _tokens(job)
    in_flight = sum(len(stage.blocks) * flying for stage, flying in zip(stages, _in_flight(job, rank), strict=True))
    here = 1 - (job.offload_layers or 0) / job.model.layers  # the others' activations wait in host memory
    computed_again = job.recompute_share if job.recompute != "none" else 0.0
    for share, tensors in ((computed_again, kept_tensors(job)), (1 - computed_again, list(block_tensors(job)))):
        for tensor in tensors if share else ():
            size = tokens * _on_tensor_rank(job, tensor)
            for name in ("forward end", "loss", "backward"):
                moments[name].add("activations", share * here * in_flight * size, size)
    if in_flight == 0:
        return
    if job.recompute != "none":
        kept = {tensor.name for tensor in kept_tensors(job)}
        for tensor in block_tensors(job):
            if tensor.name not in kept:
                size = tokens * _on_tensor_rank(job, tensor)
                moments["backward"].add("activations", size, size)
    wide = Saved("gradients inside", gradients_inside(job), is_cut=True)
    size = tokens * _on_tensor_rank(job, wide)
    moments["backward"].add("activations", size, size / 2)


def _tokens(job: Job) -> float:
    """Tokens of a micro batch on one rank."""
    return job.micro_batch * job.model.seq_length / job.layout.context


def _on_tensor_rank(job: Job, tensor: Saved) -> float:
    """Return a tensor's bytes per token on one tensor rank."""
    is_cut = tensor.is_cut or job.layout.sequence_parallel
    return tensor.bytes_per_token / (job.layout.tensor if is_cut else 1)


def _add_head(job: Job, rank: int, moments: Mapping[str, _Moment]) -> None:
    """Add the logits, the final norm and the head's input; of micro batches that wait, what each of them keeps."""
    tokens, head = _tokens(job), head_of(job)
    entries = tokens * job.model.vocab / job.layout.tensor
    inputs = tokens * job.model.hidden * (residual_bytes(job) + product_bytes(job))
    inputs /= job.layout.tensor if job.layout.sequence_parallel else 1
    # interleaved, the last stage goes backward as soon as it has gone forward: what waits is of the rank's first stages
    is_interleaved = job.layout.virtual_stages > 1 and job.schedule != "zero_bubble"
    waiting = 0.0 if is_interleaved else max(0.0, _in_flight(job, rank)[-1] - 1)
    logits = product_bytes(job)
    # torch.distributed.pipelining keeps the logits that the loss goes back to, of those that wait what the loss saved
    kept = logits if job.layout.pipeline > 1 and job.run_type else 0
    peaks = {
        "forward end": head.forward_peak,
        "loss": head.backward_peak + (logits if job.label_smoothing else 0),
        "backward": product_bytes(job),
    }
    for name, peak in peaks.items():
        moments[name].add("logits", (waiting * head.saved + kept) * entries, FP32 * entries)
        moments[name].add("logits", peak * entries, FP32 * entries)
        moments[name].add("logits", (waiting + 1) * inputs, inputs / 2)


def _resident(moments: Mapping[str, _Moment]) -> float:
    """Return the growth of a process on a CPU, where freed memory stays in glibc's heap for the next allocation.

    A hole that smaller tensors have moved into is too small for the next large one, so the heap has room for one of the
    largest more than are ever alive.
    """
    largest = max(moment.largest for moment in moments.values())
    return LIBRARIES + HEAP * (max(moment.total for moment in moments.values()) + largest)
