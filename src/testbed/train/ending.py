"""How a start of a run ends: with which reason, mark and exit code. docs/faults.md has the table of them all."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from testbed import run_files, run_lock
from testbed.autotune.choices import ChoiceContradicts
from testbed.checkpoint.weights import WeightsUnavailable
from testbed.checkpoint.writer import CheckpointFailed, CheckpointWriter, step_folders
from testbed.config.settings import RunSettings
from testbed.data.disk_array import FileChanged
from testbed.distributed import process_group, watchdog
from testbed.distributed.launch import Launch, refuse, seconds_since_start, tell_torchrun
from testbed.distributed.rendezvous import ENDED, START_PATIENCE_S, TRAINS, Meeting
from testbed.distributed.signals import MARK_WITHIN_S, RunStopped, StopSignals, end_deaf
from testbed.distributed.store_port import PortTaken
from testbed.errors import first_line, say_if_read
from testbed.metrics import run_directory
from testbed.metrics.file import read_metrics, write_metrics
from testbed.metrics.segments import failed_in_its_stead

if TYPE_CHECKING:
    from testbed.metrics.recorder import RunRecorder


class TrainingDiverged(Exception):
    """The loss or the gradient is no longer a number: nothing of that step is kept."""


class RunPreempted(Exception):
    """All ranks stopped after the same step, and its checkpoint is on disk."""


# they say it in a sentence of their own
EXPECTED = (TrainingDiverged, WeightsUnavailable, process_group.RanksDiffer, CheckpointFailed, ChoiceContradicts)
EXPECTED += (run_directory.RunAlreadyFailed, run_lock.FolderGone, FileChanged, PortTaken)
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)  # only writing ends so
WRITER_PATIENCE_S = 1.0  # a connection breaks a moment before the kernel lets go of a killed process's lock
OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")  # PyTorch on the CPU; CUDA's libraries
SURE_WITHIN_S = 3 * watchdog.BEAT_S  # a rank that lives shows it once a second
BROKEN_COLLECTIVE = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer")


class RunEnding:
    """Ends this rank's part of a run: the marks in its folder, the last state of its metrics, the exit code.

    Attributes:
        signals: what may ask the run to end, from now on.
        recorder: once there is one, so that its rows are kept.
        checkpoints: once there is one, so that what it writes in the background is.
    """

    def __init__(self, settings: RunSettings, launch: Launch):
        self.settings, self.launch = settings, launch
        self.signals = StopSignals(settings.training.grace_seconds, self._mark_in_time, launch.rank == 0)
        self.recorder: RunRecorder | None = None
        self.checkpoints: CheckpointWriter | None = None
        self._meeting: Meeting | None = None  # from before the ranks meet until they train
        self._owned: Path | None = None  # the folder, once this rank may leave its mark in it

    def meets(self) -> None:
        """The other ranks are waited for from now on: as long as they live, and by ranks that live."""
        if self.launch.is_distributed:
            open_store = functools.partial(process_group.second_connection, self.launch)
            timeout_s = self.settings.training.collective_timeout
            # torchrun ends the others when a rank dies, so there a slow start (a cold network file system) is no danger
            start_patience_s = START_PATIENCE_S if "TORCHELASTIC_RUN_ID" in os.environ else 0.0
            # loading PyTorch took this rank so long by now, on a busy machine half a minute, and takes others as long
            start_patience_s = max(start_patience_s, seconds_since_start())
            meeting = Meeting(self.launch, timeout_s, open_store, self._end_alone, start_patience_s)
            self._meeting = meeting.begin()

    def owns(self, directory: Path) -> None:
        """The folder is this run's: from now on each rank shows there where it is, and looks after the others."""
        self._owned = directory
        run_lock.hold(directory)
        watchdog.begin(self._places, self.launch.rank)
        if self.launch.is_distributed:
            timeout_s = self.settings.training.collective_timeout
            watchdog.Watch(self._places, self.launch.rank, self.launch.world_size, timeout_s, self._end_without)

    @property
    def _places(self) -> Path:
        """Where the ranks' progress files are: in the held folder, not in one that took its name."""
        return run_lock.by_handle(self._owned)

    def trains(self) -> None:
        """From now on no rank waits longer for another one than --collective_timeout allows, whatever that one does."""
        process_group.limit_waiting(self.settings.training.collective_timeout)
        if self._meeting is not None:
            self._meeting.close(TRAINS)
        self._meeting = None

    def _close_meeting(self) -> None:
        if self._meeting is not None:
            self._meeting.close(ENDED)

    def refuse(self, message: str) -> int:
        """Leave, because all ranks were told that the run cannot start. Returns 2, for what the user typed."""
        self._close_meeting()
        return self.leave(refuse(self.launch, message))

    def after(self, error: Exception | RunStopped) -> int:
        """Mark what ended the run, then leave. Returns the exit code."""
        self.signals.defer()  # from here on nothing interrupts closing down
        if self._meeting is not None:
            self._meeting.quiet()
        if isinstance(error, RunPreempted):
            try:
                return self._leave_preempted()
            except Exception as failure:
                error = failure
        if self.checkpoints is not None:
            self.checkpoints.let_finish()
        return self.leave(self._mark_failed(*self._reason_and_code(error)))

    def leave(self, exit_code: int) -> int:
        """End the process group after a success; after a failure the other ranks may be gone, so do not wait for them.

        With other ranks it does not return: gloo's threads sometimes abort the interpreter's own way out.
        """
        self.signals.defer()
        self._close_meeting()
        watchdog.end(is_good=exit_code == 0)
        empty_streams()
        has_met = torch.distributed.is_initialized()
        if has_met or self._meeting is not None:
            if has_met and exit_code == 0:
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
        """Rank 0 writes the mark, last of all; the others wait for it, so that no launcher ends rank 0 before."""
        stop = self.signals.as_exception()
        if self.launch.rank == 0:
            run_lock.check_held(self._owned)
            saved = step_folders(self._owned / run_files.CHECKPOINTS)
            if not saved:  # it began with another run's checkpoint, and no step since
                raise CheckpointFailed("this start has done no step yet")
            run_directory.check_not_failed(self._owned)
            step = self.recorder.last_step
            self.recorder.write("preempted")
            run_directory.mark_preempted(self._owned, stop.reason, step, saved[-1])
            words = f"{stop.reason}: saved step {step} in {saved[-1]}; go on with --resume"
            say_if_read(words, sys.stdout)
            tell_torchrun(words)
        process_group.wait_for_everyone()
        watchdog.end(is_good=True)
        return self.leave(stop.exit_code)

    def _reason_and_code(self, error: Exception | RunStopped) -> tuple[str, int]:
        """One sentence for what ended the run. After a stop the exit code is the stop's, whatever else went wrong."""
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
            missing = self._missing_soon() or self._level() or self._unknown()
            return f"{missing}; {self._waited()} ({first_line(error)})"
        say_if_read("".join(traceback.format_exception(error)))
        return first_line(error)

    def _why_gone(self, error: Exception) -> str | None:
        """What became of the run's folder, where that is why this rank finds no file, or no other rank any more."""
        if self._owned is None or not (isinstance(error, OSError) or is_broken_collective(error)):
            return None
        return run_lock.why_gone(self._owned)

    def _missing(self, who: Callable[[Path, int, int], str | None] = watchdog.who_is_missing) -> str | None:
        if not self.launch.is_distributed:
            return None
        if self._meeting is not None and self._meeting.told:
            return self._meeting.told  # by rank 0, which is gone itself by now, and not the cause
        found = who(self._places, self.launch.world_size, self.launch.rank) if self._owned else None
        if self._meeting is not None:
            found = found or self._meeting.who_is_dead()
            if found:
                self._meeting.tell(found)
        return found

    def _missing_soon(self) -> str | None:
        """A connection breaks a moment before the kernel shows that the process at its other end is dead, and until
        then that one seems to be where it was last, behind perhaps. So look again until somebody is known to be gone,
        or each of the others has shown since that it lives."""
        lived = self._signs_of_life()
        deadline_s = time.monotonic() + SURE_WITHIN_S
        while (gone := self._missing(watchdog.who_is_gone)) is None and time.monotonic() < deadline_s:
            lives = self._signs_of_life()
            if lived and all(lives.get(rank, beats) > beats for rank, beats in lived.items()):
                break
            time.sleep(0.05)
        return gone or self._missing()

    def _signs_of_life(self) -> dict[int, int]:
        if self._owned is None:
            return {}
        return watchdog.signs_of_life(self._places, self.launch.world_size, self.launch.rank)

    def _level(self) -> str | None:
        if self._owned is None or not self.launch.is_distributed:
            return None
        return watchdog.who_is_level(self._places, self.launch.world_size, self.launch.rank)

    def _unknown(self) -> str:
        if self.launch.rank > 0 and self._meeting is not None and not process_group.is_store_held():
            return "rank 0, or the launcher that holds the store where the ranks find each other, is gone"
        other = f"rank {1 - self.launch.rank}" if self.launch.world_size == 2 else "another rank"
        return f"{other} is gone or does not answer"

    def _waited(self) -> str:
        if self._owned is None:
            return f"rank {self.launch.rank} waited for the others to start"
        return f"rank {self.launch.rank} waited in {watchdog.own_place(self._places, self.launch.rank)}"

    def _mark_in_time(self, stop: RunStopped) -> None:
        """From the second thread of StopSignals, which then ends the process."""
        missing = self._missing()
        words = f"; {missing}" if missing else ""
        self._mark_failed(f"{stop.reason}; {self._waited()}{words}" if self._owned else stop.reason, stop.exit_code)

    def _end_without(self, missing: str) -> None:
        """From the watching thread: a rank is dead or stopped, and this one would wait for ever."""
        self._end_now(f"{missing}; {self._waited()}, longer than --collective_timeout allows")

    def _end_alone(self, missing: str) -> None:
        """From the thread of the meeting: a rank is dead, or never came."""
        self._end_now(f"{missing}; {self._waited()}")

    def _end_now(self, reason: str) -> None:
        exit_code = self.signals.as_exception().exit_code if self.signals.number else 1
        last_resort = threading.Timer(MARK_WITHIN_S, os._exit, [exit_code])  # the disk itself may hang
        last_resort.daemon = True
        last_resort.start()
        with contextlib.suppress(Exception):  # whatever fails here, the process must end
            self._mark_failed(reason, exit_code)
        os._exit(exit_code)

    def _mark_failed(self, reason: str, exit_code: int) -> int:
        """Mark the run as failed, keep its rows, say where the last good checkpoint is. Returns the exit code.

        What goes wrong after a run has closed its files changes nothing about them.
        """
        rank = self.launch.rank
        folder = run_lock.place_of(self._owned) if self._owned else None  # a renamed one gets its mark where it is
        closed = run_directory.closing_mark(folder) if folder else None
        if closed:
            say_if_read(f"rank {rank}: {reason}; the run's files were closed before ({closed})")
            return exit_code
        reason = reason.splitlines()[0]
        if folder is not None:
            reason = f"{reason}; {last_checkpoint(folder)}"
        say_if_read(f"rank {rank} failed: {reason}")
        tell_torchrun(f"rank {rank} failed: {reason}")
        standing_reason = run_directory.mark_failed(folder, rank, reason) if folder else reason
        watchdog.enter("ended")
        if folder is None:
            return exit_code
        try:
            if self.recorder is not None and self.recorder.is_writer:
                self.recorder.directory = folder
                step = self.recorder.last_step or None
                self.recorder.write("failed", failure={"reason": standing_reason, "step": step})
            elif rank > 0:
                write_in_rank_0s_stead(folder, standing_reason)
        except (OSError, ValueError) as error:  # a full disk, say: the file of the last write stays as it is
            say_if_read(f"rank {rank}: the metrics could not be updated: {error}")
        return exit_code


def write_in_rank_0s_stead(folder: Path, reason: str) -> None:
    """Rank 0 alone writes the metrics. Where it was killed before it said how the run ended, another rank says it.

    Raises:
        OSError, ValueError: it could not be written, or what is there is damaged.
    """
    path = folder / run_files.METRICS
    with run_lock.in_the_writers_stead(folder, WRITER_PATIENCE_S) as is_dead:
        if is_dead and path.exists():
            metrics = read_metrics(path)
            if metrics["status"] == "running":
                write_metrics(path, failed_in_its_stead(metrics, reason))


def empty_streams() -> None:
    """Flush. Where nobody reads any more, what is left goes nowhere: Python itself would fail over it at its end."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def is_out_of_memory(error: Exception) -> bool:
    """Of the device or of the host: PyTorch says it in three ways, NumPy in a fourth."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY)


def is_broken_collective(error: Exception) -> bool:
    """A collective that breaks or times out: another rank is gone, or does not come."""
    is_named = isinstance(error, RuntimeError) and any(word in str(error) for word in BROKEN_COLLECTIVE)
    return is_named or isinstance(error, torch.distributed.DistError)


def no_room_advice(error: OSError) -> str:
    """One sentence for a file that the disk did not take; the files before it are whole."""
    name = f"{error.filename} could not be written" if error.filename else "a file could not be written"
    return f"{name} ({error.strerror}); make room or make it writable, then go on with --resume"


def last_checkpoint(folder: Path) -> str:
    """Where to resume from, in words. Whether it is whole, --resume looks at."""
    found = step_folders(folder / run_files.CHECKPOINTS)
    return f"last checkpoint: {found[-1]}" if found else "no checkpoint was saved"


def out_of_memory_advice(settings: RunSettings, error: Exception) -> str:
    """One sentence: what was asked for, and what to give instead."""
    advice = "give a smaller one, or auto; the global batch stays the same"
    if settings.batch.micro_batch_size_per_gpu == 1:
        advice = "give --activation_checkpointing block, or shard the model with --run_type fsdp"
    return (
        f"out of memory with --micro_batch_size_per_gpu {settings.batch.micro_batch_size_per_gpu}; {advice} "
        f"({first_line(error)})"
    )
