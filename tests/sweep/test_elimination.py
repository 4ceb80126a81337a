"""The statistics of a race: intervals that hold at all looks, and the share of races that lose the fastest."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from testbed.sweep.race import (
    ERROR,
    MIXTURE,
    Difference,
    Evidence,
    Measured,
    Race,
    TimeIsUp,
    are_equivalent,
    by_speed,
    evidence_of_race,
    slower_ones,
)


def runs_of(table: dict[str, list[float]]) -> list[Measured]:
    return [Measured(name, number, speed) for name, row in table.items() for number, speed in enumerate(row, start=1)]


def test_what_a_round_has_in_common_cancels():
    """All of round 2 at half the speed: in the mean of its runs, b, which has no second run, would be the fastest."""
    evidence = Evidence(runs_of({"a": [100.0, 50.0], "b": [90.0], "c": [80.0, 40.0]}), ERROR)
    assert by_speed(evidence, "abc") == ["a", "b", "c"]
    assert evidence.difference("a", "b").estimate == pytest.approx(math.log(100 / 90))
    assert evidence.noise == pytest.approx(0.0, abs=1e-9)


def test_one_run_of_each_says_nothing():
    evidence = evidence_of_race(runs_of({"a": [100.0], "b": [1.0]}), 2)
    assert evidence.noise is None
    assert slower_ones(evidence, ["a", "b"]) == {}
    assert evidence.difference("a", "b").low == -math.inf
    assert evidence.difference("a", "b").as_ratio() == [pytest.approx(100.0), None, None]


def test_the_margin_is_that_of_the_sequence():
    """Against the e-value itself: at the bounds of the interval it is 1 / error, and within them less."""
    runs = runs_of({"a": [100, 103, 98, 101], "b": [93, 97, 90, 95], "c": [80, 81, 83, 79]})
    evidence = Evidence(runs, tail=0.01)
    found = evidence.difference("a", "b")
    freedom = 12 - (3 + 4 - 1)
    weight = MIXTURE / (MIXTURE + 2)  # each has 4 runs: the variance of the difference is half that of a run

    def e_value(hypothesis: float) -> float:
        t = (found.estimate - hypothesis) / (evidence.noise * math.sqrt(0.5))
        return math.sqrt(weight) * ((1 + t * t / freedom) / (1 + weight * t * t / freedom)) ** ((freedom + 1) / 2)

    assert e_value(found.low) == pytest.approx(1 / 0.02) == pytest.approx(e_value(found.high))
    assert e_value(found.estimate) < e_value(0.99 * found.low + 0.01 * found.estimate) < 1 / 0.02


def test_an_interval_holds_at_all_looks_together():
    """Two equal configurations, looked at after each of 20 rounds; ordinary 90 % intervals fail for a third."""
    wrong = 0
    for seed in range(150):
        logs = 0.05 * np.random.default_rng(seed).standard_normal((2, 20))
        table = np.exp(logs)
        for rounds in range(2, 21):
            found = Evidence(runs_of({"a": [*table[0, :rounds]], "b": [*table[1, :rounds]]}), tail=0.05).difference(
                "a", "b"
            )
            if not found.low <= 0 <= found.high:
                wrong += 1
                break
    assert wrong <= 0.10 * 150


def test_equivalent_needs_the_whole_interval_inside_the_margin():
    assert Difference(0.0, -0.019, 0.019).is_within(0.02)
    assert not Difference(0.0, -0.021, 0.0).is_within(0.02) and not Difference(0.01, 0.005, 0.021).is_within(0.02)
    random = np.random.default_rng(3)
    close = {name: (100 * np.exp(0.001 * random.standard_normal(12))).tolist() for name in "ab"}
    far = {**close, "c": (103 * np.exp(0.001 * random.standard_normal(12))).tolist()}
    assert are_equivalent(evidence_of_race(runs_of(close), 2), ["a", "b"], 0.02)
    assert not are_equivalent(evidence_of_race(runs_of(far), 3), ["a", "b", "c"], 0.02)


NOISES: dict[str, Callable[[np.random.Generator], float]] = {
    "normal": lambda random: float(random.standard_normal()),
    "heavy tails": lambda random: float(random.standard_t(3)) / math.sqrt(3),
    "a tail of slow runs": lambda random: 1.0 - float(random.exponential()),
}


@dataclass
class NoisyTrack:
    """Five rounds of runs with a noise of 5 %, and a drift of 2 % from run to run."""

    speeds: dict[str, float]
    noise: Callable[[np.random.Generator], float]
    random: np.random.Generator
    drift: float = 0.0

    def run(self, name: str, number: int) -> float:
        if number > 5:
            raise TimeIsUp
        self.drift += 0.02 * float(self.random.standard_normal())
        return self.speeds[name] * math.exp(self.drift + 0.05 * self.noise(self.random))

    def rounds_left(self, names: Sequence[str], done: int) -> int:
        return 5 - done


@pytest.mark.parametrize("noise", NOISES)
def test_at_most_one_race_in_twenty_loses_the_fastest(noise):
    """Nine of ten are 3 % slower, so each of nine comparisons could lose the fastest, at each of many looks."""
    speeds = {"best": 100.0, **{f"slower {number}": 97.0 for number in range(9)}}
    lost = 0
    for seed in range(150):
        random = np.random.default_rng(seed)
        race = Race([str(name) for name in random.permutation(list(speeds))], equivalent=0.02)
        race.hold(NoisyTrack(speeds, NOISES[noise], random))
        lost += "best" not in race.left
    assert lost <= 0.05 * 150
