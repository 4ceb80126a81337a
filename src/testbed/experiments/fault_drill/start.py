"""One start of the drilled run: its processes, what can be seen of it from outside, the signal, and its end.

Its processes are found by a variable in their environment, which children inherit and no program removes.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from testbed.distributed import processes
from testbed.distributed.launch import read_launch
from testbed.experiments.fault_drill.faults import LAUNCH, METRICS, NUM_RANKS, WEIGHTS, Moment
from testbed.run_files import CHECKPOINTS
from testbed.run_files import METRICS as METRICS_FILE
from testbed.run_files import WEIGHTS as WEIGHTS_FILES

POLL_S = 0.002  # a save of nano takes about a hundred times as long
SEARCH_EVERY_S = 0.25
MARKER = "TESTBED_FAULT_DRILL"
_TELLING = re.compile(r"error: |^rank \d|resum|checkpoint|skip|signal|Error\b", re.IGNORECASE)
_NOISE = re.compile(r"^\s*(raise |torch\.distributed\.elastic|File )|RUN_COMPLETE")
_BEGINS = "starting: loading PyTorch"  # the first that gpt2.py says, on rank 0
_SAVE = re.compile(r"(\.?)step_0*(\d+)(\.tmp)?")


class Timeline:
    """Note when each event is first seen in a run's folder, in seconds since the start. What was there before is no
    event."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.started_s = time.perf_counter()
        self.seen: dict[str, float] = {}
        self._before = self._present()
        self.seen[LAUNCH] = 0.0

    @property
    def seconds(self) -> float:
        """Return the seconds since the start."""
        return time.perf_counter() - self.started_s

    def look(self) -> None:
        """Note what is new."""
        now_s = self.seconds
        for event in self._present() - self._before - self.seen.keys():
            self.seen[event] = now_s

    def saving(self) -> bool:
        """Return whether a checkpoint is being written now."""
        return any(found[1] for name in self._checkpoints() if (found := _SAVE.fullmatch(name)))

    def newest_saved(self) -> int | None:
        """Return the last step whose checkpoint has its final name."""
        steps = [int(found[2]) for name in self._checkpoints() if (found := _SAVE.fullmatch(name)) and not found[1]]
        return max(steps, default=None)

    def _present(self) -> set[str]:
        present = set()
        for name in self._checkpoints():
            if found := _SAVE.fullmatch(name):
                present.add(f"save {found[2]}")
                if not found[1]:
                    present.add(f"saved {found[2]}")
        if (self.directory / METRICS_FILE).exists():
            present.add(METRICS)
        if (self.directory / WEIGHTS_FILES[0]).exists():
            present.add(WEIGHTS)
        return present

    def _checkpoints(self) -> list[str]:
        try:
            return os.listdir(self.directory / CHECKPOINTS)  # noqa: PTH208 - names, 500 times a second
        except OSError:
            return []


class StartedRun:
    """Hold the processes of one start. They write what they say to `log`."""

    def __init__(
        self,
        commands: Sequence[tuple[list[str], dict[str, str]]],
        environment: Mapping[str, str],
        timeline: Timeline,
        log: Path,
        file_size_limit: int | None = None,
    ):
        self.timeline = timeline
        self.log = log
        self.marker = environment[MARKER]
        self.program = next(word for word in commands[0][0] if word.endswith(".py"))
        self.processes = []
        self._ranks: dict[int, int] = {}  # rank -> process
        self._next_search_s = 0.0
        with log.open("ab") as output:
            for command, variables in commands:
                process = processes.start(command, output, env={**environment, **variables})
                self.processes.append(process)
                if file_size_limit is not None:
                    psutil.Process(process.pid).rlimit(psutil.RLIMIT_FSIZE, (file_size_limit, file_size_limit))

    @property
    def has_ended(self) -> bool:
        """Return whether what was started has ended. A launcher that was killed leaves ranks behind."""
        return None not in self.exit_codes

    @property
    def exit_codes(self) -> list[int | None]:
        return [process.poll() for process in self.processes]

    def wait_for(self, moment: Moment, wait_s: float, limit_s: float) -> bool:
        """Wait until `wait_s` seconds after the moment's event; False when the run ended before."""
        while not self.has_ended and (now_s := self.timeline.seconds) < limit_s:
            self.timeline.look()
            seen_s = self.timeline.seen.get(moment.after)
            if seen_s is not None and now_s >= seen_s + wait_s:
                return True
            self._find_ranks()
            time.sleep(POLL_S)
        return False

    def send(self, target: str, number: signal.Signals, limit_s: float) -> list[int]:
        """Send the signal. Returns the processes that got it; a rank that is not there yet is waited for."""
        while not (pids := self._pids(target)) and not self.has_ended and self.timeline.seconds < limit_s:
            self._find_ranks()
            time.sleep(POLL_S)
        reached = []
        for pid in pids:
            # one that has ended takes every signal until its exit code is read
            with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
                if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                    os.kill(pid, number)
                    reached.append(pid)
        return reached

    def _pids(self, target: str) -> list[int]:
        launchers = [process.pid for process in self.processes if process.poll() is None]
        if target == "launcher":
            return launchers
        if target == "everything":
            return list(dict.fromkeys([*launchers, *(process.pid for process in marked_processes(self.marker))]))
        return [pid for rank, pid in self._ranks.items() if target in ("all ranks", f"rank {rank}")]

    def _find_ranks(self) -> None:
        """Look for the ranks until both are known: in advance, because the search takes as long as a small save."""
        if len(self._ranks) == NUM_RANKS or self.timeline.seconds < self._next_search_s:
            return
        for process in marked_processes(self.marker):
            with contextlib.suppress(psutil.Error, ValueError):
                launch = read_launch(process.environ())
                if launch.is_distributed and self.program in process.cmdline():
                    self._ranks[launch.rank] = process.pid
        self._next_search_s = self.timeline.seconds + SEARCH_EVERY_S

    def wait_for_end(self, limit_s: float, poll_s: float = 0.02) -> list[str]:
        """Wait until no process of the start is left. Returns those that were, in words, and ends them.

        Args:
            poll_s: how often events are looked for; only the timeline of a reference run needs many.
        """
        deadline_s = time.perf_counter() + limit_s
        while time.perf_counter() < deadline_s:
            self.timeline.look()
            if self.has_ended and not marked_processes(self.marker):
                return []
            time.sleep(0.05 if self.has_ended else poll_s)  # the search for processes is dear
        left = [in_words(process) for process in marked_processes(self.marker)]
        end_marked(self.marker)
        for process in self.processes:
            process.wait(timeout=10)
        return left

    def says(self, words: re.Pattern[str]) -> bool:
        """Return whether the log holds these words."""
        return words.search(self.log.read_text(encoding="utf-8", errors="replace")) is not None

    def times_begun(self) -> int:
        """Return how often rank 0 began: more than once where the launcher started the ranks again."""
        return self.log.read_text(encoding="utf-8", errors="replace").count(_BEGINS)

    def said(self, most: int = 8) -> list[str]:
        """Return the lines of the log that tell how it went."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        telling = [line.strip()[:300] for line in lines if _TELLING.search(line) and not _NOISE.search(line)]
        return list(dict.fromkeys(telling))[-most:]


def marked_processes(marker: str) -> list[psutil.Process]:
    """Return every living process that was started under the marker, or whose ancestor was."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            is_ours = process.environ().get(MARKER, "").startswith(marker)
            if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def end_marked(marker: str) -> None:
    """Kill what is left."""
    deadline_s = time.perf_counter() + 10
    while (left := marked_processes(marker)) and time.perf_counter() < deadline_s:
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(0.05)


def in_words(process: psutil.Process) -> str:
    """Return `python src/gpt2.py (1234, stopped)`, as far as it can still be asked."""
    with contextlib.suppress(psutil.Error):
        return f"{' '.join(process.cmdline()[:4])[:120]} ({process.pid}, {process.status()})"
    return str(process.pid)
