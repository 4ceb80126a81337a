"""Attribute the time of an optimizer step, from a torch.profiler trace by interval arithmetic. No torch.

Parts are exclusive and add up to the step (step_clock.py marks the phases):

- data wait, forward, backward, optimizer: the phases without exposed communication.
- exposed communication: the phase "synchronise", and collectives that no computation of the rank covers.
- idle: the rest. In a pipeline, waiting for another stage, point-to-point transfers included.

On the CPU, phases are the host's, collectives are gloo's spans on their own threads, and computation is PyTorch's
operators. On CUDA, a kernel counts to the phase that launched it, and NCCL's kernels are communication. Times in
seconds.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from testbed.errors import InputError, first_line
from testbed.io import read_unpacked

MICROSECOND = 1e-6
STEP = "train/step"
SCHEDULE = "train/schedule"
PHASES = {  # range -> phase; in this order an instant on a device that works for two phases counts to the first
    "train/dataload": "data_wait",
    "train/forward": "forward",
    "train/backward": "backward",
    "train/optimizer_step": "optimizer",
    "train/synchronise": "synchronise",
}
# Between two operators the host is busy with Python and autograd; waiting takes longer.
LONGEST_PAUSE_US = 100.0
POINT_TO_POINT = ("send", "recv")
BYTES_OF_TYPE = {
    **dict.fromkeys(("float", "int", "Float", "Int"), 4),
    **dict.fromkeys(("double", "long int", "long", "Double", "Long"), 8),
    **dict.fromkeys(("c10::BFloat16", "c10::Half", "BFloat16", "Half", "short", "Short"), 2),
    **dict.fromkeys(("unsigned char", "signed char", "bool", "Byte", "Char", "Bool"), 1),
}


class TraceUnreadable(InputError):
    """The file is not a trace of this program's steps."""


@dataclass(frozen=True)
class StepAttribution:
    """One optimizer step on one rank, in seconds; the first six add up to `step_time_s`."""

    data_wait_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    exposed_communication_s: float
    idle_s: float
    step_time_s: float
    communication_s: float  # collectives in flight, covered or not
    compute_s: float  # operators or kernels at work
    num_collectives: int
    collective_bytes: int | None  # what this rank put in; None where the trace does not tell it of all


@dataclass(frozen=True)
class Collective:
    """All operations of one kind and group size in a trace."""

    name: str
    group_size: int | None  # ranks that take part; gloo's spans do not tell
    num: int
    num_bytes: int | None  # of their inputs on this rank; None where the trace does not tell
    seconds: float


@dataclass(frozen=True)
class Trace:
    """The optimizer steps in a rank's trace."""

    rank: int
    world_size: int
    timeline: str  # "host" or "device"
    steps: list[StepAttribution]
    collectives: list[Collective]
    schedule_s: list[float]  # of each step in a pipeline, how long this rank's schedule took; empty without one
    passes_s: list[float]  # and how long it was in forward and backward passes meanwhile


@dataclass
class _Events:
    """Events of a trace by kind."""

    host_ranges: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    operators: dict[Any, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))  # by thread
    calls: dict[Any, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))  # of collectives
    communication: list[dict] = field(default_factory=list)
    kernels: list[dict] = field(default_factory=list)
    launch_us: dict[int, float] = field(default_factory=dict)  # correlation -> when the host launched


def read_trace(path: Path, is_of_device: bool = False) -> Trace:
    """Attribute every optimizer step of a rank's Chrome trace, plain or .gz.

    Args:
        is_of_device: the run was on CUDA, so a trace without kernels is broken.

    Raises:
        TraceUnreadable: it is another kind of file, or holds no step.
    """
    try:
        return _read(path, is_of_device)
    except TraceUnreadable:
        raise
    except FileNotFoundError:
        raise TraceUnreadable(f"{path} is not there: the profiler's window was not reached") from None
    except Exception as error:  # whatever a damaged file does to the arithmetic: it must not cost a finished run
        raise TraceUnreadable(f"{path} is not a trace of torch.profiler: {first_line(error)}") from None


def _read(path: Path, is_of_device: bool) -> Trace:
    content = json.loads(read_unpacked(path))
    events = _sorted_out(content["traceEvents"])
    steps = sorted(events.host_ranges[STEP])
    if not steps:
        raise TraceUnreadable(f"{path} holds no {STEP} range: no step of src/gpt2.py was recorded")
    on_device = bool(events.kernels)
    if is_of_device and not on_device:
        raise TraceUnreadable(
            f"{path} holds no kernel: the profiler could not see the device (is another one attached?)"
        )
    attribute = _on_device(events) if on_device else _on_host(events)
    inside = [event for event in events.communication if any(begin <= event["ts"] < end for begin, end in steps)]
    world = content.get("distributedInfo", {})
    return Trace(
        rank=world.get("rank", 0),
        world_size=world.get("world_size", 1),
        timeline="device" if on_device else "host",
        steps=[attribute(begin, end) for begin, end in steps],
        collectives=_collectives(inside),
        **_schedules(events, steps, on_device),
    )


def bus_bytes(name: str, num_bytes: float, group_size: int) -> float:
    """Return the least bytes that each rank must send for an operation: the ring's bound. 0 for recv.

    This is the bus bandwidth of nccl-tests (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md).

    Args:
        num_bytes: of the operation's input on one rank.
    """
    if "all_reduce" in name or "allreduce" in name:
        return 2 * (group_size - 1) / group_size * num_bytes
    if "reduce_scatter" in name:
        return (group_size - 1) / group_size * num_bytes
    if "all_gather" in name or "allgather" in name:
        return (group_size - 1) * num_bytes
    return num_bytes if group_size > 1 and name != "recv" else 0.0


def _sorted_out(trace_events: Iterable[dict]) -> _Events:
    events = _Events()
    for event in trace_events:
        if event.get("ph") != "X":
            continue
        category, name = event.get("cat"), event["name"]
        span = (event["ts"], event["ts"] + event["dur"])
        if category == "user_annotation" and name.startswith("gloo:"):
            events.communication.append(event)
        elif category == "user_annotation" and name.startswith("train/"):
            events.host_ranges[name].append(span)
        elif category == "cpu_op" and name.startswith(("c10d::", "_c10d_functional::")):
            events.calls[event["tid"]].append(span)
        elif category in ("cpu_op", "user_annotation") and name.startswith(("aten::", "Torch-Compiled Region")):
            events.operators[event["tid"]].append(span)
        elif category in ("kernel", "gpu_memcpy", "gpu_memset"):
            is_nccl = "nccl" in name.lower()
            (events.communication if is_nccl else events.kernels).append(event)
        elif category in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {}):
            events.launch_us[event["args"]["correlation"]] = event["ts"]
    return events


def _on_host(events: _Events):
    """Return a function that attributes a step on the CPU, from its begin and end."""
    compute = union([])
    for thread, spans in events.operators.items():
        mine = subtract(without_pauses(union(spans), LONGEST_PAUSE_US), union(events.calls[thread]))
        compute = union([*compute, *mine])
    communication = union(_span(event) for event in events.communication)
    # A point-to-point transfer waits for the other stage to have something: a bubble, unless a phase computes.
    collectives = union(_span(event) for event in events.communication if not _is_point_to_point(event))
    uncovered = subtract(collectives, compute)
    phases = {phase: union(events.host_ranges[name]) for name, phase in PHASES.items()}

    def attribute(begin: float, end: float) -> StepAttribution:
        step = np.array([[begin, end]])
        inside = {phase: intersect(spans, step) for phase, spans in phases.items()}
        computing_phases = union([*inside["forward"], *inside["backward"], *inside["optimizer"]])
        exposed = union([*inside.pop("synchronise"), *intersect(uncovered, computing_phases)])
        parts = {phase: total_us(subtract(spans, exposed)) for phase, spans in inside.items()}
        return _step(step, parts, exposed, communication, compute, events)

    return attribute


def _on_device(events: _Events):
    """Return a function that attributes a step on CUDA, from its begin and end."""
    ranges = {phase: union(events.host_ranges[name]) for name, phase in PHASES.items()}
    by_phase: dict[str, list] = defaultdict(list)
    for event in events.kernels:
        launched = _launch(events, event)
        phase = next((name for name, spans in ranges.items() if contains(spans, launched)), "other")
        by_phase[phase].append(_span(event))
    kernels = {phase: union(by_phase[phase]) for phase in (*PHASES.values(), "other")}
    compute = union(_span(event) for event in events.kernels)
    communication = union(_span(event) for event in events.communication)
    collectives = union(_span(event) for event in events.communication if not _is_point_to_point(event))
    # Packing gradients for a collective is work that only the synchronisation needs.
    model_work = union([*kernels["forward"], *kernels["backward"], *kernels["optimizer"], *kernels["other"]])
    exposed_anywhere = subtract(union([*collectives, *kernels["synchronise"]]), model_work)

    def attribute(begin: float, end: float) -> StepAttribution:
        step = np.array([[begin, end]])
        exposed = intersect(exposed_anywhere, step)
        parts, counted = {}, exposed
        for phase in ("forward", "backward", "optimizer"):
            parts[phase] = total_us(subtract(intersect(kernels[phase], step), counted))
            counted = union([*counted, *kernels[phase]])
        busy = union([*compute, *communication])
        parts["data_wait"] = total_us(subtract(intersect(ranges["data_wait"], step), busy))
        return _step(step, parts, exposed, communication, compute, events)

    return attribute


def _step(
    step: Intervals,
    parts: dict[str, float],
    exposed: Intervals,
    communication: Intervals,
    compute: Intervals,
    events: _Events,
) -> StepAttribution:
    """Return the row of a step from its exclusive parts in microseconds; the rest is idle."""
    begin, end = map(float, step[0])
    mine = [event for event in events.communication if begin <= event["ts"] < end]
    exposed_us = total_us(exposed)
    idle_us = max(0.0, end - begin - sum(parts.values()) - exposed_us)
    return StepAttribution(
        **{f"{phase}_s": microseconds * MICROSECOND for phase, microseconds in parts.items()},
        exposed_communication_s=exposed_us * MICROSECOND,
        idle_s=idle_us * MICROSECOND,
        step_time_s=(end - begin) * MICROSECOND,
        communication_s=total_us(intersect(communication, step)) * MICROSECOND,
        compute_s=total_us(intersect(compute, step)) * MICROSECOND,
        num_collectives=len(mine),
        collective_bytes=_sum_of_known(map(_input_bytes, mine)),
    )


def _schedules(events: _Events, steps: list[tuple[float, float]], on_device: bool) -> dict[str, list[float]]:
    schedule = union(events.host_ranges[SCHEDULE])
    if not len(schedule):
        return {"schedule_s": [], "passes_s": []}
    if on_device:  # the host does not wait for another stage, the device does: kernels that the schedule launched
        everything = (*events.kernels, *events.communication)
        launched = [event for event in everything if contains(schedule, _launch(events, event))]
        spans = union(_span(event) for event in launched)
        of_steps = [intersect(spans, np.array([step])) for step in steps]
        schedule = union((own[0, 0], own[-1, 1]) for own in of_steps if len(own))
        passes = union(_span(event) for event in launched if "nccl" not in event["name"].lower())
    else:
        passes = union([*events.host_ranges["train/forward"], *events.host_ranges["train/backward"]])
    passes = intersect(passes, schedule)
    return {
        name: [total_us(intersect(spans, np.array([step]))) * MICROSECOND for step in steps]
        for name, spans in (("schedule_s", schedule), ("passes_s", passes))
    }


def _collectives(events: list[dict]) -> list[Collective]:
    of_kind = defaultdict(list)
    for event in events:
        of_kind[_collective_name(event), event.get("args", {}).get("Group size")].append(event)
    return [
        Collective(
            *kind, len(own), _sum_of_known(map(_input_bytes, own)), sum(event["dur"] for event in own) * MICROSECOND
        )
        for kind, own in sorted(of_kind.items(), key=str)
    ]


def _sum_of_known(sizes: Iterable[int | None]) -> int | None:
    total = 0
    for size in sizes:
        if size is None:
            return None
        total += size
    return total


def _collective_name(event: dict) -> str:
    """Return "all_reduce", "send" and so on, from a gloo span or an NCCL kernel."""
    told = event.get("args", {}).get("Collective name")
    if told:
        return told.removeprefix("_").removesuffix("_base")
    if "sendrecv" in event["name"].lower():
        return "send_recv"
    return event["name"].removeprefix("gloo:")


def _is_point_to_point(event: dict) -> bool:
    return any(kind in _collective_name(event).lower() for kind in POINT_TO_POINT)


def _input_bytes(event: dict) -> int | None:
    """Return the bytes of this rank's input tensors; None if the trace does not tell."""
    arguments = event.get("args", {})
    if "In msg nelems" in arguments:  # NCCL
        width = BYTES_OF_TYPE.get(arguments.get("dtype"))
        return None if width is None else int(arguments["In msg nelems"]) * width
    shapes, types = arguments.get("Input Dims"), arguments.get("Input type")
    if shapes is None or types is None:
        return None
    return _sum_of_known(
        None if kind not in BYTES_OF_TYPE else prod(shape) * BYTES_OF_TYPE[kind]
        for shape, kind in zip(shapes, types, strict=False)
        if shape
    )


def _launch(events: _Events, event: dict) -> float:
    """Return when the host launched a kernel, in microseconds."""
    return events.launch_us.get(event.get("args", {}).get("correlation"), event["ts"])


def _span(event: dict) -> tuple[float, float]:
    return event["ts"], event["ts"] + event["dur"]


Intervals = np.ndarray  # (n, 2) float64: begin and end in microseconds, sorted and disjoint


def without_pauses(intervals: Intervals, longest_us: float) -> Intervals:
    """Join intervals closer than `longest_us`."""
    if not len(intervals):
        return intervals
    half = longest_us / 2
    return union(intervals + np.array([-half, half])) - np.array([-half, half])


def union(spans: Iterable) -> Intervals:
    """Return any spans as sorted, disjoint intervals."""
    array = np.array(list(spans), dtype=float).reshape(-1, 2)
    if not len(array):
        return array
    array = array[np.argsort(array[:, 0])]
    ends = np.maximum.accumulate(array[:, 1])
    starts_new = np.concatenate([[True], array[1:, 0] > ends[:-1]])
    last_of_each = np.concatenate([np.flatnonzero(starts_new)[1:] - 1, [len(array) - 1]])
    return np.column_stack([array[starts_new, 0], ends[last_of_each]])


def intersect(left: Intervals, right: Intervals) -> Intervals:
    """Return where both are."""
    if not len(left) or not len(right):
        return union([])
    first = np.searchsorted(right[:, 1], left[:, 0], side="right")
    last = np.searchsorted(right[:, 0], left[:, 1], side="left")
    counts = np.maximum(0, last - first)
    mine = np.repeat(np.arange(len(left)), counts)
    theirs = np.concatenate([np.arange(f, f + n) for f, n in zip(first, counts, strict=True)] or [np.empty(0, int)])
    return np.column_stack([np.maximum(left[mine, 0], right[theirs, 0]), np.minimum(left[mine, 1], right[theirs, 1])])


def subtract(left: Intervals, right: Intervals) -> Intervals:
    """Return where `left` is and `right` is not."""
    if not len(left) or not len(right):
        return left
    begin, end = min(left[0, 0], right[0, 0]) - 1, max(left[-1, 1], right[-1, 1]) + 1
    gaps = np.column_stack([np.concatenate([[begin], right[:, 1]]), np.concatenate([right[:, 0], [end]])])
    return intersect(left, gaps)


def total_us(intervals: Intervals) -> float:
    return float((intervals[:, 1] - intervals[:, 0]).sum())


def contains(intervals: Intervals, moment: float) -> bool:
    place = np.searchsorted(intervals[:, 0], moment, side="right") - 1
    return bool(place >= 0 and moment < intervals[place, 1])
