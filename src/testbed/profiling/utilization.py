"""Sample CPU and device use in a background thread while a run trains."""

from __future__ import annotations

import contextlib
import statistics
import threading
from typing import Any

import psutil
import torch

INTERVAL_S = 1.0


class UtilizationSampler:
    """Samples this rank's resident memory and, on CUDA, its device through NVML, every INTERVAL_S seconds.

    CPU use is the process's CPU time over wall time in the steps that `add_step` is told of; 100 % is one core.
    """

    def __init__(self, device: torch.device):
        self._process = psutil.Process()
        self._cpu_s = self._wall_s = 0.0
        self._device = _nvml_device(device)
        self._resident_bytes: list[int] = []
        self._gpu_percent: list[float] = []
        self._gpu_memory_bytes: list[int] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="utilization", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def add_step(self, cpu_s: float, wall_s: float) -> None:
        """Add a step's CPU time, of all threads of this process, and its time by the clock."""
        self._cpu_s += cpu_s
        self._wall_s += wall_s

    def stop(self) -> dict[str, Any]:
        """End sampling; return a rank's entry in training_metrics.json."""
        self._ended.set()
        self._thread.join()
        return {
            "num_samples": len(self._resident_bytes),
            "cpu_percent_mean": 100 * self._cpu_s / self._wall_s if self._wall_s else None,
            "rss_bytes_mean": _mean(self._resident_bytes),
            "rss_bytes_max": max(self._resident_bytes, default=None),
            "gpu_percent_mean": _mean(self._gpu_percent),
            "gpu_memory_used_bytes_max": max(self._gpu_memory_bytes, default=None),
        }

    def _run(self) -> None:
        while not self._ended.wait(INTERVAL_S):
            self._resident_bytes.append(self._process.memory_info().rss)
            if self._device is not None:
                self._sample_device()

    def _sample_device(self) -> None:
        import pynvml

        with contextlib.suppress(pynvml.NVMLError):  # what is unknown stays out
            self._gpu_memory_bytes.append(pynvml.nvmlDeviceGetMemoryInfo(self._device).used)
            self._gpu_percent.append(pynvml.nvmlDeviceGetUtilizationRates(self._device).gpu)  # a MIG part has none


def _nvml_device(device: torch.device) -> Any:
    """Return NVML's handle of this rank's device; None on the CPU or without NVML."""
    if device.type != "cuda":
        return None
    try:
        import pynvml
    except ImportError:
        return None
    # by its UUID: CUDA_VISIBLE_DEVICES renumbers devices for PyTorch, not for NVML
    uuid = torch.cuda.get_device_properties(device).uuid
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        for kind in ("MIG", "GPU"):  # CUDA gives the UUID of a part of a GPU (MIG), in some versions that of the whole
            with contextlib.suppress(pynvml.NVMLError):
                handle = pynvml.nvmlDeviceGetHandleByUUID(f"{kind}-{uuid}")
                return None if kind == "GPU" and _is_divided(handle) else handle
    return None


def _is_divided(handle: Any) -> bool:
    """Return whether a GPU is divided into MIG parts: its memory is then more than this rank's."""
    import pynvml

    try:
        return pynvml.nvmlDeviceGetMigMode(handle)[0] == pynvml.NVML_DEVICE_MIG_ENABLE
    except pynvml.NVMLError:  # a GPU that cannot be divided
        return False


def _mean(values: list) -> float | None:
    return statistics.fmean(values) if values else None
