"""The answer of a comparison, for a file and for a terminal. No torch."""

from __future__ import annotations

import math
from typing import Any

from testbed.errors import InputError
from testbed.experiments.divergence.causes import likely_cause
from testbed.experiments.divergence.comparison import Comparison
from testbed.experiments.divergence.sides import Side


def answer_of(a: Side, b: Side, noisy: Side | None) -> dict[str, Any]:
    """Return the first divergence, or None under "divergence", and the noise. What is no number is None.

    Raises:
        InputError: the sides have no step in common.
    """
    comparison = Comparison(a, b, noisy)
    if min(a.steps, b.steps) < 1 or not comparison.places:
        raise InputError("one of the sides has no step that could be compared; make it again, with --steps 1 or more")
    parting = comparison.first()
    noise = comparison.noise
    largest = {
        phase: max((size for place, size in noise.items() if place.phase == phase and place.step > 0), default=None)
        for phase in ("forward", "backward", "update")
    }
    answer: dict[str, Any] = {
        "divergence": None,
        "failed": [name for name, side in (("A", a), ("B", b)) if side.facts.get("failed")],
        "noise": {phase: _finite(size) for phase, size in largest.items()},
        "floor": comparison.floor,
        "places": len(comparison.places),
        "left_out": comparison.left_out,
        "steps": min(a.steps, b.steps),
    }
    if parting is not None:
        place = parting.place
        answer["divergence"] = {
            "step": place.step,
            "phase": "initial weights" if place.step == 0 else "forward" if place.phase == "weights" else place.phase,
            "name": place.name,
            "ranks": parting.ranks,
            "size": _finite(parting.size),
            "limit": parting.limit,
            "against": parting.against,
            "cause": likely_cause(parting, a, b),
        }
    return answer


def _finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None


def lines_of(answer: dict[str, Any]) -> list[str]:
    """Return the answer as lines for a terminal."""
    known = {phase: size for phase, size in answer["noise"].items() if size is not None}
    noise = ", ".join(f"{phase} {size:.1e}" for phase, size in known.items())
    noise = f"noise of rounding, relative: {noise or 'not measured'}; floor {answer['floor']:.1e}"
    found = answer["divergence"]
    if found is None:
        lines = [f"No divergence: all within rounding, {answer['places']} places in {answer['steps']} steps.", noise]
        if answer["left_out"]:
            lines.insert(1, f"{answer['left_out']} places are left out: one side does not show them.")
        lines += [f"Side {side} failed: nothing is known of what comes after these steps." for side in answer["failed"]]
        return lines
    ranks = f"rank {', '.join(map(str, found['ranks']))} of side A" if found["ranks"] else "all ranks of side A"
    if found["cause"] == found["against"]:
        return [f"First divergence: step {found['step']}, {found['phase']}, {found['name']}: {found['cause']}.", noise]
    size = "no number" if found["size"] is None else f"{found['size']:.2e}"
    return [
        f"First divergence: step {found['step']}, {found['phase']}, {found['name']}, {ranks}.",
        f"Relative difference from {found['against']}: {size}, where rounding explains {found['limit']:.1e}.",
        f"Likely cause: {found['cause']}.",
        noise,
    ]
