"""The statistics of a race: intervals that hold at all looks, and the share of races that lose the fastest."""

from __future__ import annotations

import math

import numpy as np
import pytest
from support.race_simulation import Case, cases, field_of_run_types, simulate, typical_scatter

from testbed.sweep.elimination import (
    ERROR,
    MIXTURE,
    Difference,
    Evidence,
    Measured,
    are_equivalent,
    by_speed,
    evidence_of_race,
    slower_ones,
)

CASES = {case.name: case for case in cases()}


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


@pytest.mark.parametrize("name", CASES)
def test_at_most_one_race_in_twenty_loses_the_fastest(name, capsys):
    counted = simulate(CASES[name], races=200, seed=1)
    with capsys.disabled():
        print(f"\n{name}: {counted}")
    assert counted.wrong <= 0.05
    if "3 % slower" not in name:  # with half the runs it takes about what the sweep takes; 200 races count to 0.03
        assert counted.took_it >= counted.sweep_took_it - 0.07


def test_a_race_takes_at_most_half_the_runs_of_the_sweep():
    quiet, plain, planned = (simulate(case, races=150, seed=2) for case in cases()[:3])
    assert cases()[2].plan_error is not None
    assert max(quiet.mean_runs, plain.mean_runs) <= quiet.sweep_runs / 2
    assert planned.mean_runs <= 0.4 * planned.sweep_runs


def test_many_that_are_a_little_slower_do_not_add_up_to_an_error():
    """Nine at 2.1 % behind, five times as many looks as the sweep: each comparison could lose the fastest."""
    speeds = tuple(np.log([1.0] + [1 / 1.021] * (len(field_of_run_types()) - 1)).tolist())
    counted = simulate(Case("close", speeds, (typical_scatter(),) * len(speeds)), races=150, seed=5)
    assert counted.wrong <= 0.05
