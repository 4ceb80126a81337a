"""Hold what step_time multiplies and divides by: rates, fitted factors, how wide an interval is. No torch.

Either from a machine's calibration.json, or from data sheets and the published runs (published_score.json has the
width of their intervals, made by score.py).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np

from testbed.planner.calibration import Calibration, MeasuredRates, read_calibration
from testbed.planner.factors import MEASURED_DEVIATIONS
from testbed.planner.fit import NOISE, Fit, Measured, Nominal, measured, nominal_of
from testbed.planner.job import Job, Machine
from testbed.planner.published import Row, own_rows
from testbed.planner.rates import DataSheetRates

SCORE_FILE = Path(__file__).parent / "published_score.json"
COVERED = 0.9
NORMAL_WIDTH = 1.645  # standard deviations on each side that hold 90 % of a normal distribution


@dataclass(frozen=True)
class Constants:
    """What a step's time is computed with.

    Attributes:
        fit: factors of published runs, or of a calibrated machine's whole steps; without any all are 1.
        width: of the 90 % interval of log time, in standard deviations of the fit.
        calibration: measured rates; None: a data sheet's.
        label: "calibrated ..." or "uncalibrated ...".
    """

    fit: Fit = field(default_factory=lambda: Fit([]))
    width: float = NORMAL_WIDTH
    calibration: Calibration | None = None
    label: str = "uncalibrated: data sheet"

    def nominal(self, job: Job, machine: Machine) -> Nominal:
        """Return a step before any factor."""
        sheet = DataSheetRates(machine.device)
        if self.calibration is None:
            return nominal_of(job, machine, sheet)
        rates = MeasuredRates(self.calibration, min(machine.devices, machine.per_node), sheet)
        return nominal_of(job, machine, rates, MEASURED_DEVIATIONS)


@cache
def published_constants() -> Constants:
    """Return the constants of a machine that was not calibrated: data sheets and the project's published runs."""
    width = json.loads(SCORE_FILE.read_text(encoding="utf-8"))["width"] if SCORE_FILE.exists() else NORMAL_WIDTH
    return constants_of_rows(own_rows(), width)


def constants_of_rows(rows: Sequence[Row], width: float) -> Constants:
    """Return constants fitted to published rows."""
    fitted = [measured(row) for row in rows if row.is_fitted]
    return Constants(fit=Fit(fitted), width=width, label=f"uncalibrated: data sheet and {len(fitted)} published runs")


def calibrated_constants(path: Path) -> Constants:
    """Return the constants of a machine from its calibration.json. InputError where that is no such file."""
    return constants_of_calibration(read_calibration(path), path.name)


def constants_of_calibration(calibration: Calibration, name: str = "calibration.json") -> Constants:
    """Fit the factors of a machine's run types, links and parts to its whole steps.

    The interval is conformal: the 90 % quantile of what each step is off by without it, in deviations of that fit
    (Barber et al. 2021, Predictive inference with the jackknife+, arXiv:1905.02928).
    """
    bare = Constants(calibration=calibration)
    rows = []
    for step in calibration.steps:
        machine = calibration.machine(step.job.layout.devices, step.link)
        rows.append(Measured(bare.nominal(step.job, machine), math.log(step.seconds), NOISE))
    scores = []
    for place, row in enumerate(rows):
        log_time, deviation = Fit(rows[:place] + rows[place + 1 :]).predict(row.nominal)
        scores.append(abs(log_time - row.log_time) / deviation)
    return Constants(
        fit=Fit(rows),
        width=conformal_quantile(scores) if len(scores) > 1 else NORMAL_WIDTH,
        calibration=calibration,
        label=f"calibrated with {name}, {len(rows)} whole steps",
    )


def conformal_quantile(scores: Sequence[float], weights: Sequence[float] | None = None) -> float:
    """Return the score that 90 % lie below, a new one with the mean weight counted as the largest."""
    if not len(scores):
        return math.inf
    order = np.argsort(scores)
    weight = np.ones(len(scores)) if weights is None else np.asarray(weights, dtype=float)
    reached = np.cumsum(weight[order]) / (weight.sum() + weight.mean())
    place = int(np.searchsorted(reached, COVERED))
    return float(np.asarray(scores)[order[min(place, len(scores) - 1)]])
