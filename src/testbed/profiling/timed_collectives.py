"""Add up what PyTorch's flight recorder timed on all ranks' GPUs (--watch_collectives every_step).

The host does not know when a collective of NCCL begins or ends. The recorder has how long each was on its stream: a
rank that comes early waits inside it. Only what was called in a step counts: between steps rank 0 keeps rows and
writes, by design. And only collectives of all ranks: along one axis of a mesh a rank is also late because it waited
along another.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from testbed.config.settings import RunSettings
from testbed.distributed.flight_recorder import named
from testbed.distributed.launch import Launch

WINDOWS = 10  # means over steps in their order
LEAST_STEPS = WINDOWS + 2  # that a read has to show: the first and the last do not count
ROOTED = ("broadcast", "gather", "reduce", "scatter")  # in which ranks do different things
Call = tuple[int, str, int, str]  # as all ranks know it: step, group, number in the group, name with sizes


def times_collectives(settings: RunSettings, device: torch.device, launch: Launch) -> bool:
    """Return whether a run is to time its collectives: on NCCL, between ranks."""
    is_asked = settings.measuring.watch_collectives == "every_step" and launch.world_size > 1
    return is_asked and device.type == "cuda" and settings.compute.backend != "gloo"


class TimedCalls(NamedTuple):
    """A rank's seconds in collectives of all ranks.

    Attributes:
        has_smaller_groups: in the steps some of the ranks exchanged too, or it is not known which.
    """

    seconds: Mapping[Call, float]
    has_smaller_groups: bool = False


def calls_of(
    entries: Sequence[Mapping[str, Any]],
    steps: Sequence[tuple[int, int, int]],
    size_of_group: Callable[[str], int],
    world_size: int,
) -> TimedCalls:
    """Return the collectives of a flight recorder that were called in a step and were timed.

    Args:
        steps: numbers of steps in their order, and when each began and ended on this rank, by the clock of the entries.
    """
    size_of = functools.cache(size_of_group)
    began, seconds, has_smaller = [begin for _, begin, _ in steps], {}, False
    for entry in entries:
        index = bisect.bisect_right(began, entry["time_created_ns"]) - 1
        if index < 0 or entry["time_created_ns"] > steps[index][2]:
            continue
        group, name = entry["process_group"][0], entry["profiling_name"].rpartition(":")[2]
        # NCCL notes a batch, of sends or of other operations, as "coalesced": one number for all, and no sizes
        if entry["is_p2p"] or name == "coalesced" or size_of(group) not in (1, world_size):
            has_smaller = True
        elif size_of(group) == world_size and name not in ROOTED and entry.get("duration_ms"):
            call = steps[index][0], group, entry["collective_seq_id"], named(entry).rpartition(":")[2]
            seconds[call] = entry["duration_ms"] / 1e3
    return TimedCalls(seconds, has_smaller)


def timed_collectives(per_rank: Sequence[TimedCalls]) -> dict[str, Any]:
    """Return the field `timed_collectives`: each rank's longest wait of a step in collectives that all have timed.

    A rank waits in a call by what it is in it longer than the rank that comes last. Where calls overlap, ranks wait for
    one lateness in several of them, so their waits are not added up.
    """
    found: dict[str, Any] = {"has_smaller_groups": any(one.has_smaller_groups for one in per_rank)}
    common = set.intersection(*(set(one.seconds) for one in per_rank))
    # of the first step the recorder may have lost a part, and the last one may not be over
    of_step: dict[int, list[np.ndarray]] = {step: [] for step in sorted({call[0] for call in common})[1:-1]}
    if len(of_step) < WINDOWS:
        return {**found, "num_steps": 0, "per_rank_s": []}
    for call in common:
        if call[0] in of_step:
            seconds = np.array([one.seconds[call] for one in per_rank])
            of_step[call[0]].append(seconds - seconds.min())
    times = np.array([np.max(waits, axis=0) for waits in of_step.values()])  # steps x ranks
    windows = [part.mean(axis=0).round(9).tolist() for part in np.array_split(times, WINDOWS)]
    return {**found, "num_steps": len(times), "per_rank_s": windows}
