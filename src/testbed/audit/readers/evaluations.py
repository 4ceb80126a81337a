"""Read the evaluations that transformers' Trainer logs: seconds, samples per second and steps per second of each.

Trainer.evaluate (trainer.py) and speed_metrics (trainer_utils.py): the samples are counted, the steps are
ceil(samples / batch), and a rate is an amount over the unrounded seconds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from testbed.audit.log_lines import Figure
from testbed.audit.readers.curves import Curves, number
from testbed.audit.readers.printed import figure

TIME_SLACK, RATE_SLACK = 0.00005, 0.0005  # seconds are rounded to four places, rates to three
RATES = ("samples_per_second", "steps_per_second")
_NAME = re.compile(rf"((?:eval|test|predict)(?:[_/][\w. -]{{1,80}})?)[_/](runtime|{'|'.join(RATES)})")


@dataclass(frozen=True)
class Evaluation:
    """One evaluation as it was logged."""

    of: str  # the prefix of its metrics, one for each set: eval, eval_squad, test
    step: int
    figures: dict[str, Figure]  # runtime, samples_per_second, steps_per_second
    is_of_the_training: bool  # the training loop called it, on its own set; else anyone may have, on another one


def evaluations_in(rows: Iterable[Mapping[str, Any]]) -> list[Evaluation]:
    """Return the evaluations in the entries of a log, in their order."""
    found: list[Evaluation] = []
    step: float | None = None
    is_training = False
    for row in rows:
        step = number(row["step"]) if "step" in row else step  # trainer.predict logs none
        is_training = "train_loss" not in row and (is_training or "loss" in row)
        by_prefix: dict[str, dict[str, Figure]] = {}
        for name, value in row.items():
            if (known := _NAME.fullmatch(str(name))) and (seen := _figure(known[2], value)):
                by_prefix.setdefault(known[1], {})[known[2]] = seen
        if step is not None and 0 <= step < 1e15:
            found += [Evaluation(of, int(step), figures, is_training) for of, figures in by_prefix.items()]
    return found


def evaluations_of(curves: Curves) -> list[Evaluation]:
    """Return the evaluations in curves, which trackers keep under `eval/runtime` and so on.

    The first and the last may have been called by anyone, and so may two at one step.
    """
    rows: dict[int, dict[str, Any]] = {}
    for name, points in curves.items():
        if _NAME.fullmatch(name):
            for point in points:
                if point.step is not None:
                    rows.setdefault(point.step, {"step": point.step})[name.replace("/", "_")] = point.value
    ends = {*sorted(rows)[:1], *sorted(rows)[-1:]}
    return [
        replace(each, is_of_the_training=each.step not in ends)
        for each in evaluations_in(rows[step] for step in sorted(rows))
    ]


def _figure(name: str, value: Any) -> Figure | None:
    """Return a figure with its rounding, which a text may show to be coarser."""
    read = number(value)
    if read is None:
        return None
    shown = figure(value) if isinstance(value, str) else None
    return Figure(read, max(TIME_SLACK if name == "runtime" else RATE_SLACK, shown.slack if shown else 0.0))
