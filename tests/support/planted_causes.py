"""Causes that hold one rank back, planted from outside into any run type: for planted_slowdowns.py.

Each takes seconds per optimizer step (start-up: once). A style "sleep" waits, as for a disk or a device; "compute"
keeps the core busy.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

BUSY = """
import ctypes, os, sys, time
ctypes.CDLL(None).prctl(1, 9)  # end with the rank
os.sched_setaffinity(0, {int(sys.argv[1])})
share, period = float(sys.argv[2]), 0.02
while True:
    end = time.thread_time() + share * period
    while time.thread_time() < end: pass
    time.sleep((1 - share) * period)
"""


def pause(seconds: float, style: str) -> None:
    if style == "sleep":
        time.sleep(seconds)
        return
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def before(function: Callable, act: Callable[[], None]) -> Callable:
    @functools.wraps(function)
    def slow(*args, **kwargs):
        act()
        return function(*args, **kwargs)

    return slow


def once_per_step(act: Callable[[], None]) -> Callable[[], None]:
    """Return what acts at its first call in each step."""
    from testbed.profiling.step_clock import StepClock

    is_due = [False]

    def note(value: bool) -> None:
        is_due[0] = value

    StepClock.__enter__ = before(StepClock.__enter__, lambda: note(True))
    StepClock.__exit__ = before(StepClock.__exit__, lambda: note(False))

    def at_first() -> None:
        if is_due[0]:
            is_due[0] = False
            act()

    return at_first


def data(seconds: float, style: str) -> None:
    from testbed.train.batches import TrainingBatches

    TrainingBatches.of_step = before(TrainingBatches.of_step, lambda: pause(seconds, style))


def forward(seconds: float, style: str) -> None:
    from testbed.model.gpt2 import MLP

    MLP.forward = before(MLP.forward, once_per_step(lambda: pause(seconds, style)))


def backward(seconds: float, style: str) -> None:
    """In the gradient of one layer, somewhere in the backward pass."""
    from testbed.model.gpt2 import MLP

    act, compute = once_per_step(lambda: pause(seconds, style)), MLP.forward

    def slow(self, x):
        y = compute(self, x)
        if y.requires_grad:
            y.register_hook(lambda gradient: act())
        return y

    MLP.forward = slow


def optimizer(seconds: float, style: str) -> None:
    from testbed.profiling.step_clock import StepClock

    enter = StepClock.phase

    def slow(clock, name):
        entered = enter(clock, name)
        return _Paused(entered, seconds, style) if name == "optimizer" else entered

    StepClock.phase = slow


class _Paused:
    def __init__(self, inner, seconds: float, style: str):
        self.inner, self.seconds, self.style = inner, seconds, style

    def __enter__(self):
        found = self.inner.__enter__()
        pause(self.seconds, self.style)
        return found

    def __exit__(self, *error):
        return self.inner.__exit__(*error)


def collective(seconds: float, style: str) -> None:
    """In the first call of a step, after it has been entered: what copies and registers memory before a transfer."""
    from torch._ops import OpOverload

    act, redispatch = once_per_step(lambda: pause(seconds, style)), OpOverload.redispatch

    def slow(operator, keys, *args, **kwargs):
        if operator.namespace == "c10d":
            act()
        return redispatch(operator, keys, *args, **kwargs)

    OpOverload.redispatch = slow


def core(share: float, style: str) -> None:
    """Another process on the core that this rank is bound to, which wants `share` of it."""
    number = int(os.environ["RANK"]) % (os.cpu_count() or 1)
    os.sched_setaffinity(0, {number})
    subprocess.Popen([sys.executable, "-S", "-c", BUSY, str(number), str(share)])


def garbage(seconds: float, style: str) -> None:
    """As many live objects as make one collection of a step take so long."""
    from testbed.model.gpt2 import MLP

    kept = [[] for _ in range(20_000)]
    times = []
    for _ in range(3):
        begin_s = time.thread_time()  # by the clock, other work on the machine would make the cause too small
        gc.collect()
        times.append(time.thread_time() - begin_s)
    per_object_s = min(times) / len(gc.get_objects())
    kept += [[] for _ in range(int(seconds / per_object_s))]
    MLP.forward = before(MLP.forward, once_per_step(gc.collect))
    MLP.kept = kept


def writing(seconds: float, style: str) -> None:
    from testbed.metrics.recorder import RunRecorder

    RunRecorder.write_if_due = before(RunRecorder.write_if_due, lambda: pause(seconds, style))


def start_up(seconds: float, style: str) -> None:
    from testbed.train import run

    run.build_strategy = before(run.build_strategy, lambda: pause(seconds, style))


def unwatched(steps: int, path: str, seed: int, changes_over: bool) -> None:
    """No cause: watch collectives in some steps and in others not (alternation.py), and note when each step began,
    without what it took to change over, and the CPU time of that. Without `changes_over` all are watched."""
    from support.alternation import is_given, now
    from testbed.profiling.step_clock import StepClock

    moments: list[list[float]] = []
    watches: list = []
    changes, times = [0.0, 0.0], []
    enter = StepClock.__enter__

    def enter_next(clock):
        watches.append(clock.watch)
        began, is_on = now(), is_given(len(moments), seed) or not changes_over
        moments.append([one - other for one, other in zip(began, changes, strict=True)])
        if is_on != (clock.watch is not None):
            clock.watch, clock.watched = watches[0] if is_on else None, {}
            watches[0]._switch(is_on)
            for place, (end, begin) in enumerate(zip(now(), began, strict=True)):
                changes[place] += end - begin
            times.append(end - begin)
        if len(moments) == steps and os.environ["RANK"] == "0":
            Path(path).write_text(json.dumps({"moments": moments, "changing_s": times}))
        return enter(clock)

    StepClock.__enter__ = enter_next


CAUSES = {
    "data": data, "forward": forward, "backward": backward, "optimizer": optimizer, "collective": collective,
    "core": core, "garbage collection": garbage, "writing": writing, "start-up": start_up,
}  # fmt: skip
