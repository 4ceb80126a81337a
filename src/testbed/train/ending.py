"""End a start of a run: its reason, its mark and its exit code. docs/faults.md lists them all."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from testbed import run_folder
from testbed.checkpoint.folders import CheckpointFailed, step_folders
from testbed.checkpoint.writer import CheckpointWriter
from testbed.config.settings import RunSettings
from testbed.distributed import flight_recorder, process_group, watchdog
from testbed.distributed.launch import Launch, refuse, tell_torchrun
from testbed.distributed.signals import RunStopped, StopSignals, end_process, ignore_signals_until_exit
from testbed.errors import first_line, say_if_read
from testbed.metrics.file import read_metrics, write_metrics
from testbed.metrics.segments import closed_as_failed
from testbed.run_folder import marks, run_lock
from testbed.train.other_ranks import OtherRanks
from testbed.train.reasons import is_broken_collective, last_checkpoint, reason_of, with_exit_code

if TYPE_CHECKING:
    from testbed.metrics.recorder import RunRecorder
    from testbed.metrics.trackers import Trackers


class Refused(Exception):
    """The command cannot run as typed, and every rank knows it. One sentence."""


class RunPreempted(Exception):
    """All ranks stopped after the same step, and its checkpoint is on disk."""


class RunEnding:
    """Ends this rank's part of a run: `reasons` says why, `mark_failed` and `mark_preempted` write it, and this leaves.

    After `with RunEnding(...) as ending:` `exit_code` is set, or the process ends there, where there are other ranks.

    Attributes:
        signals: what may ask the run to end, from now on.
        ranks: what is known of the other ranks.
        recorder: set it once there is one, so that its rows are kept.
        checkpoints: set it once there is one, so that what it writes in the background is kept.
        trackers: likewise.
    """

    def __init__(self, settings: RunSettings, launch: Launch):
        self.settings, self.launch = settings, launch
        self.signals = StopSignals(settings.training.grace_seconds, self._mark_in_time, launch.rank == 0)
        self.ranks = OtherRanks(launch, settings.training.collective_timeout, self.end_from_thread)
        self.recorder: RunRecorder | None = None
        self.checkpoints: CheckpointWriter | None = None
        self.trackers: Trackers | None = None
        self.exit_code: int | None = None

    def __enter__(self) -> RunEnding:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None:
            self.exit_code = self._leave(0)
        elif isinstance(error, Refused):
            self.ranks.end_startup_watch()
            self.exit_code = self._leave(refuse(self.launch, str(error)))
        elif isinstance(error, (Exception, RunStopped)):
            self.exit_code = self._leave_after(error)
        elif isinstance(error, SystemExit):  # a library called exit(): no end of a run, whatever its code says
            ended = RuntimeError(f"something called exit({error.code!r}) before the run's end")
            self.exit_code = self._leave_after(ended.with_traceback(trace))
        else:
            return False
        return True

    def _leave_after(self, error: Exception | RunStopped) -> int:
        """Mark what ended the run, then leave. Returns the exit code."""
        self.signals.defer()  # from here on nothing interrupts closing down
        self.ranks.end_startup_watch()
        if isinstance(error, RunPreempted):
            try:
                return self._leave_preempted()
            except Exception as failure:
                error = failure
        if self.checkpoints is not None:
            self.checkpoints.let_finish()
        reason, exit_code = self.reason_and_code(error)
        self.mark_failed(reason, has_waited=is_broken_collective(error))
        return self._leave(exit_code)

    def _leave_preempted(self) -> int:
        """Mark the run on rank 0. The others wait for it, so that no launcher ends rank 0 before."""
        stop = self.signals.as_exception()
        if self.launch.rank == 0:
            assert self.ranks.directory is not None and self.recorder is not None  # it has trained
            mark_preempted(self.ranks.directory, self.recorder, stop)
        process_group.wait_for_everyone()
        watchdog.end(is_good=True)
        return self._leave(stop.exit_code)

    def _leave(self, exit_code: int) -> int:
        """End the process group after a success. After a failure the other ranks may be gone, so do not wait for them.

        With other ranks it does not return: gloo's threads sometimes abort the interpreter's own way out.
        """
        self.signals.defer()
        self.ranks.end_startup_watch()
        watchdog.end(is_good=exit_code == 0)
        empty_streams()
        has_joined = torch.distributed.is_initialized()
        if has_joined and exit_code == 0:
            with contextlib.suppress(Exception):  # all is written, whatever becomes of the other ranks now
                process_group.wait_for_everyone()
                process_group.stop_process_group()
                if self.recorder is not None:
                    self.recorder.note_process_group_ended()
        self._close_trackers(exit_code)
        empty_streams()
        may_hang = self.trackers is not None and self.trackers.may_hold_up_exit
        if has_joined or self.launch.is_distributed or may_hang:
            os._exit(exit_code)
        ignore_signals_until_exit()
        return exit_code

    def _close_trackers(self, exit_code: int) -> None:
        """Let the trackers take what is left, and with exit code 0 the run's files, which are closed by now."""
        if self.trackers is not None:
            self.trackers.close(exit_code)

    def reason_and_code(self, error: Exception | RunStopped) -> tuple[str, int]:
        """Return one sentence for what ended the run, and the exit code. Prints the traceback of a fault."""
        settings = self.settings if self.recorder is None else self.recorder.settings  # with what was chosen
        reason = reason_of(error, settings, self.ranks)
        if reason is None:
            say_if_read("".join(traceback.format_exception(error)))
            reason = first_line(error)
        is_asked_to_stop = self.signals.agreed or self.signals.number
        return with_exit_code(error, reason, self.signals.as_exception() if is_asked_to_stop else None)

    def mark_failed(self, reason: str, has_waited: bool = False) -> None:
        """Write that the run failed, where this start has claimed a folder."""
        mark_failed(self.ranks.directory, self.recorder, self.launch.rank, reason, has_waited)

    def _mark_in_time(self, stop: RunStopped) -> None:
        """Mark the run from the second thread of StopSignals, which then ends the process."""
        missing = self.ranks.missing()
        words = f"; {missing}" if missing else ""
        reason = f"{stop.reason}; {self.ranks.waited()}{words}" if self.ranks.directory else stop.reason
        self.mark_failed(reason, has_waited=True)
        self._close_trackers(stop.exit_code)

    def end_from_thread(self, reason: str) -> None:
        """Mark the run as failed and end the process, from a thread that watches the other ranks."""
        exit_code = self.signals.as_exception().exit_code if self.signals.number else 1

        def leave_mark() -> None:
            self.mark_failed(reason, has_waited=True)
            self._close_trackers(exit_code)

        end_process(leave_mark, exit_code)


def empty_streams() -> None:
    """Flush. Where no one reads any more, drop what is left: Python itself would fail over it at its end."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


WRITER_PATIENCE_S = 1.0  # a connection breaks a moment before the kernel lets go of a killed process's lock


def mark_preempted(directory: Path, recorder: RunRecorder, stop: RunStopped) -> None:
    """Mark the run as stopped after a saved step. Only rank 0 calls it, last of all. Raises CheckpointFailed,
    RunAlreadyFailed or FolderGone.
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
    """Close the metrics of a run whose rank 0, which alone writes them, was killed before it could. Raises OSError or
    InputError.
    """
    path = folder / run_folder.METRICS
    with run_lock.dead_writers_lock(folder, WRITER_PATIENCE_S) as is_dead:
        if is_dead and path.exists():
            metrics = read_metrics(path)
            if metrics["status"] == "running":
                write_metrics(path, closed_as_failed(metrics, reason))
