"""Read the set-up that a program printed into its log, by patterns that have the value in their first group.

DeepSpeed prints every setting as `print]   train_batch_size ............. 8` (deepspeed/runtime/config.py, `print`),
with a space alone where the name is long. A batch that is printed is a setting: with a data loader of its own, a
program may have trained on other batches.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from testbed.audit.reported import BREAKDOWN, INSTRUMENTS, PRECISION, ZERO

LONGEST_COUNT = 15  # digits
_LINE = r"(?m)(?:print\]|^worker-\d+:)\s+{}(?: \.+)? +(\S+)\s*$"  # of DeepSpeed
_FLAG = r"""(?:--|")(?:{})["']?(?:=|[:,]?\s+)["']?(\d+)\b"""  # of a command line, or a name in JSON
FLAGS = {
    "global_batch_size": _FLAG.format("global[-_]batch[-_]size|train[-_]batch[-_]size"),
    "micro_batch_size": _FLAG.format("micro[-_]batch[-_]size|train_micro_batch_size_per_gpu"),
    "world_size": r"\bdist_world_size=(\d+)",
}
ENGINE = {
    "world_size": _LINE.format("world_size"),
    "global_batch_size": _LINE.format("train_batch_size"),
    "micro_batch_size": _LINE.format("train_micro_batch_size_per_gpu"),
    ZERO: _LINE.format("zero_optimization_stage"),
    "fp16": _LINE.format("fp16_enabled"),
    "bf16": _LINE.format("bfloat16_enabled"),
    "breakdown": _LINE.format("wall_clock_breakdown"),
    "flops_profiler": r'flops_profiler_config[ .]+\{\s*"enabled": (true|false)',
}


_SLOWS_DOWN = {"breakdown": BREAKDOWN, "flops_profiler": "DeepSpeed's flops profiler ran (flops_profiler_config)"}


def said_in(text: str, patterns: Mapping[str, str]) -> dict[str, str]:
    """Return what each pattern finds, where all of its places in the text say the same."""
    found = {name: {match[1].strip() for match in re.finditer(each, text)} for name, each in patterns.items()}
    return {name: values.pop() for name, values in found.items() if len(values) == 1}


def counts_of(said: Mapping[str, str]) -> dict[str, int]:
    """Return the whole numbers above 0 in what was said, products multiplied: 8*64 is 512."""
    parts = {name: re.split(r" ?\* ?", text.replace(",", "")) for name, text in said.items()}
    return {name: count for name, numbers in parts.items()
            if all(each.isdecimal() and len(each) <= LONGEST_COUNT for each in numbers)
            and (count := math.prod(map(int, numbers)))}  # fmt: skip


def printed_setup(text: str) -> dict[str, Any]:
    """Return fields of `Reported` that DeepSpeed's lines give; the batch else by flags in the log, or a JSON."""
    said = said_in(text, FLAGS) | said_in(text, ENGINE)
    settings = {PRECISION: _precision(said), ZERO: said.get(ZERO)}
    instruments = [words for name, words in _SLOWS_DOWN.items() if said.get(name, "").lower() == "true"]
    if not instruments and said.get("breakdown") == "False":
        settings[INSTRUMENTS] = "none"
    counted = {name: said[name] for name in FLAGS if name in said}
    return counts_of(counted) | {
        "settings": {name: value for name, value in settings.items() if value},
        "instruments": tuple(instruments),
    }


def plain_precision(text: str) -> str:
    """Return the name of a precision in one spelling: torch.bfloat16, BF16 and bfloat16 are bf16."""
    name = text.strip().lower().removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")
    if found := set(re.findall(r"(?:bf|fp|tf)(?:8|16|32|64)\b", name)):
        return "/".join(sorted(found))
    return "fp32" if name in ("fp", "single") else name


def _precision(said: Mapping[str, str]) -> str | None:
    on = [name for name in ("fp16", "bf16") if said.get(name) == "True"]
    return on[0] if on else "fp32" if {"fp16", "bf16"} <= said.keys() else None
