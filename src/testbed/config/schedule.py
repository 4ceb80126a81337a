"""Number of optimizer steps of a run, and marks of its learning-rate schedule. No torch.

optim/lr_schedule.py computes the learning rate of a step from them. Each function raises InputError, one sentence for
the first rule that is broken.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from testbed.config.deepspeed_scheduler import OpenEnd
from testbed.config.table import FLAGS
from testbed.data.token_file import TokenFile
from testbed.data.windows import longest_pair, num_windows
from testbed.errors import InputError
from testbed.model.shape import LEARNING_RATES, MUON_LEARNING_RATES, ModelShape, size_name

_NEEDS = {name: flag.needs for name, flag in FLAGS.items() if flag.needs}
DEFAULT_MUON_MOMENTUM = 0.95
DEFAULT_DECAY_SHARE = 0.2


def peak_learning_rate(values: Mapping[str, Any]) -> float:
    """Return the given peak learning rate, or that of the size that has this shape; if none has, that of --model."""
    if values["learning_rate"] is not None:
        return values["learning_rate"]
    rates = LEARNING_RATES | (MUON_LEARNING_RATES if values["optimizer"] == "muon" else {})
    shape = ModelShape(**{field.name: values[field.name] for field in dataclasses.fields(ModelShape)})
    return rates.get(size_name(shape), rates[values["model"]])


def options_of_optimizer(values: Mapping[str, Any], typed: frozenset[str]) -> dict[str, float | None]:
    """Return the flags that only some optimizers and schedules read: their value or default, else None.

    A flag without effect must not be typed. From a --config file it is dropped.
    """
    options = {}
    for name, (owner, choices) in _NEEDS.items():
        if values[owner] in choices:
            options[name] = values[name]
        elif name in typed:
            raise InputError(
                f"--{name} belongs to --{owner} {' or '.join(choices)}, not to {values[owner]}; leave it out"
            )
        else:
            options[name] = None
    if values["optimizer"] == "muon":
        if options["muon_learning_rate"] is None:
            options["muon_learning_rate"] = values["learning_rate"]
        if options["muon_momentum"] is None:
            options["muon_momentum"] = DEFAULT_MUON_MOMENTUM
        if options["muon_learning_rate"] and not values["learning_rate"]:
            raise InputError(
                f"--muon_learning_rate {options['muon_learning_rate']:g} with --learning_rate 0: it follows that "
                "schedule in proportion, and there is none to 0; give --learning_rate a small value"
            )
    if values["lr_schedule"] == "wsd" and options["decay_share"] is None:
        options["decay_share"] = DEFAULT_DECAY_SHARE
    return options


def check_data_suffices(values: Mapping[str, Any], train_file: TokenFile, val_file: TokenFile) -> None:
    """Check that the files hold at least one global batch to train on and one window to validate on."""
    sequence, global_batch = values["seq_length"], values["global_batch_size"]
    if values["max_val_steps"] != 0:
        _check_holds(1, "one", f"--val_data_path {val_file.path}", val_file, sequence, "--max_val_steps 0")
    if not values["eval_only"]:
        needed = f"the global batch of {global_batch}"
        name = f"--train_data_path {train_file.path}"
        _check_holds(global_batch, needed, name, train_file, sequence, "a smaller --global_batch_size")


def _check_holds(number: int, needed: str, name: str, file: TokenFile, sequence: int, way_out: str) -> None:
    """Refuse a file with fewer than a number of windows, or of pairs that fit whole into one."""
    found = num_windows(file, sequence)
    if found >= number:
        return
    holds = f"windows of --seq_length {sequence} ({len(file.tokens):,} tokens)"
    shorter = "use more text, a shorter sequence"
    if file.targets is not None:
        holds = f"pairs that fit whole into --seq_length {sequence} (the longest pair needs {longest_pair(file)})"
        shorter = "use more pairs, a longer sequence"
    raise InputError(f"{name} holds {found} {holds}, fewer than {needed}; {shorter}, or {way_out}")


def one_length(values: Mapping[str, Any], typed: frozenset[str]) -> dict[str, int | None]:
    """Return --max_train_steps and --max_tokens, at most one of them set: of two, the one on the command line."""
    names = ("max_train_steps", "max_tokens")
    if None in [values[name] for name in names]:
        return {name: values[name] for name in names}
    if len(typed & {*names}) != 1:
        said = " and ".join(f"--{name} {values[name]}" for name in names)
        of_file = f", and both are of --config {values['config']}" if values["config"] and not typed & {*names} else ""
        raise InputError(f"{said} both say how long to train{of_file}; give one of them")
    return {name: values[name] if name in typed else None for name in names}


def count_steps(values: Mapping[str, Any], train_file: TokenFile) -> tuple[int, int]:
    """Return the optimizer steps of an epoch and of the whole run. --max_train_steps and --max_tokens win over
    --epochs."""
    steps = values["max_train_steps"]
    if values["max_tokens"]:
        steps = math.ceil(values["max_tokens"] / (values["global_batch_size"] * values["seq_length"]))
    steps_per_epoch = num_windows(train_file, values["seq_length"]) // values["global_batch_size"]
    total = steps or steps_per_epoch * values["epochs"]
    if (values["stop_at_step"] or 0) > total:
        raise InputError(
            f"--stop_at_step {values['stop_at_step']} is after the run's last step, {total}; leave it out, or give "
            "--max_train_steps the steps of the whole run"
        )
    return steps_per_epoch, total


def learning_rate_marks(
    values: Mapping[str, Any], total_steps: int, open_end: OpenEnd | None = None
) -> dict[str, float]:
    """Return the steps of warm-up and decay and the lowest learning rate, by their flags.

    Args:
        open_end: how DeepSpeed's file says that the rate falls, where it leaves the steps or the peak to the flags.
    """
    warmup = values["warmup_steps"] if values["warmup_steps"] is not None else min(2000, total_steps // 10)
    decay = values["lr_decay_steps"] or max(total_steps, 1)
    if warmup > decay:
        raise InputError(
            f"--warmup_steps {warmup} reaches past the end of the schedule at step {decay} "
            "(--lr_decay_steps, or the run's last step): the learning rate would never get to its peak; "
            f"give --warmup_steps {decay // 10}, or at most {decay}"
        )
    of_file = {}
    if open_end is not None and open_end.flag == "decay_share":
        if warmup >= decay:
            raise InputError(
                f"--warmup_steps {warmup} leaves no step until step {decay} for the fall of {open_end.said}; give fewer"
            )
        of_file = {"decay_share": 1 - warmup / decay}
    elif open_end is not None:
        of_file = {"min_learning_rate": open_end.share * values["learning_rate"]}
    values = {**values, **of_file}
    lowest = values["min_learning_rate"]  # wsd's default is nothing, for its fall is short (arXiv:2405.18392, figure 5)
    if lowest is None:
        peak = values["learning_rate"]
        lowest = {"cosine": peak / 10, "wsd": 0.0, "constant": peak}[values["lr_schedule"]]
    if lowest > values["learning_rate"]:
        raise InputError(
            f"--min_learning_rate {lowest:g} is above --learning_rate "
            f"{values['learning_rate']:g}; the schedule ends at the lower one"
        )
    if values["lr_schedule"] == "wsd" and warmup + decay_steps(decay, values["decay_share"]) > decay:
        raise InputError(
            f"--decay_share {values['decay_share']:g} of {decay} steps is {decay_steps(decay, values['decay_share'])}, "
            f"which with --warmup_steps {warmup} is more than there are; lower one of them"
        )
    return of_file | {"warmup_steps": warmup, "lr_decay_steps": decay, "min_learning_rate": lowest}


def decay_steps(last: int, decay_share: float) -> int:
    """Return the steps in which wsd decays, at least one; `last` is the length of its schedule."""
    return max(1, round(decay_share * last))
