"""Read which operators and kernels a torch.profiler trace spent its optimizer steps in, where there is no Nsight.

The time of an operator is its own: what the operators that it calls take is theirs. What the steps were spent on as a
whole (data wait, exposed communication, idle) is in the run's `attribution`, see testbed.profiling.trace.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from testbed.analysis.profiles.nsight import Row, StatsTable
from testbed.errors import InputError, first_line
from testbed.io import read_unpacked

Interval = tuple[int, int]  # start and end in nanoseconds
_STEP = "train/step"
_STEP_OF_PROFILER = "ProfilerStep#"  # traces of other programs have these alone


@dataclass(frozen=True)
class OperatorTrace:
    """One rank's trace. `tables` holds "operators", and on CUDA "cuda_gpu_kern_sum" and "cuda_gpu_mem_time_sum"."""

    path: Path
    num_steps: int
    tables: dict[str, StatsTable]


def read_operators(path: Path) -> OperatorTrace:
    """Read a Chrome trace, plain or .gz; only what began inside an optimizer step counts.

    InputError: it is not a trace, or holds no step.
    """
    path = Path(path)
    try:
        trace = _read(path)
    except Exception as error:  # zlib, json and the arithmetic each have errors of their own for a damaged file
        raise InputError(f"{path} is not a trace of torch.profiler: {first_line(error)}") from None
    if not trace.num_steps:
        raise InputError(f"{path} holds no optimizer step: no range {_STEP} or {_STEP_OF_PROFILER}<n>")
    return trace


def _read(path: Path) -> OperatorTrace:
    events = [event for event in json.loads(read_unpacked(path))["traceEvents"] if event.get("ph") == "X"]
    steps = [_span(event) for event in events if event["name"] == _STEP]
    steps = steps or [_span(event) for event in events if event["name"].startswith(_STEP_OF_PROFILER)]
    by_thread: dict[tuple, list[tuple[str, Interval]]] = defaultdict(list)
    durations: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for event in events:
        category = event.get("cat")
        if category == "cpu_op":
            by_thread[event["pid"], event["tid"]].append((event["name"], _span(event)))
        elif category in ("kernel", "gpu_memcpy", "gpu_memset"):
            report = "cuda_gpu_kern_sum" if category == "kernel" else "cuda_gpu_mem_time_sum"
            start, end = _span(event)
            if _is_inside(start, steps):
                durations[report][event["name"]].append(end - start)
    for called in by_thread.values():
        for (name, (start, _)), own in zip(called, own_times([span for _, span in called]), strict=True):
            if _is_inside(start, steps):
                durations["operators"][name].append(own)
    return OperatorTrace(path, len(steps), {report: _table(report, values) for report, values in durations.items()})


def _table(report: str, durations: dict[str, list[int]]) -> StatsTable:
    """Add up durations in nanoseconds by name to the rows that `nsys stats` would make of them, the largest first."""
    everything = sum(map(sum, durations.values()))
    rows = []
    for name, mine in sorted(durations.items(), key=lambda item: -sum(item[1])):
        total, array = sum(mine), np.array(mine, dtype=float)
        mean, median = float(array.mean()), float(np.median(array))
        stddev = float(array.std(ddof=1)) if len(mine) > 1 else 0.0
        percent = 100 * total / everything if everything else None
        rows.append(Row(name, total, len(mine), mean, median, min(mine), max(mine), stddev, percent))
    return StatsTable(report, tuple(rows))


def _span(event: dict) -> Interval:
    """Return begin and end in nanoseconds. The file has microseconds with three decimals."""
    return round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000)


def _is_inside(moment: int, steps: list[Interval]) -> bool:
    return any(start <= moment < end for start, end in steps)


def own_times(spans: Sequence[Interval]) -> list[int]:
    """Return for each call of one thread its duration without that of the calls that it makes.

    Calls of a thread lie inside one another or apart. Of two that begin together the shorter is the inner one.
    """
    own = [end - start for start, end in spans]
    open_calls: list[int] = []  # the innermost last
    for number in sorted(range(len(spans)), key=lambda each: (spans[each][0], -spans[each][1])):
        start, end = spans[number]
        while open_calls and spans[open_calls[-1]][1] <= start:
            open_calls.pop()
        if open_calls:
            caller = open_calls[-1]
            own[caller] -= min(end, spans[caller][1]) - start
        open_calls.append(number)
    return own
