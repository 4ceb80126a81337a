"""Runs that are stopped, killed or failed while a test looks on."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

from support.forked import Forked
from support.programs import TINY_RUN, data_flags, python_command
from support.settings import typed
from testbed.distributed import watchdog
from testbed.distributed.launch import Launch
from testbed.distributed.rendezvous import free_port
from testbed.train import ending as run_ending
from testbed.train.other_ranks import OtherRanks

ENDLESS = ["--max_train_steps", "100000", "--epochs", "99999", "--global_batch_size", "16", "--max_val_steps", "0"]
FAILED, PREEMPTED, COMPLETE = "RUN_FAILED.txt", "RUN_PREEMPTED.txt", "RUN_COMPLETE.txt"


def wait_for(is_so: Callable[[], bool], timeout_s: float = 20) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


class Started:
    """Processes of one run, what they say, and where their ranks are."""

    def __init__(self, folder: Path, commands: list[list[str]], environments: list[dict[str, str]]):
        self.folder, self.said = folder, folder.with_suffix(f".{time.monotonic_ns()}.txt")
        self.said.touch()
        self.processes = [
            self._start(command, variables) for command, variables in zip(commands, environments, strict=True)
        ]

    def _start(self, command: list[str], variables: dict[str, str]) -> subprocess.Popen | Forked:
        if command[:2] == python_command() and "PYTHONPATH" not in variables:
            return Forked(command[2:], variables, self.said)
        with self.said.open("a") as output:
            return subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, **variables})

    def wait_until(self, is_so: Callable[[], object], timeout_s: float = 150) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not is_so():
            assert time.monotonic() < deadline_s, f"waited in vain\n{self.text}"
            assert any(process.poll() is None for process in self.processes), self.text
            time.sleep(0.005)

    def is_at(self, step: int, phase: str | None = None, rank: int = 0) -> bool:
        place = watchdog.read_place(self.folder, rank)
        return place is not None and place.step >= step and phase in (None, place.phase)

    def process_of(self, rank: int) -> int | None:
        place = watchdog.read_place(self.folder, rank)
        return None if place is None else place.process

    def codes(self, timeout_s: float = 150) -> list[int]:
        deadline_s = time.monotonic() + timeout_s
        return [process.wait(max(0.1, deadline_s - time.monotonic())) for process in self.processes]

    @property
    def text(self) -> str:
        """All of it, but for the steps' lines: a test looks for what is said once."""
        return re.sub(r"^step .*\n", "", self.said.read_text(), flags=re.MULTILINE)

    def mark(self, name: str) -> str:
        there = {mark for mark in (FAILED, PREEMPTED, COMPLETE) if (self.folder / mark).exists()}
        assert there == {name}, self.text
        return (self.folder / name).read_text()


@contextlib.contextmanager
def started(folder: Path, commands: list[list[str]], environments: list[dict] | None = None) -> Iterator[Started]:
    run = Started(folder, commands, environments or [{} for _ in commands])
    try:
        yield run
    finally:
        for process in run.processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def ranks(folder: Path, flags: list[str], of_rank_1: tuple[str, ...] = (), **variables: str):
    """Two ranks without a launcher, so that each one's exit code is seen and nobody ends the other."""
    port = free_port()
    environments = [Launch(rank, rank, 2, 2).as_variables("127.0.0.1", port) | variables for rank in range(2)]
    commands = [[*python_command(), *flags], [*python_command(), *flags, *of_rank_1]]
    return started(folder, commands, environments)


def flags_of(files, folder: Path, *more: str) -> list[str]:
    return [*TINY_RUN, *data_flags(files), "--timing_warmup_steps", "1", "--checkpoint_path", str(folder), *more]


# --- without memory, and the rest


def ending_of(files, *flags: str) -> run_ending.RunEnding:
    """The ending of a run without its signals, which would be the test program's own."""
    arguments = [*TINY_RUN, *data_flags(files), "--micro_batch_size_per_gpu", "2", *flags]
    ending = object.__new__(run_ending.RunEnding)
    ending.settings = typed(arguments).settings
    ending.launch, ending.recorder = Launch(0, 0, 1, 1), None
    ending.checkpoints = ending.trackers = None
    ending.ranks = OtherRanks(ending.launch, 60, ending.end_from_thread)
    ending.signals = SimpleNamespace(agreed=0, number=0)
    return ending
