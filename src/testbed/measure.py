"""The clock of an optimizer step, memory, and the rate that the device reaches at best."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from typing import TypeVar

import torch

Read = TypeVar("Read")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class StepClock:
    """Times one optimizer step: data wait, forward, backward, synchronisation, update, and nothing else.

    The device has finished its work on both sides. Used as `with clock:`; afterwards `step_time_s` and `data_wait_s`.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.step_time_s = 0.0
        self.data_wait_s = 0.0

    def __enter__(self) -> StepClock:
        synchronize(self.device)
        self.data_wait_s = 0.0
        self._start_s = time.perf_counter()
        return self

    def data_wait(self, read: Callable[[int], Read], step: int) -> Read:
        """Call `read(step)` and count its time as waiting for data."""
        start_s = time.perf_counter()
        batches = read(step)
        self.data_wait_s += time.perf_counter() - start_s
        return batches

    def __exit__(self, *failure: object) -> None:
        synchronize(self.device)
        self.step_time_s = time.perf_counter() - self._start_s


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given. The CPU has, when the call returns."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_memory(device: torch.device) -> dict[str, int | None]:
    """Most memory this rank ever held: resident set on the host, allocated and reserved on a CUDA device, in bytes."""
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    is_cuda = device.type == "cuda"
    return {
        "peak_rss_bytes": resident * (1 if sys.platform == "darwin" else 1024),  # Linux counts KiB
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(device) if is_cuda else None,
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(device) if is_cuda else None,
    }


def measured_peak(device: torch.device, precision: str, repeats: int = 5) -> tuple[float, str]:
    """Best rate of a large square matrix product on this device, in FLOP/s, and a sentence that says so."""
    size = 8192 if device.type == "cuda" else _affordable_size(device, DTYPES[precision])
    left = torch.randn(size, size, device=device).to(DTYPES[precision])
    best_s = min(_seconds_of_product(left, left, device) for _ in range(repeats))
    threads = "" if device.type == "cuda" else f", {torch.get_num_threads()} threads"
    return 2 * size**3 / best_s, f"measured: best of {repeats} {precision} products of {size}x{size} matrices{threads}"


def _affordable_size(device: torch.device, dtype: torch.dtype, limit_s: float = 0.4, largest: int = 2048) -> int:
    """The largest product that stays under `limit_s`: a CPU that emulates bf16 needs 20 s for a size of 2,048."""
    size = 256
    small = torch.randn(size, size, device=device).to(dtype)
    seconds = min(_seconds_of_product(small, small, device) for _ in range(3))
    while size < largest and seconds * 8 < limit_s:  # twice the size is eight times the work
        size, seconds = size * 2, seconds * 8
    return size


def is_bf16_faster(device: torch.device) -> bool:
    """Whether the device multiplies bf16 well: a trial product must be at least 1.5 times as fast as in fp32.

    A name or a feature flag would not do: many CPUs accept bf16 and emulate it, 100 times slower than fp32.
    """
    size = 4096 if device.type == "cuda" else 256
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        matrix = torch.randn(size, size, device=device).to(dtype)
        _seconds_of_product(matrix, matrix, device)  # the first call chooses a kernel
        seconds[dtype] = min(_seconds_of_product(matrix, matrix, device) for _ in range(5))
    if device.type == "cuda":  # the trial is not part of the run's memory
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return seconds[torch.float32] > 1.5 * seconds[torch.bfloat16]


def _seconds_of_product(left: torch.Tensor, right: torch.Tensor, device: torch.device) -> float:
    synchronize(device)
    start_s = time.perf_counter()
    left @ right
    synchronize(device)
    return time.perf_counter() - start_s
