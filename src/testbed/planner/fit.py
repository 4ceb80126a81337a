"""Fit the factors of parts to measured steps, by numpy alone. No torch.

log t = log sum of parts x exp(sum of factors) + noise. Gauss-Newton steps on the posterior mode, where outliers weigh
less (noise of Student's t, by reweighting; Lange et al. 1989, doi:10.2307/2290063). The factors are shrunk towards 1
by their deviations, so with few rows the data sheet speaks. Each step is solved over the rows, which are fewer than
the factors (Rasmussen and Williams 2006, Gaussian Processes for Machine Learning, equations 2.25 and 2.26).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from testbed.memory_model.job import Job, Machine
from testbed.planner.factors import TOTAL, Factor, factors_of
from testbed.planner.parts import PARTS, Rates, step_parts
from testbed.planner.published import FRAMEWORKS, Row
from testbed.planner.rates import DataSheetRates

NOISE = 0.04  # of log time: a rounded comment, a release, one reading for a mean
WEAK = 2.0  # times the noise, of rows graded weak or flagged
FREEDOM = 4.0  # degrees, of Student's t
ROUNDS = 25
TOLERANCE = 1e-7

PART_PLACES = {part: place for place, part in enumerate(PARTS)}


@dataclass(frozen=True)
class Nominal:
    """A step by its rates alone: seconds of each of PARTS, idle time apart, and the factors that concern it."""

    seconds: np.ndarray
    idle: float
    factors: tuple[Factor, ...]

    @property
    def with_idle(self) -> np.ndarray:
        """Seconds by part, a pipeline's idle time shared out among them: it idles while others compute the same."""
        whole = float(self.seconds.sum())
        return np.asarray(self.seconds * (1 + self.idle / whole)) if whole else self.seconds


@dataclass(frozen=True)
class Measured:
    """A row as the fit sees it."""

    nominal: Nominal
    log_time: float
    noise: float


def nominal_of(job: Job, machine: Machine, rates: Rates) -> Nominal:
    """Return a step before any factor."""
    parts, idle = step_parts(job, machine, rates)
    framework = FRAMEWORKS.get(job.stack)
    factors = tuple(factors_of(job, machine, framework))
    return Nominal(np.array([parts[part] for part in PARTS]), idle, factors)


def measured(row: Row) -> Measured:
    """Return what the fit needs of a published row."""
    is_weak = row.grade == "weak" or bool(row.flags)
    return Measured(
        nominal=nominal_of(row.job, row.machine, DataSheetRates(row.machine.device)),
        log_time=float(np.log(row.step_time_s)) if row.step_time_s else float("nan"),
        noise=NOISE * (WEAK if is_weak else 1.0),
    )


class Fit:
    """Factors fitted to rows; without any row all of them are 1."""

    def __init__(self, rows: Sequence[Measured]) -> None:
        names = tuple(dict.fromkeys(factor for row in rows for factor in row.nominal.factors))
        self.places = {factor: place for place, factor in enumerate(names)}
        self.variances = np.array([factor.deviation**2 for factor in names])
        self.values = np.zeros(len(names))
        self.gradient = np.zeros((len(rows), len(names)))
        self.spread = np.eye(len(rows))  # covariance of the rows' logarithms, under the factors' deviations
        if rows:
            self._solve(rows)

    def _solve(self, rows: Sequence[Measured]) -> None:
        target = np.array([row.log_time for row in rows])
        noise = np.array([row.noise for row in rows])
        seconds = np.array([row.nominal.with_idle for row in rows])
        member = np.zeros_like(self.gradient)  # whether a factor concerns a row
        for number, row in enumerate(rows):
            member[number, [self.places[factor] for factor in row.nominal.factors]] = 1.0
        of_part = np.array([PART_PLACES.get(factor.part, len(PARTS)) for factor in self.places])  # the last: all of it
        selector = (of_part[:, None] == np.arange(len(PARTS) + 1)).astype(float)
        for _ in range(ROUNDS):
            sums = (member * self.values) @ selector  # rows x parts, and the whole step
            parts = seconds * np.exp(sums[:, :-1])
            whole = parts.sum(axis=1, keepdims=True)
            residual = target - np.log(whole[:, 0]) - sums[:, -1]
            shares = np.hstack([parts / whole, np.ones_like(whole)])
            self.gradient = member * shares[:, of_part]
            weight = (FREEDOM + 1) / (FREEDOM + (residual / noise) ** 2) / noise**2
            scaled = self.gradient * self.variances
            self.spread = scaled @ self.gradient.T + np.diag(1 / weight)
            values = scaled.T @ np.linalg.solve(self.spread, residual + self.gradient @ self.values)
            moved = np.abs(values - self.values).max()
            self.values = values
            if moved < TOLERANCE:
                break

    def _log_time(self, nominal: Nominal) -> tuple[float, np.ndarray]:
        """Return the logarithm of the step's time, and the shares of its parts."""
        parts = self.parts(nominal)
        return float(np.log(parts.sum()) + self._sum(nominal, TOTAL)), parts / parts.sum()

    def parts(self, nominal: Nominal) -> np.ndarray:
        """Return seconds by part with their factors, but for those of the whole step."""
        scale = np.zeros(len(PARTS))
        for factor in nominal.factors:
            if factor.part != TOTAL and factor in self.places:
                scale[PART_PLACES[factor.part]] += self.values[self.places[factor]]
        return np.asarray(nominal.with_idle * np.exp(scale))

    def _sum(self, nominal: Nominal, part: str) -> float:
        factors = (factor for factor in nominal.factors if factor.part == part and factor in self.places)
        return float(sum(self.values[self.places[factor]] for factor in factors))

    @cached_property
    def _inverse(self) -> np.ndarray:
        """The inverse of `spread`: a plan asks for hundreds of predictions."""
        return np.linalg.inv(self.spread)

    def predict(self, nominal: Nominal) -> tuple[float, float]:
        """Return the logarithm of a step's time and its standard deviation; a factor not seen adds its own."""
        log_time, shares = self._log_time(nominal)
        known = np.zeros(len(self.values))
        variance = NOISE**2
        for factor in nominal.factors:
            share = share_of(factor, shares)
            variance += share**2 * factor.deviation**2
            if factor in self.places:
                known[self.places[factor]] = share
        with_rows = self.gradient @ (self.variances * known)
        variance -= float(with_rows @ self._inverse @ with_rows) if len(with_rows) else 0.0
        return log_time, float(np.sqrt(max(variance, NOISE**2)))


def share_of(factor: Factor, shares: np.ndarray) -> float:
    """Return by how much the logarithm of the step's time moves with the factor's."""
    return 1.0 if factor.part == TOTAL else float(shares[PART_PLACES[factor.part]])
