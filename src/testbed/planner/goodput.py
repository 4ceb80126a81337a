"""Compute what failures and checkpoints leave of the time: Young 1974, Daly 2006 (doi:10.1016/j.future.2004.11.016)."""

from __future__ import annotations

import math
from dataclasses import dataclass

RESTART_S = 300.0  # assumed
SAVED_PER_S = 1e9  # bytes of a checkpoint that a node writes in a second, assumed where flags do not say


@dataclass(frozen=True, kw_only=True)
class Failures:
    """Failures of a whole machine, and what they cost. All in seconds."""

    between_s: float  # mean time between failures that stop the run
    save_s: float  # a checkpoint, while which nothing is trained
    restart_s: float = RESTART_S  # from the failure to the first step after it

    @property
    def interval_s(self) -> float:
        """Training time between two checkpoints that loses least: Daly's equation 37, Young's square root corrected."""
        if self.save_s >= 2 * self.between_s:
            return self.between_s
        share = self.save_s / (2 * self.between_s)
        young_s = math.sqrt(2 * self.save_s * self.between_s)
        return young_s * (1 + math.sqrt(share) / 3 + share / 9) - self.save_s

    @property
    def goodput(self) -> float:
        """Training time over wall time with that interval, for failures that come at random (Daly's equation 20)."""
        cycle = (self.interval_s + self.save_s) / self.between_s
        if cycle + self.restart_s / self.between_s > 50:  # e^50: it never gets there
            return 0.0
        wall_s = self.between_s * math.exp(self.restart_s / self.between_s) * math.expm1(cycle)
        return self.interval_s / wall_s
