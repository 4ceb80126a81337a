"""Handle the signals that end a run, and the death of its launcher."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

import psutil

from testbed.distributed.launch import launcher

PARENT_POLL_S = 0.5
SAME_SIGNAL_S = 2.0
MARK_WITHIN_S = 5.0  # then the process ends without a mark
INTERRUPTED, STOPPED = 130, 143  # exit codes, as shells have them: 128 + SIGINT, 128 + SIGTERM
INTERRUPT_HEARD = "Ctrl-C: the step is finished and saved; another Ctrl-C, after two seconds, ends the run at once"
LAUNCHER_DIED = 1000  # among the signals' numbers, one of which each rank tells the others
STOPS = {
    int(signal.SIGINT): "interrupted (SIGINT, Ctrl-C)",
    int(signal.SIGTERM): "terminated (SIGTERM)",
    int(signal.SIGUSR1): "asked to make room (SIGUSR1)",
    int(signal.SIGHUP): "its terminal was closed (SIGHUP)",
    LAUNCHER_DIED: "the launcher died",
}


class RunStopped(BaseException):
    """A signal, or the death of the launcher, asked this run to end. Not an Exception: nothing should swallow it."""

    def __init__(self, reason: str, exit_code: int):
        super().__init__(reason)
        self.reason = reason
        self.exit_code = exit_code


def stop_of(number: int) -> RunStopped:
    """Return the stop that a signal's number, or LAUNCHER_DIED, asks for."""
    return RunStopped(STOPS[number], INTERRUPTED if number == signal.SIGINT else STOPPED)


def end_on_signals() -> None:
    """End the process at a stop or the launcher's death. While PyTorch loads there is nothing to save or to mark.

    `StopSignals` takes over from here.
    """
    for number in stop_signals():
        signal.signal(number, lambda number, _: os._exit(stop_of(number).exit_code))
    _watch_launcher()


def stop_signals() -> list[int]:
    """Return the signals that ask a run to end; without SIGHUP under nohup, which ignores it."""
    numbers = sorted({*STOPS} - {LAUNCHER_DIED})
    return [number for number in numbers if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN]


def end_process(leave_mark: Callable[[], object], exit_code: int) -> NoReturn:
    """Leave a mark and end the process, whatever fails and however long the disk hangs."""
    last_resort = threading.Timer(MARK_WITHIN_S, os._exit, [exit_code])
    last_resort.daemon = True
    last_resort.start()
    with contextlib.suppress(Exception):
        leave_mark()
    os._exit(exit_code)


def ignore_signals_until_exit() -> None:
    """Ignore stop signals from now on, because all is written and the exit code is known.

    On its way out the interpreter puts the default handlers back, and a signal that comes then would end the process
    with another code than the run's."""
    for number in stop_signals():
        signal.signal(number, signal.SIG_IGN)


class StopSignals:
    """Requests to end this run: Ctrl-C, SIGTERM, SIGUSR1, SIGHUP, the death of the launcher. One object per process.

    After `interrupt`, while the run starts up, a stop raises RunStopped in the main thread. Before that, and after
    `defer`, it is only noted in `number`, and the loop ends the run after a step on which all ranks agree.

    A main thread that waits inside a collective, or saves, runs no signal handler. So a second thread, woken by the
    signal itself, ends the process when `grace_s` are over, or at once when the signal comes again: after more than
    SAME_SIGNAL_S, because launchers send one stop several times.

    Attributes:
        number: the first signal that this rank got, or LAUNCHER_DIED; 0: none.
        agreed: what all ranks agreed to stop for after the step that they have just done; 0: nothing.
    """

    def __init__(self, grace_s: float, on_stuck: Callable[[RunStopped], None], is_speaking: bool = False):
        """Args: on_stuck: leaves the run's mark. is_speaking: this rank says that Ctrl-C was heard."""
        self.number = self.agreed = 0
        self._grace_s, self._on_stuck, self._is_speaking = grace_s, on_stuck, is_speaking
        self._raises = False
        self._read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        for number in stop_signals():
            signal.signal(number, self._handle)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        threading.Thread(target=self._end_when_grace_is_over, name="bound-the-end", daemon=True).start()
        _watch_launcher()

    def interrupt(self) -> None:
        """Raise RunStopped at a stop from now on, and for one that came before. Call it where RunStopped is caught."""
        self._raises = True
        if self.number:
            raise self.as_exception()

    def defer(self) -> None:
        """Raise nothing from now on: a stop waits for the end of the step, or of closing down. The grace bounds it."""
        self._raises = False

    def agree(self, number: int) -> int:
        """Note what all ranks agreed to stop for, 0 for nothing. Returns it."""
        self.agreed = number
        return number

    def as_exception(self) -> RunStopped:
        """Return the stop that was agreed on, or that this rank was asked for."""
        return stop_of(self.agreed or self.number)

    def _handle(self, number: int, frame: object) -> None:
        if self.number:
            return  # the same stop seen twice, or a later one, which is the second thread's
        self.number = LAUNCHER_DIED if _launcher_died.is_set() else number
        if self._raises:
            raise self.as_exception()

    def _end_when_grace_is_over(self) -> None:
        """End the process when the grace after the first signal is over, or at once after a second signal. Runs in a
        thread of its own."""
        first, deadline_s, same_until_s = 0, None, 0.0
        while True:
            left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            if not select.select([self._read_end], [], [], left_s)[0]:
                how = f"and this rank had not ended after --grace_seconds {self._grace_s:g}"
                break
            numbers = [number for number in os.read(self._read_end, 64) if number in STOPS]  # not SIGCHLD
            if numbers and first == 0:
                first = numbers[0]
                _asked_to_stop.set()
                deadline_s, same_until_s = time.monotonic() + self._grace_s, time.monotonic() + SAME_SIGNAL_S
                if first == signal.SIGINT and self._is_speaking and not self._raises:
                    with contextlib.suppress(OSError):  # nobody reads any more
                        print(f"\n{INTERRUPT_HEARD}", file=sys.stderr, flush=True)
            elif numbers and time.monotonic() > same_until_s:
                how = "and a second time, so this rank ended at once"
                break
        stop = stop_of(self.number or first)
        end_process(lambda: self._on_stuck(RunStopped(f"{stop.reason}, {how}", stop.exit_code)), stop.exit_code)


_launcher_died = threading.Event()
_asked_to_stop = threading.Event()
_launcher_watch: threading.Thread | None = None


def _watch_launcher() -> None:
    """Send SIGTERM to this rank when its launcher dies. A person's shell is not a launcher."""
    global _launcher_watch
    if launcher() == "python" or _launcher_watch is not None:
        return

    def watch() -> None:
        with contextlib.suppress(psutil.NoSuchProcess):  # vanished while being looked at: it is gone
            ancestors = _launcher_processes()
            while all(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in ancestors):
                time.sleep(PARENT_POLL_S)
        _launcher_died.set()
        if not _asked_to_stop.is_set():  # else it would be taken for a second signal, which ends the process at once
            os.kill(os.getpid(), signal.SIGTERM)

    _launcher_watch = threading.Thread(target=watch, name="watch-launcher", daemon=True)
    _launcher_watch.start()


def _launcher_processes() -> list[psutil.Process]:
    """Return the parent, and above deepspeed's per-node launcher also the `deepspeed` command."""
    parent = psutil.Process().parent()
    if parent is None:
        return []
    ancestors = [parent]
    if any("deepspeed.launcher.launch" in word for word in parent.cmdline()):
        grandparent = parent.parent()
        if grandparent is not None and grandparent.pid != 1:
            ancestors.append(grandparent)
    return ancestors
