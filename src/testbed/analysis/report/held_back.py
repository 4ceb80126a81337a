"""The report's section on what holds each run back: the sentence of scripts/diagnose.py, run by run."""

from __future__ import annotations

from collections.abc import Callable

from testbed.analysis.diagnosis.diagnose import OF_DEVICES, Diagnosis, diagnose
from testbed.analysis.diagnosis.words import SHOWN, verdict, way_out
from testbed.analysis.document.model import Cell, RunLinks, Section, table_of
from testbed.analysis.report.figures import link_to
from testbed.analysis.runs.entries import Entry, Subject
from testbed.analysis.runs.load import Run

Diagnosed = tuple[Entry, Run, Diagnosis]


def held_back(subject: Subject) -> Section | None:
    """Return what holds each run back that watched its collectives."""
    found = [
        (entry, run, diagnose(run.record))
        for entry in subject.entries
        for run in entry.runs
        if run.record.get("watched_steps") or run.record.get("timed_collectives")
    ]
    if not found:
        return None
    columns: dict[str, Callable[[Diagnosed], Cell]] = {
        "configuration": lambda one: link_to(one[0]),
        "run": lambda one: RunLinks((subject.number_of(one[1]),)),
        "what holds it back": lambda one: verdict(one[2]),
        "try": lambda one: way_out(one[2].findings[0]) if one[2].findings else "",
    }
    shown = {OF_DEVICES if OF_DEVICES in one[2].notes else SHOWN: None for one in found}
    note = (
        "From each rank's own time of every phase, without what it was blocked in collectives; on CUDA from how long "
        "collectives took on each GPU. Intervals hold at 95 % for all ranks and phases of a run together. "
        f"All findings: python scripts/diagnose.py RUN. Note: {'; '.join(shown)}."
    )
    return Section("What holds a run back", [table_of(found, columns, "", note, columns)], "held_back")
