"""How far apart two sets of repeats are, how sure that is, and what they could not have shown.

One number per run is one repeat: steps of one run share its machine, its memory layout and its minute, so they are not
independent, and an interval made of them is too narrow.

**The interval** of a ratio of medians is made on the log scale, where swapping the arms only changes the sign:

    log ratio +- 1.05 * t(0.975, df) * sqrt(SE_a^2 + SE_b^2)

SE is the bootstrap standard error of the median of one arm's logarithms (scipy.stats.bootstrap), df is Welch and
Satterthwaite's. It was chosen by measurement. Share of comparisons of equal arms that claim a difference, in per cent,
which must not exceed 5 (normal noise of the logarithms, 8,000 comparisons each, so +-0.5; in the columns 1:5 one arm
has five times the noise of the other, as several ranks may have against one; the level of noise cancels):

    repeats per arm                   5         7         8        10        20        30
    noise in the arms             1:1 1:5   1:1 1:5   1:1 1:5   1:1 1:5   1:1 1:5   1:1 1:5
    this interval                 1.5 2.1   2.0 2.6   2.8 3.4   3.4 4.0   3.4 4.4   4.0 5.0
    the same, not widened         1.8 2.2   2.5 3.0   3.5 4.0   3.6 4.6   4.6 5.4   4.6 5.6
    percentile bootstrap          2.9 5.2   4.0 9.0   3.8 6.6   3.8 5.6   3.3 5.2   3.8 5.5
    basic bootstrap, logarithms    14  21    17  25    13  19    12  16    11  15    11  14

The percentile bootstrap holds for arms of equal noise alone: the median of 7 is resampled from 7 values, and the bounds
jump. BCa does as the percentile does. Other noise, this interval, 1:1 and 1:5: a tail of slow runs (exponential) 1.2 to
3.5 and 2.9 to 5.0; heavy tails (t, 3 degrees of freedom) 0.8 to 3.3 and 1.5 to 4.4.

Arms are not paired by round. A drift that both share, runs interleaved, widens the interval: 0 to 2 % false claims.
Resampling whole rounds finds more then, but with a drift of 10 standard deviations over five rounds makes 13 % false
claims, 31 % with the percentile interval. No method helps runs that are not interleaved (A A A B B B): a drift of one
and a half standard deviations from the first run to the last makes 9 % false claims of 5 repeats and 23 % of 10.

**Equality.** No detectable difference may be just too few runs. Two one-sided tests (Schuirmann 1987, J. Pharmacokinet.
Biopharm. 15, 657) on the log ratio say whether arms are equal within a margin: one against "slower by the margin or
more", one against "faster by it or more". Both reject where the interval lies within 1 / (1 + margin) to 1 + margin.
The 95 % interval decides, not a 90 % one: at the margin, and where a tail of slow runs meets arms of unequal noise, the
latter calls more comparisons equal than the 5 % that are promised. A difference can be sure and still lie within it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from scipy import special, stats

from testbed.errors import InputError

Value = TypeVar("Value")
MIN_REPEATS = 5  # measuring.md, rule 13: fewer make no claim
CONFIDENCE = 0.95
POWER = 0.80  # an effect counts as detectable when four of five comparisons would find it
NUM_RESAMPLES = 4_999
WIDENING = 1.05  # measured, see above: without it up to 6 % of comparisons of equal arms claim a difference

FASTER, SLOWER = "faster", "slower"
NO_DIFFERENCE, NOT_ENOUGH = "no detectable difference", "not enough repeats"
EQUAL, FURTHER_APART, NOT_SHOWN = "equal", "further apart", "not shown"
DEFAULT_MARGIN = 0.02  # as in find_fastest.py: a difference that does not matter

# Difference of log medians that POWER of the comparisons detect, in standard deviations of one run, for so many repeats
# in each arm: normal noise, 16,000 to 40,000 simulated comparisons each. Beyond the last it falls with the square root.
# Odd and even numbers differ because the median of an even number averages two runs.
_EFFECT_PER_NOISE = {
    5: 2.915, 6: 2.349, 7: 2.326, 8: 1.983, 9: 1.983, 10: 1.763, 11: 1.763, 12: 1.585, 15: 1.478, 20: 1.209, 25: 1.12,
    31: 0.996, 41: 0.859, 51: 0.763, 81: 0.6,
}  # fmt: skip
# Smallest log(1 + margin) within which POWER of comparisons of equal arms are shown to be equal, likewise: 6,000 to
# 8,000 simulated comparisons each.
_MARGIN_PER_NOISE = {
    5: 3.377, 6: 2.583, 7: 2.702, 8: 2.271, 9: 2.265, 10: 1.996, 11: 1.991, 12: 1.763, 15: 1.693, 20: 1.367, 25: 1.28,
    31: 1.168, 41: 0.989, 51: 0.87, 81: 0.675,
}  # fmt: skip


@dataclass(frozen=True)
class Ratio:
    """Median of a over median of b, and what may be said about it. `low` and `high` None: too few repeats to say.

    `noise` is the standard deviation of one run relative to its arm's middle, both arms together; None without repeats.
    `minimum_detectable_effect` is the fraction by which medians must differ for POWER of such comparisons to find it.
    `planning_noise` is what it and `repeats_to_detect` are computed from: the upper 80 % confidence limit of `noise`.
    The spread of a few runs is itself uncertain, and half of all plans made with the point estimate are too small
    (Browne, Statistics in Medicine 14, 1995, pages 1933 to 1940).
    """

    ratio: float
    low: float | None
    high: float | None
    n_a: int
    n_b: int
    verdict: str
    minimum_detectable_effect: float | None
    noise: float | None
    planning_noise: float | None

    def interval_among(self, comparisons: int) -> tuple[float, float] | None:
        """Return the interval at a confidence of 1 - 0.05 / comparisons: as many of them hold together at 95 %.

        It is the 95 % interval widened on the log scale by the ratio of Student's quantiles. Their degrees of freedom
        are the smaller arm's repeats less one, the fewest that Welch's can be: rather too wide than too narrow.
        """
        if self.low is None or self.high is None:
            return None
        freedom, tail = min(self.n_a, self.n_b) - 1, (1 - CONFIDENCE) / 2
        wider = special.stdtrit(freedom, 1 - tail / comparisons) / special.stdtrit(freedom, 1 - tail)
        low, high = (self.ratio * (bound / self.ratio) ** wider for bound in (self.low, self.high))
        return float(low), float(high)

    def repeats_to_detect(self, effect: float) -> int | None:
        """Return the repeats per arm at which POWER of all comparisons find a difference of the fraction `effect`."""
        return None if self.planning_noise is None else repeats_needed(self.planning_noise, effect)


def all_known(values: Iterable[Value | None]) -> tuple[Value, ...] | None:
    """Return the values, or None where one of them is not known."""
    given = tuple(values)
    known = tuple(value for value in given if value is not None)
    return known if len(known) == len(given) else None


def compare(a: Sequence[float], b: Sequence[float]) -> Ratio:
    """Compare rates (more is better), one number per run. The verdict is about `a`.

    InputError when an arm is empty or holds a rate that is not positive and finite.
    """
    a, b = _rates(a), _rates(b)
    ratio = float(np.median(a) / np.median(b))
    noise, planning_noise = noise_of((a, b))
    if min(len(a), len(b)) < MIN_REPEATS:
        return Ratio(ratio, None, None, len(a), len(b), NOT_ENOUGH, None, noise, planning_noise)
    widest = math.exp(_margin([(_log_standard_error(rates), len(rates)) for rates in (a, b)]))
    low, high = ratio / widest, ratio * widest
    verdict = FASTER if low > 1 else SLOWER if high < 1 else NO_DIFFERENCE
    effect = math.expm1(
        math.hypot(*(_effect_per_noise(len(rates)) * _log_stdev(rates) for rates in (a, b)))
        / math.sqrt(2)
        * (planning_noise / noise if noise and planning_noise is not None else 1.0)
    )
    return Ratio(ratio, low, high, len(a), len(b), verdict, effect, noise, planning_noise)


def median_interval(values: Sequence[float]) -> tuple[float | None, float | None, float | None]:
    """Return median and bounds of its 95 % interval; the bounds are None below MIN_REPEATS, all three without values.

    Times, rates and sizes are above 0: their interval is made on the log scale, so that no bound is below 0.

    For a table or a figure. Whether two arms differ is for `compare`: overlapping intervals do not say that they agree.
    """
    if not len(values):
        return None, None, None
    median = float(np.median(values))
    if len(values) < MIN_REPEATS:
        return median, None, None
    if min(values) > 0:
        widest = math.exp(_margin([(_log_standard_error(values), len(values))]))
        return median, median / widest, median * widest
    margin = _margin([(_standard_error(tuple(sorted(map(float, values)))), len(values))])
    return median, max(median - margin, min(0.0, *values)), median + margin


def detectable_effect(noise: float, repeats: int) -> float:
    """Return the fraction by which one arm must be faster for POWER of comparisons of so many repeats to find it."""
    return math.expm1(_effect_per_noise(repeats) * noise)


def repeats_needed(noise: float, effect: float) -> int:
    """Return the repeats per arm at which POWER of all comparisons find that one is faster by the fraction `effect`.

    `noise` is the true standard deviation of one run as a fraction. Never fewer than MIN_REPEATS.
    """
    if effect <= 0 or noise < 0:
        raise InputError(f"effect {effect} must be above 0 and noise {noise} not below 0")
    return _repeats(_EFFECT_PER_NOISE, noise, effect)


def repeats_to_show(noise: float, margin: float) -> int:
    """Return the repeats per arm at which POWER of comparisons of equal arms show that they are equal within `margin`.

    `noise` as in `repeats_needed`. Never fewer than MIN_REPEATS.
    """
    if margin <= 0 or noise < 0:
        raise InputError(f"margin {margin} must be above 0 and noise {noise} not below 0")
    return _repeats(_MARGIN_PER_NOISE, noise, margin)


def _repeats(per_noise: dict[int, float], noise: float, fraction: float) -> int:
    wanted, last = math.log1p(fraction), max(per_noise)
    for repeats in range(MIN_REPEATS, last + 1):
        if np.interp(repeats, list(per_noise), list(per_noise.values())) * noise <= wanted:
            return repeats
    return math.ceil(last * (per_noise[last] * noise / wanted) ** 2)


def equality(ratio: Ratio, margin: float) -> str:
    """Return whether two arms are equal within the fraction `margin`: EQUAL, FURTHER_APART, NOT_SHOWN or NOT_ENOUGH."""
    if ratio.low is None or ratio.high is None:
        return NOT_ENOUGH
    if 1 / (1 + margin) <= ratio.low and ratio.high <= 1 + margin:
        return EQUAL
    return FURTHER_APART if ratio.low > 1 + margin or ratio.high < 1 / (1 + margin) else NOT_SHOWN


def noise_of(arms: Iterable[Sequence[float]]) -> tuple[float | None, float | None]:
    """Return the standard deviation of one run, pooled over the arms, and its upper 80 % confidence limit.

    Both are fractions; None without an arm of two rates.
    """
    repeated = [rates for rates in arms if len(rates) > 1]
    if not repeated:
        return None, None
    variances = np.array([_log_stdev(rates) ** 2 for rates in repeated])
    noise = math.sqrt(variances.mean())
    if not noise:
        return 0.0, 0.0
    freedom = variances.sum() ** 2 / sum(variances**2 / (np.array([len(rates) for rates in repeated]) - 1))
    return noise, noise * math.sqrt(freedom / special.chdtri(freedom, 0.8))


def _rates(values: Sequence[float]) -> tuple[float, ...]:
    rates = tuple(map(float, values))
    if not rates or not all(math.isfinite(rate) and rate > 0 for rate in rates):
        raise InputError(f"an arm is one positive finite rate per run, not {list(rates)}")
    return rates


@functools.lru_cache(maxsize=4096)  # a report compares each arm with many others
def _standard_error(values: tuple[float, ...]) -> float:
    """Return the bootstrap standard error of the median of sorted values; the seed is fixed, and so is the verdict."""
    if len(set(values)) == 1:
        return 0.0
    resampled = stats.bootstrap(
        (np.array(values),), np.median, vectorized=True, n_resamples=NUM_RESAMPLES, method="percentile", rng=0
    )
    return float(resampled.standard_error)


def _log_standard_error(rates: Sequence[float]) -> float:
    return _standard_error(tuple(np.log(sorted(rates)).tolist()))


def _margin(arms: Sequence[tuple[float, int]]) -> float:
    """Return half the width of the interval of a difference of medians, given each one's standard error and repeats."""
    variances = np.array([standard_error**2 for standard_error, _ in arms])
    if not variances.any():
        return 0.0
    freedom = variances.sum() ** 2 / sum(variances**2 / (np.array([repeats for _, repeats in arms]) - 1))
    return float(WIDENING * special.stdtrit(freedom, (1 + CONFIDENCE) / 2) * math.sqrt(variances.sum()))


def _log_stdev(rates: Sequence[float]) -> float:
    return float(np.std(np.log(rates), ddof=1))


def _effect_per_noise(repeats: int) -> float:
    last = max(_EFFECT_PER_NOISE)
    if repeats > last:
        return _EFFECT_PER_NOISE[last] * math.sqrt(last / repeats)
    return float(np.interp(repeats, list(_EFFECT_PER_NOISE), list(_EFFECT_PER_NOISE.values())))
