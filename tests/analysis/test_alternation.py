"""The comparison of two ways of doing a step within one run."""

from __future__ import annotations

import numpy as np
import pytest
from support.alternation import added, in_words, is_given


@pytest.mark.parametrize("cost", [0.0, 0.01])
def test_a_small_cost_shows_beside_a_drift(cost):
    drift = 0.05 * (1 + 0.2 * np.sin(np.arange(4000) / 600))  # of a core, from minute to minute
    longer = [1 + cost * is_given(step) for step in range(4000)]
    moments_s = np.cumsum([0.0, *(drift * longer)])
    assert len(added(moments_s)) == 980 and np.median(added(moments_s)) == pytest.approx(cost, abs=5e-4)
    told = in_words(np.stack([moments_s, moments_s / 2], axis=1))
    share = f"{np.median(added(moments_s)):+.2%}"
    assert told.startswith(f"{share} by the clock (") and f" and {share} in CPU time (" in told
