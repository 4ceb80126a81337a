"""Versions, host, hardware, commit and scheduler of a run, as rank 0 sees them."""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from testbed.config.device_name import cpu_name
from testbed.config.environment_variables import nccl_variables, recorded_variables, slurm_facts
from testbed.distributed.launch import Launch, usable_cores
from testbed.io import SOURCE, write_text
from testbed.run_folder import LAUNCHER
from testbed.run_folder.run_lock import check_held


def facts(device: torch.device, *packages: str) -> dict[str, Any]:
    """Return where one process measures: commit, host, hardware, versions, those of `packages` too."""
    found, is_dirty = commit()
    return {
        "git_commit": found,
        "git_dirty": is_dirty,
        "env": versions() | {f"{package}_version": _installed(package) for package in packages},
        "host": host(),
        "hardware": hardware(device, Launch(0, 0, 1, 1), None),
    }


def versions() -> dict[str, str | None]:
    return {
        "python_version": platform.python_version(),
        "torch_version": torch.__version__,
        "numpy_version": _installed("numpy"),
        "transformers_version": _installed("transformers"),
        "deepspeed_version": _installed("deepspeed"),
        "cuda_version": torch.version.cuda,
    }


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def host() -> dict[str, str]:
    return {"hostname": socket.gethostname(), "os": platform.platform()}


def hardware(device: torch.device, launch: Launch, backend: str | None) -> dict:
    is_cuda = device.type == "cuda"
    facts = {
        "device_type": device.type,
        "gpu_name": torch.cuda.get_device_name(device) if is_cuda else None,
        "cpu_name": cpu_name(),
        "gpu_count_visible": torch.cuda.device_count(),
        "world_size": launch.world_size,
        "num_nodes": launch.num_nodes,
        "cuda_version": torch.version.cuda if is_cuda else None,
        "cpu_cores_visible": usable_cores(),
        "cpu_threads_per_rank": torch.get_num_threads(),
        "backend": backend,
    }
    if os.environ.get("EC2_INSTANCE_TYPE"):
        facts["instance_type"] = os.environ["EC2_INSTANCE_TYPE"]
    return facts


def commit() -> tuple[str, bool | None]:
    """Return the commit of this source, and whether files differ from it; ("unknown", None) outside a repository."""
    told = os.environ.get("GIT_COMMIT")
    found = told or _git("rev-parse", "HEAD")
    changes = _git("status", "--porcelain", "--untracked-files=no")
    return found or "unknown", None if changes is None else bool(changes)


def _git(*arguments: str) -> str | None:
    try:
        answer = subprocess.run(["git", *arguments], cwd=SOURCE, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()


def scheduler() -> dict[str, str] | None:
    """Return the facts of the Slurm job; None elsewhere."""
    slurm = slurm_facts()
    return None if slurm is None else {"type": "slurm", **slurm}


def write_launcher_metadata(directory: Path, launch: Launch, git_commit: str) -> None:
    """Write how the run was started, and the variables of communication libraries."""
    check_held(directory)
    content = {
        "checkpoint_path": str(directory),
        "rank0_host": socket.gethostname(),
        "world_size": launch.world_size,
        "git_commit": git_commit,
        "env": recorded_variables(),
        "nccl_env": nccl_variables(),
    }
    slurm = slurm_facts()
    if slurm is not None:
        content["slurm"] = slurm
    write_text(directory / LAUNCHER, json.dumps(content, indent=2) + "\n")
