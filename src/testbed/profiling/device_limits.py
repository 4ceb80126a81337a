"""Measure peak memory, and the best rate of a device."""

from __future__ import annotations

import contextlib
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import torch

from testbed.distributed import process_group
from testbed.errors import counted
from testbed.model.flops import peak_from_table
from testbed.profiling.step_clock import synchronize

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Names of torch.cpu.get_capabilities(): x86 with AVX-512 or AMX, and Arm. Other CPUs emulate bf16.
BF16_INSTRUCTIONS = ("amx_bf16", "avx512_bf16", "sve_bf16", "bf16")
# What PyTorch says on the CPU, and what CUDA, cuBLAS and cuDNN say when they cannot load a kernel or make a handle.
OUT_OF_MEMORY = (
    *("can't allocate memory", "not enough memory", "out of memory"),
    *("CUBLAS_STATUS_ALLOC_FAILED", "CUBLAS_STATUS_NOT_INITIALIZED"),
    *("CUDNN_STATUS_ALLOC_FAILED", "CUDNN_STATUS_NOT_INITIALIZED"),
)
# Before training. A GPU that idles runs at a low clock, and its first product loads the kernel.
FIRST_MEASUREMENT: dict[str, dict[str, Any]] = {"cpu": {"repeats": 2}, "cuda": {"repeats": 20, "warmup_s": 0.3}}
BF16_MARGIN = 1.5  # the instructions gain 2 to 16 times, emulation loses


def resident_bytes() -> int:
    """Return the resident set of this process."""
    return psutil.Process().memory_info().rss


def peak_memory(device: torch.device) -> dict[str, int | None]:
    """Return the peak memory of this rank in bytes: resident set, and allocated and reserved CUDA memory."""
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    is_cuda = device.type == "cuda"
    return {
        "peak_rss_bytes": resident * (1 if sys.platform == "darwin" else 1024),  # Linux counts KiB
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(device) if is_cuda else None,
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(device) if is_cuda else None,
    }


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out, of the device or of the host. Libraries say so in several ways, NumPy in one."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY)


class PeakRate:
    """Best rate of a large square matrix product, measured between the steps of a run.

    On a shared machine the peak of another minute is another one. All ranks multiply at the same time, as in a step,
    because cores share units and heat. A product takes up to 0.4 s, so repeats are kept to about a hundredth of the
    time.
    """

    SHARE_OF_TIME = 0.01

    def __init__(self, device: torch.device, precision: str):
        self.device, self.precision = device, precision
        self.size = 8192 if device.type == "cuda" else _affordable_size(device, DTYPES[precision])
        self._seconds: list[float] = []
        self._since_s = 0.0

    def measure(self, repeats: int = 1, warmup_s: float = 0.0) -> None:
        """Multiply. All ranks call it together, outside the step clock."""
        matrix = _random_matrix(self.size, self.device, DTYPES[self.precision])
        end_s = time.perf_counter() + warmup_s
        while time.perf_counter() < end_s:
            _seconds_of_product(matrix, matrix, self.device)
        self._seconds += [_seconds_of_product(matrix, matrix, self.device) for _ in range(repeats)]
        self._since_s = 0.0

    def measure_if_due(self, step_time_s: float) -> None:
        """Multiply again if enough time has passed; all ranks decide alike by the same step time.

        Not on CUDA, where the matrices would count as the run's memory.
        """
        self._since_s += step_time_s
        if self.device.type == "cpu" and self._since_s * self.SHARE_OF_TIME > 0.5:
            self.measure()

    def flops_per_s(self) -> float:
        """Return the best rate of this rank."""
        return 2 * self.size**3 / min(self._seconds)

    def source(self, num_ranks: int) -> str:
        """Return in words how the rate was measured."""
        together = f", {num_ranks} ranks at the same time" if num_ranks > 1 else ""
        threads = "" if self.device.type == "cuda" else f", {counted(torch.get_num_threads(), 'thread')}"
        return (
            f"measured: best of {len(self._seconds)} {self.precision} products of {self.size}x{self.size} matrices "
            f"between the steps{threads}{together}"
        )


def _affordable_size(device: torch.device, dtype: torch.dtype, limit_s: float = 0.4, largest: int = 2048) -> int:
    """Return the largest size whose product takes less than `limit_s`: a CPU that emulates bf16 needs 20 s for 2,048.

    Processor time makes repeats of a run choose the same size.
    """
    size = 256
    small = _random_matrix(size, device, dtype)
    with _one_thread():
        products = [_seconds_of_product(small, small, device, time.thread_time) for _ in range(6)]
    seconds = min(products) / torch.get_num_threads()
    while size < largest and seconds * 8 < limit_s:  # twice the size is eight times the work
        size, seconds = size * 2, seconds * 8
    return size


def choose_precision(device: torch.device) -> tuple[str, str]:
    """Return bf16 if the device has instructions for it, and they are at least BF16_MARGIN times as fast as fp32.

    Neither decides alone. A CPU without the instructions emulates bf16, up to 100 times slower than fp32, and short
    timings can hide that. A library that is told to leave them out (ONEDNN_MAX_CPU_ISA) is as slow. The two are timed
    in turns, on a CPU in processor time of one thread.

    Returns:
        "bf16" or "fp32", and a sentence that says why.
    """
    instructions = _bf16_instructions(device)
    if instructions is None:
        return "fp32", f"precision fp32: this {_kind(device)} has no instructions that multiply bf16"
    ratio = _speed_of_bf16(device)
    is_faster = ratio >= BF16_MARGIN
    return ("bf16" if is_faster else "fp32"), (
        f"precision {'bf16' if is_faster else 'fp32'}: bf16 products are {ratio:.1f} times as fast as in fp32 here "
        f"({instructions}), and {BF16_MARGIN} times are asked for"
    )


def _bf16_instructions(device: torch.device) -> str | None:
    """Return the name of the bf16 hardware; None if the device emulates it."""
    if device.type == "cuda":
        has_them = torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.cuda.get_device_name(device) if has_them else None
    found = torch.cpu.get_capabilities()
    return next((name for name in BF16_INSTRUCTIONS if found.get(name)), None)


def _speed_of_bf16(device: torch.device, rounds: int = 7) -> float:
    """Return how many times as fast as fp32 a bf16 product is, the median over rounds."""
    is_cuda = device.type == "cuda"
    clock = time.perf_counter if is_cuda else time.thread_time
    pair = [_random_matrix(4096 if is_cuda else 1024, device, dtype) for dtype in (torch.float32, torch.bfloat16)]
    with _one_thread():
        for matrix in pair:
            _seconds_of_product(matrix, matrix, device, clock)  # the first call chooses a kernel
        times = [[_seconds_of_product(matrix, matrix, device, clock) for matrix in pair] for _ in range(rounds)]
    if is_cuda:  # the trial is not part of the run's memory
        del pair, matrix
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return statistics.median(in_fp32 / in_bf16 for in_fp32, in_bf16 in times)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Compute in the calling thread only, so that its processor time is all of it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _kind(device: torch.device) -> str:
    return "GPU" if device.type == "cuda" else "CPU"


def _random_matrix(size: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return random numbers from a generator of their own, which leaves dropout's alone."""
    return torch.randn(size, size, device=device, generator=torch.Generator(device)).to(dtype)


def _seconds_of_product(
    left: torch.Tensor, right: torch.Tensor, device: torch.device, clock: Callable[[], float] = time.perf_counter
) -> float:
    synchronize(device)
    start_s = clock()
    left @ right
    synchronize(device)
    return clock() - start_s


def begin_peak_rate(device: torch.device, precision: str) -> PeakRate | None:
    """Begin to measure the device's best rate; None if every rank has a data sheet. All ranks call it."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    is_known = peak_from_table(name, precision) is not None
    if all(process_group.gather_objects(is_known)):  # decided together: devices of one run may differ
        return None
    peak = PeakRate(device, precision)
    peak.size = min(process_group.gather_objects(peak.size))
    process_group.wait_for_everyone()
    peak.measure(**FIRST_MEASUREMENT[device.type])
    if device.type == "cuda":  # its matrices are not the run's memory
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return peak
