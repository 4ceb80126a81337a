"""What choosing a device does to the process: which cores it keeps to."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.settings import settings_of

from testbed.autotune import device
from testbed.autotune.device import keep_to_own_cores
from testbed.distributed.launch import Launch
from testbed.errors import InputError


@pytest.mark.parametrize(
    ("devices", "slurm", "index", "local_rank"),
    [(4, False, 3, "3"), (4, True, 3, "3"), (1, True, 0, "0")],  # the last: Slurm shows each task one GPU
)
def test_we_and_deepspeed_take_the_same_gpu(token_files, monkeypatch, devices, slurm, index, local_rank):
    """DeepSpeed calls set_device(LOCAL_RANK) by itself."""
    taken = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    monkeypatch.setattr(device, "check_backend", lambda settings, device: None)
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("SLURM_PROCID", "3") if slurm else monkeypatch.delenv("SLURM_PROCID", raising=False)
    settings = settings_of(token_files, "--run_type", "ddp", "--device", "auto", world_size=4)
    assert device.choose_device(settings, Launch(3, 3, 4, 4)) == torch.device("cuda", index)
    assert taken == [torch.device("cuda", index)] and os.environ["LOCAL_RANK"] == local_rank


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    monkeypatch.setattr(device, "check_backend", lambda settings, device: None)
    monkeypatch.delenv("SLURM_PROCID", raising=False)


@pytest.mark.usefixtures("two_gpus")
def test_ranks_share_a_gpu_with_gloo_alone(token_files):
    def chosen(run_type: str, *flags: str) -> torch.device:
        flags = ("--run_type", run_type, "--device", "auto", *flags)
        return device.choose_device(settings_of(token_files, *flags, world_size=4), Launch(3, 3, 4, 4))

    assert chosen("ddp", "--backend", "gloo") == chosen("allreduce", "--backend", "gloo") == torch.device("cuda", 1)
    with pytest.raises(InputError, match="4 ranks on this node, but PyTorch sees 2 CUDA devices"):
        chosen("ddp")
    with pytest.raises(InputError, match="--backend gloo with --device cuda and --run_type fsdp: gloo averages"):
        chosen("fsdp", "--backend", "gloo")


@pytest.mark.parametrize("flags", ["--backend nccl", "--precision fp16"])
def test_what_needs_a_gpu_is_refused_where_auto_finds_none(token_files, monkeypatch, flags):
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    settings = settings_of(token_files, "--device", "auto", *flags.split())
    with pytest.raises(InputError, match=f"{flags} with --device cpu: "):
        device.choose_device(settings, Launch(0, 0, 1, 1))


def test_deterministic_kernels_are_asked_of_every_library(monkeypatch):
    for name in ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO"):
        monkeypatch.setenv(name, "x")  # so that it is put back
        monkeypatch.delenv(name)
    try:
        device.keep_to_deterministic_kernels()
        assert torch.are_deterministic_algorithms_enabled()
        assert (os.environ["CUBLAS_WORKSPACE_CONFIG"], os.environ["NCCL_ALGO"]) == (":4096:8", "Ring")
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture
def cores():
    """The cores of this process; every thread has them again afterwards."""
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("this system cannot bind a process to cores")
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("there is one core, so there is nothing to share out")
    yield cores
    for thread in threads():
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(thread, cores)


def threads() -> list[int]:
    return [int(path.name) for path in Path("/proc/self/task").iterdir()]


def test_a_rank_and_all_its_threads_keep_to_their_share_of_the_cores(cores):
    is_over = threading.Event()
    waiting = threading.Thread(target=is_over.wait)  # as those that a library has started before
    waiting.start()
    keep_to_own_cores(1, Launch(1, 1, 2, 2))
    share = len(cores) // 2
    try:
        assert len(threads()) > 1
        assert {frozenset(os.sched_getaffinity(thread)) for thread in threads()} == {
            frozenset(cores[share : 2 * share])
        }
    finally:
        is_over.set()
        waiting.join()


def test_more_threads_than_cores_are_refused_and_nothing_is_bound(cores):
    words = f"--bind_cores: each of 2 ranks would have {len(cores) // 2} of the {len(cores)} cores"
    with pytest.raises(ValueError, match=words):
        keep_to_own_cores(len(cores), Launch(0, 0, 2, 2))
    assert sorted(os.sched_getaffinity(0)) == cores


def test_freed_memory_is_kept_unless_the_user_set_the_c_library(monkeypatch):
    calls: list[tuple[int, int]] = []
    library = SimpleNamespace(mallopt=lambda *arguments: calls.append(arguments))
    monkeypatch.setattr(device.ctypes, "CDLL", lambda name: library)
    for name in device.OWN_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    device.keep_freed_memory()
    assert {option for option, _ in calls} == {device.M_MMAP_THRESHOLD, device.M_TRIM_THRESHOLD}
    calls.clear()
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    device.keep_freed_memory()
    assert not calls
