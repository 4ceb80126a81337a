"""By how much one rank's time exceeds the others', step by step, and how sure that is.

Steps of one run are not independent: other work on the machine comes and goes over seconds. So the windows of steps are
put into NUM_BATCHES batches in their order, and a Student interval is made of one number per batch (batch means,
Conway 1963). What the batches still have in common is measured by their lag-1 autocorrelation r: the variance of
their mean is (1 + r) / (1 - r) times that of independent ones.

The number of a batch is the rank's lowest tenth minus the median of the others': what a rank meets now and then only
ever adds to its pauses, so quiet steps show best what every step has. Of what comes in some steps only, as garbage
collection does, it is of means, and of CPU times, which vary to both sides, of medians. The interval holds at 95 % for
all comparisons of a run together (Bonferroni).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import special

NUM_BATCHES = 10
QUIET, MIDDLE, MEAN = 0.1, 0.5, None  # which number of a batch
LEAST_WINDOWS = 12  # fewer make no claim
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Shift:
    """Seconds per step by which a rank exceeds the others, with an interval; `score` is seconds in standard errors."""

    seconds: float
    low: float
    high: float
    score: float


def shift_of(values: np.ndarray, comparisons: int) -> Shift:
    """Return the shift behind one number per batch, in their order.

    Args:
        comparisons: how many of them are made of this run.
    """
    middle, spread = float(values.mean()), float(values.std(ddof=1))
    if not spread:
        return Shift(middle, middle, middle, math.copysign(math.inf, middle) if middle else 0.0)
    around = values - middle
    r = float((around[1:] * around[:-1]).sum() / (around**2).sum())
    r = min(0.8, max(0.0, r + 2 / len(values)))  # of so few the estimate is too low by about that (Kendall 1954)
    error = spread * math.sqrt((1 + r) / (1 - r) / len(values))
    margin = float(special.stdtrit(len(values) - 1, 1 - (1 - CONFIDENCE) / 2 / comparisons)) * error
    return Shift(middle, middle - margin, middle + margin, middle / error)


def batches(times: np.ndarray, quantile: float | None = QUIET) -> np.ndarray:
    """Return batches x ranks of windows x ranks: a quantile of each batch, or the mean."""
    parts = np.array_split(times, min(NUM_BATCHES, len(times)))
    return np.array([part.mean(axis=0) if quantile is None else np.quantile(part, quantile, axis=0) for part in parts])


def against_others(of_batches: np.ndarray) -> np.ndarray:
    """Return each rank's numbers minus the median of the other ranks, (batches, ranks) of (batches, ranks)."""
    order = np.argsort(of_batches, axis=1)
    ordered, place = np.take_along_axis(of_batches, order, axis=1), np.argsort(order, axis=1)
    num_others = of_batches.shape[1] - 1

    def other(number: int) -> np.ndarray:  # the others of each rank, in order, are all but itself
        return np.where(number < place, ordered[:, [number]], ordered[:, [min(number + 1, num_others)]])

    return of_batches - (other((num_others - 1) // 2) + other(num_others // 2)) / 2
