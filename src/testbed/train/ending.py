"""End a start of a run: its reason, its mark and its exit code. docs/faults.md lists them all."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from testbed.checkpoint.writer import CheckpointWriter
from testbed.config.settings import RunSettings
from testbed.distributed import process_group, watchdog
from testbed.distributed.launch import Launch, refuse
from testbed.distributed.signals import RunStopped, StopSignals, end_process, ignore_signals_until_exit
from testbed.errors import first_line, say_if_read
from testbed.train.last_files import mark_failed, mark_preempted
from testbed.train.other_ranks import OtherRanks
from testbed.train.reasons import is_broken_collective, reason_of, with_exit_code

if TYPE_CHECKING:
    from testbed.metrics.recorder import RunRecorder


class Refused(Exception):
    """The command cannot run as typed, and every rank knows it. One sentence."""


class RunPreempted(Exception):
    """All ranks stopped after the same step, and its checkpoint is on disk."""


class RunEnding:
    """Ends this rank's part of a run: `reasons` says why, `last_files` writes it, and this leaves with the exit code.

    Used as `with RunEnding(...) as ending:`. Afterwards `exit_code` is set, unless there are other ranks: then the
    process ends there.

    Attributes:
        signals: what may ask the run to end, from now on.
        ranks: what is known of the other ranks.
        recorder: set it once there is one, so that its rows are kept.
        checkpoints: set it once there is one, so that what it writes in the background is kept.
    """

    def __init__(self, settings: RunSettings, launch: Launch):
        self.settings, self.launch = settings, launch
        self.signals = StopSignals(settings.training.grace_seconds, self._mark_in_time, launch.rank == 0)
        self.ranks = OtherRanks(launch, settings.training.collective_timeout, self.end_from_thread)
        self.recorder: RunRecorder | None = None
        self.checkpoints: CheckpointWriter | None = None
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
        if has_joined or self.launch.is_distributed:
            if has_joined and exit_code == 0:
                with contextlib.suppress(Exception):  # all is written, whatever becomes of the other ranks now
                    process_group.wait_for_everyone()
                    process_group.stop_process_group()
                    if self.recorder is not None:
                        self.recorder.note_process_group_ended()
            empty_streams()
            os._exit(exit_code)
        ignore_signals_until_exit()
        return exit_code

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

    def end_from_thread(self, reason: str) -> None:
        """Mark the run as failed and end the process, from a thread that watches the other ranks."""
        exit_code = self.signals.as_exception().exit_code if self.signals.number else 1
        end_process(lambda: self.mark_failed(reason, has_waited=True), exit_code)


def empty_streams() -> None:
    """Flush. Where no one reads any more, drop what is left: Python itself would fail over it at its end."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
