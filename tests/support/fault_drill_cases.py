"""Share cases among the tests of fault drill."""

from __future__ import annotations

import dataclasses

from testbed.experiments.fault_drill.faults import (
    DAMAGE,
    PROCESSES,
    Fault,
    Moment,
)
from testbed.sweep.request import parse_variants

VARIANTS = parse_variants("ddp,fsdp,optimized:zero_stage=3")


SAVED = Moment("saved 6", 0.3)  # a start that was struck here has two checkpoints


def fault(kind: str, number: int = 1, **changes: object) -> Fault:
    """A fault of a stand-in's run: everything is killed after the second save, unless said otherwise."""
    form = DAMAGE[kind][0] if kind in DAMAGE else None
    known = Fault(number, kind, "ddp", PROCESSES, "everything", (SAVED,), form, (0.0, 0.5))
    return dataclasses.replace(known, **changes)
