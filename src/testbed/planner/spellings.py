"""Read words of published rows, however they are spelled: precision, sharding, checkpointing, offloading. No torch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

# What a precision's words hold -> its class; of several the first, since the narrow products are the large ones.
PRECISIONS = (
    ("nvfp4", "nvfp4"),
    (r"fp4|float4|e2m1", "fp4"),
    (r"mx.*8|8.*mx", "mxfp8"),
    (r"fp8|float8|int8|e4m3|e5m2", "fp8"),
    (r"bf16|bfloat16", "bf16"),
    (r"tf32", "tf32"),
    (r"fp16|float16|half", "fp16"),
    (r"fp32|float32|single", "fp32"),
)
USUAL_PRECISION = "bf16"  # a guess, where no word says another
SHARDED = ((r"no_shard", 0), (r"grad_op", 2), (r"fsdp|full_shard|hybrid|hsdp|true", 3))
KINDS_OF_RECOMPUTATION = (
    ("selective_attention", "selective_attention"),
    (r"selective[-_ ]op", "selective_op"),
    ("select", "selective_attention"),
    (r"full|block|layer|uniform|true|yes|\bon\b", "full"),
)
NOT_STATED = ("", "unknown", "none stated", "not stated", "null")
NO = ("", "none", "false", "no", "off", "0", "0.0")
HEAD_DIMS = (128, 64, 80, 96, 112, 256, 100, 72, 32)  # that models have, the usual ones first


def precision_in(stated: Mapping[str, Any]) -> tuple[str, bool]:
    """Return the class of the large matrix products, and whether the row states one."""
    for text in (stated.get("class"), stated.get("detail")):
        for words, name in PRECISIONS:
            if re.search(words, str(text or "").lower()):
                return name, True
    return USUAL_PRECISION, False


def zero_stage_in(strategy: Mapping[str, Any]) -> int | None:
    """Return ZeRO's stage: as a number, or as `fsdp` and `family` name it; None where nothing does."""
    stated = strategy.get("zero_stage")
    if str(stated) in ("0", "1", "2", "3", "0.0", "1.0", "2.0", "3.0"):
        return int(float(str(stated)))
    text = f"{strategy.get('fsdp') or ''} {strategy.get('family') or ''}".lower()
    number = re.search(r"zero[-_ ]?([0-3])", text)
    if number:
        return int(number[1])
    return next((stage for words, stage in SHARDED if re.search(words, text)), None)


def recompute_in(stated: Any) -> tuple[str, float, bool]:
    """Return the kind of activation checkpointing, the share of the layers that it concerns, and whether the row states
    it."""
    text = str("" if stated is None else stated).lower()
    if text.strip() in NOT_STATED:
        return "none", 1.0, False
    kind = next((kind for words, kind in KINDS_OF_RECOMPUTATION if re.search(words, text)), "none")
    part = re.search(r"(\d{1,6}) of (\d{1,6})", text)
    return kind, min(1.0, int(part[1]) / max(1, int(part[2]))) if part else 1.0, True


def offload_in(*parts: Mapping[str, Any]) -> str:
    """Return what waits in host memory besides activations: "parameters" and all else, "optimizer", or "none"."""
    found = "none"
    for key, value in (entry for part in parts for entry in part.items()):
        text = f"{key} {value}".lower()
        if "offload" not in text or "activation" in text or str(value).lower() in (*NO, "null"):
            continue
        if "optim" not in text and "zero_offload" not in text:
            return "parameters"
        found = "optimizer"
    return found


def heads_of(hidden: int) -> int:
    """Return how many heads a model of a width may have: a guess."""
    return next((hidden // width for width in HEAD_DIMS if hidden % width == 0), 1)


def half_a_digit(number: float) -> float:
    """Return by how much, relative to itself, a number may differ from what it was rounded from: 2.67 by 0.005."""
    text = repr(number)
    _, _, decimals = text.partition(".")
    return 0.5 * 10.0 ** -len(decimals) / number if "e" not in text and math.isfinite(number) else 0.0
