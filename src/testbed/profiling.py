"""Looking inside a step: a torch.profiler window, and NVTX ranges for Nsight. A run that uses them is instrumented."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from testbed.settings import RunSettings

PROFILED_STEPS = 3


@contextlib.contextmanager
def profiler_window(settings: RunSettings, directory: Path, rank: int) -> Iterator[Callable[[], None]]:
    """With --profile, trace PROFILED_STEPS steps after warm-up into `directory`; yields what to call after a step."""
    if not settings.profile:
        yield lambda: None
        return
    directory.mkdir(parents=True, exist_ok=True)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    schedule = torch.profiler.schedule(
        wait=max(0, settings.timing_warmup_steps - 1), warmup=1, active=PROFILED_STEPS, repeat=1
    )

    def write_trace(profiler: torch.profiler.profile) -> None:
        profiler.export_chrome_trace(str(directory / f"rank{rank}.pt.trace.json"))

    with torch.profiler.profile(activities=activities, schedule=schedule, on_trace_ready=write_trace) as profiler:
        yield profiler.step


@contextlib.contextmanager
def nvtx_range(name: str, is_enabled: bool) -> Iterator[None]:
    """A named range in Nsight's timeline; nothing where there is no CUDA."""
    if not (is_enabled and torch.cuda.is_available()):
        yield
        return
    torch.cuda.nvtx.range_push(name)
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()
