"""What receivers are told of collectives, in a gloo group of one rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch._C import _distributed_c10d as c10d

from testbed.profiling.collective_log import receive_collectives

TENSOR = torch.ones(4)


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


def test_nothing_is_registered_for_nobody(told):
    receive_collectives([], "gloo")
    assert c10d.Work.wait.__name__ == "wait" and "testbed" not in str(c10d.Work.wait)
    dist.all_reduce(TENSOR.clone())
    scatter()
    assert not told.events
