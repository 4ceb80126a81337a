"""The folder of a run: who may write into it, and the marks that say how the run ended. No torch."""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from testbed.atomic_file import write_text
from testbed.launch import Launch

METRICS = "training_metrics.json"
COMPLETE = "RUN_COMPLETE.txt"
FAILED = "RUN_FAILED.txt"
LAUNCHER = "launcher_metadata.json"
EFFECTIVE_CONFIG = "effective_config.json"
CHECKPOINTS = "checkpoints"
BEST = "best"
PROFILER_LOGS = "profiler_logs"
TENSORBOARD = "tensorboard"
WEIGHTS = ("model.safetensors", "config.json")
OWN_FILES = (METRICS, COMPLETE, FAILED, LAUNCHER, EFFECTIVE_CONFIG, *WEIGHTS)
OWN_FOLDERS = (CHECKPOINTS, BEST, PROFILER_LOGS, TENSORBOARD)

# recorded because they change how a run communicates; an allow-list, so that no secret can land in a file
RECORDED_VARIABLES = ("CUDA_VISIBLE_DEVICES", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME")
RECORDED_PREFIXES = ("NCCL_", "TORCH_NCCL_")


def now_utc() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def claim(directory: Path, overwrite: bool, resume: bool) -> None:
    """Make the folder this run's own: create it, or empty it of an earlier run's files. Only rank 0 calls it.

    Raises:
        ValueError: it cannot be written, or holds a run and neither --overwrite nor --resume was given.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ValueError(
            f"--checkpoint_path {directory} cannot be written ({error.strerror or error}); choose another folder"
        ) from None
    if resume:
        for mark in (COMPLETE, FAILED):  # it is neither, as long as it runs
            (directory / mark).unlink(missing_ok=True)
        return
    held = [directory / name for name in (*OWN_FILES, *OWN_FOLDERS) if (directory / name).exists()]
    if held and not overwrite:
        raise ValueError(
            f"--checkpoint_path {directory} already holds a run ({held[0].name}); give --overwrite to replace it, "
            "--resume to continue it, or another folder"
        )
    for path in held:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def write_launcher_metadata(directory: Path, launch: Launch, git_commit: str) -> None:
    """Who started the run, and with which settings of the communication libraries. Empty values are left out."""
    recorded = {name: value for name, value in os.environ.items() if name in RECORDED_VARIABLES and value}
    communication = {name: value for name, value in os.environ.items() if name.startswith(RECORDED_PREFIXES) and value}
    content = {
        "checkpoint_path": str(directory),
        "rank0_host": socket.gethostname(),
        "world_size": launch.world_size,
        "git_commit": git_commit,
        "env": recorded,
        "nccl_env": communication,
    }
    if "SLURM_JOB_ID" in os.environ:
        names = {"job_id": "SLURM_JOB_ID", "nodelist": "SLURM_JOB_NODELIST"}
        content["slurm"] = {key: os.environ[name] for key, name in names.items() if name in os.environ}
    write_text(directory / LAUNCHER, json.dumps(content, indent=2) + "\n")


def mark_complete(directory: Path, world_size: int, tokens_per_s: float | None, total_wall_time_s: float) -> str:
    """Write RUN_COMPLETE.txt, one line in the form that the older launchers look for; returns the line."""
    speed = "n/a" if tokens_per_s is None else f"{tokens_per_s:.2f}"
    line = (
        f"[Rank 0] RUN_COMPLETE checkpoint_path={directory} world_size={world_size} "
        f"tokens_per_sec={speed} total_wall_time_sec={total_wall_time_s:.2f} "
        f"timestamp_utc={now_utc()}"
    )
    write_text(directory / COMPLETE, line + "\n")
    return line


def mark_failed(directory: Path, rank: int, reason: str) -> str:
    """Write RUN_FAILED.txt unless another rank has: the first to fail knows the cause. Returns what stands."""
    mine = directory / f".{FAILED}.rank{rank}.tmp"
    try:
        mine.write_text(f"[Rank {rank}] RUN_FAILED reason={reason} timestamp_utc={now_utc()}\n", encoding="utf-8")
        os.link(mine, directory / FAILED)  # in one move, and only where there is none yet
    except FileExistsError:
        return (directory / FAILED).read_text(encoding="utf-8").strip()
    except OSError as error:
        return f"{reason} (and {FAILED} could not be written: {error.strerror})"
    finally:
        mine.unlink(missing_ok=True)
    return reason
