"""Read where the time of profiled steps went, with one meaning of communication in files of every age.

Communication is the time in which a rank takes part in a collective or in the synchronisation after backward, packing
of gradients included. Its exposed part is what no computation of the rank covers, so it is never more than the whole.
One device alone communicates with none: what its collectives cost is the program's own time, and counts as idle.

A file's `communication_s` holds collectives in flight without the packing, and its `exposed_communication_s` holds the
packing too. The larger of the two is the whole where one lies inside the other, as in every strategy so far, and else
the least that it can be.
"""

from __future__ import annotations

from typing import Any


def attribution_of(metrics: dict[str, Any]) -> dict[str, Any] | None:
    """Return `attribution` of a metrics file with communication as above; None where no step was attributed."""
    found = metrics.get("attribution")
    if not found:
        return None
    hardware = metrics.get("hardware") or {}
    devices = hardware.get("num_devices") or hardware.get("world_size")
    per_rank = [
        {**of_rank, "steps": [with_one_meaning(step, devices) for step in of_rank["steps"]]}
        for of_rank in found["per_rank"]
    ]
    return {**found, "per_rank": per_rank}


def with_one_meaning(step: dict[str, Any], devices: int | None) -> dict[str, Any]:
    """Return a row of the attribution, of a step or a mean of steps, with communication as above; a second time it
    changes nothing."""
    exposed_s = step["exposed_communication_s"]
    if devices == 1:
        return {**step, "idle_s": step["idle_s"] + exposed_s, "exposed_communication_s": 0.0, "communication_s": 0.0}
    return {**step, "communication_s": max(step["communication_s"], exposed_s)}
