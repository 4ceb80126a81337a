"""Who is there while a run starts: a sign of life per rank in the store where the ranks find each other. No torch.

Until the ranks train they wait for each other for minutes, because rank 0 may read files that long; and one that waits
for the dead would wait as long. So a thread of each rank says every second in the store that its process runs, from
before the ranks have met until they train. Rank 0 looks after all others and says there whom it misses; the others
look after rank 0. One that lives is waited for, however slow it is.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from testbed.launch import Launch
from testbed.watchdog import BEAT_S, is_process_alive, is_process_stopped

ENDED = "ended"
DEAD_FOR_S = 2.5 * BEAT_S  # the main thread learns of a death by itself, most of the time, and knows more about it
FAREWELL_S = 2 * BEAT_S  # for the others to read what rank 0 says, before its store goes with it


class Store(Protocol):
    """What is used of PyTorch's."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...


@dataclass(frozen=True)
class Sign:
    """What a rank says of itself. `count`: one more each time, or ENDED: by its own will."""

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
    """Where process numbers mean the same: the machine's name and, on Linux, the namespace of its processes."""
    namespace = ""
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - no path, a name
    return f"{socket.gethostname()} {namespace}".strip()


class Meeting:
    """A thread that shows that this rank lives, and ends it when one that it needs does not.

    A rank of this machine whose process is gone is missed at once. Any other is when it has given no sign for
    `timeout_s`: before its first one it loads PyTorch, dead or alive. Only time in which this process itself ran
    counts.
    """

    def __init__(
        self, launch: Launch, timeout_s: float, open_store: Callable[[], Store], on_missing: Callable[[str], None]
    ):
        """Args: open_store: a connection that nobody else uses; OSError or RuntimeError as long as there is none."""
        self._launch, self._timeout_s = launch, timeout_s
        self._patience_s = max(timeout_s - 2 * BEAT_S, timeout_s / 2)
        self._open_store, self._on_missing = open_store, on_missing
        self._store: Store | None = None
        self._others = range(1, launch.world_size) if launch.rank == 0 else (0,)
        self._signs: dict[int, Sign] = {}
        self._seen_alive: set[int] = set()  # of this machine: the store may hold a sign of an earlier start
        self._still_s = dict.fromkeys(self._others, 0.0)  # without a new sign
        self._dead_s = dict.fromkeys(self._others, 0.0)
        self._count = 0
        self._has_ended = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="meet-ranks", daemon=True)

    def begin(self) -> Meeting:
        """From now on this rank shows that it lives."""
        self._thread.start()
        return self

    def close(self, has_ended: bool) -> None:
        """Nobody is missed any more: this rank trains from now on, or ends by its own will."""
        self._has_ended = has_ended
        self._closed.set()
        self._thread.join(BEAT_S)  # no longer: it may wait for a store that is gone

    def _run(self) -> None:
        before_s = time.monotonic()
        while not self._closed.wait(BEAT_S if len(self._signs) == len(self._others) else BEAT_S / 5):
            now_s = time.monotonic()
            missing = self.look(min(now_s - before_s, 2 * BEAT_S))
            before_s = now_s
            if missing is not None and not self._closed.is_set():
                self._on_missing(missing)
                return
        if self._has_ended and self._store is not None:
            with contextlib.suppress(Exception):
                self._say(ENDED)

    def look(self, seconds: float) -> str | None:
        """Say that this rank lives, and count `seconds` more; the sentence about who is missing, or None."""
        said = None
        try:
            said = self._exchange()
        except (OSError, RuntimeError, ValueError):  # not there yet, or gone
            self._store = None
        if said is not None:
            return said
        for rank in self._others:
            self._still_s[rank] += seconds
            self._dead_s[rank] = self._dead_s[rank] + seconds if self._is_dead(rank) else 0.0
        missing = [rank for rank in self._others if self._is_missing(rank)]
        if not missing:
            return None
        sentence = self._in_words(missing)
        if self._launch.rank == 0:
            self._tell(sentence)
        return sentence

    def who_is_dead(self) -> str | None:
        """For a rank whose connection broke: of those that it looks after, who is not there; None: nobody, or it is not
        known."""
        gone = [rank for rank in self._others if self._is_dead(rank) or self._said_so(rank)]
        return self._in_words(gone) if gone else None

    def is_store_gone(self) -> bool:
        """Whether nobody holds the ranks' store any more: without a launcher that does, it is rank 0's."""
        try:
            self._open_store()
        except (OSError, RuntimeError, ValueError):
            return True
        return False

    def _exchange(self) -> str | None:
        """Our sign for theirs. Returns what rank 0 says."""
        if self._store is None:
            self._store = self._open_store()
        self._count += 1
        self._say(str(self._count))
        for rank in self._others:
            if not self._store.check([_key(rank)]):
                continue
            sign = Sign.read(self._store.get(_key(rank)).decode())
            if sign != self._signs.get(rank):
                self._signs[rank], self._still_s[rank] = sign, 0.0
            if sign.is_here and is_process_alive(sign.process):
                self._seen_alive.add(rank)
        if self._launch.rank == 0 or 0 not in self._signs:
            return None
        key = _key_of_missing(self._signs[0].process)
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _say(self, count: str) -> None:
        self._store.set(_key(self._launch.rank), str(Sign(this_machine(), os.getpid(), count)))

    def _tell(self, sentence: str) -> None:
        with contextlib.suppress(Exception):
            self._store.set(_key_of_missing(os.getpid()), sentence)
            if self._launch.world_size > 2:
                time.sleep(FAREWELL_S)

    def _is_dead(self, rank: int) -> bool:
        return rank in self._seen_alive and not is_process_alive(self._signs[rank].process)

    def _said_so(self, rank: int) -> bool:
        return rank in self._signs and self._signs[rank].count == ENDED

    def _is_missing(self, rank: int) -> bool:
        return self._dead_s[rank] >= DEAD_FOR_S or self._still_s[rank] >= self._patience_s

    def _in_words(self, ranks: Iterable[int]) -> str:
        """About the first of them, and how many there are more."""
        first, *others = ranks
        more = f" (and {len(others)} more)" if others else ""
        return f"rank {first}{more} {self._state_of(first)}"

    def _state_of(self, rank: int) -> str:
        within = f"for --collective_timeout {self._timeout_s:g} s"
        sign = self._signs.get(rank)
        if sign is None:
            return (
                f"has not come: {within} there was no sign of it. It died before it gave one, or was not started; a "
                "rank that needs longer to load PyTorch needs a larger --collective_timeout"
            )
        if self._said_so(rank):
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
