"""Express the scheduler section of DeepSpeed's file in flags. No torch.

DeepSpeed sets the rate after each step, so its first two steps have the lowest one. A rate here is that of DeepSpeed up
to two steps later. The curves are those of deepspeed/runtime/lr_schedules.py.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

from testbed.config.flag_types import AUTO
from testbed.config.flags import checked_like_a_flag
from testbed.config.table import FLAGS
from testbed.errors import InputError, one_line

# the parameters of each kind, with DeepSpeed's defaults. None: there is none
_WARMUP = {"warmup_num_steps": 1000, "warmup_type": "log", "last_batch_iteration": -1}
KINDS: dict[str, dict[str, Any]] = {
    "WarmupLR": {**_WARMUP, "warmup_min_lr": 0, "warmup_max_lr": None},
    "WarmupDecayLR": {**_WARMUP, "warmup_min_lr": 0, "warmup_max_lr": 0.001, "total_num_steps": None},
    "WarmupCosineLR": {**_WARMUP, "warmup_min_ratio": 0, "cos_min_ratio": 0.0001, "total_num_steps": None},
}
_SCHEDULE = {"WarmupLR": "constant", "WarmupDecayLR": "wsd", "WarmupCosineLR": "cosine"}
_FLAG = {
    "warmup_max_lr": "learning_rate",
    "warmup_num_steps": "warmup_steps",
    "warmup_type": "warmup_shape",
    "total_num_steps": "lr_decay_steps",
}
_FIXED = {
    "warmup_min_lr": (0, "warm-up begins at 0"),
    "warmup_min_ratio": (0, "warm-up begins at 0"),
    "last_batch_iteration": (-1, "a run begins at its first step, or where --resume says"),
}


@dataclass(frozen=True)
class Decision:
    """The value of a flag, and what says it in the file: "scheduler.params.warmup_num_steps = 1000"."""

    value: Any
    said: str


@dataclass(frozen=True)
class OpenEnd:
    """How the rate falls, which follows from the steps or the peak. No flag may say otherwise.

    Attributes:
        flag: decay_share, which then falls from the end of the warm-up, or min_learning_rate.
        share: of the peak rate, for min_learning_rate.
    """

    flag: str
    said: str
    share: float = 0.0


def flags_of_scheduler(
    section: Any, learning_rate: Decision | None
) -> tuple[dict[str, Decision], OpenEnd | None, list[str]]:
    """Return what a scheduler section decides by the names of the flags, the end that follows from other flags, and
    each thing that flags cannot express.

    Args:
        section: as in the file; "auto" in it leaves a value to its flag.
        learning_rate: what optimizer.params.lr of the same file decides.
    """
    kind = section.get("type") if isinstance(section, dict) else None
    if not isinstance(kind, str) or kind not in KINDS:
        return {}, None, [f"scheduler.type must be {', '.join(KINDS)} or the section be left out, not {shown(kind)}"]
    given = section.get("params") or {}
    if not isinstance(given, dict):
        return {}, None, ["scheduler.params must be a JSON object"]
    faults = [
        f"scheduler.params.{shown(name)[1:-1]} is not a parameter of {kind}"
        for name in sorted(given.keys() - KINDS[kind].keys())
    ]
    values = KINDS[kind] | {name: value for name, value in given.items() if name in KINDS[kind] and value is not None}
    for name, (only, why) in _FIXED.items():
        value = values.get(name, only)
        if value != AUTO and (isinstance(value, bool) or value != only):
            faults.append(f"scheduler.params.{name} = {shown(value)}, but {why}; write {only} or leave it out")
    found = {"lr_schedule": Decision(_SCHEDULE[kind], f"scheduler.type = {kind}")}
    for name, flag in _FLAG.items():
        value = values.get(name)
        if value in (None, AUTO):
            continue
        place = f"scheduler.params.{name}"
        if flag != "warmup_shape" and not is_number(value):
            faults.append(f'{place} cannot be {shown(value)}: write a number from 0 without quotes, or "auto"')
            continue
        try:
            typed = checked_like_a_flag(FLAGS[flag], _whole(value), place)
            found[flag] = Decision(typed, f"{place} = {value}" + " (DeepSpeed's default)" * (name not in given))
        except InputError as error:
            faults.append(str(error))
    peak = found.get("learning_rate")
    if peak is not None and learning_rate is not None and peak.value != learning_rate.value:
        faults.append(f"{learning_rate.said} has no effect beside {peak.said}, the schedule's peak; write one rate")
    open_end = None
    if kind == "WarmupDecayLR":
        open_end = OpenEnd("decay_share", "scheduler.type = WarmupDecayLR")
        if values["total_num_steps"] is None:
            faults.append('WarmupDecayLR needs scheduler.params.total_num_steps, a number or "auto"')
    elif kind == "WarmupCosineLR" and (ratio := values["cos_min_ratio"]) != AUTO:
        if not is_number(ratio) or ratio > 1:
            faults.append(f"scheduler.params.cos_min_ratio must be a number from 0 to 1, not {shown(ratio)}")
        else:
            open_end = OpenEnd("min_learning_rate", f"scheduler.params.cos_min_ratio = {ratio}", ratio)
    return found, open_end, faults


def _whole(value: Any) -> Any:
    """Return 1e3, which JSON reads as a float, as the whole number that it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def is_number(value: Any) -> bool:
    """Return whether a JSON value is a number from 0 that a float holds; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max


def shown(value: Any) -> str:
    """Return a value of the file for a sentence: a text in Python's quotes, all else as JSON, cut in the middle."""
    try:
        return one_line(repr(value) if isinstance(value, str) else json.dumps(value), 80)
    except ValueError:  # Python writes no number of more than 4,300 digits
        return "a number of thousands of digits"
