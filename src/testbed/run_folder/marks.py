"""Write and read the marks that say how a run ended. No torch."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

from testbed.errors import one_line
from testbed.io import now_utc, read_text, write_text
from testbed.run_folder import COMPLETE, FAILED, PREEMPTED
from testbed.run_folder.run_lock import check_held

LONGEST = 20_000  # characters of a mark's part: a path has at most 4,096 bytes, of which each may be escaped


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
