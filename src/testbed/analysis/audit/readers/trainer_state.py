"""Read trainer_state.json, which Hugging Face's Trainer saves with its checkpoints and at the end.

Fields as in transformers, trainer_callback.py (TrainerState), trainer.py (log, _inner_training_loop) and
trainer_utils.py (speed_metrics). An entry of `log_history` is of training (`loss`), of an evaluation (`eval_...`), or
of the end (`train_runtime` with `train_loss`). World size and accumulation are not in the file.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from testbed.analysis.audit.log_lines import Figure, LogLine, Relation
from testbed.analysis.audit.readers.curve_lines import merged, related_by
from testbed.analysis.audit.readers.curves import Curves, Point, number, numbers
from testbed.analysis.audit.readers.tracked import reported_of
from testbed.analysis.audit.reported import Reported
from testbed.errors import InputError
from testbed.io import read_json

NAME = "trainer_state.json"
FORM = "trainer_state.json"
RATES = ("samples_per_second", "steps_per_second")
# how figures are rounded; epochs only before transformers 4.44
TIME_SLACK, RATE_SLACK, EPOCH_SLACK = 0.00005, 0.0005, 0.005
_EVALUATION = re.compile(rf"(eval(?:_\w+)?)_(runtime|{'|'.join(RATES)})")


def read_trainer_state(path: Path, is_typed: bool) -> list[Reported]:
    """Read one run.

    Raises:
        InputError: it is no such file.
    """
    state = read_json(path)
    entries = state.get("log_history") if isinstance(state, dict) else None
    if not isinstance(entries, list):
        raise InputError(f"{path} is no state of a transformers Trainer: it has no list 'log_history'")
    rows = [numbers(entry) for entry in entries if isinstance(entry, dict)]
    values = numbers(state)
    final = next((row for row in reversed(rows) if {"train_loss", "train_runtime"} <= row.keys()), {})
    if final:
        final = {name: values[name] for name in ("global_step", "max_steps") if name in values} | final
    steps = values.get("global_step")
    end = {"step": values.get("global_step"), "epoch": values.get("epoch")}
    lines, relations = _lines([entry for entry in entries if isinstance(entry, dict)], end)
    run = reported_of(
        path, FORM, _curves(rows), {},
        unread=("ranks and accumulation (the file does not have them)",),
        optimizer_steps=int(steps) if steps and 0 < steps < 1e15 else None,
        lines=lines, relations=relations,
        details={"state": values, "log_history": rows, "final": final},
    )  # fmt: skip
    return [run] if is_typed or run.has_figures else []


def _curves(rows: list[dict[str, float]]) -> Curves:
    curves: Curves = {}
    for row in rows:
        is_end = "train_loss" in row
        for name, value in row.items():
            if is_end or name == "loss" or name.startswith("eval_"):
                step = row.get("step")
                curves.setdefault(name, []).append(Point(int(step) if step is not None else None, value))
    return curves


def _lines(rows: list[dict], end: dict) -> tuple[tuple[LogLine, ...], tuple[Relation, ...]]:
    """Return a line per step, and that evaluations are of one set and epochs of one length."""
    per_step = _epochs_per_step(rows)
    is_rounded = all(round(value, 2) == value for row in rows if (value := number(row.get("epoch"))) is not None)
    lines, sets = [], set()
    for row in [*rows, end]:
        values = numbers(row)
        step = values.pop("step", None)
        if step is None or not 0 <= step < 1e15:
            continue
        figures = {}
        if step and values.get("epoch", 0) > 0:
            figures["step"] = Figure(step)
            epoch = values["epoch"]
            # Of each epoch, accumulation may leave out less than a step or count a part of one as a whole.
            figures["epoch"] = Figure(epoch, EPOCH_SLACK * (is_rounded and row is not end) + per_step * (1 + epoch))
        for name, value in values.items():
            if found := _EVALUATION.fullmatch(name):
                figures[name] = Figure(value, TIME_SLACK if found[2] == "runtime" else RATE_SLACK)
                sets.add(found[1])
        lines.append(LogLine(int(step), figures, None, str(row.get("loss")).lower() == "nan"))
    relations = [related_by({"step": 1, "epoch": -1})]
    relations += [related_by({f"{of}_runtime": 1, f"{of}_{rate}": 1}) for of in sorted(sets) for rate in RATES]
    return merged(lines), tuple(relations)


def _epochs_per_step(rows: list[dict[str, Any]]) -> float:
    """Return the share of an epoch that a step is, by the last row that has both."""
    for row in reversed(rows):
        values = numbers(row)
        if values.get("step", 0) > 0 and values.get("epoch", 0) > 0:
            return values["epoch"] / values["step"]
    return 0.0
