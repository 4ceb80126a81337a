"""Hold what step_time multiplies and divides by: rates, fitted factors, how wide an interval is. No torch.

Either from a machine's calibration.json, or from data sheets and the published runs (published_score.json has the
width of their intervals, made by score.py).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np

from testbed.planner.calibration import Calibration, MeasuredRates, read_calibration
from testbed.planner.fit import Fit, measured, nominal_of
from testbed.planner.job import Job, Machine
from testbed.planner.parts import Rates
from testbed.planner.published import Row, own_rows
from testbed.planner.rates import DataSheetRates

SCORE_FILE = Path(__file__).parent / "published_score.json"
LEAST_SPREAD = 0.03  # of log time of a calibrated machine: no step repeats better
SHRINK = 0.5  # steps that the mean over all run types counts for, next to a run type's own
COVERED = 0.9


@dataclass(frozen=True)
class Constants:
    """What a step's time is computed with.

    Attributes:
        fit: factors of published runs; without rows all are 1.
        width: of the interval of log time, in standard deviations of the fit or, calibrated, in itself.
        calibration: measured rates; None: a data sheet's.
        corrections: of a calibrated machine by run type: logarithm of measured over predicted; "" for all others.
        label: "calibrated ..." or "uncalibrated ...".
    """

    fit: Fit = field(default_factory=lambda: Fit([]))
    width: float = 1.645
    calibration: Calibration | None = None
    corrections: Mapping[str, float] = field(default_factory=dict)
    label: str = "uncalibrated: data sheet"

    def rates(self, machine: Machine) -> Rates:
        sheet = DataSheetRates(machine.device)
        if self.calibration is None:
            return sheet
        return MeasuredRates(self.calibration, min(machine.devices, machine.per_node), sheet)

    def log_interval(self, job: Job, machine: Machine, log_time: float, deviation: float) -> tuple[float, float]:
        """Return the middle and half the width of the 90 % interval of log time."""
        if self.calibration is None:
            return log_time, self.width * deviation
        correction = self.corrections.get(job.run_type or "", self.corrections.get("", 0.0))
        return log_time + correction, self.width


@cache
def published_constants() -> Constants:
    """Return the constants of a machine that was not calibrated: data sheets and the project's published runs."""
    width = json.loads(SCORE_FILE.read_text(encoding="utf-8"))["width"] if SCORE_FILE.exists() else 1.645
    return constants_of_rows(own_rows(), width)


def constants_of_rows(rows: Sequence[Row], width: float) -> Constants:
    """Return constants fitted to published rows."""
    fitted = [measured(row) for row in rows if row.is_fitted]
    return Constants(fit=Fit(fitted), width=width, label=f"uncalibrated: data sheet and {len(fitted)} published runs")


def calibrated_constants(path: Path) -> Constants:
    """Return the constants of a machine from its calibration.json. InputError where that is no such file."""
    return constants_of_calibration(read_calibration(path), path.name)


def constants_of_calibration(calibration: Calibration, name: str = "calibration.json") -> Constants:
    """Correct each run type by what its whole steps took, shrunk towards the mean of all.

    The interval is conformal: the 90 % quantile of the steps' residuals, each from the corrections of the others
    (Vovk et al. 2005, Algorithmic Learning in a Random World; Barber et al. 2021, arXiv:1905.02928, jackknife+).
    """
    bare = Constants(calibration=calibration)
    found: list[tuple[str, float]] = []
    for step in calibration.steps:
        machine = calibration.machine(step.job.layout.devices, step.link)
        seconds = nominal_of(step.job, machine, bare.rates(machine)).with_idle.sum()
        found.append((step.job.run_type or "", math.log(step.seconds / seconds)))
    held_out = [
        abs(value - _corrections(found[:place] + found[place + 1 :]).get(run_type, 0.0))
        for place, (run_type, value) in enumerate(found)
    ]
    return Constants(
        calibration=calibration,
        width=max(LEAST_SPREAD, conformal_quantile(held_out)) if held_out else 0.5,
        corrections=_corrections(found),
        label=f"calibrated with {name}, {len(found)} whole steps",
    )


def _corrections(found: Sequence[tuple[str, float]]) -> dict[str, float]:
    if not found:
        return {}
    mean = float(np.median([value for _, value in found]))
    corrections = {"": mean}
    for run_type in {name for name, _ in found}:
        own = [value for name, value in found if name == run_type]
        corrections[run_type] = (sum(own) + SHRINK * mean) / (len(own) + SHRINK)
    return corrections


def conformal_quantile(scores: Sequence[float], weights: Sequence[float] | None = None) -> float:
    """Return the score that 90 % lie below, a new one with the mean weight counted as the largest."""
    if not len(scores):
        return math.inf
    order = np.argsort(scores)
    weight = np.ones(len(scores)) if weights is None else np.asarray(weights, dtype=float)
    reached = np.cumsum(weight[order]) / (weight.sum() + weight.mean())
    place = int(np.searchsorted(reached, COVERED))
    return float(np.asarray(scores)[order[min(place, len(scores) - 1)]])
