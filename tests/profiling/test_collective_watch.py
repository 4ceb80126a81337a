"""What a rank was blocked in collectives, and what its phases took of their own. Clocks that the test moves."""

from __future__ import annotations

import gc
import hashlib
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from testbed.metrics.watched_steps import MOST_ROWS, WatchedSteps
from testbed.profiling import collective_watch
from testbed.profiling.collective_log import ALL_RANKS
from testbed.profiling.collective_watch import BETWEEN, CollectiveWatch, QueueClock

AXES = {ALL_RANKS: "copies"}  # of the only group here


class Clocks:
    """Wall, CPU and queued time, which pass only when they are told to."""

    def __init__(self):
        self.wall_s = self.cpu_s = self.queued_s = 0.0

    def compute(self, seconds: float) -> None:
        self.wall_s += seconds
        self.cpu_s += seconds

    def sleep(self, seconds: float) -> None:
        self.wall_s += seconds

    def queue(self, seconds: float) -> None:
        self.wall_s += seconds
        self.queued_s += seconds

    def __call__(self) -> float:
        return self.queued_s

    def close(self) -> None:
        pass


@pytest.fixture
def clocks(monkeypatch) -> Clocks:
    clocks = Clocks()
    stand_in = SimpleNamespace(perf_counter=lambda: clocks.wall_s, thread_time=lambda: clocks.cpu_s)
    monkeypatch.setattr(collective_watch, "time", stand_in)
    monkeypatch.setattr(collective_watch, "QueueClock", lambda: clocks)
    return clocks


@pytest.fixture
def watch(clocks):
    watch = CollectiveWatch()
    watch.begin_steps(0.0)
    watch.enter_phase("backward")
    yield watch
    watch.close()


def start(watch: CollectiveWatch, name: str = "allreduce", size: int = 8):
    call = watch.enter(name, (torch.empty(size, dtype=torch.uint8),))
    watch.leave("return", call)
    return call


def test_a_wait_is_blocked_time_and_the_rest_is_the_phases_own(watch, clocks):
    clocks.compute(1.0)
    call = start(watch)
    clocks.sleep(0.5)
    watch.leave("done", call)
    clocks.compute(0.25)
    watch.enter_phase("optimizer")
    clocks.compute(0.125)
    step = watch.take_step()
    assert (step["own_backward_s"], step["cpu_backward_s"], step["blocked_s"]) == (1.25, 1.25, 0.5)
    assert (step["own_optimizer_s"], step["own_forward_s"]) == (0.125, 0.0)
    assert watch.rows(AXES.get) == [
        {
            "name": "allreduce",
            "axes": "copies",
            "phase": "backward",
            "num": 1,
            "bytes": 8,
            "call_s": 0.0,
            "blocked_s": 0.5,
        }
    ]


def test_a_transfer_that_computation_hides_blocks_nothing(watch, clocks):
    call = start(watch)
    clocks.compute(1.0)
    watch.leave("done", call)
    assert watch.take_step()["blocked_s"] == 0.0


def test_a_pause_while_nothing_is_under_way_is_the_phases_own(watch, clocks):
    """What a slow disk, a sleep or a core that others use looks like: no CPU time, and no collective to wait for."""
    call = start(watch)
    watch.leave("done", call)
    clocks.sleep(1.0)
    step = watch.take_step()
    assert (step["own_backward_s"], step["cpu_backward_s"], step["blocked_s"]) == (1.0, 0.0, 0.0)


def test_what_the_core_did_for_others_is_queued(watch, clocks):
    clocks.compute(1.0)
    clocks.queue(0.5)
    call = start(watch)
    clocks.queue(0.25)  # while it waits for others it would not have run
    watch.leave("done", call)
    watch.enter_phase("schedule")
    clocks.queue(0.125)
    step = watch.take_step()
    assert (step["own_backward_s"], step["cpu_backward_s"], step["queued_backward_s"]) == (1.5, 1.0, 0.5)
    assert (step["own_elsewhere_s"], step["queued_elsewhere_s"], step["blocked_s"]) == (0.125, 0.125, 0.25)


def test_calls_are_of_the_step_and_without_what_was_queued(watch, clocks):
    call = watch.enter("allreduce", (torch.empty(8, dtype=torch.uint8),))
    clocks.compute(0.5)
    clocks.queue(0.25)
    watch.leave("return", call)
    watch.leave("done", call)
    assert watch.take_step()["calls_s"] == 0.5
    call = watch.enter("allgather", (torch.empty(8, dtype=torch.uint8),))  # between the steps
    clocks.compute(1.0)
    watch.leave("return", call)
    assert watch.take_step()["calls_s"] == 0.0


@pytest.mark.parametrize("text", [None, b"", b"7\n", b"a b c\n"])
def test_a_system_without_queued_times_counts_none(monkeypatch, tmp_path, text):
    if text is not None:
        (tmp_path / "schedstat").write_bytes(text)
    opened = os.open
    monkeypatch.setattr(collective_watch.os, "open", lambda path, flags: opened(tmp_path / "schedstat", flags))
    clock = QueueClock()
    assert clock() == 0.0
    clock.close()


def test_a_thread_that_shares_its_core_queues():
    """Of this machine: two threads of equal weight on one core each wait about half of the time for it."""
    if not Path("/proc/thread-self/schedstat").exists():
        pytest.skip("/proc/thread-self/schedstat does not exist here")
    clock, cores = QueueClock(), os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    # as long as the test, and without Python's lock
    other = threading.Thread(target=hashlib.pbkdf2_hmac, args=("sha256", b"", b"", 1_000_000))
    other.start()
    try:
        before_s, began_s = clock(), time.perf_counter()
        while (passed_s := time.perf_counter() - began_s) < 0.3:
            pass
        queued_s = clock() - before_s
    finally:
        os.sched_setaffinity(0, cores)
        other.join()
    assert 0.1 * passed_s < queued_s < passed_s
    clock.close()
    assert clock() == 0.0


def test_a_slow_call_is_own_time_of_that_collective(watch, clocks):
    call = watch.enter("allgather", ([torch.empty(4, dtype=torch.uint8)], torch.empty(1, dtype=torch.int64), 5))
    clocks.sleep(0.5)
    watch.leave("return", call)
    watch.leave("done", call)
    assert watch.take_step()["own_backward_s"] == 0.5
    (row,) = watch.rows(AXES.get)
    assert (row["bytes"], row["call_s"], row["blocked_s"]) == (12, 0.5, 0.0)


def test_collectives_that_overlap_are_waited_for_once(watch, clocks):
    first, second = start(watch), start(watch)
    clocks.sleep(0.5)
    watch.leave("done", second)
    clocks.sleep(0.5)
    watch.leave("done", first)
    assert watch.take_step()["blocked_s"] == 1.0


def test_what_does_not_tell_its_end_counts_while_it_is_waited_for(watch, clocks):
    call = watch.enter("recv", (torch.empty(8, dtype=torch.uint8),))
    watch.leave("started", call)
    clocks.sleep(0.25)
    watch.leave("waits", call)
    clocks.sleep(0.5)
    watch.leave("done", call)
    clocks.sleep(0.125)
    watch.enter_phase("forward")
    step = watch.take_step()
    assert (step["blocked_s"], step["own_backward_s"]) == (0.5, 0.375)
    (row,) = watch.rows(AXES.get)
    assert (row["call_s"], row["blocked_s"]) == (0.0, 0.5)


def test_garbage_collection_is_no_phases_own_time(watch, clocks):
    """Nor its CPU time, of which there is less than time by the clock where something else uses the core."""
    watch._on_gc("start", {})
    clocks.compute(0.5)
    clocks.queue(1.0)
    watch._on_gc("stop", {})
    clocks.compute(0.25)
    step = watch.take_step()
    assert (step["gc_s"], step["own_backward_s"], step["cpu_backward_s"]) == (1.5, 0.25, 0.25)
    assert step["queued_backward_s"] == 0.0


def test_the_time_between_steps_is_of_the_step_after_it(watch, clocks):
    watch.take_step()
    clocks.compute(0.5)
    call = start(watch, "barrier")
    clocks.sleep(2.0)
    watch.leave("done", call)
    watch.enter_phase("forward")
    clocks.compute(0.25)
    step = watch.take_step()
    assert (step[f"own_{BETWEEN}_s"], step["own_forward_s"], step["blocked_s"]) == (0.5, 0.25, 0.0)
    assert watch.take_step()["own_forward_s"] == 0.0, "each step begins with nothing"


def test_another_threads_collectives_are_not_counted(watch):
    calls = []
    thread = threading.Thread(target=lambda: calls.append(watch.enter("broadcast", ())))
    thread.start()
    thread.join()
    watch.leave("return", calls[0])
    assert watch.rows(AXES.get) == []


@pytest.mark.parametrize(
    ("num_calls", "step_s", "is_watched"),
    [
        (3, 0.2, [True] * 7),
        (20, 0.1, [True, *[False] * 7, True, False]),
        (40, 1.0, [True] * 7),
    ],
)
def test_steps_are_left_out_where_watching_would_cost_more_than_is_allowed(clocks, num_calls, step_s, is_watched):
    """20 calls, the phases and a switch are 6.2 ms or 6.2 % of a step of 0.1 s: every eighth one costs 0.78 %."""
    watch, switched = CollectiveWatch(), []

    def switch(is_on: bool) -> None:
        switched.append(is_on)
        clocks.compute(collective_watch.SWITCH_S)

    watch.switch_by(switch)
    watch.begin_steps(0.0)
    found = []
    for _ in is_watched:
        watch.enter_phase("forward")
        clocks.compute(step_s)
        step = watch.take_step()
        found.append(bool(step))
        if step:
            assert step[f"own_{BETWEEN}_s"] == 0.0, "to register hooks is not of the step"
            watch.limit_cost(num_calls, step_s)
    assert found == is_watched
    assert switched == ([False, True, False] if False in is_watched else []), "hooks are there for watched steps alone"
    watch.close()
    assert switched[-1] is False, "none are left after the training"


def test_the_phases_of_a_short_step_cost_too(clocks):
    watch = CollectiveWatch()
    watch.begin_steps(0.0)
    assert watch.take_step()
    watch.limit_cost(0, 0.5 * collective_watch.PHASES_S / collective_watch.MOST_OF_A_STEP)
    assert not watch.take_step()
    watch.close()


def test_a_group_that_cannot_be_made_leaves_the_phase_as_it_was(watch, clocks, monkeypatch):
    def fail(*_):
        clocks.sleep(1.0)
        raise ValueError("no such rank")

    monkeypatch.setattr(collective_watch.distributed_c10d, "_new_group_with_tag", fail)
    watch.count_new_groups()
    with pytest.raises(ValueError, match="no such rank"):
        collective_watch.distributed_c10d._new_group_with_tag([5])
    clocks.compute(0.5)
    assert watch.take_step()["own_backward_s"] == 0.5


def test_the_start_up_counts_from_the_programs_start_without_waits(clocks):
    clocks.wall_s = 10.0
    watch = CollectiveWatch()
    watch.enter_phase(collective_watch.JOINING)
    clocks.sleep(5.0)
    watch.enter_phase(collective_watch.START_UP)
    clocks.compute(2.0)
    call = start(watch)
    clocks.sleep(1.0)
    watch.leave("done", call)
    assert watch.begin_steps(startup_s=11.0) == 3.0 + 2.0
    watch.close()
    assert watch._on_gc not in gc.callbacks


def test_windows_grow_with_the_run_and_keep_its_means():
    watched, per_step = WatchedSteps(), 1000
    for step in range(6, 6 + per_step):
        watched.add(step, {"gc_s": [float(step), 0.5]})
    rows = watched.rows()
    assert MOST_ROWS / 2 <= len(rows) <= MOST_ROWS
    assert [row["num_steps"] for row in rows[:-1]] == [8] * (len(rows) - 1)
    assert rows[0] == {"step": 6, "num_steps": 8, "per_rank_gc_s": [9.5, 0.5]}
    assert sum(row["num_steps"] for row in rows) == per_step
    assert sum(row["num_steps"] * row["per_rank_gc_s"][0] for row in rows) == sum(range(6, 6 + per_step))
