"""The folder of a run: who may write into it, and the marks that say how the run ended. No torch."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import socket
import tempfile
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

from testbed import watchdog
from testbed.atomic_file import write_text
from testbed.launch import Launch
from testbed.recorded_environment import nccl_variables, recorded_variables, slurm_facts

METRICS = "training_metrics.json"
COMPLETE = "RUN_COMPLETE.txt"
FAILED = "RUN_FAILED.txt"
PREEMPTED = "RUN_PREEMPTED.txt"
LAUNCHER = "launcher_metadata.json"
EFFECTIVE_CONFIG = "effective_config.json"
CHECKPOINTS = "checkpoints"
BEST = "best"
PROFILER_LOGS = "profiler_logs"
TENSORBOARD = "tensorboard"
LOCK = ".lock"
WEIGHTS = ("model.safetensors", "config.json")
TOKENIZER = "tokenizer.json"  # beside the weights: the BPE that their ids belong to, unless it is GPT-2's
INFERENCE = "inference_metrics.json"  # what scripts/evaluate.py measured of the weights
OWN_FILES = (METRICS, COMPLETE, FAILED, PREEMPTED, LAUNCHER, EFFECTIVE_CONFIG, *WEIGHTS, TOKENIZER, INFERENCE)
OWN_FOLDERS = (CHECKPOINTS, BEST, PROFILER_LOGS, TENSORBOARD)
LOCK_WAIT_S = 5.0
_locks: dict[Path, int] = {}  # folder -> the open file that the lock hangs on


def now_utc() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def keep_others_out(directory: Path) -> None:
    """Create the run's folder and lock it until this process ends, however it ends: the kernel lets go of the lock of a
    process that is killed. Only rank 0 calls it.

    Raises:
        ValueError: the folder cannot be written, or another run is writing into it.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
        descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise ValueError(
            f"--checkpoint_path {directory} cannot be written ({error.strerror or error}); choose another folder"
        ) from None
    try:
        _lock(descriptor)
    except BlockingIOError:
        holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another process"
        os.close(descriptor)
        raise ValueError(
            f"--checkpoint_path {directory} is being written by another run ({holder}); wait until it has ended, or "
            "choose another folder"
        ) from None
    except OSError as error:  # a file system without locks: nothing to be had, and no reason not to train
        print(f"no lock on {directory} ({error.strerror or error}): start no second run in it", flush=True)
    with contextlib.suppress(OSError):  # a full disk: it only makes the other's refusal say more
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    _locks[directory] = descriptor


def let_others_in(directory: Path) -> None:
    """Give the lock back while this process lives on. The file stays: it means nothing without the lock."""
    if directory in _locks:
        os.close(_locks.pop(directory))


def _lock(descriptor: int) -> None:
    """Try for a few seconds: a launcher restarts a run while the kernel still clears up the killed rank 0."""
    deadline_s = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.2)


def claim(directory: Path, overwrite: bool) -> None:
    """Make a locked folder a new run's own: empty it of an earlier run's files. Only rank 0 calls it.

    Raises:
        ValueError: it holds a run and --overwrite was not given.
    """
    held = held_files(directory)
    if held and not overwrite:
        raise ValueError(
            f"--checkpoint_path {directory} already holds a run ({held[0].name}); give --overwrite to replace it, "
            "--resume to continue it, or another folder"
        )
    for path in (*held, *_leftovers(directory)):
        _delete(path)


def held_files(directory: Path) -> list[Path]:
    """What a run left in this folder."""
    return [directory / name for name in (*OWN_FILES, *OWN_FOLDERS) if (directory / name).exists()]


def reopen(directory: Path, from_the_start: bool) -> None:
    """Make a locked folder ready for a run that goes on in it: it is neither complete nor failed as long as it runs.

    Args:
        from_the_start: none of its steps is kept, so nothing that they left is either, but for the metrics, which say
            what was lost, and the folders of checkpoints.
    """
    kept = {METRICS, CHECKPOINTS}
    ended = (COMPLETE, FAILED, PREEMPTED, INFERENCE)  # what was measured is of weights that will be others
    for name in [name for name in (*OWN_FILES, *OWN_FOLDERS) if name not in kept] if from_the_start else ended:
        _delete(directory / name)
    for half in (*(directory / CHECKPOINTS).glob(".step_*.tmp"), *_leftovers(directory)):
        _delete(half)


def _leftovers(directory: Path) -> list[Path]:
    """Hidden files that a killed start left: half-written ones, and where its ranks were."""
    return [path for form in (".*.tmp", watchdog.FILES) for path in directory.glob(form)]


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():  # of a link goes the link, whatever it leads to
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_launcher_metadata(directory: Path, launch: Launch, git_commit: str) -> None:
    """Who started the run, and with which settings of the communication libraries. Empty values are left out."""
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


def mark_preempted(directory: Path, reason: str, step: int, checkpoint: Path) -> None:
    """Write RUN_PREEMPTED.txt: the run was asked to end, and nothing that it did is lost.

    Raises:
        RunAlreadyFailed: a rank has marked the run as failed in the meantime; a run has one end.
    """
    check_not_failed(directory)
    line = (
        f"[Rank 0] RUN_PREEMPTED checkpoint_path={directory} reason={reason} step={step} checkpoint={checkpoint} "
        f"timestamp_utc={now_utc()}"
    )
    write_text(directory / PREEMPTED, line + "\n")
    try:
        check_not_failed(directory)  # in the meantime: whichever of the two marks was written last, the failure stands
    except RunAlreadyFailed:
        (directory / PREEMPTED).unlink(missing_ok=True)
        raise


class RunAlreadyFailed(Exception):
    """A run that was to be marked as preempted has failed."""


def check_not_failed(directory: Path) -> None:
    """RunAlreadyFailed where a rank has marked this run as failed, though all was saved: it ended too early."""
    if (directory / FAILED).exists():
        raise RunAlreadyFailed(f"the step is saved, but a rank ended too early: {directory / FAILED} says why")


def closing_mark(directory: Path) -> str | None:
    """The mark of a run whose files are closed, by name: what goes wrong from now on changes nothing about them."""
    return next((mark for mark in (COMPLETE, PREEMPTED) if (directory / mark).exists()), None)


def mark_failed(directory: Path, rank: int, reason: str) -> str:
    """Write RUN_FAILED.txt unless another rank has: the first to fail knows the cause. Returns what stands."""
    mine = directory / f".{FAILED}.rank{rank}.{threading.get_ident()}.tmp"  # a rank's watching thread may mark it too
    try:
        mine.write_text(f"[Rank {rank}] RUN_FAILED reason={reason} timestamp_utc={now_utc()}\n", encoding="utf-8")
        os.link(mine, directory / FAILED)  # in one move, and only where there is none yet
        (directory / PREEMPTED).unlink(missing_ok=True)
    except FileExistsError:
        return (directory / FAILED).read_text(encoding="utf-8").strip()
    except OSError as error:
        return f"{reason} (and {FAILED} could not be written: {error.strerror})"
    finally:
        mine.unlink(missing_ok=True)
    return reason
