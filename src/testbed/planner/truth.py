"""Say why a published row cannot be true: more FLOP/s than the device has, weights that do not fit. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from testbed.planner.devices import GIB, Device
from testbed.planner.job import Job

CLAIMED_TIME, CLAIMED_SPEED = "claimed_step_time_s", "claimed_tokens_per_s_per_gpu"
CLAIMED_MEMORY = "claimed_peak_memory_gib"


class ImpossibleRow(Exception):
    """A row that cannot be true or be read, with the reason as a sentence."""

    def __init__(self, reason: str, id: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.id = id


def check(raw: Mapping[str, Any], job: Job, device: Device) -> None:
    """Raise ImpossibleRow where a row contradicts itself or its device."""
    layout, model = job.layout, job.model
    if layout.pipeline * layout.virtual_stages > model.layers + 2:
        stages = f"{layout.pipeline} x {layout.virtual_stages}"
        raise ImpossibleRow(f"{stages} pipeline stages are more than the {model.layers} layers, embedding and head")
    if model.heads % layout.tensor:
        raise ImpossibleRow(f"{layout.tensor} tensor ranks cannot share {model.heads} heads")
    if model.seq_length % layout.context:
        raise ImpossibleRow(f"{layout.context} context ranks cannot share sequences of {model.seq_length} tokens")
    if job.accumulation < 1 - 1e-6:
        raise ImpossibleRow(
            f"micro batch {job.micro_batch:g} x {layout.data} data ranks is more than the global batch "
            f"{job.global_batch:g}"
        )
    weights = least_weight_bytes(job)
    if weights > device.memory_bytes * 1.02:
        raise ImpossibleRow(
            f"the weights alone take {weights / GIB:.1f} GiB on each device, which has {device.memory_bytes / GIB:.1f}"
        )
    for key, seconds in _claimed_times(raw, job):
        speed = _flops_done(job) / layout.devices / seconds
        peak = device.peak_of(job.precision)
        if speed > peak:
            raise ImpossibleRow(
                f"{key} means {speed / 1e12:.0f} TFLOP/s on each device, above its peak of {peak / 1e12:.0f} "
                f"in {job.precision}"
            )
    for value in _values_of(raw, CLAIMED_MEMORY):
        if value * GIB > device.memory_bytes * 1.02:
            raise ImpossibleRow(f"{CLAIMED_MEMORY} of {value:g} is more than the device has")


def least_weight_bytes(job: Job) -> float:
    """Return the bytes of the weights that a device holds at least: 16 bits each, the embedding once."""
    layout = job.layout
    shards = layout.shard if layout.zero_stage == 3 else 1
    width = 4.0 if job.precision in ("fp32", "tf32") else 2.0
    return width * job.model.parameters / (layout.tensor * layout.pipeline * shards)


def _flops_done(job: Job) -> float:
    """Return the FLOPs of one step of all devices; full recomputation repeats the forward pass of the blocks."""
    model = job.model
    blocks = model.flops_per_token() - 6 * model.head_parameters
    again = blocks / 3 * job.recompute_share if job.recompute == "full" else 0.0
    return (model.flops_per_token() + again) * job.tokens_per_step


def _claimed_times(raw: Mapping[str, Any], job: Job) -> Iterator[tuple[str, float]]:
    for seconds in _values_of(raw, CLAIMED_TIME):
        yield CLAIMED_TIME, seconds
    for speed in _values_of(raw, CLAIMED_SPEED):
        yield CLAIMED_SPEED, job.tokens_per_step / job.layout.devices / speed


def _values_of(raw: Mapping[str, Any], key: str) -> Iterator[float]:
    """Yield the numbers under a key, in the row or one level below."""
    for place in (raw, *(value for value in raw.values() if isinstance(value, Mapping))):
        value = place.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise ImpossibleRow(f"{key} is {value!r}, which is no positive number")
        yield float(value)
