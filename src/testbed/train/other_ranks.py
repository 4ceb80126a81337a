"""Watch the other ranks, and find out which one blocks this one: dead, stopped or behind."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from testbed.distributed import process_group, watchdog
from testbed.distributed.launch import Launch
from testbed.distributed.rendezvous import StartupWatch
from testbed.run_folder import run_lock

SURE_WITHIN_S = 3 * watchdog.BEAT_S  # a rank that lives shows it once a second


class OtherRanks:
    """Knowledge of the other ranks, from their progress files and, until they train, from their processes.

    Args:
        timeout_s: --collective_timeout.
        end_run: ends this process with a reason, from a thread that watches.

    Attributes:
        directory: the run's folder, once this start has claimed it.
        startup: from when the ranks have joined until they train.
    """

    def __init__(self, launch: Launch, timeout_s: float, end_run: Callable[[str], None]):
        self.launch, self._timeout_s, self._end_run = launch, timeout_s, end_run
        self.directory: Path | None = None
        self.startup: StartupWatch | None = None

    def watch_startup(self, processes: list[tuple[str, int]]) -> None:
        """Watch the other ranks' processes until the ranks train. `processes`: `rendezvous.this_process` of each."""
        self.startup = StartupWatch(self.launch, processes, self._timeout_s, self.end_for_missing_rank).begin()

    def claim_directory(self, directory: Path, is_cuda: bool) -> None:
        """Hold the run's folder, start this rank's progress file there, and the thread that watches the others'."""
        self.directory = directory
        run_lock.hold(directory)
        folder, rank = self.progress_folder, self.launch.rank
        watchdog.begin(folder, rank)
        if self.launch.is_distributed:
            world_size, timeout_s = self.launch.world_size, self._timeout_s
            watchdog.Watch(folder, rank, world_size, timeout_s, self.end_for_stuck_rank, is_cuda=is_cuda)

    def arm_timeouts(self) -> None:
        """Let no rank wait longer for another one than --collective_timeout from now on, whatever that one does."""
        process_group.limit_waiting(self._timeout_s)
        self.end_startup_watch()
        self.startup = None

    def end_startup_watch(self) -> None:
        """Stop watching the processes of ranks that start. Nothing else ends."""
        if self.startup is not None:
            self.startup.close()

    def end_for_stuck_rank(self, missing: str) -> None:
        """End from the watching thread: a rank is dead or stopped, and this one would wait without end."""
        self._end_run(f"{missing}; {self.waited()}, longer than --collective_timeout allows")

    def end_for_missing_rank(self, missing: str) -> None:
        """End from the watching thread: a rank died or was stopped before the ranks train."""
        self._end_run(f"{missing}; {self.waited()}")

    @property
    def progress_folder(self) -> Path:
        """Folder of the ranks' progress files: the held one, not one that took its name."""
        assert self.directory is not None
        return run_lock.by_handle(self.directory)

    def missing(self, describe: Callable[[Path, int, int], str | None] = watchdog.missing_ranks) -> str | None:
        """Describe the ranks that block this one, or return None where none is known."""
        if not self.launch.is_distributed:
            return None
        if self.startup is not None and (dead := self.startup.dead_rank()):
            return dead
        return describe(self.progress_folder, self.launch.world_size, self.launch.rank) if self.directory else None

    def blocking(self) -> str:
        """Describe the rank for which a collective broke or timed out."""
        return (
            self._wait_for_proof_of_death() or self.missing(watchdog.longest_waiting_at_same_place) or self._unknown()
        )

    def waited(self) -> str:
        """Say where this rank waited."""
        if self.directory is None:
            return f"rank {self.launch.rank} waited for the others to start"
        return f"rank {self.launch.rank} waited in {watchdog.own_place(self.progress_folder, self.launch.rank)}"

    def _wait_for_proof_of_death(self) -> str | None:
        """Look until a rank is known to be gone, or until each of the others has shown that it lives.

        A connection breaks a moment before the kernel shows that the process at its other end is dead. Until then that
        rank seems to be where it was last, perhaps behind.
        """
        lived = self._signs_of_life()
        deadline_s = time.monotonic() + SURE_WITHIN_S
        while (gone := self.missing(watchdog.gone_ranks)) is None and time.monotonic() < deadline_s:
            lives = self._signs_of_life()
            if lived and all(lives.get(rank, beats) > beats for rank, beats in lived.items()):
                break
            time.sleep(0.05)
        return gone or self.missing()

    def _signs_of_life(self) -> dict[int, int]:
        if self.directory is None:
            return {}
        return watchdog.signs_of_life(self.progress_folder, self.launch.world_size, self.launch.rank)

    def _unknown(self) -> str:
        if self.launch.rank > 0 and self.directory is None and not process_group.is_store_held():
            return "rank 0, or the launcher that holds the store where the ranks find each other, is gone"
        other = f"rank {1 - self.launch.rank}" if self.launch.world_size == 2 else "another rank"
        return f"{other} is gone or does not answer"
