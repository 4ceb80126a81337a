"""Name the rank that does not come, or dies, while a run starts. No torch.

The store's timeout says how many ranks came, not which, and only torchrun ends the ranks that wait for a dead one. No
collective has a short timeout yet, because rank 0 may read files for minutes while the others wait.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from testbed.distributed.launch import Launch, seconds_since_start
from testbed.distributed.watchdog import BEAT_S, is_process_alive, is_process_stopped

LOOK_EVERY_S = 0.2
DEAD_FOR_S = 2.5 * BEAT_S  # most of the time the main thread learns of a death by itself, and knows more about it
FAREWELL_S = 2 * BEAT_S  # for the others to ask the store too, which ends with rank 0
LEAST_PATIENCE_S = 5.0
TORCHRUN_PATIENCE_S = 600.0  # torchrun ends the others when a rank dies, so a slow start is no danger there


class RankMissing(Exception):
    """A rank did not come. One sentence."""


class Store(Protocol):
    """The part of PyTorch's store that is used here."""

    def set(self, key: str, value: str) -> None: ...
    def check(self, keys: list[str]) -> bool: ...


def patience_s(timeout_s: float) -> float:
    """Return how long to wait for a rank to come: --collective_timeout, or as long as loading PyTorch took here."""
    by_launcher = TORCHRUN_PATIENCE_S if "TORCHELASTIC_RUN_ID" in os.environ else LEAST_PATIENCE_S
    return max(timeout_s, seconds_since_start(), by_launcher)


def wait_for_ranks(store: Store, launch: Launch, patience_s: float) -> None:
    """Wait until every rank has come to the store.

    Raises:
        RankMissing: one has not within `patience_s`.
    """
    store.set(_key(launch.rank), "here")
    keys = [_key(rank) for rank in range(launch.world_size)]
    deadline_s = time.monotonic() + patience_s
    while not store.check(keys):
        if time.monotonic() > deadline_s:
            missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
            if launch.rank == 0:
                time.sleep(FAREWELL_S)
            more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
            raise RankMissing(
                f"rank {missing[0]}{more} has not come: for {patience_s:.0f} s there was no sign of it. It died "
                "before, or was not started; a rank that needs longer to load PyTorch needs a larger "
                "--collective_timeout"
            )
        time.sleep(LOOK_EVERY_S)


def no_answer(trouble: str, patience_s: float) -> RankMissing:
    """Return the error of a rank that found no store."""
    return RankMissing(
        f"rank 0 has not come: nobody answered for {patience_s:.0f} s where the ranks find each other ({trouble}). "
        "It died before it opened the store there, was not started, or cannot be reached from here (address, port, "
        "firewall: MASTER_ADDR, MASTER_PORT); a rank that needs longer to load PyTorch needs a larger "
        "--collective_timeout"
    )


def _key(rank: int) -> str:
    return f"rank_{rank}"


def this_process() -> tuple[str, int]:
    """Return the place where process numbers mean the same, and this process's number.

    The place is the machine's name; on Linux also its boot (virtual machines of one image have one name) and the
    namespace of its processes.
    """
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))  # noqa: PTH115 - no path, a name
    return " ".join(parts), os.getpid()


def _is_dead(process: int) -> bool:
    return not is_process_alive(process)


class StartupWatch:
    """Look at the other ranks' processes on this machine until the ranks train, in a thread.

    A rank that lives is waited for, however slow it is. One of another machine is its launcher's.
    """

    def __init__(
        self,
        launch: Launch,
        processes: Sequence[tuple[str, int]],
        timeout_s: float,
        on_missing: Callable[[str], None],
    ):
        """Args:
        processes: `this_process` of every rank.
        timeout_s: how long a rank may be stopped.
        on_missing: ends the process, with the sentence about the missing rank.
        """
        here = processes[launch.rank][0]
        self._processes = {
            rank: process for rank, (place, process) in enumerate(processes) if rank != launch.rank and place == here
        }
        self._timeout_s, self._on_missing = timeout_s, on_missing
        self._dead_s: dict[int, float] = {}  # rank -> seconds since it was first seen dead, the earliest first
        self._stopped_s: dict[int, float] = {}
        self._closed = threading.Event()

    def begin(self) -> StartupWatch:
        threading.Thread(target=self._run, name="watch-startup", daemon=True).start()
        return self

    def close(self) -> None:
        """End no process from here on."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(BEAT_S / 2):
            missing = self.look(BEAT_S / 2)
            if missing is not None and not self._closed.is_set():
                self._on_missing(missing)
                return

    def look(self, seconds: float) -> str | None:
        """Count `seconds` more. Returns the sentence about a rank that is dead or stopped, or None."""
        self._count(self._dead_s, seconds, _is_dead)
        self._count(self._stopped_s, seconds, is_process_stopped)
        if max(list(self._dead_s.values()), default=0.0) >= DEAD_FOR_S:
            return self.dead_rank()
        for rank, stopped_s in self._stopped_s.items():
            if stopped_s >= self._timeout_s:
                return (
                    f"rank {rank} is stopped (SIGSTOP): for --collective_timeout {self._timeout_s:g} s it gave no sign "
                    "of life while the run started up"
                )
        return None

    def dead_rank(self) -> str | None:
        """Describe the rank that died first. None: none is known to be dead."""
        self._count(self._dead_s, 0.0, _is_dead)
        first = next(iter(self._dead_s), None)
        if first is None:
            return None
        return f"rank {first} is dead: killed from outside while the run started up, unless its own message says why"

    def _count(self, seconds_of: dict[int, float], seconds: float, is_so: Callable[[int], bool]) -> None:
        for rank, process in self._processes.items():
            if not is_so(process):
                seconds_of.pop(rank, None)
            else:
                seconds_of[rank] = seconds_of.get(rank, 0.0) + seconds
