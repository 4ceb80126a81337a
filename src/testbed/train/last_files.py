"""Write what a start of a run leaves behind as it ends: its mark, and the last state of its metrics."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from testbed import run_folder
from testbed.checkpoint.folders import CheckpointFailed, step_folders
from testbed.distributed import flight_recorder, watchdog
from testbed.distributed.launch import tell_torchrun
from testbed.distributed.signals import RunStopped
from testbed.errors import say_if_read
from testbed.metrics.file import read_metrics, write_metrics
from testbed.metrics.segments import closed_as_failed
from testbed.run_folder import marks, run_lock
from testbed.train.reasons import last_checkpoint

if TYPE_CHECKING:
    from testbed.metrics.recorder import RunRecorder

WRITER_PATIENCE_S = 1.0  # a connection breaks a moment before the kernel lets go of a killed process's lock


def mark_preempted(directory: Path, recorder: RunRecorder, stop: RunStopped) -> None:
    """Mark the run as stopped after a saved step. Only rank 0 calls it, last of all.

    Raises:
        CheckpointFailed: this start has saved no step.
        RunAlreadyFailed: another rank has marked the run as failed.
        FolderGone: the run's folder was renamed or deleted.
    """
    run_lock.check_held(directory)
    saved = step_folders(directory / run_folder.CHECKPOINTS)
    if not saved:  # it began with another run's checkpoint, and no step since
        raise CheckpointFailed("this start has done no step yet")
    marks.check_not_failed(directory)
    step = recorder.last_step
    recorder.write("preempted")
    marks.mark_preempted(directory, stop.reason, step, saved[-1])
    words = f"{stop.reason}: saved step {step} in {saved[-1]}; go on with --resume"
    say_if_read(words, sys.stdout)
    tell_torchrun(words)


def mark_failed(
    directory: Path | None, recorder: RunRecorder | None, rank: int, reason: str, has_waited: bool = False
) -> None:
    """Mark the run as failed, keep its rows, say where the last checkpoint is.

    What goes wrong after a run has closed its files changes nothing about them.

    Args:
        directory: the run's folder; None: this start has not claimed it.
        has_waited: this rank waited for others. Then the collective that it is in is added.
    """
    folder = run_lock.place_of(directory) if directory else None  # a renamed one gets its mark where it is
    closed = marks.closing_mark(folder) if folder else None
    if closed:
        say_if_read(f"rank {rank}: {reason}; the run's files were closed before ({closed})")
        return
    reason = reason.splitlines()[0]
    if folder is not None:
        reason = f"{reason}; {last_checkpoint(folder)}"
    say_if_read(f"rank {rank} failed: {reason}")
    tell_torchrun(f"rank {rank} failed: {reason}")
    standing_reason = marks.mark_failed(folder, rank, reason) if folder else reason
    watchdog.enter("ended")
    if folder is not None:
        _close_metrics(folder, recorder, rank, standing_reason)
    if has_waited:
        _add_collective(folder, rank, reason)


def _close_metrics(folder: Path, recorder: RunRecorder | None, rank: int, standing_reason: str) -> None:
    """Keep the rows of a failed run, with the reason."""
    try:
        if recorder is not None and recorder.is_writer:
            recorder.directory = folder
            step = recorder.last_step or None
            recorder.write("failed", failure={"reason": standing_reason, "step": step})
        elif rank > 0:
            finalize_metrics_for_dead_rank0(folder, standing_reason)
    except (OSError, ValueError) as error:  # a full disk, say: the file of the last write stays as it is
        say_if_read(f"rank {rank}: the metrics could not be updated: {error}")


def _add_collective(folder: Path | None, rank: int, reason: str) -> None:
    """Add the collective that this rank is in to its message and mark. This may end the process, so it is last."""
    collective = flight_recorder.collective_under_way()
    if collective is None:
        return
    words = f"rank {rank} was inside {collective}"
    say_if_read(words)
    tell_torchrun(f"rank {rank} failed: {reason}; {words}")
    if folder is not None:
        marks.add_to_failure(folder, rank, words)


def finalize_metrics_for_dead_rank0(folder: Path, reason: str) -> None:
    """Close the metrics of a run whose rank 0, which alone writes them, was killed before it could.

    Raises:
        OSError, InputError: it could not be written, or what is there is damaged.
    """
    path = folder / run_folder.METRICS
    with run_lock.dead_writers_lock(folder, WRITER_PATIENCE_S) as is_dead:
        if is_dead and path.exists():
            metrics = read_metrics(path)
            if metrics["status"] == "running":
                write_metrics(path, closed_as_failed(metrics, reason))
