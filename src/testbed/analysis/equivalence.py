"""Test whether two sets of repeats are equal within a margin. No detectable difference may be just too few runs.

**Two one-sided tests** (Schuirmann 1987, J. Pharmacokinet. Biopharm. 15, 657) on the log ratio of medians: one against
"slower by the margin or more", one against "faster by it or more". Both reject where the interval of the ratio lies
within 1 / (1 + margin) to 1 + margin. The 95 % interval of statistics.py decides, not a 90 % one: at the margin, and
where a tail of slow runs meets arms of unequal noise, the latter calls more comparisons equal than the 5 % that are
promised. tests/analysis/test_equivalence.py counts.

A difference can be sure and still lie within the margin. Neither excludes the other.
"""

from __future__ import annotations

import math

import numpy as np

from testbed.analysis.statistics import MIN_REPEATS, NOT_ENOUGH, Ratio
from testbed.errors import InputError

DEFAULT_MARGIN = 0.02  # as in find_fastest.py: a difference that does not matter
EQUAL, FURTHER_APART, NOT_SHOWN = "equal", "further apart", "not shown"

# Smallest log(1 + margin) within which POWER of comparisons of equal arms are shown to be equal, in standard deviations
# of one run, for so many repeats in each arm: normal noise, 6,000 to 8,000 simulated comparisons each. Beyond the last
# it falls with the square root.
_MARGIN_PER_NOISE = {
    5: 3.377, 6: 2.583, 7: 2.702, 8: 2.271, 9: 2.265, 10: 1.996, 11: 1.991, 12: 1.763, 15: 1.693, 20: 1.367, 25: 1.28,
    31: 1.168, 41: 0.989, 51: 0.87, 81: 0.675,
}  # fmt: skip


def equality(ratio: Ratio, margin: float) -> str:
    """Return whether two arms are equal within the fraction `margin`: EQUAL, FURTHER_APART, NOT_SHOWN or NOT_ENOUGH."""
    if ratio.low is None or ratio.high is None:
        return NOT_ENOUGH
    if 1 / (1 + margin) <= ratio.low and ratio.high <= 1 + margin:
        return EQUAL
    return FURTHER_APART if ratio.low > 1 + margin or ratio.high < 1 / (1 + margin) else NOT_SHOWN


def repeats_to_show(noise: float, margin: float) -> int:
    """Return the repeats per arm at which POWER of comparisons of equal arms show that they are equal within `margin`.

    `noise` is the true standard deviation of one run as a fraction. Never fewer than MIN_REPEATS.
    """
    if margin <= 0 or noise < 0:
        raise InputError(f"margin {margin} must be above 0 and noise {noise} not below 0")
    wanted, known = math.log1p(margin), sorted(_MARGIN_PER_NOISE)
    values = [_MARGIN_PER_NOISE[number] for number in known]
    for repeats in range(MIN_REPEATS, known[-1] + 1):
        if np.interp(repeats, known, values) * noise <= wanted:
            return repeats
    return math.ceil(known[-1] * (values[-1] * noise / wanted) ** 2)
