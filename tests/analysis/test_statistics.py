"""Verdicts are right as often as they say: simulated arms whose true ratio and noise are known."""

import itertools
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
    median_interval,
    repeats_needed,
    repeats_to_show,
)

CLAIMS = ("faster", "slower")
MARGIN = 0.02


@pytest.fixture
def quick(monkeypatch):
    """Fewer resamples for simulations: the standard error they give is 2 % uncertain, which moves no rate below."""
    monkeypatch.setattr(statistics, "NUM_RESAMPLES", 499)


def runs(generator: np.random.Generator, number: int, noise: float, rate: float = 10_000.0) -> np.ndarray:
    return rate * generator.lognormal(0, noise, number)


@pytest.mark.parametrize(("repeats", "noise"), [(5, 0.03), (7, 0.01), (10, 0.05)])
def test_arms_of_one_configuration_are_told_apart_in_at_most_one_of_twenty_cases(quick, repeats, noise):
    generator = np.random.default_rng(repeats)
    verdicts = [compare(runs(generator, repeats, noise), runs(generator, repeats, noise)).verdict for _ in range(200)]
    assert 0 < sum(verdict in CLAIMS for verdict in verdicts) <= 10  # 0 would say that nothing is ever detected


def test_a_noisy_arm_against_a_quiet_one_makes_no_more_false_claims(quick):
    """The percentile bootstrap claims a difference in 9 % of these."""
    generator = np.random.default_rng(7)
    verdicts = [compare(runs(generator, 7, 0.05), runs(generator, 7, 0.01)).verdict for _ in range(200)]
    assert sum(verdict in CLAIMS for verdict in verdicts) <= 10


def test_a_drift_that_both_arms_share_makes_no_claims_when_runs_are_interleaved(quick):
    generator = np.random.default_rng(3)
    drift = np.exp(np.linspace(0, 0.06, 10))
    sessions = [runs(generator, 10, 0.02) * drift for _ in range(100)]
    assert sum(compare(each[::2], each[1::2]).verdict in CLAIMS for each in sessions) <= 5
    # what interleaving is for: the same runs, one arm after the other
    assert sum(compare(each[:5], each[5:]).verdict in CLAIMS for each in sessions) > 10


def share_detected(repeats: int, noise: float, effect: float) -> float:
    generator = np.random.default_rng(1)
    pairs = [(runs(generator, repeats, noise, 1 + effect), runs(generator, repeats, noise, 1)) for _ in range(150)]
    return np.mean([compare(*pair).verdict == "faster" for pair in pairs])


@pytest.mark.parametrize(("noise", "effect"), [(0.03, 0.05), (0.01, 0.02)])
def test_the_named_number_of_repeats_detects_the_effect(quick, noise, effect):
    repeats = repeats_needed(noise, effect)
    assert share_detected(repeats, noise, effect) >= 0.77  # 0.80 with the standard error of 150 trials, 0.033
    assert detectable_effect(noise, repeats) <= effect < detectable_effect(noise, repeats - 1)
    if repeats > 10:
        assert share_detected(repeats // 2, noise, effect) < 0.6  # and it is not named out of caution alone


@pytest.mark.parametrize("repeats", [5, 12, 15])
def test_the_detectable_effect_is_found_in_four_of_five_comparisons(quick, repeats):
    effect = math.expm1(0.02 * statistics._effect_per_noise(repeats))
    assert share_detected(repeats, 0.02, effect) == pytest.approx(0.8, abs=0.1)  # three standard errors


def test_a_plan_made_from_five_noisy_runs_of_each_is_large_enough(quick):
    """The noise is estimated from the pilot's runs, and low by chance in half of all pilots."""
    generator = np.random.default_rng(2)
    detected = []
    for _ in range(20):
        pilot = compare(runs(generator, 5, 0.02), runs(generator, 5, 0.02))
        repeats = pilot.repeats_to_detect(0.05)
        detected += [compare(runs(generator, repeats, 0.02, 1.05), runs(generator, repeats, 0.02, 1)) for _ in range(4)]
    assert np.mean([ratio.verdict == "faster" for ratio in detected]) >= 0.8


def test_the_minimum_detectable_effect_is_the_one_that_these_repeats_would_detect():
    generator = np.random.default_rng(4)
    ratio = compare(runs(generator, 8, 0.02), runs(generator, 8, 0.02))
    assert repeats_needed(ratio.planning_noise, ratio.minimum_detectable_effect * 1.0001) == 8
    assert repeats_needed(ratio.planning_noise, ratio.minimum_detectable_effect * 0.97) > 8
    assert ratio.noise < ratio.planning_noise < 2 * ratio.noise


def test_the_effect_falls_with_every_repeat_and_in_the_end_with_the_square_root():
    needed = [repeats_needed(0.03, effect) for effect in (0.2, 0.1, 0.05, 0.02, 0.01, 0.005)]
    assert needed == sorted(needed)
    assert needed[0] == 5
    # the median's asymptotic variance is pi/2 sigma^2 / n; 1.96 and 0.84 are quantiles of 95 % and of 80 % power
    normal = 2 * math.pi / 2 * ((1.05 * 1.96 + 0.8416) * 0.03 / math.log(1.005)) ** 2
    assert needed[-1] == pytest.approx(normal, rel=0.15)
    many = compare(*(runs(np.random.default_rng(seed), 300, 0.03) for seed in (0, 1)))
    assert many.repeats_to_detect(many.minimum_detectable_effect) == pytest.approx(300, abs=3)


def test_the_standard_error_is_that_of_all_possible_resamples():
    values = (1.0, 2.0, 4.0, 7.0, 11.0)
    every = [np.median(sample) for sample in itertools.product(values, repeat=5)]
    assert statistics._standard_error(values) == pytest.approx(np.std(every), rel=0.03)  # 4,999 drawn: 1 %


def test_the_ratio_is_that_of_the_medians_and_turns_round_with_the_arms():
    a, b = [104.0, 101.0, 99.0, 250.0, 103.0, 102.0], [100.0, 98.0, 101.0, 97.0, 99.5]
    one, other = compare(a, b), compare(b, a)
    assert one.ratio == pytest.approx(102.5 / 99.5)
    assert (one.n_a, one.n_b) == (6, 5)
    assert (other.ratio, other.low, other.high) == pytest.approx((1 / one.ratio, 1 / one.high, 1 / one.low))
    again = compare(a[::-1], b[::-1])  # the order of the files decides nothing
    assert (again.low, again.high) == (one.low, one.high)


def test_verdicts_name_the_first_arm():
    fast, slow = [110.0, 111.0, 109.0, 110.5, 110.2], [100.0, 101.0, 99.0, 100.5, 100.2]
    assert compare(fast, slow).verdict == "faster"
    assert compare(slow, fast).verdict == "slower"
    assert compare(slow, slow).verdict == "no detectable difference"


def test_fewer_than_five_repeats_make_no_claim():
    few = compare([200.0, 201.0, 202.0, 203.0], [100.0] * 9)
    assert (few.verdict, few.low, few.high, few.minimum_detectable_effect) == ("not enough repeats", None, None, None)
    assert few.ratio == pytest.approx(2.015)
    assert few.repeats_to_detect(0.05) == 5
    single = compare([200.0], [100.0])
    assert (single.noise, single.planning_noise, single.repeats_to_detect(0.05)) == (None, None, None)


def test_runs_without_any_noise_have_an_interval_without_width():
    same = compare([100.0] * 5, [100.0] * 5)
    assert (same.ratio, same.low, same.high, same.verdict) == (1, 1, 1, "no detectable difference")
    assert same.minimum_detectable_effect == 0
    assert compare([101.0] * 5, [100.0] * 5).verdict == "faster"


@pytest.mark.parametrize("bad", [[], [1.0, 0.0], [1.0, -2.0], [math.nan] * 5, [math.inf] * 5])
def test_what_is_no_rate_is_refused(bad):
    with pytest.raises(ValueError, match="positive finite rate"):
        compare(bad, [1.0] * 5)


def test_a_median_has_an_interval_from_five_values_on():
    assert median_interval([]) == (None, None, None)
    assert median_interval([3.0, 1.0, 2.0, 9.0]) == (2.5, None, None)


def test_the_interval_of_a_rate_is_never_below_zero(quick):
    median, low, high = median_interval([4397, 5132, 4206, 392, 200])  # said to be from -1229 to 9641 tokens/s
    assert 0 < low < median == 4206 < high
    assert high / median == pytest.approx(median / low)
    _, low, high = median_interval([0.0, 0.0, 3.0, 9.0, 2.0])  # no logarithm of 0
    assert low == 0 < high
    found = [median_interval(np.random.default_rng(seed).lognormal(0.0, 0.8, 7)) for seed in range(150)]
    assert np.mean([low <= 1.0 <= high for _, low, high in found]) >= 0.95


# --- equality within a margin


def with_slow_runs(generator: np.random.Generator, repeats: int, noise: float) -> np.ndarray:
    """A tail of slow runs, of median 1 and the standard deviation `noise`."""
    return np.exp(noise * (math.log(2) - generator.exponential(1, repeats)))


EQUAL_NOISE, UNEQUAL_NOISE = (1.0, 1.0), (1.0, 0.2)
SIMULATED = [
    (runs, 8, EQUAL_NOISE, 300),
    (with_slow_runs, 8, UNEQUAL_NOISE, 300),
    *(
        pytest.param(*case, 1500, marks=pytest.mark.slow)
        for case in ((runs, 5, UNEQUAL_NOISE), (with_slow_runs, 5, EQUAL_NOISE), (with_slow_runs, 20, UNEQUAL_NOISE))
    ),
]


@pytest.mark.parametrize(("arm", "repeats", "noise", "number"), SIMULATED)
def test_arms_at_the_margin_are_rarely_called_equal_and_the_interval_holds_their_ratio(
    quick, arm, repeats, noise, number
):
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
def test_the_promised_number_of_repeats_shows_that_equal_arms_are_equal(quick, noise):
    repeats = repeats_to_show(noise, MARGIN)
    assert shown(repeats, noise) >= 0.77  # 0.80 less the standard error of 200 trials, 0.028
    if repeats > 8:
        assert shown(repeats // 2, noise) < 0.6  # and it is not named out of caution alone


def shown(repeats: int, noise: float, margin: float = MARGIN) -> float:
    generator = np.random.default_rng(repeats)
    pairs = [(runs(generator, repeats, noise), runs(generator, repeats, noise)) for _ in range(200)]
    return np.mean([equality(compare(a, b), margin) == EQUAL for a, b in pairs])


@pytest.mark.parametrize("repeats", [5, 8, 12, 20, 41])
def test_the_planned_margin_is_shown_in_four_of_five_comparisons_of_equal_arms(quick, repeats):
    margin = math.expm1(0.02 * statistics._MARGIN_PER_NOISE[repeats])
    assert shown(repeats, 0.02, margin) == pytest.approx(0.8, abs=0.085)  # three standard errors of 200 comparisons
    assert repeats_to_show(0.01999, margin) == repeats


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


def test_the_verdict_does_not_depend_on_which_arm_is_named_first(quick):
    generator = np.random.default_rng(8)
    verdicts = []
    for _ in range(40):
        a, b = 1.012 * runs(generator, 6, 0.006), runs(generator, 6, 0.006)
        verdicts.append(equality(compare(a, b), MARGIN))
        assert equality(compare(b, a), MARGIN) == verdicts[-1]
    assert {EQUAL, NOT_SHOWN} <= set(verdicts)


def test_runs_without_any_noise_are_equal_exactly_up_to_the_margin():
    assert equality(compare([102.0] * 5, [100.0] * 5), MARGIN) == EQUAL
    assert equality(compare([102.1] * 5, [100.0] * 5), MARGIN) == FURTHER_APART


@pytest.mark.parametrize("repeats_for", [repeats_needed, repeats_to_show])
@pytest.mark.parametrize(("noise", "fraction"), [(0.01, 0.0), (0.01, -0.05), (-0.01, 0.05)])
def test_a_plan_needs_a_fraction_and_a_noise(repeats_for, noise, fraction):
    with pytest.raises(ValueError, match="must be above 0"):
        repeats_for(noise, fraction)
