"""Add up, in memory, how long this rank is blocked in collectives and how long each phase takes of its own.

A rank that is slow comes last to a collective and hardly waits; the others wait for it. So a phase's own time, its time
by the clock without what this thread was blocked, names the slow rank where the phases themselves are equal, as under
DDP. No clocks of two ranks are compared.

**Blocked** is counted between two events of the training thread (a phase begins or ends, a collective is called or
back): the part in which a collective that had been called was not over, at most the time in which this thread did not
compute. What does not tell its end, as gloo's sends and receives, counts while this thread waits for it.

**Queued** is what Linux counts: the thread was ready to run and its core did something else (the second number of
`/proc/thread-self/schedstat`). Of own time, what is neither computed nor queued is a pause: a sleep, a disk, a device.

**Cost.** A collective costs CALL_S here, and a step PHASES_S. Where that is more than MOST_OF_A_STEP, steps are left
out, and no hook is registered in them. Then a watched step costs SWITCH_S more. All ranks watch the same steps.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from torch.distributed import distributed_c10d

from testbed.profiling.collective_log import ALL_RANKS, group_of, sizes_of
from testbed.profiling.step_clock import RECORDED_PHASES

BETWEEN = "between"  # from the end of a step to the beginning of the next one
ELSEWHERE = "elsewhere"  # in the step, in none of its phases: of a pipeline, its schedule
START_UP = "start_up"  # up to the first step
CALL_S = 170e-6  # CPU time, measured in steps, where it is four times what a loop of calls takes: docs/diagnosis.md
PHASES_S = 8e-4  # of a step: its phases, its sums, and to exchange them
SWITCH_S = 2e-3  # to register the hooks before a step and remove them after it; measured too
MOST_OF_A_STEP = 0.008
JOINING = "joining"  # parts of the start-up in which ranks wait for each other without collectives
NUMBER = "num_calls"  # of collectives in the step; it is exchanged with the sums


class QueueClock:
    """The seconds in which this thread was ready to run and did not. 0 where the system does not tell them."""

    def __init__(self) -> None:
        self._file: int | None = None
        with contextlib.suppress(OSError):
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        try:
            self()
        except (OSError, ValueError, IndexError):  # another kernel's form
            self.close()

    def __call__(self) -> float:
        return 0.0 if self._file is None else int(os.pread(self._file, 80, 0).split()[1]) / 1e9

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


class _Call:
    """A collective that this thread has called."""

    __slots__ = ("is_over", "is_under_way", "row")

    def __init__(self, row: list[float]):
        self.row = row
        self.is_under_way = self.is_over = False


_OWN, _CPU, _QUEUED = range(3)  # places in a phase's sums


def _by_phase(sums: dict[str, list[float]], place: int) -> dict[str, float]:
    """Return seconds by phase, and what was in none of them as elsewhere."""
    phases = (*RECORDED_PHASES, BETWEEN)
    elsewhere_s = sum(row[place] for name, row in sums.items() if name not in phases)
    found = {**{name: sums[name][place] if name in sums else 0.0 for name in phases}, ELSEWHERE: elsewhere_s}
    return {name: max(0.0, seconds) for name, seconds in found.items()}


class CollectiveWatch:
    """The sums of this rank. It is a receiver of `collective_log.receive_collectives`; one thread is watched.

    Attributes:
        totals: (collective, name of its group, phase) -> [number, bytes of inputs and outputs, seconds in the call,
            seconds blocked]. There are as many as kinds of collectives in each phase, however long the run.
        num_steps: steps that were watched.

    Args:
        is_limited: whether to leave out steps to stay within MOST_OF_A_STEP.
    """

    def __init__(self, is_limited: bool = True) -> None:
        self.totals: dict[tuple[str, str, str], list[float]] = {}
        self.num_steps = 0
        self._is_limited = is_limited
        self._switch: Callable[[bool], None] = lambda is_on: None
        self._num_calls, self._until_next = 0, 1  # 1: the next step is watched
        self._all_calls, self._all_steps_s = 0.0, 0.0
        self._lock = threading.Lock()
        self._thread = threading.get_ident()
        self._phase = START_UP
        self._sums: dict[str, list[float]] = {}
        self._blocked_s = self._calls_s = self._gc_s = self._gc_of_stretch_s = self._gc_cpu_s = 0.0
        self._num_open, self._open_since_s, self._open_s = 0, 0.0, 0.0
        self._last_row: list[float] | None = None
        self._gc_began: tuple[float, float] | None = None  # wall and CPU time
        self._began_s = self._now_s = time.perf_counter()
        self._now_cpu_s, self._now_open_s = time.thread_time(), 0.0
        self._closing = contextlib.ExitStack()
        self._queue_clock = self._closing.enter_context(contextlib.closing(QueueClock()))
        self._now_queued_s = self._queue_clock()
        gc.callbacks.append(self._on_gc)
        self._closing.callback(gc.callbacks.remove, self._on_gc)

    def close(self) -> None:
        """Stop counting garbage collections and new groups, and remove the hooks."""
        self._closing.close()
        self._switch(False)

    def enter_phase(self, name: str) -> None:
        """Begin a phase on the watched thread; the time since the last event is of the one before."""
        self._advance()
        self._phase = name

    @contextlib.contextmanager
    def joining(self) -> Iterator[None]:
        """Count what passes here to waiting for the ranks that start later. Of other threads nothing is counted."""
        if threading.get_ident() != self._thread:
            yield
            return
        phase = self._phase
        self.enter_phase(JOINING)
        try:
            yield
        finally:
            self.enter_phase(phase)

    def count_new_groups(self) -> None:
        """Count as joining what it takes to make a process group from now on: its ranks connect and wait in a store."""
        make = getattr(distributed_c10d, "_new_group_with_tag", None)  # PyTorch's own, which may be renamed
        if make is None:
            return

        @functools.wraps(make)
        def made(*arguments: Any, **named: Any) -> Any:
            with self.joining():
                return make(*arguments, **named)

        distributed_c10d._new_group_with_tag = made
        self._closing.callback(setattr, distributed_c10d, "_new_group_with_tag", make)

    def switch_by(self, switch: Callable[[bool], None]) -> None:
        """Take what registers the hooks (True) and removes them (False)."""
        self._switch = switch

    def enter(self, name: str, arguments: tuple) -> _Call | None:
        """Note that a collective is called. None: by another thread, such as one that writes a checkpoint."""
        if threading.get_ident() != self._thread:
            return None
        self._advance()
        self._num_calls += 1
        row = self.totals.setdefault((name, group_of(arguments) or ALL_RANKS, self._phase), [0, 0, 0.0, 0.0])
        row[0] += 1
        row[1] += sum(sizes_of(arguments))
        return _Call(row)

    def leave(self, event: str, call: _Call | None) -> None:
        """Note an event of a collective, "done" from any thread."""
        if call is None:
            return
        if event == "done":
            self._close(call)
            return
        before_s = self._now_s
        ran_s = self._advance()
        if event != "waits":
            call.row[2] += self._now_s - before_s
            if self._phase != BETWEEN:
                self._calls_s += ran_s
        if event != "started":
            self._open(call)

    def _open(self, call: _Call) -> None:
        """Count from now on what is waited for this collective."""
        self._last_row = call.row
        with self._lock:
            if not call.is_over:
                call.is_under_way = True
                if not self._num_open:
                    self._open_since_s = self._now_s
                self._num_open += 1

    def _close(self, call: _Call) -> None:
        with self._lock:
            call.is_over = True
            if call.is_under_way:
                self._num_open -= 1
                if not self._num_open:
                    self._open_s += time.perf_counter() - self._open_since_s

    def _advance(self) -> float:
        """Book the stretch since the last event: blocked, in garbage collection, or the phase's own.

        Returns:
            Its own seconds but those in which this thread waited for its core.
        """
        now_s, cpu_s, queued_s = time.perf_counter(), time.thread_time(), self._queue_clock()
        with self._lock:
            open_s = self._open_s + (now_s - self._open_since_s if self._num_open else 0.0)
        wall_s, computed_s = now_s - self._now_s, cpu_s - self._now_cpu_s
        blocked_s = max(0.0, min(open_s - self._now_open_s, wall_s - computed_s))
        if blocked_s and self._last_row is not None:
            self._last_row[3] += blocked_s
        own_s = wall_s - blocked_s - self._gc_of_stretch_s
        own_cpu_s = computed_s - self._gc_cpu_s  # what waited for the core in a collection is of the collection
        waited_s = min(queued_s - self._now_queued_s, max(0.0, own_s - own_cpu_s))
        phase = self._phase
        sums = self._sums.get(phase)
        if sums is None:
            sums = self._sums[phase] = [0.0, 0.0, 0.0]
        sums[_OWN] += own_s
        sums[_CPU] += own_cpu_s
        sums[_QUEUED] += waited_s
        if phase != BETWEEN:
            self._blocked_s += blocked_s
        self._gc_s += self._gc_of_stretch_s
        self._gc_of_stretch_s = self._gc_cpu_s = 0.0
        self._now_s, self._now_cpu_s, self._now_queued_s, self._now_open_s = now_s, cpu_s, queued_s, open_s
        return own_s - waited_s

    def _on_gc(self, moment: str, _: dict[str, Any]) -> None:
        if threading.get_ident() != self._thread:
            return
        now = time.perf_counter(), time.thread_time()
        if moment == "stop" and self._gc_began is not None:
            self._gc_of_stretch_s += now[0] - self._gc_began[0]
            self._gc_cpu_s += now[1] - self._gc_began[1]
        self._gc_began = now if moment == "start" else None

    def begin_steps(self, startup_s: float) -> float:
        """End the start-up; return its own seconds on this rank, without those in which it waited for others.

        Args:
            startup_s: from the program's start to now. What came before this watch counts as own time.
        """
        self.enter_phase(BETWEEN)
        before_watch_s = startup_s - (self._now_s - self._began_s)
        own_s = max(0.0, before_watch_s) + self._sums.get(START_UP, [0.0])[_OWN]
        self._begin_sums()
        return own_s

    def _begin_sums(self) -> None:
        self._sums = {}
        self._blocked_s = self._calls_s = self._gc_s = 0.0
        self._num_calls = 0

    def take_step(self) -> dict[str, float]:
        """End a step; return its sums by name, with what came before it. Empty: it was not watched."""
        self.enter_phase(BETWEEN)
        found = {}
        if self._until_next == 1:
            computed_s = _by_phase(self._sums, _CPU)
            found = {
                **{f"own_{name}_s": seconds for name, seconds in _by_phase(self._sums, _OWN).items()},
                **{f"cpu_{name}_s": computed_s[name] for name in RECORDED_PHASES},
                **{f"queued_{name}_s": seconds for name, seconds in _by_phase(self._sums, _QUEUED).items()},
                "calls_s": max(0.0, self._calls_s),
                "blocked_s": self._blocked_s,
                "gc_s": self._gc_s,
                NUMBER: float(self._num_calls),
            }
            self.num_steps += 1
        else:
            self._until_next -= 1
            if self._until_next == 1:  # what comes before the next step is counted with it
                self._switch(True)
                self._advance()  # but not this
        self._begin_sums()
        return found

    def limit_cost(self, num_calls: float, step_time_s: float) -> None:
        """Decide after a watched step how many steps later the next one is. All ranks give the same numbers."""
        self._all_calls += num_calls
        self._all_steps_s += step_time_s
        calls_s = self._all_calls * CALL_S + self.num_steps * PHASES_S
        allowed_s = self._all_steps_s * MOST_OF_A_STEP
        self._until_next = 1
        if self._is_limited and calls_s > allowed_s > 0:
            self._until_next = math.ceil((calls_s + self.num_steps * SWITCH_S) / allowed_s)
            self._switch(False)

    def rows(self, axes_of_group: Callable[[str], str]) -> list[dict[str, Any]]:
        """Return `totals` as the metrics file has them: groups along the same axes of the mesh together.

        Args:
            axes_of_group: the axes of the group with this name.
        """
        sums: dict[tuple[str, str, str], list[float]] = {}
        for (name, group, phase), row in self.totals.items():
            of_axes = sums.setdefault((name, axes_of_group(group), phase), [0, 0, 0.0, 0.0])
            of_axes[:] = map(sum, zip(of_axes, row, strict=True))
        names = ("num", "bytes", "call_s", "blocked_s")
        return [
            {"name": name, "axes": axes, "phase": phase, **dict(zip(names, row, strict=True))}
            for (name, axes, phase), row in sorted(sums.items())
        ]
