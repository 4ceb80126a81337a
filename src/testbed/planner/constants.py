"""Hold what step_time multiplies and divides by: rates, fitted factors, how wide an interval is. No torch.

Either from a machine's calibration.json, or from data sheets and the published runs (published_score.json has the
width of their intervals, made by score.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from testbed.io import holding_together
from testbed.planner.calibration import Calibration, check_machine, read_calibration
from testbed.planner.fit import Fit, measured
from testbed.planner.measured_rates import Calibrated
from testbed.planner.rows import own_rows

SCORE_FILE = Path(__file__).parent / "published_score.json"
NORMAL_WIDTH = 1.645  # standard deviations on each side that hold 90 % of a normal distribution


@dataclass(frozen=True)
class Constants:
    """Constants of the formulas of a step's time.

    Attributes:
        fit: factors of published runs; without rows all are 1.
        width: of the interval of log time, in standard deviations of the fit.
        calibrated: the rates of a calibrated machine, in place of data sheet and factors.
        label: "calibrated ..." or "uncalibrated ...".
    """

    fit: Fit = field(default_factory=lambda: Fit([]))
    width: float = NORMAL_WIDTH
    calibrated: Calibrated | None = None
    label: str = "uncalibrated: data sheet"

    @property
    def calibration(self) -> Calibration | None:
        return None if self.calibrated is None else self.calibrated.calibration


@cache
def published_constants() -> Constants:
    """Return the constants of a machine that was not calibrated: data sheets and the project's published runs."""
    width = json.loads(SCORE_FILE.read_text(encoding="utf-8"))["width"]
    fitted = [measured(row) for row in own_rows() if row.is_fitted]
    return Constants(fit=Fit(fitted), width=width, label=f"uncalibrated: data sheet and {len(fitted)} published runs")


def calibrated_constants(path: Path, here: Mapping[str, Any]) -> Constants:
    """Return the constants of this machine from its calibration.json.

    Args:
        here: as for `check_machine`.

    Raises:
        InputError: it is another kind of file, or another machine's.
    """
    calibration = read_calibration(path)
    check_machine(calibration, here, path)
    with holding_together(f"--calibration {path}"):
        return constants_of_calibration(calibration, path.name)


def constants_of_calibration(calibration: Calibration, name: str = "calibration.json") -> Constants:
    """Return constants that predict from what was measured."""
    label = f"calibrated with {name}, {len(calibration.steps)} whole steps"
    return Constants(calibrated=Calibrated.of(calibration), label=label)
