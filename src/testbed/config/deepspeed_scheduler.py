"""Express the scheduler section of DeepSpeed's file in flags. No torch.

DeepSpeed sets the rate after each step, so its first two steps have the lowest one. A rate here is that of DeepSpeed up
to two steps later. The curves are those of deepspeed/runtime/lr_schedules.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from testbed.config.flag_types import AUTO
from testbed.config.flags import checked_like_a_flag
from testbed.config.table import FLAGS
from testbed.errors import InputError

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


def flags_of_scheduler(section: Any, learning_rate: Decision | None) -> tuple[dict[str, Decision], list[str]]:
    """Return what a scheduler section decides by the names of the flags, and each thing that flags cannot express.

    Args:
        section: as in the file; "auto" in it leaves a value to its flag.
        learning_rate: what optimizer.params.lr of the same file decides; WarmupCosineLR's end is a share of it.
    """
    kind = section.get("type") if isinstance(section, dict) else None
    if kind not in KINDS:
        return {}, [f"scheduler.type must be {', '.join(KINDS)} or the section be left out, not {kind!r}"]
    given = section.get("params", {})
    if not isinstance(given, dict):
        return {}, ["scheduler.params must be a JSON object"]
    faults = [
        f"scheduler.params.{name} is no parameter of {kind}" for name in sorted(given.keys() - KINDS[kind].keys())
    ]
    values = KINDS[kind] | {name: value for name, value in given.items() if name in KINDS[kind] and value is not None}
    for name, (only, why) in _FIXED.items():
        if values.get(name, only) not in (only, AUTO):
            faults.append(f"scheduler.params.{name} = {values[name]!r}, but {why}; write {only} or leave it out")
    found = {"lr_schedule": Decision(_SCHEDULE[kind], f"scheduler.type = {kind}")}
    for name, flag in _FLAG.items():
        value = values.get(name)
        if value in (None, AUTO):
            continue
        place = f"scheduler.params.{name}"
        try:
            typed = checked_like_a_flag(FLAGS[flag], _whole(value), place)
            found[flag] = Decision(typed, f"{place} = {value}" + " (DeepSpeed's default)" * (name not in given))
        except InputError as error:
            faults.append(str(error))
    ends, more = _end_of(kind, values, found, learning_rate) if not faults else ({}, [])
    return found | ends, faults + more


def _end_of(
    kind: str, values: Mapping[str, Any], found: Mapping[str, Decision], learning_rate: Decision | None
) -> tuple[dict[str, Decision], list[str]]:
    """Return the flags for how the rate falls, or why they cannot be worked out."""
    if kind == "WarmupDecayLR":
        if not {"lr_decay_steps", "warmup_steps"} <= found.keys():
            return {}, ["WarmupDecayLR needs scheduler.params.total_num_steps and warmup_num_steps as numbers"]
        total, warmup = found["lr_decay_steps"].value, found["warmup_steps"].value
        if warmup >= total:
            return {}, [f"scheduler.params.total_num_steps = {total} leaves no step after {warmup} of warm-up"]
        said = f"scheduler.params.total_num_steps = {total} after warmup_num_steps = {warmup}"
        return {"decay_share": Decision(1 - warmup / total, said)}, []
    if kind == "WarmupCosineLR" and values["cos_min_ratio"] != AUTO:
        ratio = values["cos_min_ratio"]
        if learning_rate is None:
            return {}, ["WarmupCosineLR ends at a share of the rate: name optimizer.params.lr too"]
        if not isinstance(ratio, int | float) or not 0 <= ratio <= 1:
            return {}, [f"scheduler.params.cos_min_ratio must be a number from 0 to 1, not {ratio!r}"]
        said = f"scheduler.params.cos_min_ratio = {ratio} of {learning_rate.said}"
        return {"min_learning_rate": Decision(ratio * learning_rate.value, said)}, []
    return {}, []


def _whole(value: Any) -> Any:
    """Return 1e3, which JSON reads as a float, as the whole number that it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
