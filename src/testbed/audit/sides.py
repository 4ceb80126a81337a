"""The two sides of a claim: arms, each the runs of one configuration as their files tell them."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from testbed.analysis.runs.load import Run
from testbed.audit.finding import Audited
from testbed.audit.reported import Reported


@dataclass(frozen=True, eq=False)
class Side(Audited):
    """One arm of a comparison: its name in a finding and its runs, at least one."""

    name: str
    runs: tuple[Reported, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    @property
    def first(self) -> Reported:
        return self.runs[0]

    def middle(self, quantity: str) -> float | None:
        """Return the median of a number over the runs; None when one of them does not have it."""
        values = [getattr(run, quantity) for run in self.runs]
        return None if None in values else median(values)


@dataclass(frozen=True)
class Claim(Audited):
    """Hold the runs that are compared, and the protocol: strong, weak, time_to_loss, or None if no plan says."""

    baseline: Side
    other: Side
    protocol: str | None = None

    @property
    def names(self) -> tuple[str, str]:
        return (self.baseline.name, self.other.name)

    @property
    def turned(self) -> Claim:
        return Claim(self.other, self.baseline, self.protocol)

    @property
    def measured_runs(self) -> tuple[list[Run], list[Run]]:
        """Return the runs of both sides that come from a training_metrics.json."""
        one, other = ([item.run for item in side.runs if item.run] for side in (self.baseline, self.other))
        return one, other
