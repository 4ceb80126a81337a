"""Compare two ways of doing a step within one run: steps of one and of the other in turn, ABBA, so that a slow drift is
in both.

Cores of virtual machines change their speed by more than what is to be measured, so two runs do not show it, and single
steps take many times as long as others. So the median of many comparisons counts, and its interval is of their order.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

WARM_UP = 80  # steps


def is_given(step: int) -> bool:
    """Return whether a step, counted from 0, is of the first kind."""
    return step % 4 in (0, 3)


def now() -> tuple[float, float]:
    """Return the clock, and the CPU time of all threads of this process, in seconds."""
    return time.perf_counter(), time.process_time()


def added(moments_s: Sequence[float]) -> np.ndarray:
    """Return by what share steps of the first kind take longer, one number for each four steps, in order of size.

    Args:
        moments_s: when each step began.
    """
    step_s = np.diff(moments_s)[WARM_UP:]
    fours = step_s[: len(step_s) // 4 * 4].reshape(-1, 4)
    return np.sort((fours[:, 0] + fours[:, 3]) / (fours[:, 1] + fours[:, 2]) - 1)


def in_words(moments: Sequence[Sequence[float]]) -> str:
    """Return the medians of `added` by the clock and in CPU time, with intervals, and of how many comparisons they are.

    Args:
        moments: `now` at the beginning of each step.
    """
    told = []
    for name, times in zip(("by the clock", "in CPU time"), np.array(moments).T, strict=True):
        shares = added(times)
        beyond = max(0, int(len(shares) / 2 - 0.98 * len(shares) ** 0.5))  # of the median, by the sign test
        low, high = shares[beyond], shares[-1 - beyond]
        told.append(f"{np.median(shares):+.2%} {name} ({low:+.2%} to {high:+.2%})")
    return f"{' and '.join(told)}, 95 %, {len(shares)} comparisons of two steps with two"
