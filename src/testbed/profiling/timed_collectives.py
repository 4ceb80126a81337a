"""Match the collectives that PyTorch's flight recorder timed on all ranks' GPUs (--watch_collectives every_step).

The host does not know when a collective of NCCL begins or ends. The recorder has how long each was on its stream: a
rank that comes early waits inside it. Only what was called in a step counts: between steps rank 0 keeps rows and
writes, by design.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

WINDOWS = 10  # of a kind of collective: means over its steps in their order
MOST_ROWS = 64
ROOTED = ("broadcast", "gather", "reduce", "scatter")  # the ranks of a group do not do the same in them
CALLS = np.dtype([("group", "i4"), ("number", "i8"), ("kind", "i4"), ("step", "i4"), ("seconds", "f4")])
_OTHER_NAMES = {"byte": torch.uint8, "char": torch.int8}  # of dtypes; the rest are called as in torch


class TimedCalls(NamedTuple):
    """A rank's timed collectives: `calls` has places in `groups` (name, ranks) and in `kinds` (name, bytes)."""

    groups: list[tuple[str, tuple[int, ...]]]
    kinds: list[tuple[str, int]]
    calls: np.ndarray


def calls_of(
    entries: Sequence[Mapping[str, Any]],
    steps_ns: Sequence[tuple[int, int]],
    ranks_of_group: Callable[[str], Sequence[int]],
) -> TimedCalls:
    """Return the collectives of a flight recorder that were called in a step and were timed.

    Transfers between two ranks are left out, and what ranks of a group do differently.

    Args:
        steps_ns: when steps of this rank began and ended, in their order, by the clock of the entries. Their number is
            that of the other ranks.
    """
    groups: dict[str, tuple[int, tuple[int, ...]]] = {}
    kinds: dict[tuple[str, int], int] = {}
    began, rows = [begin for begin, _ in steps_ns], []
    for entry in entries:
        step = bisect.bisect_right(began, entry["time_created_ns"]) - 1
        name = entry["profiling_name"].rpartition(":")[2]
        is_inside = step >= 0 and entry["time_created_ns"] <= steps_ns[step][1]
        if entry["is_p2p"] or not entry.get("duration_ms") or not is_inside or name in ROOTED:
            continue
        group = entry["process_group"][0]
        if group not in groups:
            groups[group] = len(groups), tuple(sorted(ranks_of_group(group)))
        sizes = zip(entry["input_sizes"], entry["input_dtypes"], strict=False)
        kind = name, sum(math.prod(size) * _bytes_of(dtype) for size, dtype in sizes)
        number, seconds = entry["collective_seq_id"], entry["duration_ms"] / 1e3
        rows.append((groups[group][0], number, kinds.setdefault(kind, len(kinds)), step, seconds))
    named = [(name, ranks) for name, (_, ranks) in groups.items()]
    return TimedCalls(named, list(kinds), np.array(rows, dtype=CALLS))


def _bytes_of(dtype: str) -> int:
    """Return the size of an element of a dtype as C++ calls it ("Float", "BFloat16"); 1 of one that is not known."""
    found = _OTHER_NAMES.get(dtype.lower(), getattr(torch, dtype.lower(), None))
    return found.itemsize if isinstance(found, torch.dtype) else 1


def timed_collectives(per_rank: Sequence[TimedCalls], axes_of: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    """Return the field `timed_collectives`: kinds of collectives that all ranks of a group have timed.

    Stages end their work at different times by design, so groups along them are left out.

    Args:
        axes_of: the axes of the mesh along which these ranks differ.
    """
    rows, net_s = [], np.zeros(len(per_rank))
    for group, ranks in dict.fromkeys(group for one in per_rank for group in one.groups):
        axes = axes_of(ranks)
        if len(ranks) < 2 or "stages" in axes:
            continue
        calls = _common([per_rank[rank] for rank in ranks], (group, ranks))
        for kind in dict.fromkeys(calls[0]["kind"].tolist()) if calls else ():
            of_kind = calls[0]["kind"] == kind
            steps, places = np.unique(calls[0]["step"][of_kind], return_inverse=True)
            if len(steps) < WINDOWS:
                continue
            times = np.zeros((len(steps), len(ranks)))  # seconds in calls of this kind, steps x ranks
            for place, of_rank in enumerate(calls):
                np.add.at(times[:, place], places, of_rank["seconds"][of_kind])
            means = times.mean(axis=0)
            net_s[list(ranks)] += _waited_for(means)
            name, num_bytes = per_rank[ranks[0]].kinds[kind]
            row = {"name": name, "axes": axes, "bytes": num_bytes, "ranks": list(ranks), "num_steps": len(steps)}
            windows = [part.mean(axis=0).round(9).tolist() for part in np.array_split(times, WINDOWS)]
            rows.append((float(np.ptp(means)), {**row, "num": int(of_kind.sum()), "per_rank_s": windows}))
    rows.sort(key=lambda row: -row[0])
    return {"per_rank_net_s": net_s.round(9).tolist(), "collectives": [row for _, row in rows[:MOST_ROWS]]}


def _common(per_rank: Sequence[TimedCalls], group: tuple[str, tuple[int, ...]]) -> list[np.ndarray]:
    """Return each rank's calls of a group that all its ranks have, in the same order. Empty: there are none."""
    found, kinds = [], []
    for one in per_rank:
        if group not in one.groups:
            return []
        calls = one.calls[one.calls["group"] == one.groups.index(group)]
        found.append(calls[np.argsort(calls["number"], kind="stable")])
        kinds.append(one.kinds)
    numbers = functools.reduce(np.intersect1d, [calls["number"] for calls in found])
    found = [calls[np.searchsorted(calls["number"], numbers)] for calls in found]
    # where ranks call the same number differently, their counts have drifted apart
    labels = [[of_rank[kind] for kind in calls["kind"].tolist()] for calls, of_rank in zip(found, kinds, strict=True)]
    is_same = np.array([len(set(of_call)) == 1 for of_call in zip(*labels, strict=True)], dtype=bool)
    is_same &= np.all([calls["step"] == found[0]["step"] for calls in found], axis=0)
    return [calls[is_same] for calls in found] if is_same.any() else []


def _waited_for(means: np.ndarray) -> np.ndarray:
    """Return for how long others wait for each rank of a group, minus for how long it waits for the last one."""
    others = np.array([np.median(np.delete(means, place)) for place in range(len(means))])
    return np.maximum(0.0, others - means) - (means - means.min())
