"""Residual factors: what whole steps of a run type take over the sum of their measured parts. No torch.

The factors of a run type on some ranks are the least squares of relative errors over its whole steps, drawn towards
those of all run types on as many ranks (ridge, Hoerl and Kennard 1970, Technometrics 12, 55): four steps cannot fix
five numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from testbed.config.run_types import REFERENCE
from testbed.memory_model.job import Job
from testbed.planner.calibration import Calibration

# Group of a step's parts -> factor and its spread before any whole step was seen. The host's work is partly in the
# measured operations, which were called by it too.
GROUPS = {
    "compute": (1.1, 0.15),
    "elementwise": (1.1, 0.3),
    "optimizer": (1.0, 0.3),
    "host": (0.7, 1.0),
    "communication": (1.0, 0.4),
}
SPREADS_OF_KINDS = {"compute": 0.08, "elementwise": 0.2, "optimizer": 0.5, "host": 2.0, "communication": 0.5}
PLAIN = (REFERENCE, 1)
SPREAD_OF_KINDS = 0.2  # of the kinds' steps around what they have in common
STEP_NOISE = 0.03  # relative error of a whole step's median
LEAST = 0.1
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
    if job.strategy is not None and "zero_stage" in job.strategy.options:
        return f"{job.run_type} {job.layout.zero_stage}"
    return f"{job.run_type} {job.schedule}" if job.schedule and job.strategy is not None else str(job.run_type)


class _Seen(NamedTuple):
    """A whole step: its seconds by group before any factor, what it took, and the relative error of that."""

    groups: np.ndarray
    seconds: float
    noise: float


def fitted(calibration: Calibration, grouped: Grouped) -> Residuals:
    """Fit the factors of every kind, and predict each of its steps from the others.

    Args:
        grouped: seconds of a job by group, before any factor.
    """
    seen: dict[tuple[str, int], list[_Seen]] = {}
    for step in calibration.steps:
        parts = grouped(step.job)
        noise = STEP_NOISE + max(step.high - step.low, 0.0) / step.seconds / 2
        row = _Seen(np.array([parts[name] for name in GROUPS]), step.seconds, noise)
        seen.setdefault((kind_of(step.job), step.job.layout.devices), []).append(row)
    factors: dict[tuple[str, int], dict[str, float]] = {}
    errors: list[float] = []
    for (kind, ranks), rows in seen.items():
        others = [row for key, found in seen.items() if key[1] == ranks and key[0] != kind for row in found]
        factors[kind, ranks] = dict(zip(GROUPS, map(float, _of_kind(rows, others)), strict=True))
        for left_out in range(len(rows) if len(rows) > 1 else 0):
            row = rows[left_out]
            found = _of_kind(rows[:left_out] + rows[left_out + 1 :], others)
            errors.append(math.log(row.seconds / float(row.groups @ found)))
    return Residuals(factors, tuple(errors))


def _of_kind(rows: Sequence[_Seen], others: Sequence[_Seen]) -> np.ndarray:
    """Return the factors of one kind, drawn to those of all kinds on as many ranks, and these to GROUPS."""
    means, spreads = (np.array(column) for column in zip(*GROUPS.values(), strict=True))
    # what all kinds have in common moves little for one step more or less
    pooled = [row._replace(noise=row.noise + SPREAD_OF_KINDS) for row in (*rows, *others)]
    return _ridge(rows, _ridge(pooled, means, spreads), np.array([SPREADS_OF_KINDS[name] for name in GROUPS]))


def _ridge(rows: Sequence[_Seen], means: np.ndarray, spreads: np.ndarray) -> np.ndarray:
    """Return the factors by least squares, none below LEAST of where it began."""
    weighed = np.array([row.groups / (row.seconds * row.noise) for row in rows]).reshape(-1, len(means))
    target = np.array([1 / row.noise for row in rows])
    normal = weighed.T @ weighed + np.diag(spreads**-2)
    found = np.linalg.solve(normal, weighed.T @ target + means / spreads**2)
    return np.asarray(np.maximum(found, LEAST * means))
