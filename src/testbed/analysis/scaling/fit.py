"""Laws of scaling fitted to throughput: what share of the work behaves as if only one rank did it.

Amdahl (AFIPS 1967) speaks of fixed work, Gustafson (CACM 31(5), 1988) of work that grows with the ranks. The serial
share describes the points and is not a cause: communication, imbalance, a slower clock with more busy cores
and cache effects all go into it, and it need not hold at rank counts that were not measured.
"""

from __future__ import annotations

import math
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
        law=lambda share, ranks: _inverse(share + (1 - share) / ranks),
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
        law=lambda share, ranks: ranks - share * (ranks - 1),
    )


def no_fit(law: str, reason: str | None) -> dict[str, Any]:
    """Return the same fields with nothing in them but the reason."""
    return {
        "law": law, "reason": reason, "serial_fraction": None, "low": None, "high": None, "num_points": 0,
        "rank_counts": [], "residuals": [], "residual_rms": None, "limit_of_speedup": None,
        "super_linear_ranks": [], "notes": [],
    }  # fmt: skip


def _fit(
    name: str, tokens_per_s: Mapping[int, Sequence[float]], response: Callable, weight: Callable, law: Callable
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
    speed_ups = {ranks: values / np.median(samples[1]) for ranks, values in samples.items()}
    errors = np.concatenate([values - law(share, ranks) for ranks, values in speed_ups.items()])
    low, high = _interval(share_of, list(samples.values()))
    residuals: list[dict[str, Any]] = []
    for ranks, values in speed_ups.items():
        measured, fitted = float(np.median(values)), law(share, ranks)
        row = {"ranks": ranks, "n": len(values), "speedup": measured}
        residuals.append(row | {"fitted": _finite(fitted), "residual": _finite(measured - fitted)})
    super_linear = [row["ranks"] for row in residuals if row["speedup"] > row["ranks"] > 1]
    return {
        **no_fit(name, reason=None),
        "serial_fraction": share,
        "low": low,
        "high": high,
        "num_points": len(errors),
        "rank_counts": counts,
        "residuals": residuals,
        "residual_rms": _finite(float(np.sqrt(np.mean(errors**2)))),
        "limit_of_speedup": 1 / share if name == "amdahl" and share > 0 else None,
        "super_linear_ranks": super_linear,
        "notes": _notes(samples, share, super_linear),
    }


def _inverse(relative_time: float) -> float:
    """Return the speed-up of a relative time; NaN where a very negative s makes the law's own time negative."""
    return math.nan if relative_time <= 0 else 1 / relative_time


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _interval(statistic: Callable, samples: list[np.ndarray]) -> tuple[float | None, float | None]:
    """Return the percentile bootstrap over runs, each rank count resampled by itself; None where one has too few."""
    if min(map(len, samples)) < MIN_REPEATS:
        return None, None
    found = stats.bootstrap(
        samples, statistic, vectorized=True, paired=False, n_resamples=NUM_RESAMPLES, method="percentile",
        confidence_level=CONFIDENCE, rng=np.random.default_rng(_SEED),
    ).confidence_interval  # fmt: skip
    return float(found.low), float(found.high)


def _notes(samples: Mapping[int, Any], share: float, super_linear: list[int]) -> list[str]:
    notes = []
    if len(samples) == 2:
        notes.append("2 rank counts fix the one parameter: the fit cannot show whether the law holds")
    if (fewest := min(map(len, samples.values()))) < MIN_REPEATS:
        notes.append(f"fewer than {MIN_REPEATS} repeats at some rank count ({fewest}): no interval and no claim")
    if super_linear:
        ranks = ", ".join(map(str, super_linear))
        notes.append(f"faster than linear at {ranks} ranks: no law of a serial share explains that, look for the cause")
    if share < 0:
        notes.append("the serial share is negative: the law does not describe these points")
    return notes
