"""The torch.profiler window of --profile."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from testbed.run_folder.run_lock import check_held

if TYPE_CHECKING:
    from testbed.config.settings import RunSettings


def trace_file(directory: Path, rank: int) -> Path:
    """Return the path of a rank's trace."""
    return directory / f"rank{rank}.pt.trace.json"


def first_profiled_step(settings: RunSettings, first_step: int) -> int:
    """Return the first traced optimizer step, counted from 1, of a start after `first_step`."""
    return first_step + max(1, settings.measuring.timing_warmup_steps) + 1


@contextlib.contextmanager
def profiler_window(settings: RunSettings, directory: Path, rank: int) -> Iterator[Callable[[], None]]:
    """Trace --profile_steps steps after warm-up into `directory`; yield the function to call after each step."""
    if not settings.measuring.profile:
        yield lambda: None
        return
    check_held(directory.parent)  # a run's folder that has vanished is not made again
    directory.mkdir(parents=True, exist_ok=True)
    trace_file(directory, rank).unlink(missing_ok=True)  # of an earlier start, whose steps have other numbers
    activities = [torch.profiler.ProfilerActivity.CPU]
    if settings.compute.device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    schedule = torch.profiler.schedule(
        wait=max(0, settings.measuring.timing_warmup_steps - 1),
        warmup=1,
        active=settings.measuring.profile_steps,
        repeat=1,
    )

    def write_trace(profiler: torch.profiler.profile) -> None:
        profiler.export_chrome_trace(str(trace_file(directory, rank)))

    # which PyTorch 2.11 says of the only cycle that there is
    warnings.filterwarnings("ignore", message=".*Profiler clears events at the end of each cycle")
    # shapes, because the bytes of a collective follow from them
    with torch.profiler.profile(
        activities=activities, schedule=schedule, on_trace_ready=write_trace, record_shapes=True
    ) as profiler:
        yield profiler.step
