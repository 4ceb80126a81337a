"""Device, threads and precision of this rank."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

import torch

from testbed.autotune.attention import check_backend
from testbed.config.compatibility import check_on_device
from testbed.config.run_types import STRATEGIES
from testbed.config.settings import RunSettings
from testbed.distributed import process_group
from testbed.distributed.launch import Launch
from testbed.errors import InputError, first_line
from testbed.profiling.device_limits import choose_precision

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
OWN_SETTINGS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")  # of the user, for glibc


def keep_freed_memory() -> None:
    """Let glibc reuse freed memory instead of giving it back to the kernel.

    PyTorch has no cache of its own on the CPU, and glibc maps and unmaps every block over 32 MB: each step's logits are
    faulted in page by page again. Keeping them saves 15 % of a nano step and 40 % with GPT-2's vocabulary, for a higher
    resident set. Other C libraries have no such call and are left alone, and so is what the user set.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not any(name in os.environ for name in OWN_SETTINGS):
        mallopt(M_MMAP_THRESHOLD, 1 << 30)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def keep_to_own_cores(num_threads: int, launch: Launch) -> None:
    """Bind all present and future threads of this process to its share of the node's cores, a contiguous range.

    Raises:
        InputError: the system cannot bind, or the share has fewer cores than the rank has threads.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise InputError("--bind_cores needs Linux, where a process can be bound to cores; leave it out")
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // launch.local_world_size
    if share < num_threads:
        raise InputError(
            f"--bind_cores: each of {launch.local_world_size} ranks would have {share} of the {len(cores)} cores that "
            f"this one may use, fewer than its {num_threads} threads; lower --threads_per_rank, start fewer ranks, or "
            "leave it out where the launcher binds ranks itself"
        )
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
            os.sched_setaffinity(int(thread.name), cores[launch.local_rank * share : (launch.local_rank + 1) * share])


def device_type(asked: str) -> str:
    """Return "cuda" or "cpu" for --device. Raises InputError if it does not exist."""
    has_cuda = torch.cuda.is_available()
    if asked == "cuda" and not has_cuda:
        raise InputError("--device cuda, but PyTorch finds no CUDA device here; use --device cpu or auto")
    return "cuda" if has_cuda and asked != "cpu" else "cpu"


def choose_device(settings: RunSettings, launch: Launch) -> torch.device:
    """Return the device of this rank, after setting its CPU threads.

    Raises:
        InputError: the device does not exist, or lacks the precision or kernel.
    """
    torch.set_num_threads(settings.compute.threads_per_rank)
    if settings.compute.bind_cores:
        keep_to_own_cores(settings.compute.threads_per_rank, launch)
    device = torch.device(device_type(settings.compute.device))
    check_on_device({**settings.by_flag(), "device": device.type})
    if device.type == "cpu":
        keep_freed_memory()
    else:
        device = _own_gpu(settings, launch)
        torch.cuda.set_device(device)
    if settings.compute.deterministic:
        keep_to_deterministic_kernels()
    run_type = settings.training.run_type
    if STRATEGIES[run_type].devices == "all" and (device.type == "cpu" or torch.cuda.device_count() < 2):
        found = "there is no CUDA device" if device.type == "cpu" else "there is one CUDA device"
        raise InputError(
            f"--run_type {run_type} splits a batch over the CUDA devices of one process and needs two, but {found} "
            "here; use --run_type baseline, or ddp with torchrun, which also runs on CPU cores"
        )
    check_float8(settings, device)
    check_backend(settings, device)
    return device


def _own_gpu(settings: RunSettings, launch: Launch) -> torch.device:
    """Return the GPU of this rank. With --backend gloo ranks may share one.

    Raises:
        InputError: there are too few.
    """
    devices = torch.cuda.device_count()
    if devices == 1 and launch.local_world_size > 1 and "SLURM_PROCID" in os.environ:  # Slurm shows each task its own
        os.environ["LOCAL_RANK"] = "0"  # DeepSpeed takes the device of this number; the launch has been read
        return torch.device("cuda", 0)
    if launch.local_world_size > devices and settings.compute.backend != "gloo":
        raise InputError(
            f"the launcher started {launch.local_world_size} ranks on this node, but PyTorch sees {devices} CUDA "
            f"device{'s' * (devices > 1)}; start as many ranks as devices, use --device cpu, or --backend gloo, with "
            "which ranks share one"
        )
    return torch.device("cuda", launch.local_rank % devices)


def keep_to_deterministic_kernels() -> None:
    """Let PyTorch use kernels alone that give the same bits every time. Before the first use of CUDA.

    cuBLAS needs a workspace of fixed size for it. NCCL may choose another algorithm, which adds in another order, at
    every start; a ring adds in the same order each time.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("NCCL_ALGO", "Ring")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def why_nothing_compiles(device: torch.device) -> str | None:
    """Try torch.compile on a device; return why it fails, None if it works."""
    try:
        x = torch.ones(8, device=device, requires_grad=True)
        torch.compile(lambda x: torch.nn.functional.gelu(x) * 2)(x).sum().backward()
    except Exception as error:  # no Triton, no C compiler, a driver too old: of many types
        return f"the compiler does not work here ({first_line(error)})"
    finally:
        torch._dynamo.reset()
    return None


def with_precision_resolved(
    settings: RunSettings, launch: Launch, device: torch.device
) -> tuple[RunSettings, str | None]:
    """Decide --precision auto on rank 0, for all ranks. All ranks call it.

    Returns:
        The settings, and a line that says why; None if a precision was given.
    """
    if settings.compute.precision != "auto":
        return settings, None
    chosen = choose_precision(device) if launch.rank == 0 else None
    precision, words = process_group.gather_objects(chosen)[0]
    return settings.with_values(precision=precision), words


OLDEST_CAPABILITY = (8, 9)  # Ada; Hopper is 9.0


def check_float8(settings: RunSettings, device: torch.device) -> None:
    """Check that a GPU multiplies in 8 bits. That no CPU does is a rule of config/compatibility.py.

    Raises:
        InputError: it does not.
    """
    if settings.compute.matmul != "fp8" or device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST_CAPABILITY:
        raise InputError(
            f"--matmul fp8 needs compute capability 8.9 or newer (Ada, Hopper), but "
            f"{torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}; leave it out"
        )
