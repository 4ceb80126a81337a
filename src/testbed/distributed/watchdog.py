"""Keep one small file per rank that says where the rank is. The others read from it which rank is dead or stuck.

A rank that waits in a collective runs no Python and cannot know which rank it waits for. So each rank notes where it
goes before it goes there, and a thread counts up for as long as the process runs. No torch.

A note is a store into mapped memory: no system call, no flush, and there after kill -9. On one machine it is
seen at once; over a network file system half a minute late, so other machines are named, never judged.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from testbed.errors import say_if_read
from testbed.io import read_regular

BEAT_S = 1.0
NOTICE_S = 5.0  # a rank that was stopped for a moment, as by a debugger that attaches, is not worth a line
PROCESSES, EXITING = Path("/proc"), 0x4  # PF_EXITING, among the flags in a process's "stat"
# in the order in which a step passes them; then what lies between steps
PHASES = {
    "start": "starting up",
    "barrier": "the barrier before a step",
    "data_wait": "reading data",
    "schedule": "the pipeline's schedule",
    "forward": "forward",
    "backward": "backward",
    "synchronise": "gradient synchronisation",
    "optimizer": "the optimizer's update",
    "device": "waiting for the GPU to finish the step",
    "exchange": "the exchange of the step's numbers",
    "checkpoint": "saving the checkpoint",
    "validation": "validation",
    "finish": "writing the run's last files",
    "ended": "its end",
}
_NUMBER = {phase: number for number, phase in enumerate(PHASES)}
_NAMES = tuple(PHASES)
_IN_NO_STEP = ("start", "finish", "ended")
# Phases that end within --collective_timeout on a GPU unless a collective hangs. Reading data, saving and validation
# may take longer for reasons of their own.
_ENDS_SOON = ("barrier", "schedule", "forward", "backward", "synchronise", "optimizer", "device", "exchange")
_PLACE = struct.Struct("<qQd")  # step, number of the phase, moment by the monotonic clock
_BEAT = struct.Struct("<q")
_WHO = struct.Struct("<q64s")  # process, machine
_BEAT_AT, _WHO_AT, _SIZE = _PLACE.size, _PLACE.size + _BEAT.size, _PLACE.size + _BEAT.size + _WHO.size


class ProgressFile:
    """This rank's file. If the folder cannot hold it (a full disk), the run continues without one."""

    def __init__(self, directory: Path, rank: int):
        self.path = path_of(directory, rank)
        self._step, self._beats, self._map = 0, 0, None
        with contextlib.suppress(OSError), self.path.open("wb+", buffering=0) as file:
            file.write(bytes(_SIZE))  # taken from the disk now: a hole in a mapped file would end the process later
            self._map = mmap.mmap(file.fileno(), _SIZE)
            _WHO.pack_into(self._map, _WHO_AT, os.getpid(), socket.gethostname().encode()[:64])
        self.enter("start", 0)

    def enter(self, phase: str, step: int | None = None) -> None:
        """Note that this rank is now in `phase`, a key of PHASES, of `step`, counted from 1. None: the same step."""
        if step is not None:
            self._step = step
        if self._map is not None:
            _PLACE.pack_into(self._map, 0, self._step, _NUMBER[phase], time.monotonic())

    def beat(self) -> None:
        """Show once more that this process runs."""
        self._beats += 1
        if self._map is not None:
            _BEAT.pack_into(self._map, _BEAT_AT, self._beats)

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)


_mine: ProgressFile | None = None


def begin(directory: Path, rank: int) -> None:
    """Keep this process's progress file from now on."""
    global _mine
    _mine = ProgressFile(directory, rank)


def enter(phase: str, step: int | None = None) -> None:
    """Call `ProgressFile.enter` of this process's file, if there is one."""
    if _mine is not None:
        _mine.enter(phase, step)


def end(is_good: bool) -> None:
    """Note that this rank ends by itself. After a good end its file is removed."""
    enter("ended")
    if _mine is not None and is_good:
        _mine.remove()


def path_of(directory: Path, rank: int) -> Path:
    return directory / f".rank{rank}.progress"


@dataclass(frozen=True)
class Place:
    """The content of a progress file."""

    rank: int
    step: int
    phase: str
    since_s: float  # by the clock of its machine
    beats: int
    process: int
    machine: str

    @property
    def words(self) -> str:
        """Name the place."""
        return PHASES[self.phase] if self.phase in _IN_NO_STEP else f"{PHASES[self.phase]} of step {self.step}"

    @property
    def is_here(self) -> bool:
        """Return whether its process and clock are those of this machine."""
        return self.machine == socket.gethostname()

    @property
    def is_alive(self) -> bool:
        """Return whether the process lives. A zombie does not; of another machine nothing is known."""
        return not self.is_here or is_process_alive(self.process)


def read_place(directory: Path, rank: int) -> Place | None:
    """Read where a rank is. None: its file is missing or damaged."""
    try:
        content = read_regular(path_of(directory, rank))
        step, phase, since_s = _PLACE.unpack_from(content, 0)
        beats = _BEAT.unpack_from(content, _BEAT_AT)[0]
        process, machine = _WHO.unpack_from(content, _WHO_AT)
        return Place(rank, step, _NAMES[phase], since_s, beats, process, machine.rstrip(b"\0").decode(errors="replace"))
    except (OSError, struct.error, IndexError):  # IndexError: it names no phase
        return None


def steps_done(directory: Path) -> int:
    """Return the optimizer steps that the start before had done, by rank 0's progress file; 0 where there is none."""
    place = read_place(directory, 0)
    if place is None or place.phase in ("start", "ended"):  # a rank that ended itself wrote all its rows
        return 0
    return place.step if _NUMBER[place.phase] >= _NUMBER["exchange"] else max(0, place.step - 1)


def own_place(directory: Path, rank: int) -> str:
    """Name the place where this rank is, for the end of a sentence."""
    place = read_place(directory, rank)
    return "an unknown place" if place is None else _with_seconds(place)


def missing_ranks(directory: Path, world_size: int, rank: int) -> str | None:
    """Describe the ranks that block this one: the dead, else the stopped, else those behind. None: there is none."""
    return gone_ranks(directory, world_size, rank) or _ranks_behind(directory, world_size, rank)


def gone_ranks(directory: Path, world_size: int, rank: int) -> str | None:
    """Describe the ranks that run no more: the dead, else the stopped, else one that ended itself. None: all run."""
    others = _others(directory, world_size, rank)
    dead = [place for place in others if place.phase != "ended" and not place.is_alive]
    if dead:
        return "; ".join(f"rank {place.rank} is dead, its last sign was from {place.words}" for place in dead) + (
            " (killed from outside: if the kernel did it for lack of memory, which dmesg tells, give a smaller "
            "--micro_batch_size_per_gpu)"
        )
    stopped = [place for place in others if place.is_here and is_process_stopped(place.process)]
    if stopped:
        return "; ".join(
            f"rank {place.rank} is stopped (SIGSTOP): it is in {_with_seconds(place)}" for place in stopped
        )
    ended = [place for place in others if place.phase == "ended"]
    if ended:
        return f"rank {ended[0].rank} has ended itself, its own message says why"
    return None


def signs_of_life(directory: Path, world_size: int, rank: int) -> dict[int, int]:
    """Return how often each other rank of this machine has shown that it runs. It lived when its number grew."""
    return {place.rank: place.beats for place in _others(directory, world_size, rank) if place.is_here}


def _others(directory: Path, world_size: int, rank: int) -> list[Place]:
    places = [read_place(directory, other) for other in range(world_size) if other != rank]
    return [place for place in places if place is not None]


def _ranks_behind(directory: Path, world_size: int, rank: int) -> str | None:
    mine, others = read_place(directory, rank), _others(directory, world_size, rank)
    behind = [place for place in others if mine is not None and _order(place) < _order(mine)]
    if behind:
        last = min(map(_order, behind))
        return "; ".join(f"rank {place.rank} is in {_with_seconds(place)}" for place in behind if _order(place) == last)
    return None


def longest_waiting_at_same_place(directory: Path, world_size: int, rank: int) -> str | None:
    """Describe the rank that has stood longest at the place where this one is, of the ranks of this machine.

    A collective can time out with no rank missing: one rank may be in forward while the others wait in backward.
    """
    mine, places = read_place(directory, rank), [read_place(directory, other) for other in range(world_size)]
    level = [place for place in places if mine and place and place.is_here and _order(place) == _order(mine)]
    level = sorted((place for place in level if place.rank != rank), key=lambda place: place.since_s)
    return f"no rank is behind, and rank {level[0].rank} is in {_with_seconds(level[0])}" if level else None


def _order(place: Place) -> tuple[bool, int, int]:
    """Return how far a rank has come. Inside a step the phases of micro batches alternate: they count as one."""
    number = _NUMBER[place.phase]
    if _NUMBER["schedule"] <= number <= _NUMBER["backward"]:
        number = _NUMBER["schedule"]
    return place.phase == "finish", place.step, number


def _with_seconds(place: Place) -> str:
    return f"{place.words} since {time.monotonic() - place.since_s:.0f} s" if place.is_here else place.words


def is_process_alive(process: int) -> bool:
    """Return whether this machine runs the process. A zombie is not alive, nor is one that the kernel takes apart."""
    return _status(process) not in (None, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD) and not _is_exiting(process)


def is_process_stopped(process: int) -> bool:
    """Return whether it was sent SIGSTOP, or is held by a debugger."""
    return _status(process) in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


def _is_exiting(process: int) -> bool:
    """Return whether Linux has begun to end it. Its connections break before it is listed as a zombie."""
    try:
        fields = (PROCESSES / str(process) / "stat").read_text(errors="replace").rpartition(")")[2].split()
        return bool(int(fields[6]) & EXITING)
    except (OSError, ValueError, IndexError):  # gone meanwhile; no Linux
        return False


def _stopped_words(process: int) -> str | None:
    """Say in which state a stopped process is, with the letter that ps shows. None: it is not stopped."""
    return {
        psutil.STATUS_STOPPED: f"is stopped (state T: SIGSTOP or Ctrl-Z; kill -CONT {process} lets it go on)",
        psutil.STATUS_TRACING_STOP: "is held by a debugger (state t)",
    }.get(_status(process))


def _status(process: int) -> str | None:
    try:
        return psutil.Process(process).status()
    except psutil.Error:
        return None


class Watch:
    """Show in a thread that this process runs, and end it when another rank of this machine does not.

    The timeouts of collectives find most of what can go wrong. They find nothing where the host waits for a CUDA device
    or for a group that another library made, so this thread looks too: this rank has been at one place for `timeout_s`,
    and for as long another one is dead or has not run at all. Only time in which this process itself ran counts: a job
    that was suspended as a whole continues.

    With `is_cuda` this rank's own place is enough. NCCL's own timeout ends the process by SIGABRT, without a mark and
    without a reason, so it is set later than this one. The first step of a start is left out, because it compiles.

    A rank that is stopped is said to be so after a few seconds, once, by the lowest rank of its machine that runs.
    """

    def __init__(
        self,
        directory: Path,
        rank: int,
        world_size: int,
        timeout_s: float,
        on_stuck: Callable[[str], None],
        is_cuda: bool = False,
        on_stopped: Callable[[str], None] = say_if_read,
    ):
        self._is_cuda, self._timeout_s, self._on_stopped = is_cuda, timeout_s, on_stopped
        self._said_stopped: set[int] = set()  # ranks that all know of as stopped, until they continue
        self._first_step: int | None = None
        self._directory, self._rank, self._world_size = directory, rank, world_size
        # A beat before the collectives' own timeout: after it, nobody can tell which collective it was. Three beats
        # pass until this rank and then the others have been seen twice at the same place.
        self._patience_s = max(timeout_s - 4 * BEAT_S, timeout_s / 2)
        self._on_stuck = on_stuck
        self._still_s: dict[int, float] = {}  # rank -> seconds in which nothing changed
        self._seen: dict[int, tuple] = {}
        threading.Thread(target=self._run, name="watch-ranks", daemon=True).start()

    def _run(self) -> None:
        before_s = time.monotonic()
        while True:
            time.sleep(BEAT_S)
            if _mine is not None:
                _mine.beat()
            now_s = time.monotonic()
            stuck = self.look(min(now_s - before_s, 2 * BEAT_S))
            before_s = now_s
            if stuck is not None:
                self._on_stuck(stuck)

    def look(self, seconds: float) -> str | None:
        """Count `seconds` more. Returns the sentence about a rank that has been missing for too long, or None."""
        mine = read_place(self._directory, self._rank)
        if mine is None or mine.phase == "ended":
            return None
        self._count(self._rank, (mine.step, mine.phase, mine.since_s), seconds)
        if self._first_step is None and mine.phase in _ENDS_SOON:
            self._first_step = mine.step
        if self._still_s[self._rank] < BEAT_S:  # it makes progress: it waits for no rank, and no file need be read
            self._said_stopped.clear()
            self._seen = {self._rank: self._seen[self._rank]}
            return None
        here = []
        for rank in range(self._world_size):
            place = None if rank == self._rank else read_place(self._directory, rank)
            if place is None or not place.is_here or place.phase == "ended":
                continue
            here.append(place)
            self._count(rank, (place.beats, place.process) if place.is_alive else ("dead",), seconds)
            if min(self._still_s[rank], self._still_s[self._rank]) >= self._patience_s:
                missing = missing_ranks(self._directory, self._world_size, self._rank)
                return missing or f"rank {rank} shows no sign of life: it is in {_with_seconds(place)}"
        self._say_who_is_stopped(here)
        return self._look_at_own_device(mine)

    def _say_who_is_stopped(self, others: list[Place]) -> None:
        """Say which of the other ranks of this machine are stopped, and when this one gives up. Once for each stop."""
        silent = [place for place in others if self._still_s[place.rank] >= NOTICE_S]
        self._said_stopped &= {place.rank for place in silent}
        stopped = {place: words for place in silent if (words := _stopped_words(place.process))}
        moving = {self._rank, *(place.rank for place in others)} - {place.rank for place in silent}
        new = [place for place in stopped if place.rank not in self._said_stopped]
        self._said_stopped |= {place.rank for place in new}
        if self._rank > min(moving):
            return
        for place in new:
            left_s = self._patience_s - min(self._still_s[place.rank], self._still_s[self._rank])
            self._on_stopped(
                f"rank {place.rank} does not move: its process {place.process} {stopped[place]}, in "
                f"{_with_seconds(place)}; rank {self._rank} waits for it in "
                f"{own_place(self._directory, self._rank)}, and gives up in about {left_s:.0f} s "
                f"(--collective_timeout {self._timeout_s:g})"
            )

    def _look_at_own_device(self, mine: Place) -> str | None:
        """Return the sentence about a GPU of this rank that does not finish, or None."""
        if not self._is_cuda or mine.phase not in _ENDS_SOON:
            return None
        if mine.step == self._first_step or self._still_s[self._rank] < self._patience_s:
            return None
        return missing_ranks(self._directory, self._world_size, self._rank) or (
            f"rank {self._rank} makes no progress and no rank is behind it: a collective that not every rank called "
            "alike, or a kernel that does not end"
        )

    def _count(self, rank: int, state: tuple, seconds: float) -> None:
        is_same = self._seen.get(rank) == state
        self._still_s[rank] = self._still_s.get(rank, 0.0) + seconds if is_same else 0.0
        self._seen[rank] = state
