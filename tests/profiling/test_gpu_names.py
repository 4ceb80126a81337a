"""GPUs by number, by name and as parts of a GPU (MIG), with NVML and CUDA replaced."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from testbed.profiling import utilization
from testbed.sweep.request import visible_devices

UUID = "8932f937-d72c-4106-c12f-20bd9faed9f6"
GPU, DIVIDED, PART = "a GPU", "a GPU that is divided", "a part of it"


class NotSupported(Exception):
    pass


@pytest.fixture
def nvml(monkeypatch) -> dict[str, str]:
    """The names that NVML knows, to be filled; it answers for the three kinds of handles as its manual says."""
    known: dict[str, str] = {}
    module = ModuleType("pynvml")

    def handle(name: str) -> str:
        if name not in known:
            raise NotSupported
        return known[name]

    def rates(of: str) -> SimpleNamespace:
        if of != GPU:
            raise NotSupported
        return SimpleNamespace(gpu=70)

    def mode(of: str) -> tuple[int, int]:
        if of == PART:
            raise NotSupported
        return (int(of == DIVIDED), 0)

    module.NVMLError, module.NVML_DEVICE_MIG_ENABLE = NotSupported, 1
    module.nvmlInit = lambda: None
    module.nvmlDeviceGetHandleByUUID, module.nvmlDeviceGetMigMode = handle, mode
    module.nvmlDeviceGetUtilizationRates = rates
    module.nvmlDeviceGetMemoryInfo = lambda of: SimpleNamespace(used={GPU: 80, DIVIDED: 80, PART: 10}[of])
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=UUID))
    return known


@pytest.mark.parametrize(
    ("known", "percent", "used"),
    [
        ({f"GPU-{UUID}": GPU}, [70], [80]),
        ({f"MIG-{UUID}": PART}, [], [10]),  # no rate, but a memory of its own
        ({f"GPU-{UUID}": DIVIDED}, [], []),  # CUDA named the whole: its memory is other processes' too
        ({f"GPU-{UUID}": DIVIDED, f"MIG-{UUID}": PART}, [], [10]),
        ({}, [], []),
    ],
)
def test_use_is_of_this_rank_s_gpu_or_part(nvml, known, percent, used):
    nvml.update(known)
    sampler = utilization.UtilizationSampler(torch.device("cuda", 0))
    if sampler._device is not None:
        sampler._sample_device()
    assert (sampler._gpu_percent, sampler._gpu_memory_bytes) == (percent, used)


def test_without_a_driver_nothing_is_sampled(nvml):
    def no_driver():
        raise NotSupported

    nvml[f"GPU-{UUID}"] = GPU
    sys.modules["pynvml"].nvmlInit = no_driver
    assert utilization._nvml_device(torch.device("cuda", 0)) is None
    assert utilization._nvml_device(torch.device("cpu")) is None


@pytest.mark.parametrize(
    ("visible", "number", "names"),
    [
        (None, 2, ("0", "1")),
        ("2,3,5", 2, ("2", "3")),
        ("GPU-8932f937, GPU-d0a6", 2, ("GPU-8932f937", "GPU-d0a6")),
        ("MIG-4f7d2c34,MIG-9b1a", 1, ("MIG-4f7d2c34",)),  # a process sees one part, however many are named
        ("MIG-GPU-8932f937/1/0", 1, ("MIG-GPU-8932f937/1/0",)),
    ],
)
def test_a_sweep_hands_on_the_names_that_it_was_given(monkeypatch, visible, number, names):
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_devices(number) == names
