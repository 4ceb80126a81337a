"""Compare two ways of doing a step within one run: blocks of steps in turn, ABBA, so that a slow drift is in both.

Cores of virtual machines change their speed by more than what is to be measured, so two runs do not show it. Beside the
clock the CPU time of the process counts, which other work on the machine changes least.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from testbed.analysis.statistics import median_interval

BLOCK = 20  # steps


def is_given(step: int) -> bool:
    """Return whether a step, counted from 0, is of the first kind."""
    return step // BLOCK % 4 in (0, 3)


def now() -> tuple[float, float]:
    """Return the clock, and the CPU time of all threads of this process, in seconds."""
    return time.perf_counter(), time.process_time()


def added(moments_s: Sequence[float]) -> list[float]:
    """Return by what share steps of the first kind take longer, one number for each four blocks.

    Args:
        moments_s: when each step began.
    """
    step_s = np.diff(moments_s)[4 * BLOCK :]  # the first ones warm up
    blocks = step_s[: len(step_s) // (4 * BLOCK) * 4 * BLOCK].reshape(-1, 4, BLOCK).mean(axis=2)
    return list(blocks[:, [0, 3]].sum(axis=1) / blocks[:, [1, 2]].sum(axis=1) - 1)


def in_words(moments: Sequence[Sequence[float]]) -> str:
    """Return the medians of `added` by the clock and in CPU time, with intervals, and of how many comparisons they are.

    Args:
        moments: `now` at the beginning of each step.
    """
    told = []
    for name, times in zip(("by the clock", "in CPU time"), np.array(moments).T, strict=True):
        shares = added(times)
        middle, low, high = median_interval(shares, is_signed=True)
        told.append(f"{middle:+.2%} {name} ({low:+.2%} to {high:+.2%})")
    return f"{' and '.join(told)}, 95 %, {len(shares)} comparisons of {2 * BLOCK} steps with as many"
