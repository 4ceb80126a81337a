"""Hold a race: rounds of runs, until one configuration leads, all that are left are equal, or time is up. No torch.

`Race` makes no runs itself: a `Track` does, src/gpt2.py in fact and random numbers in a test. What it decides follows
from the runs alone, so a race that was stopped comes to the same place again from the runs that are there. `Evidence`
says which configurations are slower, however often one looks.

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

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from testbed.sweep.plan import FAILED, order_of_round

ERROR = 0.05  # of a whole race
# Weight of "no difference" in the mixture, in runs: small values look for large differences, as a field has. Tried from
# 0.015 to 0.1 in simulated races: the runs that a race takes change by 4 %.
MIXTURE = 0.015

ONE_LEADS, EQUIVALENT, TIME_IS_UP, STOPPED = "one leads", "equivalent", "time is up", "stopped"
TOO_CLOSE = "too close for the budget"  # what is left of it is for the second measurement
LEAST_ROUNDS = 3  # before that is said
SLOWER_THAN = "slower than "  # how the reason begins of one that left
BEST_FIRST_ROUND = 2  # far slower ones can leave in it, by the noise of the first few, before their second run


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

    def difference(self, a: str, b: str, rounds: int = 0, freedom: int = 0) -> Difference:
        """Return how much faster a is than b.

        Args:
            rounds: of both, in addition to those that were made and like them.
            freedom: degrees of freedom that these rounds add.
        """
        one, other = self._names[a], self._names[b]
        per_noise = float(self._inverse[one, one] + self._inverse[other, other] - 2 * self._inverse[one, other])
        margin = self._margin(1 / (1 / per_noise + rounds / 2), self._freedom + freedom)
        estimate = float(self._effects[one] - self._effects[other])
        return Difference(estimate, estimate - margin, estimate + margin)

    def _margin(self, per_noise: float, freedom: int) -> float:
        """Return half the width of the interval of a contrast whose variance is `per_noise` times that of a run."""
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
    found = [evidence.difference(a, b, rounds, rounds * (len(left) - 1)) for a, b in pairs]
    return any(each.low > 0 or each.high < 0 for each in found) or all(each.is_within(equivalent) for each in found)


class TimeIsUp(Exception):
    """The next run does not fit into the budget."""


class RunStopped(Exception):
    """A signal came."""


class Track(Protocol):
    """Makes runs."""

    def run(self, name: str, number: int) -> float | str:
        """Return the tokens/s of run `number` of a configuration, or why it failed.

        Raises:
            TimeIsUp: it does not fit into the budget.
            RunStopped: a signal came.
        """
        ...

    def rounds_left(self, names: Sequence[str], done: int) -> int:
        """Return how many more rounds of these configurations fit into the budget, after `done` rounds."""
        ...


@dataclass
class Race:
    """A race and where it stands. `names`: the field, in the order of the first round.

    Attributes:
        runs: those that were made, in their order.
        left: configurations that may be the fastest, the fastest first once there are runs.
        out: those that left, each with the reason.
        end: one of the words above; None while it runs.
    """

    names: Sequence[str]
    equivalent: float
    runs: list[Measured] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    out: dict[str, str] = field(default_factory=dict)
    end: str | None = None

    def __post_init__(self) -> None:
        self.left = list(self.names)

    def evidence(self) -> Evidence:
        return evidence_of_race(self.runs, len(self.names))

    def first_two(self) -> list[str]:
        """Return the winner and the runner-up by the runs so far: fewer than two if fewer have run and not failed."""
        measured = dict.fromkeys(run.name for run in self.runs)
        if not measured:
            return []
        ordered = by_speed(self.evidence(), measured)
        failed = {name for name, why in self.out.items() if why.startswith(FAILED)}
        left = [name for name in ordered if name in self.left]
        return [*left, *(name for name in ordered if name not in left and name not in failed)][:2]

    def hold(self, track: Track) -> None:
        """Make rounds until the race has ended; `end` says how."""
        try:
            for number in itertools.count(1):
                self._round(number, track)
                if self.end is not None:
                    return
        except TimeIsUp:
            self.end = TIME_IS_UP
        except RunStopped:
            self.end = STOPPED

    def _round(self, number: int, track: Track) -> None:
        for name in self._order(number):
            if name not in self.left:  # left within this round
                continue
            speed = track.run(name, number)
            if isinstance(speed, str):
                self.left.remove(name)
                self.out[name] = f"{FAILED}: {speed}"
            else:
                self.runs.append(Measured(name, number, speed))
            if number > 1:
                self._judge()
            if len(self.left) <= 1 and number > 1:
                break
        if self.end is None and len(self.left) <= 1:
            self.end = ONE_LEADS
        if self.end is None and number >= LEAST_ROUNDS:
            rounds = track.rounds_left(self.left, number)
            if not may_still_tell(self.evidence(), self.left, rounds, self.equivalent):
                self.end = TOO_CLOSE

    def _order(self, number: int) -> list[str]:
        """Return the order of a round. From the third on all take turns, so that drift favours none."""
        if number == 1:
            return list(self.left)
        if number == BEST_FIRST_ROUND:
            return by_speed(self.evidence(), self.left)
        alphabetical = sorted(self.left)
        return [alphabetical[place] for place in order_of_round(len(alphabetical), number)]

    def _judge(self) -> None:
        if not self.runs:
            return
        evidence = self.evidence()
        slower = slower_ones(evidence, self.left)
        self.out |= {name: SLOWER_THAN + other for name, other in slower.items()}
        self.left = by_speed(evidence, [name for name in self.left if name not in slower])
        if len(self.left) > 1 and are_equivalent(evidence, self.left, self.equivalent):
            self.end = EQUIVALENT
