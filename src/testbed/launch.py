"""Who launched this process, and how it ends: the only reader of RANK, WORLD_SIZE and LOCAL_RANK. No torch.

Launchers differ in what they forward. `deepspeed` on SIGTERM dies at once and leaves its child and the ranks running;
`torchrun` on kill -9 leaves the ranks. So every rank watches the processes above it and ends itself when one is gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

PARENT_POLL_S = 0.5
REFUSAL_WAIT_S = 3.0  # longer than rank 0 needs to print, far under every launcher's own patience


class RunStopped(BaseException):
    """A signal, or the death of the launcher, asked this run to end. Not an Exception: nothing should swallow it."""

    def __init__(self, reason: str, exit_code: int):
        super().__init__(reason)
        self.reason = reason
        self.exit_code = exit_code


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


def read_launch() -> Launch:
    """Read the variables that torchrun, deepspeed and Slurm wrappers set; none of them means one process.

    Raises:
        ValueError: a variable is not a number, or the numbers contradict each other.
    """
    values = {}
    # torchrun says LOCAL_WORLD_SIZE, deepspeed LOCAL_SIZE; without either all ranks are on this node
    local_size_name = "LOCAL_WORLD_SIZE" if "LOCAL_WORLD_SIZE" in os.environ else "LOCAL_SIZE"
    world_size = os.environ.get("WORLD_SIZE", "1")
    for name, default in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"), (local_size_name, world_size)):
        text = os.environ.get(name, default)
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


def refuse(launch: Launch | None, message: str) -> int:
    """Say on local rank 0 why the run cannot start; the others wait, lest the launcher ends rank 0 before it spoke.

    Returns:
        2, the exit code for what the user typed.
    """
    if launch is None or launch.local_rank == 0:
        print(f"gpt2.py: error: {message}", file=sys.stderr, flush=True)
    else:
        time.sleep(REFUSAL_WAIT_S)
    return 2


def stop_on_signals_and_orphanhood(on_stuck: Callable[[RunStopped], None], grace_s: float = 10.0) -> Callable[[], None]:
    """From now on Ctrl-C, SIGTERM and the death of the launcher raise RunStopped in the main thread, once.

    A main thread that waits inside a collective runs no Python, so a second thread, woken by the signal itself,
    waits `grace_s` seconds and then ends the process after `on_stuck` has left its trace.

    Returns:
        What to call before closing down: a signal then no longer interrupts it, `grace_s` still bounds it.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    reasons = {
        signal.SIGINT: RunStopped("interrupted (SIGINT, Ctrl-C)", 130),
        signal.SIGTERM: RunStopped("terminated (SIGTERM)", 143),
    }
    launcher_died = threading.Event()
    stop: list[RunStopped] = []  # the first cause; what comes later is the same stop seen twice

    def raise_stop(signal_number: int, frame: object) -> None:
        if not stop:
            orphaned = RunStopped("the launcher died, so this rank ended itself", 143)
            stop.append(orphaned if launcher_died.is_set() else reasons[signal.Signals(signal_number)])
            raise stop[0]

    for signal_number in reasons:
        signal.signal(signal_number, raise_stop)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)

    def end_a_stuck_process() -> None:
        received = os.read(read_end, 1)  # blocks until the first signal
        while received and received[0] not in reasons:  # e.g. SIGCHLD
            received = os.read(read_end, 1)
        time.sleep(grace_s)
        last_word = stop[0] if stop else reasons[signal.Signals(received[0])]
        with contextlib.suppress(Exception):  # whatever fails here, the process must end
            on_stuck(last_word)
        os._exit(last_word.exit_code)

    def watch_launcher() -> None:
        with contextlib.suppress(psutil.NoSuchProcess):  # vanished while being looked at: it is gone
            ancestors = _launcher_processes()
            while all(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in ancestors):
                time.sleep(PARENT_POLL_S)
        launcher_died.set()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end_a_stuck_process, name="end-a-stuck-process", daemon=True).start()
    if "RANK" in os.environ:
        threading.Thread(target=watch_launcher, name="watch-launcher", daemon=True).start()
    return lambda: stop.append(reasons[signal.SIGTERM]) if not stop else None


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
