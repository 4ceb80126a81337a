"""Compare two ways of doing a step within one run: blocks of steps of one and of the other, whose order is drawn for
each pair of blocks.

Cores of virtual machines change their speed by more than what is to be measured, so two runs do not show it. The two
blocks of a pair are neighbours, so a slow drift is in both; their order is drawn, so nothing periodic in a run can look
like a cost: where there is none, a pair is as likely to find any gain as the same loss, which is all that the interval
assumes (Wilcoxon's signed ranks). The first step of a block is left out, as changing over disturbs it.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Sequence

import numpy as np

BLOCK = 4  # steps of one kind in a row
WARM_UP = 10  # pairs of blocks


@functools.cache
def _begins(pair: int, seed: int) -> bool:
    return random.Random(f"{seed} {pair}").random() < 0.5


def is_given(step: int, seed: int) -> bool:
    """Return whether a step, counted from 0, is of the first kind in a run with this seed."""
    pair, place = divmod(step, 2 * BLOCK)
    return (place < BLOCK) == _begins(pair, seed)


def now() -> tuple[float, float]:
    """Return the clock, and the CPU time of all threads of this process, in seconds."""
    return time.perf_counter(), time.process_time()


def added(moments_s: Sequence[float], seed: int) -> np.ndarray:
    """Return by what share blocks of the first kind take longer than the other of their pair, as logarithms of ratios.

    Args:
        moments_s: when each step began.
        seed: what `is_given` was asked with.
    """
    step_s = np.diff(moments_s)
    pairs = step_s[: len(step_s) // (2 * BLOCK) * (2 * BLOCK)].reshape(-1, 2, BLOCK)[:, :, 1:].sum(axis=2)
    begins = np.array([_begins(pair, seed) for pair in range(len(pairs))])
    return np.where(begins, 1, -1)[WARM_UP:] * np.log(pairs[WARM_UP:, 0] / pairs[WARM_UP:, 1])


def estimate(ratios: np.ndarray) -> tuple[float, float, float]:
    """Return the median of all means of two logarithms (Hodges and Lehmann) as a share, and its 95 % interval."""
    rows, columns = np.triu_indices(len(ratios))
    means = np.sort((ratios[rows] + ratios[columns]) / 2)
    num = len(ratios)
    expected, deviation = num * (num + 1) / 4, (num * (num + 1) * (2 * num + 1) / 24) ** 0.5
    beyond = max(0, int(expected - 1.96 * deviation))
    middle, low, high = np.expm1([np.median(means), means[beyond], means[-1 - beyond]])
    return middle, low, high


def compared(moments: Sequence[Sequence[float]], seed: int) -> dict[str, list[float]]:
    """Return `added` by the clock and in CPU time, as a file keeps them.

    Args:
        moments: `now` at the beginning of each step.
        seed: of the run.
    """
    times = zip(("by the clock", "in CPU time"), np.array(moments).T, strict=True)
    return {name: added(moments_s, seed).round(4).tolist() for name, moments_s in times}


def in_words(runs: Sequence[dict[str, list[float]]]) -> str:
    """Return what is added in runs together, with intervals, and of how many pairs of blocks they are."""
    ratios = {name: np.concatenate([run[name] for run in runs]) for name in runs[0]}
    told = ["{1:+.2%} {0} ({2:+.2%} to {3:+.2%})".format(name, *estimate(of)) for name, of in ratios.items()]
    return f"{' and '.join(told)}, 95 %, {len(ratios['by the clock'])} pairs of {BLOCK} steps"
