"""Residual factors: what whole steps of a run type take over the sum of their measured parts. No torch.

The factors of a run type on some ranks are the least squares of relative errors over its whole steps, drawn towards
those of the plain program (ridge, Hoerl and Kennard 1970, Technometrics 12, 55): four steps cannot fix five numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from testbed.planner.calibration import Calibration
from testbed.planner.job import Job

# Group of a step's parts -> factor and its spread before any whole step was seen. The host's work is partly in the
# measured operations, which were called by it too.
GROUPS = {
    "compute": (1.1, 0.15),
    "elementwise": (1.1, 0.3),
    "optimizer": (1.0, 0.3),
    "host": (0.7, 1.0),
    "communication": (1.0, 0.4),
}
SPREADS_OF_OTHERS = {"compute": 0.08, "elementwise": 0.2, "optimizer": 0.5, "host": 2.0, "communication": 0.5}
PLAIN = ("baseline", 1)
STEP_NOISE = 0.03  # relative error of a whole step's median
LEAST, SWEEPS = 0.1, 100
COVERED = 0.9  # of the interval
FEWEST_FOR_INTERVAL = 10
Grouped = Callable[[Job], dict[str, float]]


@dataclass(frozen=True)
class Residuals:
    """Factors by (kind, ranks) and group, and the errors of steps that were predicted without themselves."""

    factors: dict[tuple[str, int], dict[str, float]]
    errors: tuple[float, ...]  # log(measured / predicted)

    def of(self, kind: str, ranks: int) -> dict[str, float]:
        """Return a kind's factors on the nearest number of ranks; the plain program's where none is known."""
        known = [each for each in self.factors if each[0] == kind] or [PLAIN]
        nearest = min(known, key=lambda each: abs(math.log(each[1] / ranks)))
        return self.factors.get(nearest) or {name: mean for name, (mean, _) in GROUPS.items()}

    def interval(self) -> tuple[float, float]:
        """Return factors to the ends of the 90 % interval: conformal (Vovk et al. 2005), the errors pooled."""
        errors = sorted(self.errors)
        if len(errors) < FEWEST_FOR_INTERVAL:
            return 0.7, 1.4
        rank = math.ceil((1 - COVERED) / 2 * (len(errors) + 1)) - 1
        low, high = errors[max(rank, 0)], errors[min(len(errors) - 1 - rank, len(errors) - 1)]
        return math.exp(min(low, 0.0)), math.exp(max(high, 0.0))


def kind_of(job: Job) -> str:
    """Return the run type, with what else makes it another program: ZeRO's stage, the schedule."""
    if job.run_type == "optimized":
        return f"optimized {job.layout.zero_stage}"
    return f"pipeline {job.schedule}" if job.run_type == "pipeline" else str(job.run_type)


def fitted(calibration: Calibration, grouped: Grouped) -> Residuals:
    """Fit the factors of every kind, and predict each of its steps from the others.

    Args:
        grouped: seconds of a job by group, before any factor.
    """
    seen: dict[tuple[str, int], list[tuple[np.ndarray, float]]] = {}
    for step in calibration.steps:
        parts = grouped(step.job)
        row = np.array([parts[name] for name in GROUPS])
        seen.setdefault((kind_of(step.job), step.job.layout.devices), []).append((row, step.seconds))
    means = np.array([mean for mean, _ in GROUPS.values()])
    spreads = np.array([spread for _, spread in GROUPS.values()])
    factors: dict[tuple[str, int], dict[str, float]] = {}
    errors: list[float] = []
    of_others = np.array([SPREADS_OF_OTHERS[name] for name in GROUPS])
    for key in sorted(seen, key=lambda each: each != PLAIN):
        rows = seen[key]
        if key != PLAIN and PLAIN in factors:
            means, spreads = np.array(list(factors[PLAIN].values())), of_others
        factors[key] = dict(zip(GROUPS, map(float, _ridge(rows, means, spreads)), strict=True))
        for left_out in range(len(rows) if len(rows) > 1 else 0):
            others = rows[:left_out] + rows[left_out + 1 :]
            row, seconds = rows[left_out]
            errors.append(float(math.log(seconds / float(row @ _ridge(others, means, spreads)))))
    return Residuals(factors, tuple(errors))


def _ridge(rows: Sequence[tuple[np.ndarray, float]], means: np.ndarray, spreads: np.ndarray) -> np.ndarray:
    """Return the factors by least squares, one after the other, none below LEAST of where it began."""
    system = np.vstack([*(row / seconds / STEP_NOISE for row, seconds in rows), np.diag(1 / spreads)])
    target = np.concatenate([np.full(len(rows), 1 / STEP_NOISE), means / spreads])
    found = means.copy()
    for _ in range(SWEEPS):
        for place, column in enumerate(system.T):
            rest = target - system @ found + column * found[place]
            found[place] = max(float(column @ rest / (column @ column)), LEAST * means[place])
    return found
