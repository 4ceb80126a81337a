"""Read curves: a trainer_state.json, a CSV with a column of steps, and TensorBoard's event files.

A curve is known by its exact name, in the table CURVES. W&B, MLflow and Lightning can write a CSV.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from testbed.audit.printed_setup import counts_of, printed_setup, said_in
from testbed.audit.reported import OF_EPOCH, SAYS_NOTHING, Reported
from testbed.audit.tables.columns import quantity_of
from testbed.audit.text import text_of
from testbed.audit.words import count_in_name
from testbed.errors import InputError
from testbed.io import read_json

STATE, EVENTS, CSV, JSON_LINES = "trainer_state.json", "TensorBoard event files", "CSV of curves", "JSON lines"
PRINTED_TRAINER = "log of a transformers Trainer"
FORMS = (STATE, EVENTS, CSV, JSON_LINES, PRINTED_TRAINER)
STEP = ("step", "_step", "steps", "iteration", "iter", "global_step", "trainer/global_step")
# quantity -> the names of its curves: of transformers, torchtitan, Megatron-LM, nanochat, composer and Lightning
CURVES: dict[str, tuple[str, ...]] = {
    "train_loss": ("loss", "train/loss", "train_loss", "training_loss", "train_loss_step", "lm loss",
                   "loss_metrics/global_avg_loss", "loss/train/total"),
    "val_loss": ("eval_loss", "eval/loss", "val_loss", "val/loss", "validation_loss", "valid_loss",
                 "lm loss validation", "validation_metrics/global_avg_loss"),
    "token_rate": ("tokens_per_sec", "tokens/s", "train/tok_per_sec", "throughput/tokens_per_sec"),
    "rank_token_rate": ("throughput(tps)", "throughput/device/tokens_per_sec", "tokens/s/gpu", "tokens/s per gpu"),
    "sample_rate": ("samples_per_sec", "samples/s", "samples_per_second", "train/samples_per_sec",
                    "throughput/samples_per_sec", "images_per_sec", "train|global/samples_per_sec"),
    "rate": ("throughput",),  # of which nothing says the unit
    "iteration_s": ("iteration-time", "time_metrics/end_to_end(s)", "train/dt", "step_time_s", "step time (s)"),
    "epoch_s": ("epoch_time", "epoch time", "epoch_time_s", "time/epoch", "epoch time (s)", "epoch_time_sec"),
    "tflops": ("tflops",),
    "mfu_percent": ("mfu(%)", "train/mfu"),
    "device_name": ("device",),
}  # fmt: skip
RATE_UNITS = {"token_rate": "tokens/s", "rank_token_rate": "tokens/s", "sample_rate": "samples/s", "rate": "throughput"}
QUANTITY_OF = {name: quantity for quantity, names in CURVES.items() for name in names}
# what a heading of a table means as a curve, where no program's name is known
OF_HEADINGS = {"token_rate": "token_rate", "sample_rate": "sample_rate", "device_token_rate": "rank_token_rate",
               "step_s": "iteration_s"}  # fmt: skip
OF_CHARTS = ("time_s", "rate", "train_loss", "val_loss", "tflops", "mfu", "losses")  # what metrics tell of a run
MOST_STEPS = 1e15
ROUNDED = 0.01
Curves = dict[str, list[tuple[int, float]]]  # quantity -> (step, value)


def read_trainer_state(path: Path) -> list[Reported]:
    """Read what the Trainer of transformers saves with its checkpoints and at the end of a run.

    Ranks and accumulation are not in the file.

    Raises:
        InputError: it is another kind of file.
    """
    state = read_json(path)
    entries = state.get("log_history") if isinstance(state, dict) else None
    if not isinstance(entries, list):
        raise InputError(f"{path} is not a state of a transformers Trainer: it has no list 'log_history'")
    rows = [row for row in entries if isinstance(row, dict)]
    end = next((row for row in reversed(rows) if {"train_loss", "train_runtime"} <= row.keys()), {})
    curves = curves_in((row.get("step"), name, value) for row in rows if row is not end for name, value in row.items())
    steps = number(state.get("global_step"))
    known = {"optimizer_steps": int(steps)} if steps and 0 < steps < MOST_STEPS else {}
    batch = number(state.get("train_batch_size"))  # of one process; versions before 4.31 do not save it
    known |= {"micro_batch_size": int(batch)} if batch and 0 < batch < MOST_STEPS else {}
    known |= _of_call(end)
    if steps and batch and known.get("rate") and known.get("time_s"):  # rates have three digits
        of_update = known["rate"] * known["time_s"] / steps
        times = round(of_update / batch)
        if times and abs(of_update / (times * batch) - 1) < ROUNDED:
            known["global_batch_size"] = int(times * batch)
    return [reported_of(path, STATE, curves, **known)]


PRINTED = re.compile(r"\{'(?:loss|eval_loss|train_runtime)': .{1,2000}?\}")
_HEADER = {
    "global_batch_size": r"Total train batch size \(w\. parallel.*?\) = ([\d,]+)",
    "micro_batch_size": r"Instantaneous batch size per device = ([\d,]+)",
    "accumulation": r"Gradient Accumulation steps = ([\d,]+)",
    "optimizer_steps": r"Total optimization steps = ([\d,]+)",
    "num_parameters": r"Number of trainable parameters = ([\d,]+)",
}


def read_printed_trainer(path: Path, text: str) -> list[Reported]:
    """Read what the Trainer of transformers prints: a dict for each logging step, and its set-up if it logs that.

    Raises:
        InputError: the dicts have no figures.
    """
    rows = [dict(re.findall(r"'(\w+)': '?([-+.\w]+)", found[0])) for found in PRINTED.finditer(text)]
    end = next((row for row in reversed(rows) if "train_runtime" in row), {})
    told = [(at, name, value) for at, row in enumerate(rows, start=1) if row is not end for name, value in row.items()]
    known = printed_setup(text) | _of_call(end) | counts_of(said_in(text, _HEADER))
    if (total := known.get("global_batch_size")) and (each := known.get("micro_batch_size")):
        known["world_size"] = total // (each * known.get("accumulation", 1)) or None
    return [reported_of(path, PRINTED_TRAINER, curves_in(told), **known, losses=())]  # no step is printed


def _of_call(end: Mapping[str, object]) -> dict[str, Any]:
    """Return the time and the rate of a whole call of train(), evaluation and saving inside, of its last line."""
    seconds, rate = number(end.get("train_runtime")), number(end.get("train_samples_per_second"))
    time = {"time_s": seconds, "time_meaning": "time of the whole train() call"} if seconds is not None else {}
    return {**time, **({"rate": rate, "rate_unit": "samples/s"} if rate is not None else {})}


def read_json_lines(path: Path) -> list[Reported]:
    """Read a file with an object for each step that was logged, as LLaMA-Factory and NeMo write it.

    Raises:
        InputError: no line is an object with a step and a curve that is known.
    """
    told = []
    for line in text_of(path).splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue  # half a line of a run that was killed
        if isinstance(row, dict):
            step = next((row[name] for name in (*STEP, "current_steps") if name in row), None)
            told += [(step, name, value) for name, value in row.items()]
    return [reported_of(path, JSON_LINES, curves_in(told))]


def is_curves(header: Sequence[str]) -> bool:
    """Return whether the first line of a CSV names steps and at least one curve that is known."""
    names = [_metric(name) for name in header]
    return any(name in STEP for name in names) and any(map(_curve_named, names))


def no_curves_in(header: Sequence[str]) -> str:
    """Return why a CSV has no curves: it has no column of steps, or no metric beside it that is known."""
    if not any(_metric(name) in STEP for name in header):
        return "it has no column 'step'"
    return f"no metric beside '{header[0]}' is known; known are {', '.join(QUANTITY_OF)}"


@functools.lru_cache(maxsize=10_000)  # a file may have any number of names
def _curve_named(name: str) -> str | None:
    """Return the quantity of a curve: by a program's name of it, or as the heading of a table."""
    known = QUANTITY_OF.get(name)
    return known if known or re.search(r"\bms\b|_ms|[(\[]", name) else OF_HEADINGS.get(quantity_of(name) or "")


def _metric(heading: str) -> str:
    return heading.rpartition(" - ")[2].strip().lower()


def read_curves_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[Reported]:
    """Read a CSV with a line for each step that was logged; a cell that was not logged is empty.

    In a chart that W&B exports, a column is `run - metric`: its runs are returned one by one.
    """
    at = next(index for index, name in enumerate(header) if _metric(name) in STEP)
    told: dict[str, list[tuple[str, str, str]]] = {}
    for row in rows:
        for heading, cell in zip(header, row, strict=True) if len(row) == len(header) else ():
            told.setdefault(heading.rpartition(" - ")[0], []).append((row[at], _metric(heading), cell))
    found = []
    for run, cells in told.items():
        devices = {cell.strip() for _, name, cell in cells if name == "device" and cell.strip()}
        known: dict[str, Any] = {"device_name": devices.pop() if len(devices) == 1 else None}
        if run:
            known |= {"name": f"{path}#{run}", "world_size": count_in_name("devices", run)}
        if (curves := curves_in(cells)) or not run:
            found.append((curves, known))
    named = [each for each in found if "name" in each[1]]
    return [reported_of(path, CSV, curves, **known) for curves, known in named or found]


def read_event_files(path: Path) -> list[Reported]:
    """Read the scalars of all event files in the folder of `path` as one run: each restart begins a new file.

    Raises:
        InputError: tensorboard is not installed, or there are no scalars.
    """
    try:
        from tensorboard.backend.event_processing.event_accumulator import SCALARS, TENSORS, EventAccumulator
        from tensorboard.util.tensor_util import make_ndarray
    except ImportError:
        raise InputError(
            f"{path} needs the package tensorboard: pip install tensorboard, or save its curves as CSV"
        ) from None
    events = EventAccumulator(str(path.parent), size_guidance={SCALARS: 0, TENSORS: 0})
    try:
        events.Reload()
    except Exception as error:  # the library names no class for damage
        raise InputError(f"{path} cannot be read as an event file of TensorBoard: {error}") from None
    told = [(event.step, tag, event.value) for tag in events.Tags()["scalars"] for event in events.Scalars(tag)]
    for tag in events.Tags()["tensors"]:
        values = [(event.step, make_ndarray(event.tensor_proto)) for event in events.Tensors(tag)]
        told += [(step, tag, float(value)) for step, value in values if value.ndim == 0 and value.dtype.kind == "f"]
    if not told:
        raise InputError(f"{path} is not an event file of TensorBoard, or it has no scalars")
    return [reported_of(path.parent, EVENTS, curves_in(told))]


def curves_in(told: Iterable[tuple[object, object, object]]) -> Curves:
    """Return the known curves in (step, name, value); of one step told twice the later value counts."""
    found: dict[str, dict[int, float]] = {}
    for step, name, value in told:
        quantity, at = _curve_named(str(name).strip().lower()), number(step)
        if quantity is None or at is None or abs(at) > MOST_STEPS:
            continue
        if (read := number(value, nan_too=quantity == "train_loss")) is not None:
            found.setdefault(quantity, {})[int(at)] = read
    return {quantity: sorted(points.items()) for quantity, points in found.items()}


def reported_of(path: Path, form: str, curves: Curves, num_skipped: int = 0, **known: Any) -> Reported:
    """Return the run that curves tell of. `known` are fields that the format gives elsewhere; they come first.

    Rates and times are medians: a mean would count the first steps, and the last value is chance. `num_skipped` points
    are left out of them, unless there are no others.

    Raises:
        InputError: there is no time, rate or loss.
    """

    def middle(quantity: str) -> float | None:
        values = [value for _, value in curves.get(quantity, [])]
        return median(values[num_skipped:] or values) if values else None

    def last(quantity: str) -> float | None:
        return next((value for _, value in reversed(curves.get(quantity, [])) if math.isfinite(value)), None)

    rates = {quantity: middle(quantity) for quantity in RATE_UNITS}
    rated = next((quantity for quantity, value in rates.items() if value is not None), "token_rate")
    percent = middle("mfu_percent")
    losses = curves.get("train_loss", [])
    is_of_epoch = "epoch_s" in curves and "iteration_s" not in curves
    seconds = middle("epoch_s" if is_of_epoch else "iteration_s")
    fields: dict[str, Any] = {
        "time_s": last("total_s") if seconds is None else seconds,
        "time_meaning": OF_EPOCH if is_of_epoch else "time of one iteration",
        "rate": rates[rated],
        "rate_unit": RATE_UNITS[rated],
        "rate_is_per_rank": rated == "rank_token_rate",
        "optimizer_steps": losses[-1][0] if losses and losses[-1][0] > 0 else None,
        "train_loss": last("train_loss"),
        "val_loss": last("val_loss"),
        "tflops": middle("tflops"),
        "mfu": percent / 100 if percent is not None and percent >= 0 else None,
        "losses": tuple(losses),
    } | known
    run = Reported(path=path, form=form, **{"name": str(path)} | fields)
    if not run.has_figures:
        raise InputError(f"{path} {SAYS_NOTHING}")
    return run


def number(value: object, nan_too: bool = False) -> float | None:
    """Return a finite number, also one written as text; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        read = float(value)
    except (ValueError, OverflowError):
        return None
    return read if math.isfinite(read) or (nan_too and math.isnan(read)) else None


def one_per_run(found: Sequence[Reported]) -> list[Reported]:
    """Return the runs without the states of earlier checkpoints: a state holds the whole run until then.

    Charts of a folder that W&B exported, one for each metric, are joined by the name of their run.
    """
    states = [item for item in found if item.form == STATE]
    states.sort(key=lambda item: (item.optimizer_steps or 0, -len(item.path.parts)))
    last = {_home(item.path): item for item in states}
    kept = [item for item in found if item.form != STATE or last[_home(item.path)] is item]
    charts: dict[tuple[Path, str], list[Reported]] = {}
    for item in kept:
        charts.setdefault((item.path.parent, item.name.removeprefix(f"{item.path}#")), []).append(item)
    return [each for items in charts.values() for each in ([_joined(items)] if _are_of_one_run(items) else items)]


def _are_of_one_run(items: Sequence[Reported]) -> bool:
    """Return whether all are charts of a run, and no two of them of one metric."""
    told = [name for item in items for name in OF_CHARTS if getattr(item, name) not in (None, ())]
    return all(item.form == CSV for item in items) and len(told) == len({*told})


def _joined(charts: Sequence[Reported]) -> Reported:
    """Return a run with the metrics of all its charts, under the name that it has in the first."""
    told: dict[str, Any] = {
        name: value for item in charts for name in OF_CHARTS if (value := getattr(item, name)) not in (None, ())
    }
    steps = [item.optimizer_steps for item in charts if item.optimizer_steps]
    rated = next((item for item in charts if item.rate is not None), charts[0])
    unit: dict[str, Any] = {"rate_unit": rated.rate_unit, "rate_is_per_rank": rated.rate_is_per_rank}
    return replace(charts[0], **told, **unit, optimizer_steps=max(steps, default=None))


def _home(path: Path) -> Path:
    """Return the folder of the run that a state belongs to; a state under another name is its own run."""
    folder = path.parent if path.name == STATE else path
    return folder.parent if re.fullmatch(r"checkpoint-\d+|last-checkpoint", folder.name) else folder
