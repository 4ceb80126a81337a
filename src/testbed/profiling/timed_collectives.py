"""Match the timed collectives of all ranks, and keep their means over windows of calls. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

WINDOWS = 10  # of a kind of collective: means over calls in their order
MOST_ROWS = 64
Key = tuple[str, tuple[int, ...], int, str, int]  # group and its ranks, number in the group, name, bytes


class Call(NamedTuple):
    """A collective on one rank: when the host called it, by its own clock, and its time on the device."""

    key: Key
    began_s: float
    seconds: float


def timed_collectives(per_rank: Sequence[Sequence[Call]], axes_of: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    """Return the field `timed_collectives`: kinds of collectives that all ranks of a group have, those in which times
    differ most first.

    Args:
        per_rank: each rank's calls in their order.
        axes_of: the axes of the mesh along which these ranks differ.
    """
    on_rank = [{call.key: call.seconds for call in calls} for calls in per_rank]
    kinds: dict[tuple, list[list[float]]] = {}
    for group, ranks, number, name, num_bytes in dict.fromkeys(call.key for calls in per_rank for call in calls):
        key: Key = (group, ranks, number, name, num_bytes)
        if len(ranks) > 1 and all(key in on_rank[rank] for rank in ranks):
            kinds.setdefault((name, ranks, num_bytes), []).append([on_rank[rank][key] for rank in ranks])
    rows = []
    for (name, ranks, num_bytes), times in kinds.items():
        if len(times) >= WINDOWS:
            windows = [part.mean(axis=0).round(9).tolist() for part in np.array_split(np.array(times), WINDOWS)]
            row = {"name": name, "axes": axes_of(ranks), "bytes": num_bytes, "ranks": list(ranks), "num": len(times)}
            rows.append({**row, "per_rank_s": windows})
    rows.sort(key=lambda row: -row["num"] * float(np.ptp(np.mean(row["per_rank_s"], axis=0))))
    spans = [calls[-1].began_s - calls[0].began_s for calls in per_rank if calls]
    return {"seconds": round(min(spans, default=0.0), 6), "collectives": rows[:MOST_ROWS]}
