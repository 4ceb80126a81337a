"""Who is there while a run starts: a sign of life per rank in the store where the ranks find each other. No torch.

Until the ranks train they wait for each other for minutes, because rank 0 may read files that long; and one that waits
for the dead would wait as long. So a thread of each rank says every second in the store that its process runs, from
before the ranks have met until they train, and another one counts for how long others have said nothing: the first may
itself wait for a store whose holder is stopped. Rank 0 looks after all others and says there whom it misses; the others
look after rank 0. One that lives is not missed, however slow it is.
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
DEAD_FOR_S = 2.5 * BEAT_S  # the main thread learns of a death by itself, most of the time, and knows more about it
FAREWELL_S = 2 * BEAT_S  # for the others to read what rank 0 says, before its store goes with it
LEAST_PATIENCE_S = 5 * BEAT_S  # signs come once a second, and a busy machine delays some
START_PATIENCE_S = 600.0  # for a first sign, where torchrun ends the others when a rank dies
FEW = 32  # ranks that may ask for each other's first sign several times a second


class Store(Protocol):
    """What is used of PyTorch's."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def multi_get(self, keys: list[str]) -> list[bytes]: ...
    def check(self, keys: list[str]) -> bool: ...


@dataclass(frozen=True)
class Sign:
    """What a rank says of itself. `count`: one more each time, or its last word: ENDED by its own will, or TRAINS."""

    machine: str
    process: int
    count: str

    def __str__(self) -> str:
        return f"{self.process} {self.count} {self.machine}"

    @classmethod
    def read(cls, text: str) -> Sign:
        process, count, machine = text.split(" ", 2)
        return cls(machine, int(process), count)

    @property
    def is_here(self) -> bool:
        """Whether its process is one of this machine's, and not of another container."""
        return self.machine == this_machine()


def this_machine() -> str:
    """Where process numbers mean the same: the machine's name, on Linux which start of it (virtual machines of one
    image are called alike), and the namespace of its processes."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))  # noqa: PTH115 - no path, a name
    return " ".join(parts)


class Meeting:
    """Two threads that show that this rank lives, and end it when one that it needs does not.

    A rank of this machine that gave a sign and whose process is gone is missed at once. Any other is when it has given
    no sign for `timeout_s`: before its first one it loads PyTorch, dead or alive. Only time in which this process
    itself ran counts.
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
        open_store: a connection that nobody else uses; OSError or RuntimeError as long as there is none.
        on_missing: ends the process, with the sentence about who is missing.
        start_patience_s: at least so long is a rank waited for that has never given a sign.
        """
        self._launch, self._timeout_s = launch, timeout_s
        self._patience_s = max(timeout_s - 2 * BEAT_S, timeout_s / 2, LEAST_PATIENCE_S)
        self._start_patience_s = max(self._patience_s, start_patience_s)
        self._open_store, self._on_missing = open_store, on_missing
        self._store: Store | None = None
        self._has_met_store, self._trouble = False, "no answer"
        self._others = range(1, launch.world_size) if launch.rank == 0 else (0,)
        self._signs: dict[int, Sign] = {}
        self._fresh: set[int] = set()  # whose sign has changed since: the store may hold one of an earlier start
        self._are_here: set[int] = set()  # whose sign names a process of this machine, and of this start
        self._still_s = dict.fromkeys(self._others, 0.0)  # without a new sign
        self._dead_s = dict.fromkeys(self._others, 0.0)
        self._count = 0
        self._last_word: str | None = None
        self._to_tell: str | None = None  # rank 0's sentence about who is missing, for the others
        self._told: str | None = None  # the same, as the others read it
        self._is_told = threading.Event()
        self._is_quiet, self._closed, self._wake = threading.Event(), threading.Event(), threading.Event()
        self._talking = threading.Thread(target=self._talk, name="meet-ranks", daemon=True)

    def begin(self) -> Meeting:
        """From now on this rank shows that it lives."""
        self._talking.start()
        threading.Thread(target=self._watch, name="miss-ranks", daemon=True).start()
        return self

    def quiet(self) -> None:
        """The main thread ends this rank, and asks here for whom it waited: the process is not ended from here."""
        self._is_quiet.set()
        self._wake.set()

    def close(self, last_word: str) -> None:
        """Nobody is missed any more: this rank TRAINS from now on, or has ENDED by its own will."""
        self.quiet()
        if self._to_tell is not None:
            self._wait_until_told()
        self._last_word = last_word
        self._closed.set()
        self._wake.set()
        self._talking.join(BEAT_S)  # no longer: it may wait for a store that is gone

    def _talk(self) -> None:
        while not self._closed.is_set():
            self.exchange()  # once more after `quiet` and `tell`, which wake this thread
            is_slow = len(self._signs) == len(self._others) or self._launch.world_size > FEW
            self._wake.wait(BEAT_S if is_slow and not self._is_quiet.is_set() else BEAT_S / 5)
            self._wake.clear()
        if self._store is not None:
            with contextlib.suppress(Exception):
                self._say(self._last_word)

    def _watch(self) -> None:
        before_s = time.monotonic()
        while not self._is_quiet.wait(BEAT_S / 2):
            now_s = time.monotonic()
            missing = self.look(min(now_s - before_s, 2 * BEAT_S))
            before_s = now_s
            if missing is not None and not self._is_quiet.is_set():
                self.tell(missing)
                self._wait_until_told()
                self._on_missing(missing)
                return

    def exchange(self) -> None:
        """Our sign for theirs, as far as there is a store. It may wait for as long as the store's holder is stopped."""
        try:
            if self._store is None:
                self._store = self._open_store()
                self._has_met_store = True
            self._count += 1
            self._say(str(self._count))
            self._read_signs()
            self._read_or_tell()
        except (OSError, RuntimeError, ValueError) as error:  # not there yet, or gone
            self._store, self._trouble = None, str(error).partition("\n")[0]

    def _read_signs(self) -> None:
        come = [rank for rank in self._others if rank in self._signs or self._store.check([_key(rank)])]
        for rank, text in zip(come, self._store.multi_get([_key(rank) for rank in come]) if come else [], strict=True):
            sign = Sign.read(text.decode())
            if sign == self._signs.get(rank):
                continue
            if rank in self._signs:
                self._fresh.add(rank)
            self._signs[rank], self._still_s[rank], self._dead_s[rank] = sign, 0.0, 0.0
            self._are_here.discard(rank)
            # over several nodes the store may hold the sign of an earlier start, whose process is gone
            if sign.is_here and (self._launch.num_nodes == 1 or is_process_alive(sign.process)):
                self._are_here.add(rank)

    def _read_or_tell(self) -> None:
        if self._launch.rank == 0:
            if self._to_tell is not None and not self._is_told.is_set():
                self._store.set(_key_of_missing(os.getpid()), self._to_tell)
                self._is_told.set()
        elif 0 in self._fresh:
            key = _key_of_missing(self._signs[0].process)
            if self._store.check([key]):
                self._told = self._store.get(key).decode()

    def _say(self, count: str) -> None:
        self._store.set(_key(self._launch.rank), str(Sign(this_machine(), os.getpid(), count)))

    def tell(self, sentence: str) -> None:
        """Rank 0 tells the others whom it misses: they look after rank 0 alone, and would take it for the cause."""
        if self._launch.rank == 0 and self._launch.world_size > 2:
            self._to_tell = self._to_tell or sentence
            self._wake.set()

    def _wait_until_told(self) -> None:
        if self._to_tell is not None and self._is_told.wait(BEAT_S):
            time.sleep(FAREWELL_S)

    def look(self, seconds: float) -> str | None:
        """Count `seconds` more; the sentence about who is missing, or None."""
        if self._told is not None:
            return self._told
        for rank in self._others:
            self._still_s[rank] += seconds
            self._dead_s[rank] = self._dead_s[rank] + seconds if self._is_dead(rank) else 0.0
        missing = [rank for rank in self._others if self._is_missing(rank)]
        return self._in_words(missing) if missing else None

    def who_is_dead(self) -> str | None:
        """For a rank whose connection broke: whom rank 0 misses, or who is not there of those that this rank looks
        after; None: nobody, or it is not known."""
        gone = [rank for rank in self._others if self._is_dead(rank) or self._has_said(rank, ENDED)]
        return self._told or (self._in_words(gone) if gone else None)

    @property
    def told(self) -> str | None:
        """Whom rank 0 misses, as it told this rank."""
        return self._told

    def _is_dead(self, rank: int) -> bool:
        return rank in self._are_here and not is_process_alive(self._signs[rank].process)

    def _has_said(self, rank: int, word: str) -> bool:
        return rank in self._fresh and self._signs[rank].count == word

    def _is_missing(self, rank: int) -> bool:
        if self._has_said(rank, TRAINS):
            return False  # it waits for the others in its first step, where collectives have their own limit
        patience_s = self._patience_s if rank in self._signs else self._start_patience_s
        return self._dead_s[rank] >= DEAD_FOR_S or self._still_s[rank] >= patience_s

    def _in_words(self, ranks: Iterable[int]) -> str:
        """About the first of them, and how many there are more."""
        first, *others = ranks
        more = f" (and {len(others)} more)" if others else ""
        return f"rank {first}{more} {self._state_of(first)}"

    def _state_of(self, rank: int) -> str:
        within = f"for --collective_timeout {self._timeout_s:g} s"
        sign = self._signs.get(rank)
        if sign is None:
            longer = "a rank that needs longer to load PyTorch needs a larger --collective_timeout"
            if not self._has_met_store:
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
        if sign.is_here and is_process_stopped(sign.process):
            return f"is stopped (SIGSTOP): {within} it gave no sign of life while the run started up"
        return f"gave no sign of life {within} while the run started up"


def _key(rank: int) -> str:
    return f"sign_of_rank_{rank}"


def _key_of_missing(process_of_rank_0: int) -> str:
    """Of what rank 0 says when it misses a rank; not what one said that was started before it."""
    return f"missed_by_process_{process_of_rank_0}"
