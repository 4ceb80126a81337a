"""Claim the folder of a run, and write the marks that say how the run ended. No torch."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import threading
from pathlib import Path

from testbed.config.environment_variables import nccl_variables, recorded_variables, slurm_facts
from testbed.distributed.launch import Launch
from testbed.errors import InputError, one_line
from testbed.io import now_utc, read_text, write_text
from testbed.run_files import (
    CHECKPOINTS,
    COMPLETE,
    EFFECTIVE_CONFIG,
    FAILED,
    INFERENCE,
    LAUNCHER,
    METRICS,
    OWN_FILES,
    OWN_FOLDERS,
    PREEMPTED,
)
from testbed.run_lock import check_held

LONGEST = 20_000  # characters of a mark's part: a path has at most 4,096 bytes, of which each may be escaped
# what `io.replacing`, marks, distributed/watchdog.py and checkpoint/writer.py leave when they are killed; others hide
# files here too
_LEFTOVER = re.compile(rf"\.(?:{'|'.join(map(re.escape, OWN_FILES))})\.(?:rank\d+\.)?\d+\.tmp|\.rank\d+\.progress")
_HALF_CHECKPOINT = re.compile(r"\.step_\d+(?:\.\w+)*\.tmp")


def claim(directory: Path, overwrite: bool) -> None:
    """Delete an earlier run's files from a locked folder, for a new run. Only rank 0 calls it.

    Raises:
        InputError: it holds a run and --overwrite was not given.
    """
    held = held_files(directory)
    if held and not overwrite:
        raise InputError(
            f"--checkpoint_path {directory} already holds a run ({held[0].name}); give --overwrite to replace it, "
            "--resume to continue it, or another folder"
        )
    # what shows that it is a run goes last: a start that is killed here leaves nothing that looks like a stranger's
    for path in (*reversed(held), *_leftovers(directory)):
        _delete(path)


def held_files(directory: Path) -> list[Path]:
    """Return the files and folders with the names of a run's own. Empty folders do not count."""
    paths = [directory / name for name in (*OWN_FILES, *OWN_FOLDERS)]
    return [path for path in paths if os.path.lexists(path) and not (path.is_dir() and not any(path.iterdir()))]


def reopen(directory: Path, from_the_start: bool) -> None:
    """Prepare a locked folder for a run that continues in it.

    Args:
        from_the_start: no step is kept, so only checkpoints and the files that identify the run stay.
    """
    kept = {METRICS, LAUNCHER, EFFECTIVE_CONFIG, CHECKPOINTS}
    ended = (COMPLETE, FAILED, PREEMPTED, INFERENCE)  # what was measured is of weights that will be others
    for name in [name for name in (*OWN_FILES, *OWN_FOLDERS) if name not in kept] if from_the_start else ended:
        _delete(directory / name)
    halves = [path for path in (directory / CHECKPOINTS).glob(".step_*.tmp") if _HALF_CHECKPOINT.fullmatch(path.name)]
    for half in (*halves, *_leftovers(directory)):
        _delete(half)


def _leftovers(directory: Path) -> list[Path]:
    """Return hidden files that a killed start left: half-written files and progress files."""
    return [path for path in directory.glob(".*") if _LEFTOVER.fullmatch(path.name)]


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():  # of a link goes the link, whatever it leads to
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


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


def mark_complete(directory: Path, world_size: int, tokens_per_s: float | None, total_wall_time_s: float) -> str:
    """Write RUN_COMPLETE.txt, one line that older launchers look for, and return the line.

    Raises:
        FolderGone: the run's folder was renamed or deleted.
    """
    check_held(directory)
    speed = "n/a" if tokens_per_s is None else f"{tokens_per_s:.2f}"
    line = (
        f"[Rank 0] RUN_COMPLETE checkpoint_path={_one_line(directory)} world_size={world_size} "
        f"tokens_per_sec={speed} total_wall_time_sec={total_wall_time_s:.2f} "
        f"timestamp_utc={now_utc()}"
    )
    write_text(directory / COMPLETE, line + "\n")
    return line


def mark_preempted(directory: Path, reason: str, step: int, checkpoint: Path) -> None:
    """Write RUN_PREEMPTED.txt.

    Raises:
        RunAlreadyFailed: a rank has marked the run as failed meanwhile.
        FolderGone: the run's folder was renamed or deleted.
    """
    check_held(directory)
    check_not_failed(directory)
    line = (
        f"[Rank 0] RUN_PREEMPTED checkpoint_path={_one_line(directory)} reason={reason} step={step} "
        f"checkpoint={_one_line(checkpoint)} timestamp_utc={now_utc()}"
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
    """Check that no rank has marked the run as failed. Raises RunAlreadyFailed."""
    if (directory / FAILED).exists():
        raise RunAlreadyFailed(f"the step is saved, but a rank ended too early: {directory / FAILED} says why")


def closing_mark(directory: Path) -> str | None:
    """Return the name of the mark of a closed run; None if it is open."""
    return next((mark for mark in (COMPLETE, PREEMPTED) if (directory / mark).exists()), None)


def mark_failed(directory: Path, rank: int, reason: str) -> str:
    """Write RUN_FAILED.txt unless another rank has, and return the reason in it: the first to fail knows the cause."""
    mine = directory / f".{FAILED}.rank{rank}.{threading.get_ident()}.tmp"  # a rank's watching thread may mark it too
    line = f"[Rank {rank}] RUN_FAILED reason={_one_line(reason)} timestamp_utc={now_utc()}\n"
    try:
        mine.write_text(line, encoding="utf-8")
        os.link(mine, directory / FAILED)  # in one move, and only where there is none yet
        (directory / PREEMPTED).unlink(missing_ok=True)
    except FileExistsError:
        try:
            return read_text(directory / FAILED, errors="replace").strip()
        except OSError as error:  # a FIFO or a folder that has its name
            return f"{reason} (and what stands as {FAILED} cannot be read: {error.strerror})"
    except OSError as error:
        return f"{reason} (and {FAILED} could not be written: {error.strerror})"
    finally:
        with contextlib.suppress(OSError):  # what kept it from being written keeps it from being deleted
            mine.unlink(missing_ok=True)
    return reason


def add_to_failure(directory: Path, rank: int, words: str) -> None:
    """Add words to the reason in RUN_FAILED.txt if this rank wrote it. Where that fails, the file stays as it is."""
    with contextlib.suppress(OSError):
        reason, when, timestamp = read_text(directory / FAILED, errors="replace").rpartition(" timestamp_utc=")
        if reason.startswith(f"[Rank {rank}] "):
            write_text(directory / FAILED, f"{reason}; {_one_line(words)}{when}{timestamp}")


def _one_line(words: object) -> str:
    """Return text without line breaks, for a mark."""
    return one_line(str(words), LONGEST)
