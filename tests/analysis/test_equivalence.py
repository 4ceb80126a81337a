"""Verdicts of equivalence are wrong as rarely, and found as often, as they say: arms whose true ratio is known."""

import math

import numpy as np
import pytest

from testbed.analysis import statistics
from testbed.analysis.statistics import (
    EQUAL,
    FURTHER_APART,
    NOT_SHOWN,
    compare,
    detectable_effect,
    equality,
    repeats_needed,
    repeats_to_show,
)

MARGIN = 0.02


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Fewer resamples: the standard error they give is 2 % uncertain, which moves no rate below."""
    monkeypatch.setattr(statistics, "NUM_RESAMPLES", 499)


def normal(generator: np.random.Generator, repeats: int, noise: float) -> np.ndarray:
    return np.exp(generator.normal(0, noise, repeats))


def with_slow_runs(generator: np.random.Generator, repeats: int, noise: float) -> np.ndarray:
    """A tail of slow runs, of median 1 and the standard deviation `noise`."""
    return np.exp(noise * (math.log(2) - generator.exponential(1, repeats)))


def share(verdicts: list[str], wanted: str) -> float:
    return sum(verdict == wanted for verdict in verdicts) / len(verdicts)


EQUAL_NOISE, UNEQUAL_NOISE = (1.0, 1.0), (1.0, 0.2)
SIMULATED = [
    (normal, 8, EQUAL_NOISE, 300),
    (with_slow_runs, 8, UNEQUAL_NOISE, 300),
    *(
        pytest.param(*case, 1500, marks=pytest.mark.slow)
        for case in ((normal, 5, UNEQUAL_NOISE), (with_slow_runs, 5, EQUAL_NOISE), (with_slow_runs, 20, UNEQUAL_NOISE))
    ),
]


@pytest.mark.parametrize(("arm", "repeats", "noise", "number"), SIMULATED)
def test_arms_at_the_margin_are_rarely_called_equal_and_the_interval_holds_their_ratio(arm, repeats, noise, number):
    """The noise is so small that arms without a difference would always be called equal."""
    generator = np.random.default_rng([repeats, number])
    one, other = (MARGIN / 10 * math.sqrt(repeats / 5) * each for each in noise)
    called_equal, held = [], []
    for turn in range(number):
        ratio = (1 + MARGIN) ** (1 if turn % 2 else -1)
        found = compare(ratio * arm(generator, repeats, one), arm(generator, repeats, other))
        called_equal.append(equality(found, MARGIN) == EQUAL)
        held.append(found.low <= ratio <= found.high)
    assert 0 < np.mean(called_equal) <= 0.05
    assert 0.95 - 2 * math.sqrt(0.95 * 0.05 / number) <= np.mean(held) < 1  # two standard errors


@pytest.mark.parametrize("noise", [0.004, 0.01])
def test_the_promised_number_of_repeats_shows_that_equal_arms_are_equal(noise):
    repeats = repeats_to_show(noise, MARGIN)
    assert shown(repeats, noise) >= 0.77  # 0.80 less the standard error of 200 trials, 0.028
    if repeats > 8:
        assert shown(repeats // 2, noise) < 0.6  # and it is not named out of caution alone


def shown(repeats: int, noise: float, margin: float = MARGIN) -> float:
    generator = np.random.default_rng(repeats)
    pairs = [(normal(generator, repeats, noise), normal(generator, repeats, noise)) for _ in range(200)]
    return share([equality(compare(a, b), margin) for a, b in pairs], EQUAL)


@pytest.mark.parametrize("repeats", [5, 8, 12, 20, 41])
def test_the_planned_margin_is_shown_in_four_of_five_comparisons_of_equal_arms(repeats):
    margin = math.expm1(0.02 * statistics._MARGIN_PER_NOISE[repeats])
    assert shown(repeats, 0.02, margin) == pytest.approx(0.8, abs=0.085)  # three standard errors of 200 comparisons
    assert repeats_to_show(0.01999, margin) == repeats


@pytest.mark.parametrize(("noise", "effect"), [(0.01, 0.02), (0.02, 0.03)])
def test_the_promised_number_of_repeats_finds_a_difference(noise, effect):
    repeats = repeats_needed(noise, effect)
    generator = np.random.default_rng(9)
    pairs = [((1 + effect) * normal(generator, repeats, noise), normal(generator, repeats, noise)) for _ in range(200)]
    assert share([compare(a, b).verdict for a, b in pairs], "faster") >= 0.77
    assert detectable_effect(noise, repeats) <= effect < detectable_effect(noise, repeats - 1)


def test_a_plan_of_equality_falls_with_the_margin_and_rises_with_the_noise():
    of_margins = [repeats_to_show(0.01, margin) for margin in (0.2, 0.05, 0.02, 0.01, 0.005, 0.002)]
    assert of_margins == sorted(of_margins) and of_margins[0] == 5 < of_margins[1] + 1 < of_margins[2]
    # two one-sided tests that must both succeed: 1.96 and 1.2816 are quantiles of 97.5 % and of 90 %, and the median of
    # many costs pi / 2 against the mean
    many = 2 * math.pi / 2 * ((1.05 * 1.96 + 1.2816) * 0.01 / math.log1p(0.002)) ** 2
    assert of_margins[-1] == pytest.approx(many, rel=0.15)
    assert repeats_to_show(0.0, 0.01) == 5


FIVE = [100.0, 100.1, 99.9, 100.05, 99.95]


@pytest.mark.parametrize(
    ("factor", "verdict"),
    [(1.0, EQUAL), (1.01, EQUAL), (1 / 1.01, EQUAL), (1.02, NOT_SHOWN), (1.1, FURTHER_APART), (0.9, FURTHER_APART)],
)
def test_each_verdict(factor, verdict):
    assert equality(compare([factor * rate for rate in FIVE], FIVE), MARGIN) == verdict


def test_the_verdict_does_not_depend_on_which_arm_is_named_first():
    generator = np.random.default_rng(8)
    verdicts = []
    for _ in range(40):
        a, b = 1.012 * normal(generator, 6, 0.006), normal(generator, 6, 0.006)
        verdicts.append(equality(compare(a, b), MARGIN))
        assert equality(compare(b, a), MARGIN) == verdicts[-1]
    assert {EQUAL, NOT_SHOWN} <= set(verdicts)


def test_runs_without_any_noise_are_equal_exactly_up_to_the_margin():
    assert equality(compare([102.0] * 5, [100.0] * 5), MARGIN) == EQUAL
    assert equality(compare([102.1] * 5, [100.0] * 5), MARGIN) == FURTHER_APART


@pytest.mark.parametrize(("noise", "margin"), [(0.01, 0.0), (0.01, -0.02), (-0.01, 0.05)])
def test_a_plan_needs_a_margin_and_a_noise(noise, margin):
    with pytest.raises(ValueError, match="must be above 0"):
        repeats_to_show(noise, margin)
