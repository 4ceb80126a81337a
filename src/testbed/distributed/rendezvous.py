"""Find dead ranks while a run starts, by heartbeats in the store where the ranks find each other. No torch.

Until the ranks train, one may wait for another for minutes, because rank 0 may read files that long. The timeouts of
torchrun and of the store cannot tell a slow rank from a dead one. So a thread of each rank writes a heartbeat to the
store every second, from before the ranks join until they train. A second thread counts how long others have written
none, because the first one may itself wait for a store whose holder is stopped. Rank 0 watches all others and writes
which one it misses; the others watch rank 0. A rank that lives is waited for, however slow it is.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from testbed.distributed.launch import Launch
from testbed.distributed.watchdog import BEAT_S, is_process_alive, is_process_stopped

ENDED, TRAINS = "ended", "trains"  # last words
DEAD_FOR_S = 2.5 * BEAT_S  # most of the time the main thread learns of a death by itself, and knows more about it
FAREWELL_S = 2 * BEAT_S  # for the others to read what rank 0 says, before its store goes with it
LEAST_PATIENCE_S = 5 * BEAT_S  # heartbeats come once a second, and a busy machine delays some
START_PATIENCE_S = 600.0  # for a first heartbeat, where torchrun ends the others when a rank dies
FEW = 32  # up to this many ranks, each asks for the others' first heartbeats several times a second


class Store(Protocol):
    """The part of PyTorch's store that is used here."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def multi_get(self, keys: list[str]) -> list[bytes]: ...
    def check(self, keys: list[str]) -> bool: ...


@dataclass(frozen=True)
class Heartbeat:
    """What a rank writes. `count` grows each time; its last word is ENDED (by itself) or TRAINS."""

    machine: str
    process: int
    count: str

    def __str__(self) -> str:
        return f"{self.process} {self.count} {self.machine}"

    @classmethod
    def read(cls, text: str) -> Heartbeat:
        process, count, machine = text.split(" ", 2)
        return cls(machine, int(process), count)

    @property
    def is_here(self) -> bool:
        """Return whether its process is one of this machine, and not of another container."""
        return self.machine == this_machine()


def this_machine() -> str:
    """Name the place where process numbers mean the same.

    The machine's name; on Linux also its boot (virtual machines of one image have one name) and the namespace of its
    processes.
    """
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))  # noqa: PTH115 - no path, a name
    return " ".join(parts)


class StartupHeartbeat:
    """Two threads that show that this rank lives, and end it when a rank that it needs does not.

    A rank of this machine whose process is gone after a heartbeat is missing at once. Any other rank is missing after
    `timeout_s` without a heartbeat: before its first one it loads PyTorch, dead or alive. Only time in which this
    process itself ran counts.
    """

    def __init__(
        self,
        launch: Launch,
        timeout_s: float,
        open_store: Callable[[], Store],
        on_missing: Callable[[str], None],
        start_patience_s: float = 0.0,
    ):
        """Args:
        open_store: opens a connection of its own; OSError or RuntimeError as long as there is no store.
        on_missing: ends the process, with the sentence about the missing rank.
        start_patience_s: least time to wait for the first heartbeat of a rank.
        """
        self._launch, self._timeout_s = launch, timeout_s
        self._patience_s = max(timeout_s - 2 * BEAT_S, timeout_s / 2, LEAST_PATIENCE_S)
        self._start_patience_s = max(self._patience_s, start_patience_s)
        self._open_store, self._on_missing = open_store, on_missing
        self._store: Store | None = None
        self._has_found_store, self._trouble = False, "no answer"
        self._others = range(1, launch.world_size) if launch.rank == 0 else (0,)
        self._beats: dict[int, Heartbeat] = {}
        self._fresh: set[int] = set()  # whose heartbeat has changed since: the store may hold one of an earlier start
        self._are_here: set[int] = set()  # whose heartbeat names a process of this machine, and of this start
        self._still_s = dict.fromkeys(self._others, 0.0)  # without a new heartbeat
        self._dead_s = dict.fromkeys(self._others, 0.0)
        self._count = 0
        self._last_word: str | None = None
        self._to_send: str | None = None  # rank 0's sentence about the missing rank, for the others
        self.received: str | None = None  # the same, as the others read it
        self._is_sent = threading.Event()
        self._is_quiet, self._closed, self._wake = threading.Event(), threading.Event(), threading.Event()
        self._writing = threading.Thread(target=self._write_until_closed, name="heartbeat", daemon=True)

    def begin(self) -> StartupHeartbeat:
        """Start both threads."""
        self._writing.start()
        threading.Thread(target=self._watch, name="watch-heartbeats", daemon=True).start()
        return self

    def quiet(self) -> None:
        """End no process from here on: the main thread ends this rank, and asks here which rank it waited for."""
        self._is_quiet.set()
        self._wake.set()

    def close(self, last_word: str) -> None:
        """Stop watching. This rank now TRAINS, or has ENDED by itself."""
        self.quiet()
        if self._to_send is not None:
            self._wait_until_sent()
        self._last_word = last_word
        self._closed.set()
        self._wake.set()
        self._writing.join(BEAT_S)  # no longer: it may wait for a store that is gone

    def _write_until_closed(self) -> None:
        while not self._closed.is_set():
            self.exchange()  # once more after `quiet` and `broadcast_failure`, which wake this thread
            is_slow = len(self._beats) == len(self._others) or self._launch.world_size > FEW
            self._wake.wait(BEAT_S if is_slow and not self._is_quiet.is_set() else BEAT_S / 5)
            self._wake.clear()
        if self._store is not None:
            assert self._last_word is not None  # `close` gave it
            with contextlib.suppress(Exception):
                self._write(self._last_word)

    def _watch(self) -> None:
        before_s = time.monotonic()
        while not self._is_quiet.wait(BEAT_S / 2):
            now_s = time.monotonic()
            missing = self.look(min(now_s - before_s, 2 * BEAT_S))
            before_s = now_s
            if missing is not None and not self._is_quiet.is_set():
                self.broadcast_failure(missing)
                self._wait_until_sent()
                self._on_missing(missing)
                return

    def exchange(self) -> None:
        """Write our heartbeat and read the others', if there is a store. Blocks while the store's holder is stopped."""
        try:
            if self._store is None:
                self._store = self._open_store()
                self._has_found_store = True
            self._count += 1
            self._write(str(self._count))
            self._read_beats()
            self._send_or_receive_failure()
        except (OSError, RuntimeError, ValueError) as error:  # not there yet, or gone
            self._store, self._trouble = None, str(error).partition("\n")[0]

    def _read_beats(self) -> None:
        assert self._store is not None
        come = [rank for rank in self._others if rank in self._beats or self._store.check([_key(rank)])]
        for rank, text in zip(come, self._store.multi_get([_key(rank) for rank in come]) if come else [], strict=True):
            beat = Heartbeat.read(text.decode())
            if beat == self._beats.get(rank):
                continue
            if rank in self._beats:
                self._fresh.add(rank)
            self._beats[rank], self._still_s[rank], self._dead_s[rank] = beat, 0.0, 0.0
            self._are_here.discard(rank)
            # over several nodes the store may hold the heartbeat of an earlier start, whose process is gone
            if beat.is_here and (self._launch.num_nodes == 1 or is_process_alive(beat.process)):
                self._are_here.add(rank)

    def _send_or_receive_failure(self) -> None:
        assert self._store is not None
        if self._launch.rank == 0:
            if self._to_send is not None and not self._is_sent.is_set():
                self._store.set(_key_of_failure(os.getpid()), self._to_send)
                self._is_sent.set()
        elif 0 in self._fresh:
            key = _key_of_failure(self._beats[0].process)
            if self._store.check([key]):
                self.received = self._store.get(key).decode()

    def _write(self, count: str) -> None:
        assert self._store is not None
        self._store.set(_key(self._launch.rank), str(Heartbeat(this_machine(), os.getpid(), count)))

    def broadcast_failure(self, sentence: str) -> None:
        """Tell the other ranks, from rank 0, which rank is missing. They watch rank 0 alone, and would blame it."""
        if self._launch.rank == 0 and self._launch.world_size > 2:
            self._to_send = self._to_send or sentence
            self._wake.set()

    def _wait_until_sent(self) -> None:
        if self._to_send is not None and self._is_sent.wait(BEAT_S):
            time.sleep(FAREWELL_S)

    def look(self, seconds: float) -> str | None:
        """Count `seconds` more. Returns the sentence about the missing rank, or None."""
        if self.received is not None:
            return self.received
        for rank in self._others:
            self._still_s[rank] += seconds
            self._dead_s[rank] = self._dead_s[rank] + seconds if self._is_dead(rank) else 0.0
        missing = [rank for rank in self._others if self._is_missing(rank)]
        return self._in_words(missing) if missing else None

    def dead_ranks(self) -> str | None:
        """Describe the ranks that are gone, for a rank whose connection broke. None: none is known to be.

        What rank 0 wrote comes first, then the ranks that this one watches.
        """
        gone = [rank for rank in self._others if self._is_dead(rank) or self._has_said(rank, ENDED)]
        return self.received or (self._in_words(gone) if gone else None)

    def _is_dead(self, rank: int) -> bool:
        return rank in self._are_here and not is_process_alive(self._beats[rank].process)

    def _has_said(self, rank: int, word: str) -> bool:
        return rank in self._fresh and self._beats[rank].count == word

    def _is_missing(self, rank: int) -> bool:
        if self._has_said(rank, TRAINS):
            return False  # it waits in its first step, where collectives have their own limit
        patience_s = self._patience_s if rank in self._beats else self._start_patience_s
        return self._dead_s[rank] >= DEAD_FOR_S or self._still_s[rank] >= patience_s

    def _in_words(self, ranks: Iterable[int]) -> str:
        """Describe the first of them, and count the others."""
        first, *others = ranks
        more = f" (and {len(others)} more)" if others else ""
        return f"rank {first}{more} {self._state_of(first)}"

    def _state_of(self, rank: int) -> str:
        within = f"for --collective_timeout {self._timeout_s:g} s"
        beat = self._beats.get(rank)
        if beat is None:
            longer = "a rank that needs longer to load PyTorch needs a larger --collective_timeout"
            if not self._has_found_store:
                return (
                    f"has not come: {within} nobody answered where the ranks find each other ({self._trouble}). Rank 0 "
                    "died before it opened the store there, was not started, or cannot be reached from here (address, "
                    f"port, firewall: MASTER_ADDR, MASTER_PORT); {longer}"
                )
            return f"has not come: {within} there was no sign of it. It died before, or was not started; {longer}"
        if self._has_said(rank, ENDED):
            return "has ended itself, its own message says why"
        if self._is_dead(rank):
            return "is dead: killed from outside while the run started up, unless its own message says why"
        if beat.is_here and is_process_stopped(beat.process):
            return f"is stopped (SIGSTOP): {within} it gave no sign of life while the run started up"
        return f"gave no sign of life {within} while the run started up"


def _key(rank: int) -> str:
    return f"heartbeat_of_rank_{rank}"


def _key_of_failure(process_of_rank_0: int) -> str:
    """Return the key of rank 0's sentence about a missing rank. An earlier start has another one."""
    return f"failure_sent_by_process_{process_of_rank_0}"
