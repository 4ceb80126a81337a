"""Read trainer_state.json, which Hugging Face's Trainer saves with its checkpoints and at the end.

Fields as in transformers, trainer_callback.py (TrainerState), trainer.py (log, _inner_training_loop) and
trainer_utils.py (speed_metrics). An entry of `log_history` is of training (`loss`), of an evaluation (`eval_...`), or
of the end (`train_runtime` with `train_loss`). World size and accumulation are not in the file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from testbed.audit.log_lines import Figure, LogLine
from testbed.audit.readers.curve_lines import related_by
from testbed.audit.readers.curves import Curves, Point, number, numbers
from testbed.audit.readers.evaluations import evaluations_in
from testbed.audit.readers.tracked import reported_of
from testbed.audit.reported import Reported
from testbed.errors import InputError
from testbed.io import read_json

NAME = "trainer_state.json"
FORM = "trainer_state.json"
EPOCH_SLACK = 0.005  # two places, only before transformers 4.44
MOST_EPOCHS = 1e6  # sys.maxsize stands for data without a length
EPOCHS = related_by({"step": 1, "epoch": -1})


def read_trainer_state(path: Path, is_typed: bool) -> list[Reported]:
    """Read one run.

    Raises:
        InputError: it is no such file.
    """
    state = read_json(path)
    entries = state.get("log_history") if isinstance(state, dict) else None
    if not isinstance(entries, list):
        raise InputError(f"{path} is no state of a transformers Trainer: it has no list 'log_history'")
    entries = [entry for entry in entries if isinstance(entry, dict)]
    rows = [numbers(entry) for entry in entries]
    values = numbers(state)
    final = next((row for row in reversed(rows) if {"train_loss", "train_runtime"} <= row.keys()), {})
    if final:
        final = {name: values[name] for name in ("global_step", "max_steps") if name in values} | final
    steps = values.get("global_step")
    checkpoint = re.search(r"checkpoint-(\d{1,12})[\\/]?$", str(state.get("best_model_checkpoint")))
    run = reported_of(
        path, FORM, _curves(rows), {},
        unread=("ranks and accumulation (the file does not have them)",),
        optimizer_steps=int(steps) if steps and 0 < steps < 1e15 else None,
        lines=_losses(entries), relations=(),
        details={
            "state": values, "log_history": rows, "final": final, "evaluations": evaluations_in(entries),
            "epochs": _epochs(rows, values),
            "best_step": values.get("best_global_step", float(checkpoint[1]) if checkpoint else None),
        },
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


def _losses(entries: Sequence[Mapping[str, Any]]) -> tuple[LogLine, ...]:
    """Return a line for each entry with a training loss."""
    steps = [(number(entry.get("step")), str(entry["loss"])) for entry in entries if "loss" in entry]
    return tuple(
        LogLine(int(step), is_nan=loss.lower() == "nan")
        for step, loss in steps
        if step is not None and abs(step) < 1e15
    )


def _epochs(rows: Sequence[Mapping[str, float]], state: Mapping[str, float]) -> list[LogLine]:
    """Return a line with `step` and `epoch` for each entry, and one for the state itself.

    Where the data have no length, an epoch is whole until the data begin again, and its fraction is the steps since
    then over all steps of the run. `epoch` is then in steps.
    """
    end = {"step": state.get("global_step", 0.0), "epoch": state.get("epoch", 0.0)}
    both = [row for row in rows if row.get("step", 0.0) > 0 and row.get("epoch", 0.0) > 0]
    if not both:
        return []
    num_rounded = sum(round(row["epoch"], 2) == row["epoch"] for row in both)
    rounding = EPOCH_SLACK if num_rounded > 0.9 * len(both) else 0.0
    per_step = median(row["epoch"] / row["step"] for row in both)
    in_steps = _steps_of_epochs(end, state) if state.get("num_train_epochs", 0.0) > MOST_EPOCHS else None
    lines = []
    for row in [*both, *([end] if end["step"] > 0 and end["epoch"] > 0 else [])]:
        epoch = row["epoch"]
        slack = rounding if row is not end else 0.0
        if in_steps is None:
            # Of each epoch, accumulation may leave out less than a step or count a part of one as a whole.
            figure = Figure(epoch, slack + per_step * (1 + epoch))
        else:
            per_epoch, all_steps = in_steps
            figure = Figure(math.floor(epoch) * per_epoch + epoch % 1 * all_steps, slack * all_steps + 2 + epoch)
        lines.append(LogLine(int(min(row["step"], 1e15)), {"step": Figure(row["step"]), "epoch": figure}))
    return lines


def _steps_of_epochs(end: Mapping[str, float], state: Mapping[str, float]) -> tuple[float, float] | None:
    """Return the steps of a whole pass over data without a length, and of the run; None where no pass was whole."""
    all_steps, whole = state.get("max_steps", 0.0), math.floor(end["epoch"])
    if whole < 1 or not 0 < end["step"] <= all_steps:
        return None
    return (end["step"] - end["epoch"] % 1 * all_steps) / whole, all_steps
