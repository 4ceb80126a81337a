"""Say which configurations of a race are slower, from runs that were made in rounds, however often one looks. No torch.

The logarithm of a run's throughput is taken as configuration + round + noise, fitted by least squares. So what the runs
of a round have in common (another program, a warm processor) cancels, also where a round is not complete.

Of each difference of two configurations there is an interval that holds at all looks together: the t-test confidence
sequence of a linear model, a normal mixture over the effect in units of the noise (Lindon, Ham, Tingley, Bojinov 2022,
"Anytime-Valid Linear Models and Regression Adjusted Causal Inference in Randomized Experiments", arXiv:2210.08589; for
one mean Wang and Ramdas 2023, arXiv:2310.03722).

**Error of a race of K configurations.** The truly fastest leaves if one of the K - 1 others is found faster than it.
Each of these intervals is wrong on that side with a probability of at most ERROR / (K - 1), so one of them with at most
ERROR, whoever leads and whenever one looks. Differences between the others cost nothing: their order is not claimed.

Assumed: normal noise, about the same in all configurations. It is estimated from all of them, because a few runs of two
say too little about it. docs/results/race counts wrong eliminations with heavy tails, drift and unequal noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

ERROR = 0.05  # of a whole race
# Weight of "no difference" in the mixture, in runs: small values look for large differences, as a field has. Tried from
# 0.015 to 0.1 in simulated races: the runs that a race takes change by 4 %.
MIXTURE = 0.015


@dataclass(frozen=True)
class Measured:
    """Throughput of one run. `round` counts from 1."""

    name: str
    round: int
    tokens_per_s: float


@dataclass(frozen=True)
class Difference:
    """Logarithm of a ratio of speeds with its interval; infinite bounds: the runs say nothing yet."""

    estimate: float
    low: float
    high: float

    def as_ratio(self) -> list[float | None]:
        """Return the ratio and its bounds; None for a bound that the runs do not give."""
        ratio, low, high = (math.exp(each) if math.isfinite(each) else None for each in vars(self).values())
        return [ratio, low, high]

    def is_within(self, margin: float) -> bool:
        """Return whether the interval lies inside a fraction, such as 0.02, of equal speed on both sides."""
        return max(abs(self.low), abs(self.high)) <= math.log1p(margin)


class Evidence:
    """Compare the configurations of a race by its runs."""

    def __init__(self, runs: Sequence[Measured], tail: float) -> None:
        """Args:
        tail: probability with which an interval may ever be wrong on one given side.
        """
        self._names = {name: place for place, name in enumerate(dict.fromkeys(run.name for run in runs))}
        rounds = {number: place for place, number in enumerate(dict.fromkeys(run.round for run in runs))}
        design = np.zeros((len(runs), len(self._names) + len(rounds)))
        for row, run in zip(design, runs, strict=True):
            row[self._names[run.name]] = row[len(self._names) + rounds[run.round]] = 1.0
        logs = np.log([run.tokens_per_s for run in runs])
        logs -= logs.mean()  # else a difference is taken between numbers that are far from 0
        self._inverse = np.linalg.pinv(design.T @ design)
        fitted = self._inverse @ (design.T @ logs)
        self._effects = fitted[: len(self._names)]
        self._freedom = len(runs) - int(np.linalg.matrix_rank(design))
        squares = float(np.sum((logs - design @ fitted) ** 2))
        self._variance = squares / self._freedom if self._freedom else math.inf
        self._tail = tail

    def speed(self, name: str) -> float:
        """Return the logarithm of a configuration's speed, relative to the field and free of the rounds that it had."""
        return float(self._effects[self._names[name]])

    @property
    def noise(self) -> float | None:
        """Standard deviation of one run as a fraction; None before a configuration has run twice."""
        return math.sqrt(self._variance) if self._freedom else None

    def difference(self, a: str, b: str) -> Difference:
        """Return how much faster a is than b."""
        one, other = self._names[a], self._names[b]
        estimate = float(self._effects[one] - self._effects[other])
        per_noise = float(self._inverse[one, one] + self._inverse[other, other] - 2 * self._inverse[one, other])
        margin = self._margin(per_noise)
        return Difference(estimate, estimate - margin, estimate + margin)

    def difference_after(self, a: str, b: str, rounds: int, freedom: int) -> Difference:
        """Return the difference that so many more rounds would show if they were like those before.

        Args:
            freedom: degrees of freedom that these rounds add.
        """
        one, other = self._names[a], self._names[b]
        now = float(self._inverse[one, one] + self._inverse[other, other] - 2 * self._inverse[one, other])
        margin = self._margin(1 / (1 / now + rounds / 2), self._freedom + freedom)
        estimate = float(self._effects[one] - self._effects[other])
        return Difference(estimate, estimate - margin, estimate + margin)

    def _margin(self, per_noise: float, freedom: int | None = None) -> float:
        """Return half the width of the interval of a contrast whose variance is `per_noise` times that of a run."""
        freedom = self._freedom if freedom is None else freedom
        if not self._freedom:
            return math.inf
        shrunk = MIXTURE / (MIXTURE + 1 / per_noise)
        error = 2 * self._tail  # of both sides
        power = (error**2 * shrunk) ** (1 / (freedom + 1))
        if power <= shrunk:  # so few runs exclude nothing
            return math.inf
        return math.sqrt(self._variance * per_noise * freedom * (1 - power) / (power - shrunk))


def evidence_of_race(runs: Sequence[Measured], num_configurations: int) -> Evidence:
    """Return the evidence with intervals for a whole race of so many configurations."""
    return Evidence(runs, ERROR / max(1, num_configurations - 1))


def by_speed(evidence: Evidence, names: Iterable[str]) -> list[str]:
    """Return the names, the fastest first."""
    return sorted(names, key=lambda name: -evidence.speed(name))


def slower_ones(evidence: Evidence, left: Sequence[str]) -> dict[str, str]:
    """Return those that are shown to be slower than another one that is left, with the name of that one."""
    found = {}
    for name in left:
        ahead = [other for other in left if other != name and evidence.difference(other, name).low > 0]
        if ahead:
            found[name] = by_speed(evidence, ahead)[0]
    return found


def are_equivalent(evidence: Evidence, left: Sequence[str], margin: float) -> bool:
    """Return whether all that are left are shown to be as fast as each other within a fraction."""
    pairs = ((a, b) for place, a in enumerate(left) for b in left[place + 1 :])
    return all(evidence.difference(a, b).is_within(margin) for a, b in pairs)


def may_still_tell(evidence: Evidence, left: Sequence[str], rounds: int, equivalent: float) -> bool:
    """Return whether so many more rounds would make one leave, or show all to be equivalent, if they were like those
    before."""
    pairs = [(a, b) for place, a in enumerate(left) for b in left[place + 1 :]]
    found = [evidence.difference_after(a, b, rounds, rounds * (len(left) - 1)) for a, b in pairs]
    return any(each.low > 0 or each.high < 0 for each in found) or all(each.is_within(equivalent) for each in found)
