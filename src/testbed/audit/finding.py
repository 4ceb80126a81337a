"""Define the findings of the audit's rules. Rules are named as in docs/audit.md."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

FAILS = "claim does not stand"
NOTE = "note"


class Rule(StrEnum):
    """The rules of docs/audit.md that a finding can break."""

    EQUAL_WORK = "equal work"
    STEP_CLOCK = "step clock"
    MORE_DEVICES = "more devices are faster"
    EVERY_STEP = "every step is timed"
    THROUGHPUT = "throughput is global"
    INSTRUMENTED = "instrumented runs"
    ONE_RUN = "one run proves nothing"
    LOSSES = "a faster run that learns worse is not faster"
    UNKNOWN = "unknown is null"
    TRACEABLE = "each figure can be traced"
    DEVICES = "equal devices"
    WARM_UP = "warm-up is left out"
    FOLLOWS = "figures follow from one another"
    POSSIBLE = "within what is possible"


@dataclass(frozen=True)
class Finding:
    """One problem: the rule it breaks, the runs it is about, and the figure that the files give instead, if any."""

    rule: Rule
    runs: tuple[str, ...]
    message: str
    severity: str  # FAILS or NOTE
    corrected: str | None = None
    unknown: tuple[str, ...] = ()  # what the files do not record, where the finding is about nothing else


class Audited:
    """Base of everything a rule checks. It makes the findings about the runs that `names` names."""

    name: str

    @property
    def names(self) -> tuple[str, ...]:
        """Return the runs that a finding is about."""
        return (self.name,)

    def fails(self, rule: Rule, message: str, corrected: str | None = None) -> Finding:
        return self.finds(rule, FAILS, message, corrected)

    def notes(self, rule: Rule, message: str, corrected: str | None = None) -> Finding:
        return self.finds(rule, NOTE, message, corrected)

    def cannot_tell(self, rule: Rule, message: str, *unknown: str) -> Finding:
        return Finding(rule, self.names, message, NOTE, unknown=unknown)

    def finds(self, rule: Rule, severity: str, message: str, corrected: str | None = None) -> Finding:
        return Finding(rule, self.names, message, severity, corrected)
