"""Name the device that computes, without PyTorch: the driver's GPUs, or the CPU."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

NVIDIA = Path("/proc/driver/nvidia/gpus")


def device_name(device: str) -> str:
    """Return the model of the first GPU that this process may use, else of the CPU.

    Args:
        device: as --device: auto, cpu or cuda.
    """
    names = [] if device == "cpu" or os.environ.get("CUDA_VISIBLE_DEVICES") == "" else gpu_names()
    return names[0] if names else cpu_name() or "CPU"


def gpu_names() -> list[str]:
    """Return the models of NVIDIA's driver; empty without one."""
    names = []
    for file in sorted(NVIDIA.glob("*/information")) if NVIDIA.is_dir() else ():
        try:
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue
        names += [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
    return names


def cpu_name() -> str | None:
    """Return the model of the CPU, as far as the system says it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or None


def torch_version() -> str:
    """Return the version of the PyTorch that is installed, which is not loaded for it."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return "none"
