"""Decide the order of a race's runs: rounds, until one leads, all that are left are equal, or time is up. No torch.

`Race` makes no runs itself: a `Track` does, src/gpt2.py in fact and random numbers in a test. What it decides follows
from the runs alone, so a race that was stopped comes to the same place again from the runs that are there.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from testbed.sweep.elimination import (
    Evidence,
    Measured,
    are_equivalent,
    by_speed,
    evidence_of_race,
    may_still_tell,
    slower_ones,
)
from testbed.sweep.plan import FAILED, order_of_round

ONE_LEADS, EQUIVALENT, TIME_IS_UP, STOPPED = "one leads", "equivalent", "time is up", "stopped"
TOO_CLOSE = "too close for the budget"  # what is left of it is for the second measurement
LEAST_ROUNDS = 3  # before that is said
SLOWER_THAN = "slower than "  # how the reason begins of one that left
BEST_FIRST_ROUND = 2  # far slower ones can leave in it, by the noise of the first few, before their second run


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
