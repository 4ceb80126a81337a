"""Read which operators and kernels a torch.profiler trace spent its optimizer steps in, where there is no Nsight.

The time of an operator is its own: what the operators that it calls take is theirs. What the steps were spent on as a
whole (data wait, exposed communication, idle) is in the run's `attribution`, see testbed.profiling.trace.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from testbed.analysis.profiles.nesting import innermost
from testbed.analysis.profiles.nsight import StatsTable
from testbed.analysis.profiles.nsight_sqlite import table_of
from testbed.errors import InputError, first_line
from testbed.io import read_unpacked

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

    InputError: it is no trace, or holds no step.
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
    by_thread: dict[tuple, list[tuple[str, tuple[int, int]]]] = defaultdict(list)
    on_device: dict[str, list] = defaultdict(list)
    for event in events:
        category = event.get("cat")
        if category == "cpu_op":
            by_thread[event["pid"], event["tid"]].append((event["name"], _span(event)))
        elif category in ("kernel", "gpu_memcpy", "gpu_memset"):
            report = "cuda_gpu_kern_sum" if category == "kernel" else "cuda_gpu_mem_time_sum"
            start, end = _span(event)
            if _is_inside(start, steps):
                on_device[report].append(((event["name"], None), end - start))
    for called in by_thread.values():
        parts = innermost([span for _, span in called])
        for (name, (start, _)), own in zip(called, parts, strict=True):
            if _is_inside(start, steps):
                on_device["operators"].append(((name, None), sum(end - begin for begin, end in own)))
    return OperatorTrace(path, len(steps), {report: table_of(report, values) for report, values in on_device.items()})


def _span(event: dict) -> tuple[int, int]:
    """Return begin and end in nanoseconds. The file has microseconds with three decimals."""
    return round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000)


def _is_inside(moment: int, steps: list[tuple[int, int]]) -> bool:
    return any(start <= moment < end for start, end in steps)
