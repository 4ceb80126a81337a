"""Merge the profiler traces of all ranks into `attribution` of training_metrics.json."""

from __future__ import annotations

import dataclasses
import shlex
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from testbed.config.settings import RunSettings
from testbed.distributed import process_group
from testbed.distributed.mesh import MeshSizes
from testbed.distributed.process_group import gather_rows
from testbed.profiling.profiler import first_profiled_step, trace_file
from testbed.profiling.step_clock import synchronize
from testbed.profiling.trace import POINT_TO_POINT, Collective, Trace, TraceUnreadable, bus_bytes, read_trace
from testbed.run_folder import PROFILER_LOGS

LARGEST_TRIAL_BYTES = 100 * 2**20  # of the all-reduce that is measured alone
# part of a step -> its field; they add up to the step
PARTS = {
    **{name: f"{name.replace(' ', '_')}_s" for name in ("forward", "backward", "optimizer", "data wait")},
    "exposed communication": "exposed_communication_s",
    "idle or other": "idle_s",
}


def attribution(
    settings: RunSettings, directory: Path, rank: int, first_step: int, device: torch.device
) -> dict[str, Any] | None:
    """Return where the time of the profiled steps went on every rank; None if a trace cannot be read. All ranks call
    it.

    Args:
        directory: of the traces.
        first_step: optimizer steps done before this start of the run.
    """
    try:
        mine: Trace | str = read_trace(trace_file(directory, rank), is_of_device=device.type == "cuda")
    except TraceUnreadable as error:
        mine = str(error)
    traces = process_group.gather_objects(mine)
    if unreadable := [trace for trace in traces if isinstance(trace, str)]:
        process_group.log_rank0(f"no attribution: {unreadable[0]}")
        return None
    first = first_profiled_step(settings, first_step)
    num_steps = len(traces[0].steps)
    collectives = _collectives(traces, settings.plan.mesh)
    last = first + num_steps - 1
    return {
        "source": f"torch.profiler, optimizer steps {first} to {last} of every rank, read by testbed.profiling.trace",
        "timeline": traces[0].timeline,
        "per_rank": [
            {
                "rank": rank,
                "steps": [{"step": first + index, **dataclasses.asdict(row)} for index, row in enumerate(trace.steps)],
            }
            for rank, trace in enumerate(traces)
        ],
        "collectives": collectives,
        "bound": _ring_bound(collectives, device),
        "pipeline": _pipeline_bubble(traces, settings),
    }


def words_on_attribution(found: Mapping[str, Any], directory: Path) -> str:
    """Return where the time of the profiled steps went, mean over steps and ranks, and the commands that show more.

    Args:
        found: what `attribution` returned.
        directory: of the run.
    """
    steps = [step for of_rank in found["per_rank"] for step in of_rank["steps"]]
    mean_s = {name: statistics.fmean(step[field] for step in steps) for name, field in PARTS.items()}
    if len(found["per_rank"]) == 1:  # collectives of one rank send nothing
        mean_s["idle or other"] += mean_s.pop("exposed communication")
    whole_s = sum(mean_s.values())
    first, last = (edge(step["step"] for step in steps) for edge in (min, max))
    parts = ", ".join(f"{name} {seconds / whole_s:.0%}" for name, seconds in mean_s.items())
    return (
        f"profiled steps {first} to {last}: {whole_s:.3f} s each (slower than without --profile) = {parts}\n"
        f"operators: python scripts/profiling/parse_nsys_stats.py --run_dir {shlex.quote(str(directory))}; timeline: "
        f"open {directory / PROFILER_LOGS}/rank0.pt.trace.json in ui.perfetto.dev"
    )


def _collectives(traces: Sequence[Trace], mesh: MeshSizes) -> list[dict[str, Any]]:
    """Return one row per kind, per optimizer step, mean over ranks. Bus bytes are None if the group is unknown."""
    rank_steps = sum(len(trace.steps) for trace in traces)
    rows = []
    for name in sorted({collective.name for trace in traces for collective in trace.collectives}):
        found = [collective for trace in traces for collective in trace.collectives if collective.name == name]
        sizes = [collective.num_bytes for collective in found]
        on_bus = [_bus_bytes(collective, mesh, len(traces)) for collective in found]
        rows.append(
            {
                "name": name,
                "num_per_step": sum(collective.num for collective in found) / rank_steps,
                "bytes_per_step": _per_step(sizes, rank_steps),
                "bus_bytes_per_step": _per_step(on_bus, rank_steps),
                "seconds_per_step": sum(collective.seconds for collective in found) / rank_steps,
            }
        )
    return rows


def _per_step(sizes: Sequence[float | None], num_steps: int) -> float | None:
    """Return the sum of the sizes over the steps; None where a size is not known."""
    known = [size for size in sizes if size is not None]
    return sum(known) / num_steps if len(known) == len(sizes) else None


def _bus_bytes(collective: Collective, mesh: MeshSizes, world_size: int) -> float | None:
    """Return the bus bytes of these operations; None if several axes of the mesh could be their group."""
    group = collective.group_size
    if group is None:
        is_one_axis = mesh.pipeline == mesh.context == 1 and 1 in (mesh.data, mesh.tensor)
        is_one_axis = is_one_axis and mesh.shard in (1, mesh.data)
        group = 2 if collective.name in POINT_TO_POINT else world_size if is_one_axis else None
    if group is None or collective.num_bytes is None:
        return None
    return bus_bytes(collective.name, collective.num_bytes, group)


def _ring_bound(collectives: Sequence[dict], device: torch.device) -> dict[str, Any] | None:
    """Return the least time for these bytes at the bandwidth of one large all-reduce."""
    sizes = [row["bus_bytes_per_step"] for row in collectives]
    if None in sizes or not sum(sizes):  # one rank alone calls collectives and sends nothing
        return None
    largest = max(row["bytes_per_step"] for row in collectives)
    num_bytes = int(min(largest, LARGEST_TRIAL_BYTES))
    bandwidth = measured_bus_bandwidth(num_bytes, device)
    return {
        "bus_bytes_per_step": sum(sizes),
        "bus_bandwidth_bytes_per_s": bandwidth,
        "seconds_per_step": sum(sizes) / bandwidth,
        "source": f"best of several all-reduces of {num_bytes:,} bytes alone, at the end of the run",
    }


def _pipeline_bubble(traces: Sequence[Trace], settings: RunSettings) -> dict[str, Any] | None:
    """Return the measured bubble and the ideal one of GPipe and 1F1B, (p - 1) / (m + p - 1) for p equal stages and m
    micro batches (Huang et al. 2019, arXiv:1811.06965, section 2.3).

    v stages on each rank divide p - 1 by v (Narayanan et al. 2021, arXiv:2104.04473, section 2.2). model_parallel has m
    = 1. The zero-bubble schedule has no ideal, as it depends on the times of its parts.
    """
    if not all(trace.schedule_s for trace in traces):
        return None
    ranks, rounds = settings.plan.mesh.pipeline, settings.model_parallel.stages_per_rank or 1
    micro_batches = 1 if settings.model_parallel.pipeline_schedule is None else settings.batch.grad_accum_steps
    ramp = (ranks - 1) / rounds
    # Ranks begin a step together, and one that is done early waits for the last: the longest schedule is everybody's.
    whole_s = sum(max(of_step) for of_step in zip(*(trace.schedule_s for trace in traces), strict=True))
    fractions = [1 - sum(trace.passes_s) / whole_s for trace in traces]
    return {
        "stages": ranks * rounds,
        "micro_batches": micro_batches,
        "per_rank_bubble_fraction": fractions,
        "bubble_fraction": statistics.fmean(fractions),
        "ideal_bubble_fraction": None
        if settings.model_parallel.pipeline_schedule == "zero_bubble"
        else ramp / (micro_batches + ramp),
    }


def measured_bus_bandwidth(num_bytes: int, device: torch.device, repeats: int = 5) -> float:
    """Measure the bytes per second of an all-reduce over all ranks: 2 (N - 1) / N x bytes / best time.

    All ranks call it, at least two.
    """
    buffer = torch.zeros(max(1, num_bytes // 4), device=device)
    world_size, times = dist.get_world_size(), []
    for _ in range(repeats + 1):  # the first one makes connections
        dist.barrier()
        synchronize(device)
        start_s = time.perf_counter()
        dist.all_reduce(buffer)
        synchronize(device)
        times.append(time.perf_counter() - start_s)
    slowest = [max(row) for row in zip(*gather_rows(torch.tensor(times, device=device)), strict=True)]
    return 2 * (world_size - 1) / world_size * buffer.nbytes / min(slowest[1:])
