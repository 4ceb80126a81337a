"""The clock of an optimizer step and its phases.

A strategy marks phases with `phase("forward")`, `phase("backward")`, `phase("synchronise")`, `phase("optimizer")`.
Marks cost microseconds, so every step has them. They are the ranges in a torch.profiler trace and, with --profile_mode,
in Nsight.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Protocol, TypeVar

import torch
from torch.profiler import record_function

from testbed.distributed import watchdog

Read = TypeVar("Read")

# phase -> the name of its range in a trace; these are the names that earlier tools look for
RANGES = {
    "data_wait": "train/dataload",
    "forward": "train/forward",
    "backward": "train/backward",
    "synchronise": "train/synchronise",
    "optimizer": "train/optimizer_step",
    "schedule": "train/schedule",  # of a pipeline: the passes inside it are phases of their own, the rest is its bubble
}
STEP_RANGE = "train/step"
RECORDED_PHASES = ("data_wait", "forward", "backward", "synchronise", "optimizer")

_running: StepClock | None = None


def synchronize(device: torch.device) -> None:
    """Wait until the device is done. On the CPU it is when a call returns."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class PhaseWatch(Protocol):
    """What is told of the phases; collective_watch.py has it."""

    def enter_phase(self, name: str) -> None:
        """Begin a phase of the step; "step" is what is in none."""

    def take_step(self) -> dict[str, float]:
        """End the step and return its sums, by name."""

    def limit_cost(self, num_calls: float, step_time_s: float) -> None:
        """Take what all ranks know of the step, to decide which steps it watches."""


class StepClock:
    """Times one optimizer step: data wait, forward, backward, synchronisation and update.

    Used as `with clock:`; afterwards `step_time_s`, `cpu_s` with the CPU time of all threads of this process in it, and
    `phase_s` with the seconds of each phase. The device is synchronised on both sides. Phases are exclusive and add up
    to at most the step; a pipeline's bubble and Python between phases are in none.

    On CUDA, events in the device's stream mark the phases, so nothing waits for them.

    A `watch` is told of the phases; `watched` then holds its sums of the step, by name.
    """

    def __init__(self, device: torch.device, emits_nvtx: bool = False, watch: PhaseWatch | None = None):
        self.device, self.watch = device, watch
        self.watched: dict[str, float] = {}
        self.emits_nvtx = emits_nvtx and device.type == "cuda"
        self.step_time_s = self.cpu_s = 0.0
        self.began_ns = self.ended_ns = 0  # of the last step, since 1970
        self.phase_s = dict.fromkeys(RANGES, 0.0)
        self._open: list[str] = []
        self._marks: list[tuple[str | None, float | torch.cuda.Event]] = []  # what begins at each moment

    @property
    def data_wait_s(self) -> float:
        return self.phase_s["data_wait"]

    def __enter__(self) -> StepClock:
        global _running
        synchronize(self.device)
        _running = self
        self._open, self._marks = [], []
        self._step_range = named_range(STEP_RANGE, self.emits_nvtx)
        self._step_range.__enter__()
        self.began_ns = time.time_ns()  # noqa: TID251 - compared with PyTorch's flight recorder, which has this clock
        self._start_s, self._start_cpu_s = time.perf_counter(), time.process_time()
        self._mark()
        return self

    def data_wait(self, read: Callable[[int], Read], step: int) -> Read:
        """Call `read(step)` and count its time as waiting for data."""
        with self.phase("data_wait"):
            return read(step)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside to the phase `name`, a key of RANGES."""
        with named_range(RANGES[name], self.emits_nvtx):
            self._open.append(name)
            watchdog.enter(name)
            self._mark()
            try:
                yield
            finally:
                self._open.pop()
                if self._open:  # back in the schedule, which may wait for another stage
                    watchdog.enter(self._open[-1])
                self._mark()

    def _mark(self) -> None:
        if self.watch is not None:
            self.watch.enter_phase(self._open[-1] if self._open else "step")
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((self._open[-1] if self._open else None, event))
        else:
            self._marks.append((self._open[-1] if self._open else None, time.perf_counter()))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        global _running
        self._mark()
        if self.device.type == "cuda":  # the host runs ahead: a hung kernel of any phase is waited for here
            watchdog.enter("device")
        synchronize(self.device)
        self.step_time_s = time.perf_counter() - self._start_s
        self.ended_ns = time.time_ns()  # noqa: TID251
        self.cpu_s = time.process_time() - self._start_cpu_s
        if self.watch is not None:
            self.watched = self.watch.take_step()
        self._step_range.__exit__(kind, error, traceback)  # after the device: an earlier end would miss its kernels
        _running = None
        self.phase_s = dict.fromkeys(RANGES, 0.0)
        for (name, begin), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            if name is not None:
                self.phase_s[name] += _seconds_between(begin, end)


def _seconds_between(begin: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    if isinstance(begin, float):
        assert isinstance(end, float), "one device marks all moments of a step"
        return end - begin
    assert not isinstance(end, float), "one device marks all moments of a step"
    return begin.elapsed_time(end) / 1000


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Mark a part of the step whose clock is running; outside a step (validation, a test) nothing is measured."""
    if _running is None:
        yield
        return
    with _running.phase(name):
        yield


@contextlib.contextmanager
def named_range(name: str, emits_nvtx: bool = False) -> Iterator[None]:
    """Mark a range in a torch.profiler trace and, with `emits_nvtx`, for which CUDA is needed, in Nsight."""
    if emits_nvtx:
        torch.cuda.nvtx.range_push(name)
    try:
        with record_function(name):
            yield
    finally:
        if emits_nvtx:
            torch.cuda.nvtx.range_pop()
