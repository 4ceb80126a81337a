"""Compare two ways of doing a step within one run: blocks of steps in turn, ABBA, so that a slow drift is in both.

Cores of virtual machines change their speed by more than what is to be measured, so two runs do not show it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from testbed.analysis.statistics import median_interval

BLOCK = 20  # steps


def is_given(step: int) -> bool:
    """Return whether a step, counted from 0, is of the first kind."""
    return step // BLOCK % 4 in (0, 3)


def added(moments_s: Sequence[float]) -> list[float]:
    """Return by what share steps of the first kind take longer, one number for each four blocks.

    Args:
        moments_s: when each step began.
    """
    step_s = np.diff(moments_s)[4 * BLOCK :]  # the first ones warm up
    blocks = step_s[: len(step_s) // (4 * BLOCK) * 4 * BLOCK].reshape(-1, 4, BLOCK).mean(axis=2)
    return list(blocks[:, [0, 3]].sum(axis=1) / blocks[:, [1, 2]].sum(axis=1) - 1)


def in_words(moments_s: Sequence[float]) -> str:
    """Return the median of `added`, with its interval and of how many comparisons it is."""
    shares = added(moments_s)
    middle, low, high = median_interval(shares, is_signed=True)
    return (
        f"{middle:+.2%} ({low:+.2%} to {high:+.2%}, 95 %, {len(shares)} comparisons of {2 * BLOCK} steps with as many)"
    )
