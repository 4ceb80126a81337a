"""What the audit's rules take and give: two arms to compare, and a finding."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from testbed.analysis.audit.reported import Reported
from testbed.analysis.runs.load import Run

FAILS = "claim does not stand"
NOTE = "note"

# The rules by name, as docs/measuring.md states them.
EQUAL_WORK = "equal work"
EQUAL_MATH = "equal math"
STEP_CLOCK = "step clock"
EVERY_STEP = "every step is timed"
THROUGHPUT = "throughput is global"
INSTRUMENTED = "instrumented runs"
COMMUNICATION = "communication time"
NESTED = "nested ranges are not added up"
ONE_RUN = "one run proves nothing"
LOSSES = "a faster run that learns worse is not faster"
UNKNOWN = "unknown is null"
TRACEABLE = "each figure can be traced"
DEVICES = "equal devices"
WARM_UP = "warm-up is left out"


@dataclass(frozen=True)
class Finding:
    """One problem: the rule it breaks, the runs it is about, and the figure that the files give instead, if any."""

    rule: str
    runs: tuple[str, ...]
    message: str
    severity: str  # FAILS or NOTE
    corrected: str | None = None


@dataclass(frozen=True, eq=False)
class Side:
    """One arm of a comparison: its name in a finding and its runs, at least one."""

    name: str
    runs: tuple[Reported, ...]

    @property
    def first(self) -> Reported:
        return self.runs[0]

    def middle(self, quantity: str) -> float | None:
        """Median of a number over the runs; None when one of them does not have it."""
        values = [getattr(run, quantity) for run in self.runs]
        return None if None in values else median(values)


@dataclass(frozen=True)
class Claim:
    """What is compared, and under which protocol (strong, weak, time_to_loss; None: nobody said)."""

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
        """The runs of both sides that come from a training_metrics.json."""
        one, other = ([item.run for item in side.runs if item.run] for side in (self.baseline, self.other))
        return one, other
