"""Time collectives by size, and what an all-reduce costs a product that runs meanwhile. All ranks call it together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch
import torch.distributed as dist

from testbed.experiments.calibration.operations import Stopwatch
from testbed.planner.calibration import Timing
from testbed.profiling.step_clock import synchronize

LEAST_SHARE = 0.01  # cores that compute and send at once hide nothing


def collectives(watch: Stopwatch, sizes: Iterable[int], link: str) -> Iterator[Timing]:
    """Time all_reduce, all_gather, reduce_scatter and p2p by the bytes of the whole tensor.

    p2p is a message and one of the same size back, halved: what one stage of a pipeline waits for.
    """
    for size in sizes:
        for name, call in _calls(size, watch.device).items():
            seconds = watch.seconds_of(call) / (2 if name == "p2p" else 1)
            yield replace(watch.row(name, [size], seconds), link=link)


def _calls(size: int, device: torch.device) -> dict[str, Callable[[], object]]:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    whole = torch.zeros(max(1, size // 4 // ranks) * ranks, device=device)
    part = torch.zeros(len(whole) // ranks, device=device)
    return {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "p2p": lambda: _there_and_back(whole, rank, ranks),
    }


def _there_and_back(tensor: torch.Tensor, rank: int, ranks: int) -> None:
    """Send between neighbours, first up and then down; a last rank without a neighbour does nothing."""
    other = rank ^ 1
    if other >= ranks:
        return
    for sends in (rank < other, rank > other):
        if sends:
            dist.send(tensor, other)
        else:
            dist.recv(tensor, other)


def overlap(watch: Stopwatch, size: int, side: int) -> float:
    """Return the share of an all-reduce of `size` bytes that ran behind square products that take about as long."""
    whole = torch.zeros(size // 4, device=watch.device)
    matrix = watch.random(side, side)
    collective_s = watch.seconds_of(lambda: dist.all_reduce(whole))
    one_s = watch.seconds_of(lambda: matrix @ matrix)
    times = max(1, round(collective_s / one_s))

    def compute() -> None:
        for _ in range(times):
            matrix @ matrix

    def both() -> None:
        work = dist.all_reduce(whole, async_op=True)
        compute()
        work.wait()
        synchronize(watch.device)

    hidden_s = collective_s + watch.seconds_of(compute) - watch.seconds_of(both)
    return min(1.0, max(LEAST_SHARE, hidden_s / collective_s))
