"""The comparison of two ways of doing a step within one run."""

from __future__ import annotations

import numpy as np
import pytest
from support.alternation import added, compared, estimate, in_words, is_given


def _moments(cost, seed=0, steps=4000):
    """When steps begin that drift, scatter and have a period of eight, those given longer by `cost`."""
    step = np.arange(steps)
    plain_s = 0.05 * (1 + 0.2 * np.sin(step / 600)) * (1 + 0.05 * (step % 8 < 4))
    plain_s *= np.random.default_rng(seed).lognormal(0, 0.05, steps)
    given = np.array([is_given(one, seed) for one in range(steps)])
    assert 0.45 < given.mean() < 0.55
    return np.cumsum([0.0, *(plain_s * (1 + cost * given))])


@pytest.mark.parametrize("cost", [0.0, 0.02])
def test_a_small_cost_shows_beside_a_drift_and_a_period(cost):
    middle, low, high = estimate(added(_moments(cost), 0))
    assert low < cost < high and high - low < 0.02 and middle == pytest.approx(cost, abs=0.008)


def test_an_interval_holds_no_cost_as_often_as_it_says():
    found = [estimate(added(_moments(0.0, seed, 800), seed)) for seed in range(200)]
    assert 0.9 <= np.mean([low <= 0 <= high for _, low, high in found]) <= 0.99


def test_runs_are_told_together():
    runs = [compared(np.stack([_moments(0.01, seed), _moments(0.01, seed) / 2], axis=1), seed) for seed in range(2)]
    assert runs[0]["by the clock"] == runs[0]["in CPU time"] != runs[1]["in CPU time"]
    share = f"{estimate(np.concatenate([run['by the clock'] for run in runs]))[0]:+.2%}"
    told = in_words(runs)
    assert told.startswith(f"{share} by the clock (") and f" and {share} in CPU time (" in told
    assert told.endswith("980 pairs of 4 steps")
