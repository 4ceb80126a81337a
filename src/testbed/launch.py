"""Who launched this process, and how it ends: the only reader of RANK, WORLD_SIZE and LOCAL_RANK. No torch.

Launchers differ in what they forward. `deepspeed` on SIGTERM dies at once and leaves its child and the ranks running;
`torchrun` on kill -9 leaves the ranks. So every rank watches the processes above it and takes their death for SIGTERM.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from testbed.atomic_file import write_text
from testbed.error_text import say

_BEGAN_S = time.monotonic()  # this module is loaded before PyTorch
PARENT_POLL_S = 0.5
REFUSAL_WAIT_S = 3.0  # longer than rank 0 needs to print, far under every launcher's own patience
SAME_SIGNAL_S = 2.0
MARK_WITHIN_S = 5.0  # after the grace: then the process ends without a mark
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
    """The stop that a signal's number, or LAUNCHER_DIED, asks for."""
    return RunStopped(STOPS[number], INTERRUPTED if number == signal.SIGINT else STOPPED)


@dataclass(frozen=True)
class Launch:
    """This process's place among the ranks, as the launcher set it."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int

    @property
    def num_nodes(self) -> int:
        return max(1, self.world_size // self.local_world_size)

    @property
    def is_distributed(self) -> bool:
        return self.world_size > 1

    def as_variables(self, master_address: str, master_port: int) -> dict[str, str]:
        """What a launcher sets for this rank: `read_launch` makes this place of it again."""
        numbers = {"RANK": self.rank, "LOCAL_RANK": self.local_rank, "WORLD_SIZE": self.world_size}
        numbers |= {"LOCAL_WORLD_SIZE": self.local_world_size, "MASTER_PORT": master_port}
        return {name: str(number) for name, number in numbers.items()} | {"MASTER_ADDR": master_address}


def read_launch(variables: Mapping[str, str] = os.environ) -> Launch:
    """Read the variables that torchrun, deepspeed and Slurm wrappers set; none of them means one process.

    Raises:
        ValueError: a variable is not a number, or the numbers contradict each other.
    """
    values = {}
    # torchrun says LOCAL_WORLD_SIZE, deepspeed LOCAL_SIZE; without either all ranks are on this node
    local_size_name = "LOCAL_WORLD_SIZE" if "LOCAL_WORLD_SIZE" in variables else "LOCAL_SIZE"
    world_size = variables.get("WORLD_SIZE", "1")
    for name, default in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"), (local_size_name, world_size)):
        text = variables.get(name, default)
        if not text.isdigit() or (name.endswith("SIZE") and int(text) == 0):
            raise ValueError(
                f"the environment variable {name}={text!r} is not a number that a launcher sets; unset it or use "
                "torchrun"
            )
        values[name] = int(text)
    launch = Launch(values["RANK"], values["LOCAL_RANK"], values["WORLD_SIZE"], values[local_size_name])
    if launch.rank >= launch.world_size:
        raise ValueError(
            f"the environment says RANK={launch.rank} of WORLD_SIZE={launch.world_size}, and ranks count from 0; "
            "unset both to run one process, or start with torchrun or deepspeed"
        )
    return launch


def launcher(variables: Mapping[str, str] = os.environ) -> str:
    """What started this process: torchrun, deepspeed, another (Slurm, a script), or python, which sets no rank."""
    if "TORCHELASTIC_RUN_ID" in variables:
        return "torchrun"
    if "CROSS_RANK" in variables:  # DeepSpeed's number of the node
        return "deepspeed"
    return "another" if "RANK" in variables else "python"


def refuse(launch: Launch | None, message: str) -> int:
    """Say on local rank 0 why the run cannot start; the others wait, lest the launcher ends rank 0 before it spoke.

    Returns:
        2, the exit code for what the user typed.
    """
    if launch is None or launch.local_rank == 0:
        say(f"gpt2.py: error: {message}", file=sys.stderr, flush=True)
        tell_torchrun(message)
    else:
        time.sleep(REFUSAL_WAIT_S)
    return 2


def seconds_since_start() -> float:
    """How long this process has run, but for the interpreter's own start."""
    return time.monotonic() - _BEGAN_S


def tell_torchrun(message: str) -> None:
    """After a rank's end torchrun prints forty lines of its own. They close with what it finds in this file, and with a
    link to its manual where there is none."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        content = {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}
        with contextlib.suppress(OSError):  # whole or not at all: of half a file torchrun would die itself
            write_text(Path(path), json.dumps({"message": content}))


def end_on_signals() -> None:
    """While PyTorch loads there is nothing to save or to mark: a stop, or the launcher's death, ends the process.

    `StopSignals` takes over from here.
    """
    for number in stop_signals():
        signal.signal(number, lambda number, _: os._exit(stop_of(number).exit_code))
    _watch_launcher()


def stop_signals() -> list[int]:
    """The signals that ask a run to end; without SIGHUP under nohup, which ignores it."""
    numbers = sorted({*STOPS} - {LAUNCHER_DIED})
    return [number for number in numbers if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN]


def stop_as_interrupt() -> None:
    """From now on SIGTERM ends this program as Ctrl-C does, through the clauses that remove or keep partial files."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt(number)

    signal.signal(signal.SIGTERM, interrupt)


def code_of_interrupt(stop: KeyboardInterrupt) -> int:
    """The exit code after Ctrl-C, or after a SIGTERM that came as `stop_as_interrupt` has it."""
    return STOPPED if stop.args else INTERRUPTED


def end_deaf() -> None:
    """All is written and the exit code is known. On its way out the interpreter puts the default handlers back, and a
    signal that comes then would end the process with another code than the run's."""
    for number in stop_signals():
        signal.signal(number, signal.SIG_IGN)


class StopSignals:
    """What asks this run to end: Ctrl-C, SIGTERM, SIGUSR1, SIGHUP, the death of the launcher. One object per process.

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
        """Args:
        on_stuck: leaves the run's mark when the process is ended from the second thread.
        is_speaking: this rank says that Ctrl-C was heard, and what another one does.
        """
        self.number = self.agreed = 0
        self._grace_s, self._on_stuck, self._is_speaking = grace_s, on_stuck, is_speaking
        self._raises = False
        self._read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        for number in stop_signals():
            signal.signal(number, self._handle)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        threading.Thread(target=self._bound, name="bound-the-end", daemon=True).start()
        _watch_launcher()

    def interrupt(self) -> None:
        """From now on a stop raises RunStopped at once, and so does one that came before: called where it is caught."""
        self._raises = True
        if self.number:
            raise self.as_exception()

    def defer(self) -> None:
        """From now on nothing raises: a stop waits for the end of the step, or of closing down; the grace bounds it."""
        self._raises = False

    def as_exception(self) -> RunStopped:
        """The stop that was agreed on, or that this rank was asked for."""
        return stop_of(self.agreed or self.number)

    def _handle(self, number: int, frame: object) -> None:
        if self.number:
            return  # the same stop seen twice, or a later one, which is the second thread's
        self.number = LAUNCHER_DIED if _launcher_died.is_set() else number
        if self._raises:
            raise self.as_exception()

    def _bound(self) -> None:
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
        last_resort = threading.Timer(MARK_WITHIN_S, os._exit, [stop.exit_code])  # the disk itself may hang
        last_resort.daemon = True
        last_resort.start()
        with contextlib.suppress(Exception):  # whatever fails here, the process must end
            self._on_stuck(RunStopped(f"{stop.reason}, {how}", stop.exit_code))
        os._exit(stop.exit_code)


_launcher_died = threading.Event()
_asked_to_stop = threading.Event()
_launcher_watch: threading.Thread | None = None


def _watch_launcher() -> None:
    """From the first call on the launcher's death is a SIGTERM to this rank. A person's shell is no launcher."""
    global _launcher_watch
    if "RANK" not in os.environ or _launcher_watch is not None:
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
    """The parent, and above deepspeed's per-node launcher also the `deepspeed` command itself."""
    parent = psutil.Process().parent()
    if parent is None:
        return []
    ancestors = [parent]
    if any("deepspeed.launcher.launch" in word for word in parent.cmdline()):
        grandparent = parent.parent()
        if grandparent is not None and grandparent.pid != 1:
            ancestors.append(grandparent)
    return ancestors


def threads_per_rank(launch: Launch) -> int:
    """CPU threads: what OMP_NUM_THREADS says, else this node's usable cores shared out evenly over its ranks."""
    told = os.environ.get("OMP_NUM_THREADS", "")
    if told.isdigit() and int(told) > 0:
        return int(told)
    return max(1, usable_cores() // launch.local_world_size)


def usable_cores() -> int:
    """Cores that this process may run on; macOS cannot restrict them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
