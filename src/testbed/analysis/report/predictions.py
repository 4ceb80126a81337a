"""The report's section on plans: what was predicted of each configuration, what was measured, where they differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from testbed.analysis.document.model import Block, Cell, Section, table_of
from testbed.analysis.document.words import UNKNOWN, Number, digits
from testbed.analysis.report.breakdown import Breakdown, breakdown
from testbed.analysis.report.figures import link_to
from testbed.analysis.runs.entries import Entry, Subject
from testbed.analysis.runs.load import Run
from testbed.planner.plan import PlannedRun
from testbed.planner.recorded import prediction_for

MIB = 2**20
COMPUTING, COMMUNICATION, OPTIMIZER, IDLE = "computing", "exposed communication", "optimizer", "waiting"
MEASURED_AS = {"forward": COMPUTING, "backward": COMPUTING, "optimizer": OPTIMIZER, COMMUNICATION: COMMUNICATION}
PREDICTED_AS = {"optimizer": OPTIMIZER, "bubble": IDLE, "host": IDLE, "stragglers": IDLE}
ABOUT = (
    "Predicted: an estimate from the run's own settings; what it rests on stands under the table. Measured: the median "
    "over runs of the median step. A plan is wrong where the measured step lies outside the interval that holds 90 % "
    "of such predictions."
)


@dataclass(frozen=True)
class Judged:
    """A configuration with its prediction."""

    entry: Entry
    prediction: PlannedRun
    step_s: float  # measured
    memory: tuple[float, float] | None  # predicted and measured bytes, of one meaning
    parts: Breakdown | None

    @property
    def is_inside(self) -> bool:
        return self.prediction.time.low <= self.step_s <= self.prediction.time.high

    def error(self) -> float:
        return self.prediction.time.seconds / self.step_s - 1


def predictions(subject: Subject) -> Section | None:
    """Return predicted against measured for every configuration whose machine is known."""
    judged = [found for entry in subject.measured if (found := _judged(entry)) is not None]
    if not judged:
        return None
    columns: dict[str, Callable[[Judged], Cell]] = {
        "configuration": lambda each: link_to(each.entry),
        "predicted step (ms)": lambda each: _ms(each.prediction.time.seconds),
        "90 % interval": lambda each: f"{_ms(each.prediction.time.low)} to {_ms(each.prediction.time.high)}",
        "measured (ms)": lambda each: _ms(each.step_s),
        "off by": lambda each: f"{each.error():+.0%}",
        "the plan": lambda each: "holds" if each.is_inside else "is wrong",
        "predicted memory (MiB)": lambda each: _mib(each, 0),
        "memory (MiB)": lambda each: _mib(each, 1),
        "memory off by": lambda each: UNKNOWN if each.memory is None else f"{each.memory[0] / each.memory[1] - 1:+.0%}",
    }
    labels = "; ".join(dict.fromkeys(each.prediction.time.label for each in judged))
    table = table_of(judged, columns, note=f"Predictions are {labels}.", text=("configuration", "the plan"))
    blocks: list[Block] = [ABOUT, table, *(_where_wrong(each) for each in judged if not each.is_inside)]
    return Section("Predicted against measured", blocks, "predicted")


def _judged(entry: Entry) -> Judged | None:
    run = entry.example
    steps = entry.values("step_time_median_s")
    prediction = prediction_for(run.record, run.path) if steps and entry.is_synchronised else None
    if prediction is None:
        return None
    return Judged(
        entry,
        prediction,
        float(np.median(steps)),
        _memory(entry, prediction),
        breakdown(entry.measured_runs or entry.runs),
    )


def _memory(entry: Entry, prediction: PlannedRun) -> tuple[float, float] | None:
    """Return predicted and measured bytes: allocated on a GPU, the growth of the process on a CPU."""
    if not prediction.job.on_cpu:
        measured, predicted = entry.values("peak_memory_bytes"), prediction.memory.allocated
    else:
        measured, predicted = [grown for run in entry.measured_runs if (grown := _growth(run))], prediction.needs_bytes
    return (predicted, float(np.median(measured))) if measured else None


def _growth(run: Run) -> float | None:
    """Return the largest rank's peak above its resident memory before the model; None in files without that."""
    ranks = run.section("memory").get("per_rank") or []
    grown = [
        rank["peak_rss_bytes"] - rank["rss_before_model_bytes"] for rank in ranks if "rss_before_model_bytes" in rank
    ]
    return max(grown, default=None)


def _where_wrong(judged: Judged) -> str:
    """Return a sentence: how far off the plan is, and the part of the step that is furthest off, if that is known."""
    prediction, name = judged.prediction, judged.entry.name
    time = prediction.time
    direction, bound, which = (
        ("slower", time.high, "most") if judged.step_s > time.high else ("faster", time.low, "least")
    )
    said = f"{name} is {direction} than planned: {_ms(judged.step_s)} ms, and {_ms(bound)} ms was the {which}"
    parts = judged.parts
    if parts is None or not parts.is_attributed:
        return f"{said}. Which part is off is not known without --profile."
    predicted, measured = (
        _grouped(prediction.time.parts, PREDICTED_AS, COMPUTING),
        _grouped(parts.seconds, MEASURED_AS, IDLE),
    )
    # the profiler slows a step: its shares are taken of the step that was measured without it
    scale = judged.step_s / sum(parts.seconds.values())
    off = {part: measured.get(part, 0.0) * scale - predicted.get(part, 0.0) for part in {*predicted, *measured}}
    worst = max(off, key=lambda part: abs(off[part]))
    was, found = _ms(predicted.get(worst, 0.0)), _ms(measured.get(worst, 0.0) * scale)
    return f"{said}. Furthest off is {worst}: {was} ms were planned, and the profiler attributes {found} ms to it."


def _grouped(seconds: Mapping[str, float], groups: Mapping[str, str], other: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for part, took in seconds.items():
        group = COMMUNICATION if "communication" in part else groups.get(part, other)
        found[group] = found.get(group, 0.0) + took
    return found


def _ms(seconds: float) -> str:
    return digits(seconds * 1e3)


def _mib(judged: Judged, place: int) -> Number:
    return Number(None if judged.memory is None else judged.memory[place] / MIB, ",.0f")
