"""One rank of a calibration: `python -m testbed.experiments.calibration.worker FILE.json`, alone or by a launcher.

FILE.json says what to measure (`Work`) and where rank 0 writes the answer.
"""

from __future__ import annotations

import json
import platform
import resource
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import torch

from testbed.autotune.device import keep_freed_memory
from testbed.distributed import process_group
from testbed.distributed.launch import Launch, limit_gomp_spinning, read_launch, usable_cores
from testbed.experiments.calibration import collectives, operations
from testbed.experiments.calibration.sizes import BY_NAME
from testbed.experiments.calibration.whole_steps import accepted_runs, time_steps
from testbed.experiments.calibration.work import Work
from testbed.io import write_text
from testbed.metrics import environment
from testbed.planner.calibration import BETWEEN, facts_here


def measure(work: Work, launch: Launch) -> dict[str, Any]:
    """Return what this start contributes to calibration.json. All ranks call it, with a process group."""
    started_s = time.perf_counter()
    device, sizes, is_link = device_of(work.device, launch), BY_NAME[work.sizes], work.link == BETWEEN
    # what has passes has several medians of its own
    watch = operations.Stopwatch(device, work.precision, launch.world_size, blocks=7 if is_link else 3)
    answer: dict[str, Any] = {
        "machine": facts(device),
        "commit": environment.commit()[0],
        "memory": {"plain": held_bytes(device)},
        "timings": [] if is_link else operations.every_operation(watch, sizes),
    }
    if launch.is_distributed:
        side = 4096 if device.type == "cuda" else 256
        answer["timings"] += collectives.collectives(watch, sizes.messages, work.link)
        answer["overlap"] = collectives.overlap(watch, sizes.messages[len(sizes.messages) // 2], side)
    if is_link:
        return answer
    flags = ["--precision", work.precision, "--device", work.device]
    runs = accepted_runs(sizes.settings, work.kinds, flags, Path(work.data), launch)
    first = work.first % max(1, len(runs))
    answer["steps"] = time_steps([*runs[first:], *runs[:first]], device, work.link, started_s + work.seconds)
    if "deepspeed" in sys.modules:
        answer["memory"]["deepspeed"] = held_bytes(device)
    return answer


def facts(device: torch.device) -> dict[str, Any]:
    """Return what says whether a plan is made for this machine."""
    is_cuda = device.type == "cuda"
    return {
        **facts_here(),
        "device": torch.cuda.get_device_name(device) if is_cuda else "cpu",
        "devices": torch.cuda.device_count() if is_cuda else usable_cores(),
        "threads": torch.get_num_threads(),
        "host": platform.node(),
        "memory_bytes": memory_of(device),
    }


def memory_of(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return psutil.virtual_memory().total


def device_of(kind: str, launch: Launch) -> torch.device:
    """Return this rank's device, after what gpt2.py does to a process on a CPU."""
    if kind == "cuda":
        device = torch.device("cuda", launch.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    keep_freed_memory()
    return torch.device("cpu")


def held_bytes(device: torch.device) -> int:
    """Return the memory that this process holds without a model: resident, on CUDA the device's that PyTorch does not
    count as allocated."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free - torch.cuda.memory_reserved(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def carry_out(work: Work, launch: Launch) -> dict[str, Any] | None:
    """Join the other ranks and measure; return the answer on rank 0, None on the others."""
    limit_gomp_spinning()
    device = torch.device("cuda", launch.local_rank) if work.device == "cuda" else torch.device("cpu")
    process_group.start_process_group(device, launch, is_needed=True)
    try:
        answer = measure(work, launch)
        process_group.wait_for_everyone()
        return answer if launch.rank == 0 else None
    finally:
        process_group.stop_process_group()


def main(file: Path) -> None:
    work = Work.read(file)
    answer = carry_out(work, read_launch())
    if answer is not None:
        write_text(Path(work.out), json.dumps(answer, default=asdict))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
