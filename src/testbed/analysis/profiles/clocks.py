"""Align the clocks of ranks by the collectives that all of them take part in. No torch.

No rank leaves such a collective before the last one has entered it. So each collective bounds by how much two clocks
differ, as a message there and back does, and the bounds of all collectives together are narrow. Between the bounds the
ends tell: they are nearly simultaneous.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

ENOUGH_FOR_DRIFT = 20  # collectives; the slope of fewer is noise
MOST_FOR_DRIFT = 200  # pairs of them grow with the square


@dataclass(frozen=True)
class Clock:
    """The difference between a rank's clock and rank 0's, `offset + drift * (time - origin)`, in the unit of the times.

    Attributes:
        uncertainty: the true offset is at most this far away, whatever the network does; None: unknown.
    """

    offset: float = 0.0
    drift: float = 0.0
    origin: float = 0.0
    uncertainty: float | None = 0.0
    num_collectives: int = 0

    def on_rank_0(self, time: float) -> float:
        """Return a moment of this rank's clock on rank 0's."""
        return time - self.offset - self.drift * (time - self.origin)


def align(mine: np.ndarray, reference: np.ndarray) -> Clock:
    """Return the difference between this rank's clock and rank 0's.

    Args:
        mine: (n, 2) begin and end of n collectives of all ranks, by this rank's clock.
        reference: the same collectives by rank 0's clock.
    """
    if not len(mine):
        return Clock(uncertainty=None)
    origin = float(mine[0, 1])
    apart = mine[:, 1] - reference[:, 1]
    drift = _slope(mine[:, 1] - origin, apart)
    drifted = (drift * (mine - origin)) if drift else np.zeros_like(mine)
    latest = float(np.min(mine[:, 1] - drifted[:, 1] - reference[:, 0]))  # it left after rank 0 had entered
    earliest = float(np.max(mine[:, 0] - drifted[:, 0] - reference[:, 1]))  # and entered before rank 0 left
    offset = float(np.median(apart - drifted[:, 1]))
    if earliest <= latest:
        offset = min(max(offset, earliest), latest)
        uncertainty = max(latest - offset, offset - earliest)
    else:  # no steady clock: the ends disagree by this much
        uncertainty = earliest - latest
    return Clock(offset, drift, origin, float(uncertainty), len(mine))


def _slope(times: np.ndarray, apart: np.ndarray) -> float:
    """Return the median slope of all pairs (Theil and Sen), which a few late ends do not move; 0 of too few."""
    if len(times) < ENOUGH_FOR_DRIFT:
        return 0.0
    chosen = np.unique(np.linspace(0, len(times) - 1, MOST_FOR_DRIFT).astype(int))
    first, second = np.triu_indices(len(chosen), k=1)
    span = times[chosen][second] - times[chosen][first]
    rise = apart[chosen][second] - apart[chosen][first]
    return float(np.median(rise[span > 0] / span[span > 0])) if np.any(span > 0) else 0.0
