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
from testbed.autotune.choices import ChoiceContradicts
from testbed.checkpoint.folders import CheckpointFailed, step_folders
from testbed.checkpoint.writer import CheckpointWriter
from testbed.config.settings import RunSettings
from testbed.distributed import flight_recorder, process_group, watchdog
from testbed.distributed.launch import Launch, refuse, tell_torchrun
from testbed.distributed.rendezvous import StartupWatch, this_process
from testbed.distributed.signals import RunStopped, StopSignals, end_deaf, end_process
from testbed.errors import first_line, say_if_read
from testbed.metrics.file import read_metrics, write_metrics
from testbed.metrics.segments import failed_in_its_stead
from testbed.profiling.device_limits import is_out_of_memory
from testbed.run_folder import marks, run_lock
from testbed.train.other_ranks import OtherRanks
from testbed.train.reasons import (
    EXPECTED,
    NO_ROOM,
    is_broken_collective,
    last_checkpoint,
    no_room_advice,
    out_of_memory_advice,
)

if TYPE_CHECKING:
    from testbed.metrics.recorder import RunRecorder

WRITER_PATIENCE_S = 1.0  # a connection breaks a moment before the kernel lets go of a killed process's lock


class Refused(Exception):
    """The command cannot run as typed, and every rank knows it. One sentence."""


class RunPreempted(Exception):
    """All ranks stopped after the same step, and its checkpoint is on disk."""


class RunEnding:
    """Ends this rank's part of a run: the marks in its folder, the last state of its metrics, the exit code.

    Used as `with RunEnding(...) as ending:`. Afterwards `exit_code` is set, unless there are other ranks: then the
    process ends there.

    Attributes:
        signals: what may ask the run to end, from now on.
        recorder: set it once there is one, so that its rows are kept.
        checkpoints: set it once there is one, so that what it writes in the background is kept.
    """

    def __init__(self, settings: RunSettings, launch: Launch):
        self.settings, self.launch = settings, launch
        self.signals = StopSignals(settings.training.grace_seconds, self._mark_in_time, launch.rank == 0)
        self.recorder: RunRecorder | None = None
        self.checkpoints: CheckpointWriter | None = None
        self.exit_code: int | None = None
        self._ranks = OtherRanks(launch)

    def __enter__(self) -> RunEnding:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None:
            self.exit_code = self.leave(0)
        elif isinstance(error, Refused):
            self._end_startup_watch()
            self.exit_code = self.leave(refuse(self.launch, str(error)))
        elif isinstance(error, (Exception, RunStopped)):
            self.exit_code = self.after(error)
        elif isinstance(error, SystemExit):  # a library called exit(): no end of a run, whatever its code says
            ended = RuntimeError(f"something called exit({error.code!r}) before the run's end")
            self.exit_code = self.after(ended.with_traceback(trace))
        else:
            return False
        return True

    def watch_startup(self) -> None:
        """Watch the other ranks' processes until the ranks train. All ranks call it, once they have joined."""
        if self.launch.is_distributed:
            processes = process_group.gather_objects(this_process())
            timeout_s = self.settings.training.collective_timeout
            watch = StartupWatch(self.launch, processes, timeout_s, self._end_for_rank_missing_at_startup)
            self._ranks.startup = watch.begin()

    def claim_directory(self, directory: Path, is_cuda: bool) -> None:
        """Take the folder for this run: each rank keeps a progress file there, and watches those of the others."""
        self._ranks.directory = directory
        run_lock.hold(directory)
        progress_folder, rank = self._ranks.progress_folder, self.launch.rank
        watchdog.begin(progress_folder, rank)
        if self.launch.is_distributed:
            timeout_s = self.settings.training.collective_timeout
            watchdog.Watch(
                progress_folder, rank, self.launch.world_size, timeout_s, self._end_for_stuck_rank, is_cuda=is_cuda
            )

    def arm_timeouts(self) -> None:
        """Let no rank wait longer for another one than --collective_timeout from now on, whatever that one does."""
        process_group.limit_waiting(self.settings.training.collective_timeout)
        self._end_startup_watch()
        self._ranks.startup = None

    @property
    def _directory(self) -> Path | None:
        """Return the run's folder, once this rank may leave its mark there."""
        return self._ranks.directory

    def _end_startup_watch(self) -> None:
        if self._ranks.startup is not None:
            self._ranks.startup.close()

    def after(self, error: Exception | RunStopped) -> int:
        """Mark what ended the run, then leave. Returns the exit code."""
        self.signals.defer()  # from here on nothing interrupts closing down
        self._end_startup_watch()
        if isinstance(error, RunPreempted):
            try:
                return self._leave_preempted()
            except Exception as failure:
                error = failure
        if self.checkpoints is not None:
            self.checkpoints.let_finish()
        return self.leave(self._mark_failed(*self._reason_and_code(error), has_waited=is_broken_collective(error)))

    def leave(self, exit_code: int) -> int:
        """End the process group after a success. After a failure the other ranks may be gone, so do not wait for them.

        With other ranks it does not return: gloo's threads sometimes abort the interpreter's own way out.
        """
        self.signals.defer()
        self._end_startup_watch()
        watchdog.end(is_good=exit_code == 0)
        empty_streams()
        has_joined = torch.distributed.is_initialized()
        if has_joined or self.launch.is_distributed:
            if has_joined and exit_code == 0:
                with contextlib.suppress(Exception):  # all is written, whatever becomes of the other ranks now
                    process_group.wait_for_everyone()
                    process_group.stop_process_group()
                    if self.recorder is not None:
                        self.recorder.note_process_group_ended()
            empty_streams()
            os._exit(exit_code)
        end_deaf()
        return exit_code

    def _leave_preempted(self) -> int:
        """Write the mark on rank 0, last of all. The others wait for it, so that no launcher ends rank 0 before."""
        stop = self.signals.as_exception()
        if self.launch.rank == 0:
            assert self._directory is not None and self.recorder is not None  # it has trained
            run_lock.check_held(self._directory)
            saved = step_folders(self._directory / run_folder.CHECKPOINTS)
            if not saved:  # it began with another run's checkpoint, and no step since
                raise CheckpointFailed("this start has done no step yet")
            marks.check_not_failed(self._directory)
            step = self.recorder.last_step
            self.recorder.write("preempted")
            marks.mark_preempted(self._directory, stop.reason, step, saved[-1])
            words = f"{stop.reason}: saved step {step} in {saved[-1]}; go on with --resume"
            say_if_read(words, sys.stdout)
            tell_torchrun(words)
        process_group.wait_for_everyone()
        watchdog.end(is_good=True)
        return self.leave(stop.exit_code)

    def _reason_and_code(self, error: Exception | RunStopped) -> tuple[str, int]:
        """Return one sentence for what ended the run, and the exit code. After a stop the code is the stop's."""
        if isinstance(error, RunStopped):
            return error.reason, error.exit_code
        exit_code = 2 if isinstance(error, ChoiceContradicts) else 1
        reason = self._reason_of(error)
        if self.signals.agreed or self.signals.number:
            stop = self.signals.as_exception()
            return f"{stop.reason}, and nothing could be saved: {reason}", stop.exit_code
        return reason, exit_code

    def _reason_of(self, error: Exception) -> str:
        if isinstance(error, EXPECTED):
            return str(error)
        if is_out_of_memory(error):
            settings = self.settings if self.recorder is None else self.recorder.settings  # with what was chosen
            return out_of_memory_advice(settings, error)
        if gone := self._why_gone(error):
            return gone
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            return no_room_advice(error)
        if is_broken_collective(error):
            return f"{self._ranks.blocking()}; {self._ranks.waited()} ({first_line(error)})"
        say_if_read("".join(traceback.format_exception(error)))
        return first_line(error)

    def _why_gone(self, error: Exception) -> str | None:
        """Say what became of the run's folder, where that is why this rank finds no file or no other rank."""
        if self._directory is None or not (isinstance(error, OSError) or is_broken_collective(error)):
            return None
        return run_lock.why_gone(self._directory)

    def _mark_in_time(self, stop: RunStopped) -> None:
        """Mark the run from the second thread of StopSignals, which then ends the process."""
        missing = self._ranks.missing()
        words = f"; {missing}" if missing else ""
        reason = f"{stop.reason}; {self._ranks.waited()}{words}" if self._directory else stop.reason
        self._mark_failed(reason, stop.exit_code, has_waited=True)

    def _end_for_stuck_rank(self, missing: str) -> None:
        """End from the watching thread: a rank is dead or stopped, and this one would wait for ever."""
        self._mark_failed_and_exit(f"{missing}; {self._ranks.waited()}, longer than --collective_timeout allows")

    def _end_for_rank_missing_at_startup(self, missing: str) -> None:
        """End from the watching thread: a rank died or was stopped before the ranks train."""
        self._mark_failed_and_exit(f"{missing}; {self._ranks.waited()}")

    def _mark_failed_and_exit(self, reason: str) -> None:
        exit_code = self.signals.as_exception().exit_code if self.signals.number else 1
        end_process(lambda: self._mark_failed(reason, exit_code, has_waited=True), exit_code)

    def _mark_failed(self, reason: str, exit_code: int, has_waited: bool = False) -> int:
        """Mark the run as failed, keep its rows, say where the last checkpoint is. Returns the exit code.

        What goes wrong after a run has closed its files changes nothing about them.

        Args:
            has_waited: this rank waited for others. Then the collective that it is in is added.
        """
        rank, directory = self.launch.rank, self._directory
        folder = run_lock.place_of(directory) if directory else None  # a renamed one gets its mark where it is
        closed = marks.closing_mark(folder) if folder else None
        if closed:
            say_if_read(f"rank {rank}: {reason}; the run's files were closed before ({closed})")
            return exit_code
        reason = reason.splitlines()[0]
        if folder is not None:
            reason = f"{reason}; {last_checkpoint(folder)}"
        say_if_read(f"rank {rank} failed: {reason}")
        tell_torchrun(f"rank {rank} failed: {reason}")
        standing_reason = marks.mark_failed(folder, rank, reason) if folder else reason
        watchdog.enter("ended")
        if folder is not None:
            self._close_metrics(folder, standing_reason)
        if has_waited:
            self._add_collective(folder, reason)
        return exit_code

    def _close_metrics(self, folder: Path, standing_reason: str) -> None:
        """Keep the rows of a failed run, with the reason."""
        rank = self.launch.rank
        try:
            if self.recorder is not None and self.recorder.is_writer:
                self.recorder.directory = folder
                step = self.recorder.last_step or None
                self.recorder.write("failed", failure={"reason": standing_reason, "step": step})
            elif rank > 0:
                write_in_rank_0s_stead(folder, standing_reason)
        except (OSError, ValueError) as error:  # a full disk, say: the file of the last write stays as it is
            say_if_read(f"rank {rank}: the metrics could not be updated: {error}")

    def _add_collective(self, folder: Path | None, reason: str) -> None:
        """Add the collective that this rank is in to its message and mark. This may end the process, so it is last."""
        collective = flight_recorder.collective_under_way()
        if collective is None:
            return
        words = f"rank {self.launch.rank} was inside {collective}"
        say_if_read(words)
        tell_torchrun(f"rank {self.launch.rank} failed: {reason}; {words}")
        if folder is not None:
            marks.add_to_failure(folder, self.launch.rank, words)


def write_in_rank_0s_stead(folder: Path, reason: str) -> None:
    """Close the metrics of a run whose rank 0, which alone writes them, was killed before it could.

    Raises:
        OSError, InputError: it could not be written, or what is there is damaged.
    """
    path = folder / run_folder.METRICS
    with run_lock.in_the_writers_stead(folder, WRITER_PATIENCE_S) as is_dead:
        if is_dead and path.exists():
            metrics = read_metrics(path)
            if metrics["status"] == "running":
                write_metrics(path, failed_in_its_stead(metrics, reason))


def empty_streams() -> None:
    """Flush. Where no one reads any more, drop what is left: Python itself would fail over it at its end."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
