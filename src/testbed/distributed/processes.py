"""Run a program in separate processes, and leave none of them behind.

Python code never runs inside a signal handler here: `Stop` notes a signal, and the loop that waits sees it.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

import psutil

POLL_S = 0.2
# gpt2.py gives itself 20 s to end on SIGTERM, torchrun gives its ranks 30 s
PATIENCE_S = 45.0
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(Exception):
    """A signal asked this program to end; what it was doing is not kept."""


class Stop:
    """Ctrl-C, SIGTERM or a closed terminal. The first asks the program to end, the second to end at once."""

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self.is_urgent = False

    def __enter__(self) -> Stop:
        # a signal that is ignored stays so: nohup ignores SIGHUP
        self._earlier = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        for number, handler in self._earlier.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._earlier.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.is_urgent = self.signal_number is not None
        self.signal_number = self.signal_number or number

    @property
    def exit_code(self) -> int | None:
        return None if self.signal_number is None else 128 + self.signal_number


@dataclass(frozen=True)
class Ended:
    """The end of a program: its exit code, negative for a signal, and whether it ran too long or `Stop` ended it."""

    exit_code: int
    seconds: float
    was_late: bool = False
    was_stopped: bool = False


def start(command: Sequence[str], output: BinaryIO, **options: Any) -> subprocess.Popen:
    """Start a program that reads nothing and writes everything to `output`.

    It leads a session, so that Ctrl-C reaches this program alone, which then ends the other.
    """
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, **streams, start_new_session=True, **options)


def run(
    command: Sequence[str],
    log: Path,
    stop: Stop,
    timeout_s: float | None = None,
    typed: Sequence[str] | None = None,
    on_wait: Callable[[], Any] = lambda: None,
    **options: Any,
) -> Ended:
    """Run a program until it ends, is late, or a signal comes; none of its processes is left then. Raises OSError.

    Args:
        log: gets the command in its first line, and what the program says.
        typed: the command as the log shows it (default: `command`).
        on_wait: called five times a second.
    """
    started_s = time.perf_counter()
    with log.open("wb") as output:
        output.write(f"$ {shlex.join(typed or command)}\n".encode())
        output.flush()
        process = start(command, output, **options)
        was_late = was_stopped = False
        try:
            while process.poll() is None:
                was_late = timeout_s is not None and time.perf_counter() - started_s > timeout_s
                was_stopped = stop.signal_number is not None
                if was_late or was_stopped:
                    end_processes(process, stop)
                    break
                on_wait()
                time.sleep(POLL_S)
        except BaseException:  # whatever fails here, the program must not continue alone
            end_processes(process, stop)
            raise
    was_stopped = was_stopped or (was_late and stop.signal_number is not None)
    return Ended(process.returncode, time.perf_counter() - started_s, was_late, was_stopped)


def end_processes(process: subprocess.Popen, stop: Stop) -> None:
    """End a program of `start` and everything that it started, and wait until all of it is gone.

    torchrun puts each rank into a separate session, so the group alone would miss them: they are looked up first.
    """
    everything = _with_descendants(process)
    _send_to_group(process, signal.SIGTERM)  # torchrun passes it on; gpt2.py leaves its files whole
    _wait_until_gone(process, everything, stop)
    everything |= _with_descendants(process)
    _send_to_group(process, signal.SIGKILL)
    for each in everything:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait()
    _wait_until_gone(process, everything, Stop())


def _wait_until_gone(process: subprocess.Popen, everything: set[psutil.Process], stop: Stop) -> None:
    """Wait at most PATIENCE_S, and no longer when a second signal comes."""
    deadline_s = time.monotonic() + PATIENCE_S
    urgent_before = stop.is_urgent
    while time.monotonic() < deadline_s and stop.is_urgent == urgent_before:
        process.poll()  # collects it, else it would stay a zombie
        if not any(_is_alive(each) for each in everything):
            return
        time.sleep(POLL_S)


def _with_descendants(process: subprocess.Popen) -> set[psutil.Process]:
    try:
        parent = psutil.Process(process.pid)
        return {parent, *parent.children(recursive=True)}
    except psutil.NoSuchProcess:
        return set()


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _send_to_group(process: subprocess.Popen, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
