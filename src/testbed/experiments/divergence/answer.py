"""The answer of a comparison, for a file and for a terminal. No torch."""

from __future__ import annotations

from typing import Any

from testbed.experiments.divergence.causes import likely_cause
from testbed.experiments.divergence.comparison import Comparison
from testbed.experiments.divergence.sides import Side


def answer_of(a: Side, b: Side, noisy: Side | None) -> dict[str, Any]:
    """Return the first divergence, or None under "divergence", and the noise."""
    comparison = Comparison(a, b, noisy)
    parting = comparison.first()
    noise = comparison.noise
    largest = {
        phase: max((size for place, size in noise.items() if place.phase == phase and place.step > 0), default=None)
        for phase in ("forward", "backward", "update")
    }
    answer: dict[str, Any] = {
        "divergence": None,
        "noise": largest,
        "floor": comparison.floor,
        "places": len(comparison.places),
        "steps": min(a.steps, b.steps),
    }
    if parting is not None:
        place = parting.place
        answer["divergence"] = {
            "step": place.step,
            "phase": "forward" if place.phase == "weights" else place.phase,
            "name": place.name,
            "ranks": parting.ranks,
            "size": parting.size,
            "limit": parting.limit,
            "against": parting.against,
            "cause": likely_cause(parting, a, b),
        }
    return answer


def lines_of(answer: dict[str, Any]) -> list[str]:
    """Return the answer as lines for a terminal."""
    known = {phase: size for phase, size in answer["noise"].items() if size is not None}
    noise = ", ".join(f"{phase} {size:.1e}" for phase, size in known.items())
    noise = f"noise of rounding, relative: {noise or 'not measured'}; floor {answer['floor']:.1e}"
    found = answer["divergence"]
    if found is None:
        return [f"No divergence: all within rounding, {answer['places']} places in {answer['steps']} steps.", noise]
    ranks = f"rank {', '.join(map(str, found['ranks']))} of side A" if found["ranks"] else "all ranks of side A"
    return [
        f"First divergence: step {found['step']}, {found['phase']}, {found['name']}, {ranks}.",
        f"Relative difference from {found['against']}: {found['size']:.2e}, where rounding explains "
        f"{found['limit']:.1e}.",
        f"Likely cause: {found['cause']}.",
        noise,
    ]
