"""Fit factors of a step's parts to measured steps, by numpy alone. No torch.

A part's seconds from its rates are off by what no data sheet tells. Of published runs three things are fitted: how far
each family of programs stays behind the formulas, and how far its attention kernels do; how large a share of its peak
an architecture reaches in matrix products. Nothing is fitted for a strategy, a device or a network, so that rankings
follow from the formulas. Of a calibration's whole steps it is what measured_rates.py says. Each factor is a random
effect: normal in its logarithm, around 0, with the deviation that it says (Laird and Ware 1982, doi:10.2307/2529876).
What was not seen keeps factor 1, and adds its deviation to the interval. The deviations are round numbers.

log t = log sum of parts x exp(sum of factors) + noise. Gauss-Newton steps on the posterior mode, where outliers weigh
less (noise of Student's t, by reweighting; Lange et al. 1989, doi:10.2307/2290063). The factors are shrunk towards 1
by their deviations, so with few rows the data sheet speaks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

NOISE = 0.04  # of log time: a rounded comment, a release, one reading for a mean
FREEDOM = 4.0  # degrees, of Student's t
ROUNDS = 25
TOLERANCE = 1e-7
COVERED = 0.9  # of an interval


class Factor(NamedTuple):
    """The parts that a factor multiplies, what it is of, and its logarithm's deviation before any row was seen."""

    parts: tuple[str, ...]
    of: str
    deviation: float


@dataclass(frozen=True)
class Nominal:
    """A step by its rates alone, before any factor: seconds of each part, and the factors that concern it."""

    seconds: np.ndarray
    factors: tuple[Factor, ...]


@dataclass(frozen=True)
class Measured:
    """A row as the fit sees it."""

    nominal: Nominal
    log_time: float
    noise: float


class Fit:
    """Factors fitted to rows, whose seconds are of `parts`; without any row all of them are 1."""

    def __init__(self, rows: Sequence[Measured], parts: Sequence[str]) -> None:
        names = tuple(dict.fromkeys(factor for row in rows for factor in row.nominal.factors))
        self.places = {factor: place for place, factor in enumerate(names)}
        self.step_parts = parts
        self.reach = np.array([self._parts_of(factor) for factor in names]).reshape(len(names), len(parts))
        self.variances = np.array([factor.deviation**2 for factor in names])
        self.values = np.zeros(len(names))
        self.gradient = np.zeros((len(rows), len(names)))
        self.linear = np.zeros(len(rows))  # what the factors have to explain of the rows' logarithms
        self.spread = np.eye(len(rows))  # covariance of the rows' logarithms, under the factors' deviations
        if rows:
            self._solve(rows)

    def _solve(self, rows: Sequence[Measured]) -> None:
        target = np.array([row.log_time for row in rows])
        noise = np.array([row.noise for row in rows])
        seconds = np.array([row.nominal.seconds for row in rows])
        member = np.zeros_like(self.gradient)  # whether a factor concerns a row
        for number, row in enumerate(rows):
            member[number, [self.places[factor] for factor in row.nominal.factors]] = 1.0
        for _ in range(ROUNDS):
            parts = seconds * np.exp((member * self.values) @ self.reach)
            whole = parts.sum(axis=1)
            residual = target - np.log(whole)
            self.gradient = member * ((parts / whole[:, None]) @ self.reach.T)
            weight = (FREEDOM + 1) / (FREEDOM + (residual / noise) ** 2) / noise**2
            scaled = self.gradient * self.variances
            self.spread = scaled @ self.gradient.T + np.diag(1 / weight)
            self.linear = residual + self.gradient @ self.values
            values = scaled.T @ np.linalg.solve(self.spread, self.linear)
            moved = np.abs(values - self.values).max()
            self.values = values
            if moved < TOLERANCE:
                break

    def _parts_of(self, factor: Factor) -> np.ndarray:
        """Return 1 for each part that a factor multiplies, 0 for the others."""
        return np.array([float(part in factor.parts) for part in self.step_parts])

    def parts(self, nominal: Nominal) -> np.ndarray:
        """Return seconds by part with their factors; one not seen is 1."""
        known = [self.places[factor] for factor in nominal.factors if factor in self.places]
        return np.asarray(nominal.seconds * np.exp(self.values[known] @ self.reach[known]))

    def left_out(self) -> np.ndarray:
        """Return the logarithm of measured over predicted for each row, predicted from the others: the posterior is
        taken as normal (Rasmussen and Williams 2006, Gaussian Processes for Machine Learning, section 5.4.2)."""
        return np.asarray(self._inverse @ self.linear / np.diag(self._inverse))

    @cached_property
    def _inverse(self) -> np.ndarray:
        """The inverse of `spread`: a plan asks for hundreds of predictions."""
        return np.linalg.inv(self.spread)

    def predict(self, nominal: Nominal) -> tuple[np.ndarray, float, float]:
        """Return `parts`, the logarithm of a step's time and its standard deviation; a factor not seen adds its own."""
        parts = self.parts(nominal)
        known = np.zeros(len(self.values))
        variance = NOISE**2
        for factor in nominal.factors:
            share = float(self._parts_of(factor) @ parts) / parts.sum()  # by how much the time's logarithm moves
            variance += share**2 * factor.deviation**2
            if factor in self.places:
                known[self.places[factor]] = share
        with_rows = self.gradient @ (self.variances * known)
        variance -= float(with_rows @ self._inverse @ with_rows) if len(with_rows) else 0.0
        return parts, math.log(parts.sum()), math.sqrt(max(variance, NOISE**2))


def conformal_quantile(scores: Sequence[float], weights: Sequence[float] | None = None) -> float:
    """Return the weighted 90 % conformal quantile. A new score, with the mean weight, counts as the largest."""
    if not len(scores):
        return math.inf
    order = np.argsort(scores)
    weight = np.ones(len(scores)) if weights is None else np.asarray(weights, dtype=float)
    reached = np.cumsum(weight[order]) / (weight.sum() + weight.mean())
    place = int(np.searchsorted(reached, COVERED))
    return float(np.asarray(scores)[order[min(place, len(scores) - 1)]])
