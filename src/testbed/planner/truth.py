"""Say why a published row cannot be true: more FLOP/s than the device has, weights that do not fit. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from testbed.memory_model.devices import GIB, Device, devices
from testbed.memory_model.job import Job
from testbed.planner.guesses import Unstated

CLAIMED_TIME, CLAIMED_SPEED = "claimed_step_time_s", "claimed_tokens_per_s_per_gpu"
CLAIMED_MEMORY, MEASURED_TIME = "claimed_peak_memory_gib", "step_time_s"


class ImpossibleRow(Exception):
    """A row that cannot be true or be read, with the reason as a sentence."""

    def __init__(self, reason: str, id: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.id = id


def check(raw: Mapping[str, Any], job: Job, device: Device, unstated: Unstated) -> None:
    """Raise ImpossibleRow where a row contradicts itself or its device.

    Of what the row does not state the value counts that forbids least: a guess must not reject a row.
    """
    layout, model = job.layout, job.model
    if layout.pipeline * layout.virtual_stages > model.layers + 2:
        stages = f"{layout.pipeline} x {layout.virtual_stages}"
        raise ImpossibleRow(f"{stages} pipeline stages are more than the {model.layers} layers, embedding and head")
    if model.heads % layout.tensor and not unstated.heads:
        raise ImpossibleRow(f"{layout.tensor} tensor ranks cannot share {model.heads} heads")
    if model.seq_length % layout.context:
        raise ImpossibleRow(f"{layout.context} context ranks cannot share sequences of {model.seq_length} tokens")
    if job.accumulation < 1 - 1e-6:
        raise ImpossibleRow(
            f"micro batch {job.micro_batch:g} x {layout.data} data ranks is more than the global batch "
            f"{job.global_batch:g}"
        )
    weights, memory = least_weight_bytes(job, unstated), most_memory(device, unstated)
    if weights > memory * 1.02:
        raise ImpossibleRow(
            f"the weights alone take {weights / GIB:.1f} GiB on each device, which has {memory / GIB:.1f}"
        )
    peak = highest_peak(job, device, unstated)
    for key, speed in _claimed_speeds(raw, job, unstated):
        if speed > peak:
            raise ImpossibleRow(
                f"{key} means {speed / 1e12:.0f} TFLOP/s on each device, above its peak of {peak / 1e12:.0f} "
                f"in {job.precision}"
            )
    for value in _values_of(raw, CLAIMED_MEMORY):
        if value * GIB > memory * 1.02:
            raise ImpossibleRow(f"{CLAIMED_MEMORY} of {value:g} is more than the device has")


def least_weight_bytes(job: Job, unstated: Unstated) -> float:
    """Return the bytes of the weights that a device holds at least: 16 bits each, the embedding once."""
    layout = job.layout
    if job.offload == "parameters":
        return 0.0
    is_sharded = layout.zero_stage == 3 or unstated.zero_stage
    shards = layout.data * layout.context if is_sharded else 1
    width = 4.0 if job.precision in ("fp32", "tf32") and not unstated.precision else 2.0
    return width * job.model.parameters / (layout.tensor * layout.pipeline * shards)


def most_memory(device: Device, unstated: Unstated) -> float:
    """Return the bytes that the device has at most: those of the largest of its kind where the row does not say."""
    if not unstated.memory:
        return device.memory_bytes
    kind = device.name.split("-")[0]
    alike = (one.memory_bytes for one in devices().values() if unstated.device or one.name.split("-")[0] == kind)
    return max(device.memory_bytes, *alike)


def highest_peak(job: Job, device: Device, unstated: Unstated) -> float:
    """Return the FLOP/s that nothing can exceed: of an unknown device or precision those of the fastest one known."""
    known = [device, *devices().values()] if unstated.device else [device]
    return max(one.fastest if unstated.precision else one.peak_of(job.precision) for one in known)


def _flops_per_token(job: Job) -> float:
    """Return the FLOPs that a token takes; full recomputation repeats the forward pass of the blocks."""
    model = job.model
    blocks = model.flops_per_token() - 6 * model.head_parameters
    again = blocks / 3 * job.recompute_share if job.recompute == "full" else 0.0
    return model.flops_per_token() + again


def _claimed_speeds(raw: Mapping[str, Any], job: Job, unstated: Unstated) -> Iterator[tuple[str, float]]:
    """Yield each claim with the FLOP/s of a device that it means, at least; a measured time is a claim too."""
    is_guessed = unstated.global_batch and unstated.micro_batch
    tokens = job.tokens_per_step / (job.micro_batch if is_guessed else 1) / job.layout.devices
    for seconds in _values_of(raw, CLAIMED_TIME):
        yield CLAIMED_TIME, _flops_per_token(job) * tokens / seconds
    for speed in _values_of(raw, CLAIMED_SPEED):
        yield CLAIMED_SPEED, _flops_per_token(job) * speed
    if raw.get("kind") != "memory_only":
        for seconds in _values_of(raw, MEASURED_TIME):
            yield MEASURED_TIME, _flops_per_token(job) * tokens / seconds


def _values_of(raw: Mapping[str, Any], key: str) -> Iterator[float]:
    """Yield the numbers under a key, in the row or one level below."""
    for place in (raw, *(value for value in raw.values() if isinstance(value, Mapping))):
        value = place.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise ImpossibleRow(f"{key} is {value!r}, which is no positive number")
        yield float(value)
