"""Memory, and the rate that a device reaches at best."""

from __future__ import annotations

import resource
import sys
import time

import torch

from testbed.step_clock import synchronize

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def peak_memory(device: torch.device) -> dict[str, int | None]:
    """Most memory this rank ever held: resident set on the host, allocated and reserved on a CUDA device, in bytes."""
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    is_cuda = device.type == "cuda"
    return {
        "peak_rss_bytes": resident * (1 if sys.platform == "darwin" else 1024),  # Linux counts KiB
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(device) if is_cuda else None,
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(device) if is_cuda else None,
    }


class PeakRate:
    """The best rate of a large square matrix product, measured beside the steps of a run rather than after it.

    On a shared machine a peak of another minute is another machine's. All ranks multiply at the same time, as they do
    in a step: cores that share a unit or their heat reach less together than one alone. A product takes up to 0.4 s, so
    after the first ones it is repeated only so often that it costs about a hundredth of the time.
    """

    SHARE_OF_TIME = 0.01

    def __init__(self, device: torch.device, precision: str):
        self.device, self.precision = device, precision
        self.size = 8192 if device.type == "cuda" else _affordable_size(device, DTYPES[precision])
        self._seconds: list[float] = []
        self._since_s = 0.0

    def measure(self, repeats: int = 1) -> None:
        """Multiply. All ranks call it at the same moment, outside the step clock."""
        matrix = _random_matrix(self.size, self.device, DTYPES[self.precision])
        self._seconds += [_seconds_of_product(matrix, matrix, self.device) for _ in range(repeats)]
        self._since_s = 0.0

    def measure_if_due(self, step_time_s: float) -> None:
        """Multiply again if enough steps have passed; all ranks come with the same time and decide alike.

        Not on CUDA, where the matrices would count in the peak of allocated memory, and nobody shares the device.
        """
        self._since_s += step_time_s
        if self.device.type == "cpu" and self._since_s * self.SHARE_OF_TIME > 0.5:
            self.measure()

    def flops_per_s(self) -> float:
        """The best that this rank saw."""
        return 2 * self.size**3 / min(self._seconds)

    def source(self, num_ranks: int) -> str:
        """Where the number comes from, in words."""
        together = f", {num_ranks} ranks at the same time" if num_ranks > 1 else ""
        threads = "" if self.device.type == "cuda" else f", {torch.get_num_threads()} threads"
        return (
            f"measured: best of {len(self._seconds)} {self.precision} products of {self.size}x{self.size} matrices "
            f"beside the steps{threads}{together}"
        )


def copy_rate(device: torch.device, repeats: int = 5) -> float:
    """Bytes per second, read and written together, of copying what no cache holds (256 MiB); the best of `repeats`."""
    source = torch.ones(64 * 2**20, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(repeats):
        synchronize(device)
        start_s = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        seconds.append(time.perf_counter() - start_s)
    return 2 * source.nbytes / min(seconds)


def _affordable_size(device: torch.device, dtype: torch.dtype, limit_s: float = 0.4, largest: int = 2048) -> int:
    """The largest product that stays under `limit_s`: a CPU that emulates bf16 needs 20 s for a size of 2,048."""
    size = 256
    small = _random_matrix(size, device, dtype)
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
        matrix = _random_matrix(size, device, dtype)
        _seconds_of_product(matrix, matrix, device)  # the first call chooses a kernel
        seconds[dtype] = min(_seconds_of_product(matrix, matrix, device) for _ in range(5))
    if device.type == "cuda":  # the trial is not part of the run's memory
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return seconds[torch.float32] > 1.5 * seconds[torch.bfloat16]


def _random_matrix(size: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """From a generator of its own: a measurement must not move the random numbers of dropout."""
    return torch.randn(size, size, device=device, generator=torch.Generator(device)).to(dtype)


def _seconds_of_product(left: torch.Tensor, right: torch.Tensor, device: torch.device) -> float:
    synchronize(device)
    start_s = time.perf_counter()
    left @ right
    synchronize(device)
    return time.perf_counter() - start_s
