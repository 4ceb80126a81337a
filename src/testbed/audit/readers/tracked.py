"""Turn the curves and settings of a run into what the audit reads.

Programs choose the names. Those known here are of the programs' own code: transformers' Trainer, torchtitan,
Megatron-LM, nanochat, composer, OLMo, litgpt. A name says unit and scope only where one of these programs writes it.
Any other is left unread and named.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from testbed.audit.readers.curve_lines import lines_of
from testbed.audit.readers.curves import TRAIN_LOSS, Curves, last, named
from testbed.audit.readers.evaluations import evaluations_of
from testbed.audit.reported import Reported

VAL_LOSS = (
    r"validation_metrics/global_avg_loss|lm loss validation",
    r"(eval|val|valid|validation)[-_/ .]loss(_epoch)?|loss/(eval|val|valid|validation)",
)
# name -> unit, and whether the program writes the rate of one rank
RATES = {
    r"throughput\(tps\)": ("tokens/s", True),  # torchtitan
    r"throughput/device/(tokens_per_sec(ond)?|TPS)": ("tokens/s", True),  # composer, OLMo
    r"throughput/tokens_per_sec": ("tokens/s", False),  # composer
    r"(train\|)?device/items_per_sec": ("items/s", True),  # Lightning's ThroughputMonitor
    r"train/tok_per_sec": ("tokens/s", False),  # nanochat
    r"(train[/_])?train_samples_per_second": ("samples/s", False),  # transformers
}
MEGATRON_RATE = "throughput"  # TFLOP/s of one rank, next to `iteration-time`
UNSCOPED_RATE = r"(?i)(\w+/)*(tokens?|tok|samples?|items)_?(per_|/)s(ec(onds?)?)?"
STEP_TIME_S = r"iteration-time|time_metrics/end_to_end\(s\)|train/dt|(\w+/)*step_time_(s|sec|seconds)"
RUN_TIME_S = r"(train[/_])?train_runtime"
STEPS_DONE = r"(train/)?global_step"
# what transformers' Trainer logs when it ends, under train/ where a tracker is told
FINAL = ("train_runtime", "train_samples_per_second", "train_steps_per_second", "train_loss")
# who writes one of these counts optimizer steps
COUNTS_STEPS = r"loss_metrics/global_avg_loss|lm loss|iteration-time|train/grad_norm|train/learning_rate|train/epoch"
WORLD_SIZE = r"(.*\.)?(ddp_|dist_)?world_size"
NANOCHAT_BATCH = r"total_batch_size"  # tokens
LENGTH = r"(.*\.)?(seq_length|seq_len|max_seq_len|block_size)"
MFU_PERCENT, MFU_SHARE = r"mfu\(%\)|train/mfu", r"(throughput/|train\|)?device/mfu"
GLOBAL_BATCH = r"(.*\.)?global_batch_size"


def reported_of(
    path: Path, form: str, curves: Curves, settings: Mapping[str, str], unread: Sequence[str] = (), **known: Any
) -> Reported:
    """Return the run that curves and settings tell of.

    Args:
        settings: the program's settings by dotted name, as text.
        unread: what the reader could not read.
        known: fields of `Reported` that the format gives elsewhere; they come first.
    """
    world_size = known.get("world_size") or _count(settings, WORLD_SIZE)
    rate, unit, is_per_rank, unscoped = _rate(curves, world_size)
    step_s, run_s = _median(curves, STEP_TIME_S), last(curves, RUN_TIME_S)
    train_loss, val_loss = last(curves, *TRAIN_LOSS), last(curves, *VAL_LOSS)
    if "lines" not in known:
        known["lines"], known["relations"] = lines_of(curves, _count(settings, NANOCHAT_BATCH))
    details = {"curves": curves, "final": _final(curves), "evaluations": evaluations_of(curves)}
    details |= known.pop("details", {})
    fields = {
        "world_size": world_size,
        "global_batch_size": _global_batch(settings, world_size),
        "optimizer_steps": _steps(curves),
        "time_s": run_s if run_s is not None else step_s,
        "time_meaning": "time of the whole train() call" if run_s is not None else "time of one iteration",
        "rate": rate,
        "rate_unit": unit,
        "rate_is_per_rank": is_per_rank,
        "train_loss": train_loss,
        "val_loss": val_loss,
        "sequence_length": _count(settings, LENGTH),
        "mfu": _mfu(curves),
        "tflops": rate if unit == "TFLOP/s" else _median(curves, "tflops"),
    } | {name: value for name, value in known.items() if value is not None}
    looked_for = {
        "ranks": "world_size",
        "batch": "global_batch_size",
        "optimizer steps": "optimizer_steps",
        "time": "time_s",
        "throughput": "rate",
        "training loss": "train_loss",
        "validation loss": "val_loss",
    }
    if unscoped and fields["rate"] is None:
        unread = [*unread, f"whether {unscoped} is of one rank or of all"]
    unread = [words for words, name in looked_for.items() if fields[name] is None] + list(unread)
    return Reported(path=path, name=str(path), form=form, unread=tuple(unread), details=details, **fields)  # type: ignore[arg-type]


def _final(curves: Curves) -> dict[str, float]:
    """Return the figures at the end of a run of transformers' Trainer; empty without the run's time."""
    final = {name: value for name in FINAL if (value := last(curves, rf"(train/)?{name}")) is not None}
    if "train_runtime" not in final:
        return {}
    steps = last(curves, STEPS_DONE)
    if steps is None:
        steps = next((points[-1].step for points in named(curves, RUN_TIME_S)), None)
    return final | ({"global_step": steps} if steps else {})


def _median(curves: Curves, pattern: str) -> float | None:
    """Return the median of a curve: a mean would count the first steps, and the last value is chance."""
    for points in named(curves, pattern):
        finite = [point.value for point in points if math.isfinite(point.value)]
        if finite:
            return median(finite)
    return None


def _rate(curves: Curves, world_size: int | None) -> tuple[float | None, str, bool, str | None]:
    """Return the median rate, its unit, whether it is of one rank, and the name of one whose scope is unknown."""
    for pattern, (unit, is_per_rank) in RATES.items():
        if (rate := _median(curves, pattern)) is not None:
            return rate, unit, is_per_rank, None
    if "iteration-time" in curves and (rate := _median(curves, MEGATRON_RATE)) is not None:
        return rate, "TFLOP/s", True, None
    unscoped = next((name for name in curves if re.fullmatch(UNSCOPED_RATE, name) and "eval" not in name), None)
    if unscoped and world_size == 1 and (rate := _median(curves, re.escape(unscoped))) is not None:
        return rate, "tokens/s" if "tok" in unscoped else unscoped.rpartition("/")[2], False, None
    return None, "tokens/s", False, unscoped


def _mfu(curves: Curves) -> float | None:
    percent, share = _median(curves, MFU_PERCENT), _median(curves, MFU_SHARE)
    found = percent / 100 if percent is not None else share
    return found if found is not None and found >= 0 else None


def _steps(curves: Curves) -> int | None:
    done = last(curves, STEPS_DONE)
    if done is not None:
        return int(done)
    if not any(named(curves, COUNTS_STEPS)):
        return None
    steps = [point.step for name in TRAIN_LOSS for points in named(curves, name) for point in points]
    return max((step for step in steps if step is not None), default=0) or None


def _count(settings: Mapping[str, str], pattern: str) -> int | None:
    """Return a whole number above zero from the settings; None where two of them differ."""
    found = {text for name, text in settings.items() if re.fullmatch(pattern, name) and text.isascii()}
    text = found.pop() if len(found) == 1 else ""
    return int(text) or None if text.isdigit() and len(text) < 10 else None


def _global_batch(settings: Mapping[str, str], world_size: int | None) -> int | None:
    """Return sequences per optimizer step: as it stands, or by transformers' arguments."""
    if batch := _count(settings, GLOBAL_BATCH):
        return batch
    micro = _count(settings, "per_device_train_batch_size")
    accumulation = _count(settings, "gradient_accumulation_steps")
    return micro * accumulation * world_size if micro and accumulation and world_size else None
