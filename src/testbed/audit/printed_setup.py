"""Read the set-up that a program printed into its log, by patterns that have the value in their first group.

DeepSpeed prints every setting as `print]   train_batch_size ............. 8` (deepspeed/runtime/config.py, `print`),
with a space alone where the name is long. A batch that is printed is a setting: with a data loader of its own, a
program may have trained on other batches.

Flags of a command line, and what W&B, Lightning and others store beside a log, are settings by name: `set_up` reads
them alike.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from testbed.audit.reported import (
    BATCH,
    BREAKDOWN,
    COMPILED,
    DATA,
    INSTRUMENTS,
    MODEL,
    PRECISION,
    RECOMPUTED,
    RESOLUTION,
    STATUS,
    STRATEGY,
    ZERO,
)
from testbed.audit.tables.columns import WORDS, quantity_of

LONGEST_COUNT = 15  # digits
_LINE = r"(?m)(?:print\]|^worker-\d+:)\s+{}(?: \.+)? +(\S+)\s*$"  # of DeepSpeed
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
SETTINGS = (MODEL, DATA, STRATEGY, PRECISION, COMPILED, RECOMPUTED, ZERO, STATUS, BATCH, RESOLUTION)
# a setting -> a field or a setting of `Reported`, or what they are computed from; of others a table's heading says it
_NAMES = {
    "world size": "world_size", "dist world size": "world_size", "num processes": "world_size", "devices": "per_node",
    "gpu count": "devices",
    "nproc per node": "per_node", "train batch size": "batch", "accumulate grad batches": "accumulation",
    "n params": "num_parameters", "max seq length": "length", "model max length": "length", "gpu": "device_name",
    "gpu name": "device_name", "gpu type": "device_name", "model": MODEL, "model name": MODEL,
    "model name or path": MODEL, "arch": MODEL, "dataset": DATA, "dataset name": DATA, "strategy": STRATEGY,
    "parallelism": STRATEGY, "dist strategy": STRATEGY, "distributed strategy": STRATEGY,
    "precision": PRECISION, "dtype": PRECISION, "param dtype": PRECISION, "mixed precision": PRECISION,
    "bf16": "bf16", "fp16": "fp16", "amp": "amp",
    **dict.fromkeys(WORDS[RESOLUTION].split(", "), RESOLUTION),
    "compile": COMPILED, "torch compile": COMPILED, "gradient checkpointing": RECOMPUTED,
    "activation checkpointing": RECOMPUTED, "zero stage": ZERO,
    "zero optimization stage": ZERO, "mode": STATUS,
}  # fmt: skip
_FIELDS = {"batch": "global_batch_size", "micro_batch": "micro_batch_size", "accumulation": "accumulation",
           "length": "sequence_length", "params": "num_parameters", "any_batch": BATCH}  # fmt: skip
_COUNTS = (*_FIELDS.values(), "per_node", "nodes", "world_size", "devices")
_IS_OF_NO_TRAINING = re.compile(r"\b(?:eval|val|valid|validation|test|inference)\b")
_IS_NO_RUN = re.compile(r"(?i)simulat\w*|predict\w*|dry[-_ ]?run|fake\w*")
_SWITCH = {"true": "on", "1": "on", "yes": "on", "false": "off", "0": "off", "no": "off"}
_COMMAND = re.compile(
    r"(?m)^(?![ \t]*#)[^\n]{0,300}?\b(?:torchrun|deepspeed|accelerate launch|python[\d.]*|torch\.distributed\.\w+)\b"
    r"([^\n]*[ '\"]--[^\n]*)"
)
_OF_DEEPSPEED = re.compile(r"\b(dist_world_size|train_batch_size|train_micro_batch_size_per_gpu)(?:\": |=)(\d+)\b")
_NAMESPACE = re.compile(r"\bNamespace\(([^\n]{0,20000})")  # of argparse
_ANY_NAME = re.compile(r"""(\w+)=(?:'([^'\n]*)'|"([^"\n]*)"|([^\s'",)]+))""")
_ANY_FLAG = re.compile(r"""--([A-Za-z][\w.-]*)(?:(?:=|[\s'",]+(?!-))['"]?([^\s'",]+))?""")
MOST_FLAGS = 2000
STARTS_WITHIN = 1_000_000  # characters of a log, in which its commands are looked for
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
    """Return the fields of `Reported` that a log's command lines and printed arguments give, and before them what
    DeepSpeed prints."""
    commands = _COMMAND.findall(text[:STARTS_WITHIN].replace("\\\n", " "))
    told = ((each[1], each[2] or "true") for command in commands for each in _ANY_FLAG.finditer(command))
    arguments = ((each[1], each[2] or each[3] or each[4]) for printed in _NAMESPACE.findall(text[:STARTS_WITHIN])
                 for each in _ANY_NAME.finditer(printed))  # fmt: skip
    flags = [*itertools.islice(itertools.chain(told, arguments), MOST_FLAGS)]
    known, said = set_up([*flags, *_OF_DEEPSPEED.findall(text)]), said_in(text, ENGINE)
    settings, of_engine = known["settings"], {PRECISION: _precision(said), ZERO: said.get(ZERO)}
    settings |= {name: value for name, value in of_engine.items() if value}
    instruments = [words for name, words in _SLOWS_DOWN.items() if said.get(name, "").lower() == "true"]
    if not instruments and said.get("breakdown") == "False":
        settings[INSTRUMENTS] = "none"
    counts = counts_of({name: said[name] for name in ("world_size", *_FIELDS.values()) if name in said})
    return known | counts | {"settings": settings, "instruments": tuple(instruments)}


def set_up(told: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Return the fields of `Reported` that named settings give. One that is told twice, and otherwise, is unknown."""
    found: dict[str, set[str]] = {}
    for name, value in told:
        whole, plain = (re.sub(r"[\W_]+", " ", each.lower()).strip() for each in (name, name.rpartition(".")[2]))
        quantity = _NAMES.get(whole) or _NAMES.get(plain) or quantity_of(plain) or ""
        if value.lower() not in ("none", "null") and not _IS_OF_NO_TRAINING.search(whole):
            found.setdefault(_FIELDS.get(quantity, quantity), set()).add(value)
    said = {name: values.pop() for name, values in found.items() if len(values) == 1}
    counts = counts_of({name: said.pop(name) for name in _COUNTS if name in said})
    nodes = counts.pop("nodes", None if "nodes" in found else 1)
    per_node, devices = counts.pop("per_node", None), counts.pop("devices", None)
    if nodes and (each := per_node or (devices if nodes == 1 else None)):
        counts.setdefault("world_size", each * nodes)
    settings = {name: said.get(name, "").rstrip("/").rpartition("/")[2] for name in _NAMES.values()}
    settings |= {name: _SWITCH.get(settings[name].lower(), settings[name]) for name in (COMPILED, RECOMPUTED)}
    if settings[STRATEGY] == "auto":  # of Lightning
        settings[STRATEGY] = "single device" if counts.get("world_size") == 1 else ""
    settings[PRECISION] = plain_precision(re.sub(r"^(?=(?:16|32|64)\b)", "fp", settings[PRECISION]))
    if on := [name for name in ("bf16", "fp16") if _SWITCH.get(settings[name].lower()) == "on"]:
        settings[PRECISION] = on[0] if len(on) == 1 else ""
    elif _SWITCH.get(settings["amp"].lower()) == "on" and settings[PRECISION] in ("", "fp32"):
        settings[PRECISION] = "amp"
    settings[RESOLUTION] *= settings[RESOLUTION][:1].isdigit()  # crop: true
    settings[STATUS] = f"of the mode {settings[STATUS]}" if _IS_NO_RUN.match(settings[STATUS]) else ""
    settings[BATCH] = str(counts.pop(BATCH, ""))
    device = said.get("device_name", "")
    return {**counts, "device_name": device if re.search("[A-Za-z]", device) else None,
            "settings": {name: settings[name] for name in SETTINGS if settings.get(name)}}  # fmt: skip


def plain_precision(text: str) -> str:
    """Return the name of a precision in one spelling: torch.bfloat16, BF16 and bfloat16 are bf16."""
    name = text.strip().lower().removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")
    if found := set(re.findall(r"(?:bf|fp|tf)(?:8|16|32|64)\b", name)):
        return "/".join(sorted(found))
    return "fp32" if name in ("fp", "single") else name


def _precision(said: Mapping[str, str]) -> str | None:
    on = [name for name in ("fp16", "bf16") if said.get(name) == "True"]
    return on[0] if on else "fp32" if {"fp16", "bf16"} <= said.keys() else None
