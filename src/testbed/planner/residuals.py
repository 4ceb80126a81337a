"""Residual factors: what whole steps of a run type take over the sum of their measured parts. No torch.

A group of parts has one factor that all run types on as many ranks share, and one of each run type on top (fit.py):
four steps alone cannot fix five numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from testbed.config.run_types import REFERENCE
from testbed.memory_model.job import Job
from testbed.planner.calibration import Calibration
from testbed.planner.fit import Factor, Fit, Measured, Nominal, conformal_quantile

# Group of a step's parts -> its factor before any whole step was seen, and the deviations of what is shared, and of a
# run type's own. The host's work is partly in the measured operations, which were called by it too.
GROUPS = {
    "compute": (1.1, 0.15, 0.08),
    "elementwise": (1.1, 0.3, 0.2),
    "optimizer": (1.0, 0.3, 0.5),
    "host": (0.7, 1.0, 1.0),
    "communication": (1.0, 0.4, 0.5),
}
PLAIN = (REFERENCE, 1)
STEP_NOISE = 0.03  # relative error of a whole step's median
FEWEST_FOR_INTERVAL = 10


@dataclass(frozen=True)
class Residuals:
    """Factors fitted to whole steps, the (kind, ranks) that had some, and the errors of steps that were predicted
    without themselves."""

    fit: Fit
    known: frozenset[tuple[str, int]]
    errors: tuple[float, ...]  # log(measured / predicted)

    def of(self, kind: str, ranks: int) -> dict[str, float]:
        """Return a kind's factors by group, on the nearest number of ranks; the plain program's where it has none."""
        known = [each for each in self.known if each[0] == kind] or [PLAIN]
        nearest = min(known, key=lambda each: abs(math.log(each[1] / ranks)))
        seconds = self.fit.parts(_nominal(dict.fromkeys(GROUPS, 1.0), *nearest))
        return dict(zip(GROUPS, map(float, seconds), strict=True))

    def interval(self) -> tuple[float, float]:
        """Return factors to the ends of the 90 % interval: conformal (Vovk et al. 2005), the errors pooled."""
        if len(self.errors) < FEWEST_FOR_INTERVAL:
            return 0.7, 1.4
        half = conformal_quantile([abs(error) for error in self.errors])
        return math.exp(-half), math.exp(half)


def kind_of(job: Job) -> str:
    """Return the run type, with what else makes it another program: ZeRO's stage, the schedule."""
    if job.strategy is not None and "zero_stage" in job.strategy.options:
        return f"{job.run_type} {job.layout.zero_stage}"
    return f"{job.run_type} {job.schedule}" if job.schedule and job.strategy is not None else str(job.run_type)


def fitted(calibration: Calibration, grouped: Callable[[Job], dict[str, float]]) -> Residuals:
    """Fit the factors of every kind, and predict each of its steps from the others.

    Args:
        grouped: seconds of a job by group, before any factor.
    """
    rows = []
    for step in calibration.steps:
        nominal = _nominal(grouped(step.job), kind_of(step.job), step.job.layout.devices)
        noise = STEP_NOISE + max(step.high - step.low, 0.0) / step.seconds / 2
        rows.append(Measured(nominal, math.log(step.seconds), noise))
    fit = Fit(rows, tuple(GROUPS))
    known = frozenset((kind_of(step.job), step.job.layout.devices) for step in calibration.steps)
    return Residuals(fit, known, tuple(map(float, fit.left_out())))


def _nominal(seconds: dict[str, float], kind: str, ranks: int) -> Nominal:
    """Return a step's groups, and the factors that concern them."""
    shared = [Factor((group,), f"{ranks} ranks", spread) for group, (_, spread, _) in GROUPS.items()]
    own = [Factor((group,), f"{kind} on {ranks}", spread) for group, (*_, spread) in GROUPS.items()]
    usual = np.array([mean * seconds[group] for group, (mean, *_) in GROUPS.items()])
    return Nominal(usual, (*shared, *own))
