"""Add up what PyTorch's flight recorder timed on all ranks' GPUs (--watch_collectives every_step).

The host does not know when a collective of NCCL begins or ends. The recorder has how long each was on its stream: a
rank that comes early waits inside it. Only what was called in a step counts: between steps rank 0 keeps rows and
writes, by design. And only collectives of all ranks: along one axis of a mesh a rank is also late because it waited
along another.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from testbed.config.settings import RunSettings
from testbed.distributed.launch import Launch

WINDOWS = 10  # means over steps in their order
MOST_KINDS = 64
ROOTED = ("broadcast", "gather", "reduce", "scatter")  # in which ranks do different things
CALLS = np.dtype([("group", "i4"), ("number", "i8"), ("kind", "i4"), ("step", "i4"), ("seconds", "f4")])
_OTHER_NAMES = {"byte": torch.uint8, "char": torch.int8}  # of dtypes; the rest are called as in torch


def times_collectives(settings: RunSettings, device: torch.device, launch: Launch) -> bool:
    """Return whether a run is to time its collectives: on NCCL, between ranks."""
    is_asked = settings.measuring.watch_collectives == "every_step" and launch.world_size > 1
    return is_asked and device.type == "cuda" and settings.compute.backend != "gloo"


class TimedCalls(NamedTuple):
    """A rank's timed collectives of all ranks: `calls` has places in `groups` and in `kinds` (name, bytes).

    Attributes:
        has_smaller_groups: collectives of some ranks were in the steps too.
    """

    groups: list[str]
    kinds: list[tuple[str, int]]
    calls: np.ndarray
    has_smaller_groups: bool = False

    @property
    def num_steps(self) -> int:
        return len(np.unique(self.calls["step"]))


NONE = TimedCalls([], [], np.array([], dtype=CALLS))


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
    sizes: dict[str, int] = {}
    groups: dict[str, int] = {}
    kinds: dict[tuple[str, int], int] = {}
    began, rows = [begin for _, begin, _ in steps], []
    for entry in entries:
        index = bisect.bisect_right(began, entry["time_created_ns"]) - 1
        if index < 0 or entry["time_created_ns"] > steps[index][2]:
            continue
        group, name = entry["process_group"][0], entry["profiling_name"].rpartition(":")[2]
        if group not in sizes:
            sizes[group] = size_of_group(group)
        if sizes[group] < world_size or entry["is_p2p"] or name in ROOTED or not entry.get("duration_ms"):
            continue
        tensors = zip(entry["input_sizes"], entry["input_dtypes"], strict=False)
        kind = name, sum(math.prod(size) * _bytes_of(dtype) for size, dtype in tensors)
        place = groups.setdefault(group, len(groups)), entry["collective_seq_id"], kinds.setdefault(kind, len(kinds))
        rows.append((*place, steps[index][0], entry["duration_ms"] / 1e3))
    has_smaller = any(1 < size < world_size for size in sizes.values())
    return TimedCalls(list(groups), list(kinds), np.array(rows, dtype=CALLS), has_smaller)


def _bytes_of(dtype: str) -> int:
    """Return the size of an element of a dtype as C++ calls it ("Float", "BFloat16"); 1 of one that is not known."""
    found = _OTHER_NAMES.get(dtype.lower(), getattr(torch, dtype.lower(), None))
    return found.itemsize if isinstance(found, torch.dtype) else 1


def timed_collectives(per_rank: Sequence[TimedCalls]) -> dict[str, Any]:
    """Return the field `timed_collectives`: each rank's seconds of a step in collectives that all ranks have timed."""
    found: dict[str, Any] = {"has_smaller_groups": any(one.has_smaller_groups for one in per_rank)}
    parts = [_common(per_rank, group) for group in per_rank[0].groups]
    calls = [np.concatenate([NONE.calls, *(part[rank] for part in parts)]) for rank in range(len(per_rank))]
    # of the first step the recorder may have lost a part
    steps, places = np.unique(calls[0]["step"], return_inverse=True)
    kept = places > 0
    if len(steps) <= WINDOWS:
        return {**found, "num_steps": 0, "per_rank_s": [], "kinds": []}
    times = np.zeros((len(steps) - 1, len(per_rank)))  # steps x ranks
    for rank, of_rank in enumerate(calls):
        np.add.at(times[:, rank], places[kept] - 1, of_rank["seconds"][kept])
    windows = [part.mean(axis=0).round(9).tolist() for part in np.array_split(times, WINDOWS)]
    rows = []
    for kind in dict.fromkeys(calls[0]["kind"][kept].tolist()):
        is_kind = kept & (calls[0]["kind"] == kind)
        means = np.array([of_rank["seconds"][is_kind].sum() for of_rank in calls]) / len(times)
        name, num_bytes = per_rank[0].kinds[kind]
        row = {"name": name, "bytes": num_bytes, "num": int(is_kind.sum()), "per_rank_s": means.round(9).tolist()}
        rows.append((float(np.ptp(means)), row))
    rows.sort(key=lambda row: -row[0])
    return {**found, "num_steps": len(times), "per_rank_s": windows, "kinds": [row for _, row in rows[:MOST_KINDS]]}


def _common(per_rank: Sequence[TimedCalls], group: str) -> list[np.ndarray]:
    """Return each rank's calls of a group that all ranks have, in the same order; their kinds are those of rank 0."""
    if any(group not in one.groups for one in per_rank):
        return [NONE.calls] * len(per_rank)
    found = []
    for one in per_rank:
        calls = one.calls[one.calls["group"] == one.groups.index(group)]
        found.append(calls[np.argsort(calls["number"], kind="stable")])
    numbers = functools.reduce(np.intersect1d, [calls["number"] for calls in found])
    found = [calls[np.searchsorted(calls["number"], numbers)] for calls in found]
    is_same = np.ones(len(numbers), dtype=bool)  # else ranks count differently, and it is not one call
    for one, calls in zip(per_rank, found, strict=True):
        same_kind = np.array([per_rank[0].kinds.index(kind) if kind in per_rank[0].kinds else -1 for kind in one.kinds])
        is_same &= (calls["step"] == found[0]["step"]) & (same_kind[calls["kind"]] == found[0]["kind"])
    return [calls[is_same] for calls in found]
