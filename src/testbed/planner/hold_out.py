"""Predict published rows from fits that did not see them, next to constant MFU, and how wide intervals must be.

Each group of rows is left out of every fitted part at once: the factors, constant MFU, and the width of the interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from testbed.planner.constants import conformal_quantile
from testbed.planner.fit import Fit, Measured, measured
from testbed.planner.published import Row

LEFT_OUT: dict[str, Callable[[Row], Hashable]] = {
    "block": lambda row: row.block,
    "sub_block": lambda row: (row.block, row.sub_block),
    "GPU kind": lambda row: row.machine.device.name,
    "source": lambda row: row.job.stack,
    "precision": lambda row: row.job.precision,
    "model size": lambda row: row.job.model.hidden,
}
FOR_WIDTH = ("block", "sub_block")
UNKNOWN = "unknown GPU kind"  # as "GPU kind", and without its data sheet


@dataclass(frozen=True)
class HeldOut:
    """A row's time as predicted without its group: logarithms of predicted over measured."""

    row: Row
    residual: float
    deviation: float  # as the fit expects it
    control: float  # of constant MFU
    width: float = math.nan  # of the 90 % interval, in deviations, from other blocks' rows

    @property
    def error(self) -> float:
        return abs(math.expm1(self.residual))

    @property
    def control_error(self) -> float:
        return abs(math.expm1(self.control))

    @property
    def score(self) -> float:
        """Return the error of the prediction in deviations."""
        return abs(self.residual) / self.deviation

    @property
    def is_covered(self) -> bool:
        return self.score <= self.width


def held_out(
    rows: Sequence[Row], group_of: Callable[[Row], Hashable], read_as: Callable[[Row], Row] = lambda row: row
) -> list[HeldOut]:
    """Predict each row that has a time from all rows of other groups.

    Args:
        read_as: what is predicted in place of a row.
    """
    timed = [row for row in rows if row.step_time_s is not None]
    seen: dict[str, Measured] = {row.id: measured(row) for row in timed}
    asked = {row.id: read_as(row) for row in timed}
    found = {}
    for group in dict.fromkeys(group_of(row) for row in timed):
        others = [row for row in timed if group_of(row) != group and row.is_fitted]
        fit = Fit([seen[row.id] for row in others])
        for row in timed:
            if group_of(row) == group:
                log_time, deviation = fit.predict(measured(asked[row.id]).nominal)
                truth = seen[row.id].log_time
                control = constant_mfu(asked[row.id], others) - truth
                found[row.id] = HeldOut(row, log_time - truth, deviation, control)
    return [found[row.id] for row in timed]


def constant_mfu(row: Row, others: Sequence[Row]) -> float:
    """Return the logarithm of a row's time at the median MFU of the rows most like it.

    Like it: the same GPU kind, precision and checkpointing; where there is none, without checkpointing, then of the
    architecture in place of the kind, then any row.
    """
    kind, architecture = row.machine.device.name, row.machine.device.architecture
    keys: list[Callable[[Row], Hashable]] = [
        lambda one: (one.machine.device.name, one.job.precision, one.job.recompute),
        lambda one: (one.machine.device.name, one.job.precision),
        lambda one: (one.machine.device.architecture, one.job.precision, one.job.recompute),
        lambda one: (one.machine.device.architecture, one.job.precision),
        lambda one: one.machine.device.name == kind,
        lambda one: one.machine.device.architecture == architecture,
        lambda one: True,
    ]
    for key in keys:
        alike = [_log_mfu(one) for one in others if key(one) == key(row)]
        if alike:
            return _log_ideal(row) - float(np.median(alike))
    return _log_ideal(row) + math.log(2)  # half of the peak


def _log_ideal(row: Row) -> float:
    return math.log(row.model_flops_per_device / row.machine.device.peak_of(row.job.precision))


def _log_mfu(row: Row) -> float:
    return _log_ideal(row) - math.log(row.step_time_s or math.nan)


def width_of(found: Sequence[HeldOut], without: str | None = None) -> float:
    """Return the interval's width in deviations: conformal, from the scores of held-out rows.

    The scores are residuals over the fit's own deviation, so an interval widens by itself where a GPU kind or a program
    was not seen (Lei et al. 2018, arXiv:1604.04173, section 5.2). Rows of one block resemble each other, so a block
    counts as the root of its number of rows (between all rows alike and all blocks alike: Dunn, Wasserman and Ramdas
    2022, arXiv:1809.07441, distribution-free prediction sets for groups).
    """
    used = [one for one in found if one.row.is_scored and one.row.block != without]
    sizes: dict[str, int] = {}
    for one in used:
        sizes[one.row.block] = sizes.get(one.row.block, 0) + 1
    return conformal_quantile([one.score for one in used], [sizes[one.row.block] ** -0.5 for one in used])


def with_widths(found: Sequence[HeldOut], pool: Sequence[HeldOut]) -> list[HeldOut]:
    """Return the rows with the width that the pool gives without the row's block."""
    widths = {block: width_of(pool, block) for block in {one.row.block for one in found}}
    return [HeldOut(one.row, one.residual, one.deviation, one.control, widths[one.row.block]) for one in found]
