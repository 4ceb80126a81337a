"""Align the clocks of ranks by the collectives that all of them take part in. No torch.

No rank leaves such a collective before the last one has entered it. So each collective bounds by how much two clocks
differ, as a message there and back does, and the bounds of all collectives together are narrow. Between the bounds the
ends tell: they are nearly simultaneous. In the seconds of a trace two clocks drift by less than that.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Clock:
    """By how much a rank's clock is ahead of rank 0's.

    Attributes:
        uncertainty_us: the true offset is at most this far away, whatever the network does; None: unknown.
        contradicts: no one offset fits all collectives: the clock is not steady, or another run's.
    """

    offset_us: float = 0.0
    uncertainty_us: float | None = 0.0
    num_collectives: int = 0
    contradicts: bool = False


def align(mine: np.ndarray, reference: np.ndarray, shares_clock: bool) -> Clock:
    """Return the difference between this rank's clock and rank 0's.

    Args:
        mine: (n, 2) begin and end of n collectives of all ranks, in microseconds of this rank's clock.
        reference: the same collectives by rank 0's clock.
        shares_clock: both ranks are on one machine: the offset is 0 unless the collectives contradict.
    """
    if not len(mine):
        return Clock(uncertainty_us=None)
    latest = float(np.min(mine[:, 1] - reference[:, 0]))  # it left after rank 0 had entered
    earliest = float(np.max(mine[:, 0] - reference[:, 1]))  # and entered before rank 0 left
    apart = float(np.median(mine[:, 1] - reference[:, 1]))
    if earliest > latest:  # no steady clock: the ends disagree by this much
        return Clock(apart, earliest - latest, len(mine), contradicts=True)
    is_shared = shares_clock and earliest <= 0 <= latest
    offset = 0.0 if is_shared else min(max(apart, earliest), latest)
    return Clock(offset, max(latest - offset, offset - earliest), len(mine))
