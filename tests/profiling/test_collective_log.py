"""What receivers are told of collectives, in a gloo group of one rank."""

from __future__ import annotations

import json
import os
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch._C import _distributed_c10d as c10d

from testbed.distributed import flight_recorder, process_group
from testbed.distributed.launch import Launch
from testbed.profiling import collective_log
from testbed.profiling.collective_log import CollectiveLog, receive_collectives
from testbed.profiling.timed_collectives import calls_of

TENSOR = torch.ones(4)
WAIT = c10d.Work.wait


class Told:
    """Keeps the events in their order."""

    def __init__(self):
        self.events: list[tuple[str, str]] = []

    def enter(self, name: str, arguments: tuple) -> str:
        self.events.append(("enter", name))
        return name

    def leave(self, event: str, name: str) -> None:
        self.events.append((event, name))


@pytest.fixture
def told():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    told = Told()
    receive_collectives([told], "gloo")
    yield told
    receive_collectives([], "gloo")
    dist.destroy_process_group()


class Gathered(torch.autograd.Function):
    """Calls a functional collective where autograd has no say any more, as DTensor does."""

    @staticmethod
    def forward(ctx, x):
        return functional.wait_tensor(functional.all_reduce(x, "sum", dist.group.WORLD))

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def functional_sum() -> None:
    found = Gathered.apply(TENSOR.clone().requires_grad_())
    assert found.tolist() == TENSOR.tolist()


def test_collectives_tell_their_end(told):
    for call in (lambda: dist.all_reduce(TENSOR.clone()), functional_sum):
        told.events.clear()
        call()
        assert told.events[0] == ("enter", "allreduce")
        assert sorted(told.events[1:]) == [("done", "allreduce"), ("return", "allreduce")]


def test_pytorchs_flight_recorder_has_the_form_that_is_read(told, monkeypatch):
    begin_ns = time.time_ns()
    for dtype in (torch.float, torch.bfloat16, torch.uint8):
        dist.all_reduce(torch.ones(40, 2, dtype=dtype))
    steps = [(7, begin_ns, time.time_ns())]
    dist.all_reduce(TENSOR.clone())  # behind the step
    entries = flight_recorder.recorded()
    assert not len(calls_of(entries, steps, process_group.size_of_group, 1).seconds)  # gloo times none
    nccl = json.dumps({"entries": [{**entry, "duration_ms": 1.5} for entry in entries]})
    monkeypatch.setattr(c10d, "_dump_nccl_trace_json", lambda includeCollectives: nccl, raising=False)
    found = calls_of(flight_recorder.recorded(), steps, process_group.size_of_group, 1)
    steps, groups, numbers, kinds = zip(*found.seconds, strict=True)
    assert len(set(groups)) == 1 and not found.has_smaller_groups and process_group.size_of_group("gone") == 0
    assert kinds == tuple(f"all_reduce (40x2 {dtype})" for dtype in ("Float", "BFloat16", "Byte"))
    assert list(found.seconds.values()) == pytest.approx([0.0015] * 3)
    assert np.diff(numbers).tolist() == [1, 1] and set(steps) == {7}


@pytest.mark.parametrize("size", [None, "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"])
def test_timing_leaves_what_the_environment_says(monkeypatch, size):
    names = ("TORCH_NCCL_ENABLE_TIMING", "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
    for name in names:
        monkeypatch.setenv(name, "7")
        if name != size:
            monkeypatch.delenv(name)
    flight_recorder.time_collectives()
    expected = {"TORCH_NCCL_ENABLE_TIMING": "1"} | ({size: "7"} if size else {"TORCH_FR_BUFFER_SIZE": "4000"})
    assert {name: os.environ[name] for name in names if name in os.environ} == expected


def scatter() -> None:
    dist.reduce_scatter_tensor(torch.empty(4), TENSOR.clone())


def scatter_later() -> None:
    work = dist.reduce_scatter_tensor(torch.empty(4), TENSOR.clone(), async_op=True)
    dist.all_reduce(TENSOR.clone())
    work.wait()


def functional_scatter() -> None:
    functional.wait_tensor(functional.reduce_scatter_tensor(TENSOR, "sum", 0, dist.group.WORLD))


@pytest.mark.parametrize("call", [scatter, scatter_later, functional_scatter])
def test_of_what_has_no_end_the_wait_is_told(told, call):
    call()
    events = [event for event, name in told.events if "reduce_scatter" in name]
    assert events == ["enter", "started", "waits", "done"]
    assert told.events[-1][0] == "done", "what came between is told in between"


@pytest.mark.parametrize("call", [lambda: dist.all_reduce(TENSOR.clone()), lambda: functional_sum(), dist.barrier])
def test_a_wait_from_python_is_end_enough_where_all_wait_there(told, call):
    receive_collectives([told], "gloo", waits_in_python=True)
    call()
    assert [event for event, _ in told.events] == ["enter", "started", "waits", "done"]


def test_the_wait_for_one_is_not_taken_for_that_for_another(told):
    work = dist.reduce_scatter_tensor(torch.empty(4), TENSOR.clone(), async_op=True)
    functional_sum()
    functional_scatter()
    scattered = [event for event, name in told.events if "reduce_scatter" in name]
    assert scattered == ["enter", "started", "enter", "started", "waits", "done"]
    work.wait()
    work.wait()
    assert [event for event, _ in told.events[-2:]] == ["waits", "done"], "and once"


def test_a_wait_that_fails_is_over(told, monkeypatch):
    def fail(work, *arguments):
        raise RuntimeError("a rank is gone")

    work = dist.reduce_scatter_tensor(torch.empty(4), TENSOR.clone(), async_op=True)
    monkeypatch.setattr(collective_log, "_wait", fail)
    with pytest.raises(RuntimeError, match="a rank is gone"):
        work.wait()
    assert [event for event, _ in told.events[-2:]] == ["waits", "done"]


def test_what_nobody_waits_for_is_forgotten(told, monkeypatch):
    monkeypatch.setattr(collective_log, "MOST_WAITED_FOR", 3)
    works = [dist.reduce_scatter_tensor(torch.empty(4), TENSOR.clone(), async_op=True) for _ in range(5)]
    assert len(collective_log._waited_for) == 3
    for work in works:
        work.wait()
    assert not collective_log._waited_for


def test_a_full_disk_ends_the_log_and_no_collective(told, tmp_path, capsys):
    log = CollectiveLog(tmp_path, Launch(0, 0, 1, 1), "gloo")
    log._file = os.open("/dev/full", os.O_WRONLY)
    receive_collectives([log], "gloo")
    for _ in range(2):
        dist.all_reduce(TENSOR.clone())
    assert capsys.readouterr().err.count("ends here: No space left on device") == 1


def test_nothing_is_registered_for_nobody(told):
    receive_collectives([], "gloo")
    assert c10d.Work.wait is WAIT
    dist.all_reduce(TENSOR.clone())
    scatter()
    assert not told.events
