"""Laws of scaling fitted to throughput: what share of the work behaves as if only one rank did it.

Amdahl (AFIPS 1967) speaks of fixed work, Gustafson (CACM 31(5), 1988) of work that grows with the ranks. The serial
share describes the points and is not a cause: communication, imbalance, a slower clock with more busy cores
and cache effects all go into it, and it need not hold at rank counts that were not measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

from testbed.analysis.statistics import CONFIDENCE, MIN_REPEATS, NUM_RESAMPLES

_SEED = 20_240_229  # of the bootstrap, so that the same files give the same report


def amdahl_fit(tokens_per_s: Mapping[int, Sequence[float]]) -> dict[str, Any]:
    """Return the serial fraction s of T(N) / T(1) = s + (1 - s) / N, which is speed-up 1 / (s + (1 - s) / N).

    Args:
        tokens_per_s: ranks -> throughput of every repeat at equal total work; T(1) is the median at one rank.

    Least squares over all repeats in relative time, which is linear in s: s is not bounded, so faster than linear
    comes out as a negative s instead of a clipped zero. The interval is a 95 % percentile bootstrap over runs.
    """
    return _fit(
        "amdahl",
        tokens_per_s,
        response=lambda speed_up, ranks: 1 / speed_up - 1 / ranks,
        weight=lambda ranks: 1 - 1 / ranks,
    )


def gustafson_fit(tokens_per_s: Mapping[int, Sequence[float]]) -> dict[str, Any]:
    """Return the serial share s of the scaled speed-up N - s (N - 1), for work that grows in proportion to the ranks.

    Arguments and method as in `amdahl_fit`. s is a share of the time at N ranks here and of the time at one rank
    there: the two numbers do not compare.
    """
    return _fit(
        "gustafson",
        tokens_per_s,
        response=lambda speed_up, ranks: ranks - speed_up,
        weight=lambda ranks: ranks - 1.0,
    )


FITS = {"strong": ("amdahl", amdahl_fit), "weak": ("gustafson", gustafson_fit)}  # by the protocol


def no_fit(law: str, reason: str | None) -> dict[str, Any]:
    """Return the same fields with nothing in them but the reason."""
    return {
        "law": law, "reason": reason, "serial_fraction": None, "low": None, "high": None, "num_points": 0,
        "rank_counts": [], "limit_of_speedup": None, "notes": [],
    }  # fmt: skip


def _fit(
    name: str, tokens_per_s: Mapping[int, Sequence[float]], response: Callable, weight: Callable
) -> dict[str, Any]:
    """Fit a law. Both are a straight line through the origin: response(speed-up, N) = s x weight(N)."""
    samples = {ranks: np.asarray(values, dtype=float) for ranks, values in sorted(tokens_per_s.items()) if len(values)}
    if len(samples) < 2:
        return no_fit(name, f"needs runs at 2 rank counts or more, there are {len(samples)}")
    if 1 not in samples:
        return no_fit(name, "needs runs at one rank: speed-up is relative to them")
    counts = list(samples)

    def share_of(*resampled: np.ndarray, axis: int = -1) -> np.ndarray:
        reference = np.median(resampled[counts.index(1)], axis=axis, keepdims=True)
        products, squares = np.zeros(()), 0.0
        for ranks, values in zip(counts, resampled, strict=True):
            products = products + weight(ranks) * response(values / reference, ranks).sum(axis=axis)
            squares += weight(ranks) ** 2 * values.shape[axis]
        return products / squares

    share = float(share_of(*samples.values()))
    low, high = _interval(share_of, list(samples.values()))
    return no_fit(name, reason=None) | {
        "serial_fraction": share,
        "low": low,
        "high": high,
        "num_points": sum(map(len, samples.values())),
        "rank_counts": counts,
        "limit_of_speedup": 1 / share if name == "amdahl" and share > 0 else None,
        "notes": _notes(samples, share),
    }


def _interval(statistic: Callable, samples: list[np.ndarray]) -> tuple[float | None, float | None]:
    """Return the percentile bootstrap over runs, each rank count resampled by itself; None where one has too few."""
    if min(map(len, samples)) < MIN_REPEATS:
        return None, None
    found = stats.bootstrap(
        samples, statistic, vectorized=True, paired=False, n_resamples=NUM_RESAMPLES, method="percentile",
        confidence_level=CONFIDENCE, rng=np.random.default_rng(_SEED),
    ).confidence_interval  # fmt: skip
    return float(found.low), float(found.high)


def _notes(samples: Mapping[int, Any], share: float) -> list[str]:
    notes = []
    if len(samples) == 2:
        notes.append("2 rank counts fix the one parameter: the fit cannot show whether the law holds")
    if (fewest := min(map(len, samples.values()))) < MIN_REPEATS:
        notes.append(f"fewer than {MIN_REPEATS} repeats at some rank count ({fewest}): no interval and no claim")
    if share < 0:
        notes.append("the serial share is negative, for runs are faster than linear: the law does not describe them")
    return notes
