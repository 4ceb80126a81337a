"""Lay curves side by side as the lines of a log, with the relations between those that one program writes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import replace

from testbed.audit.log_lines import Figure, LogLine, Relation
from testbed.audit.readers.curves import TRAIN_LOSS, Curves

MEGATRON_MS = "ms"  # iteration-time, as Megatron-LM's log prints it
TOKENS_PER_STEP = {"train/tok_per_sec": 1, "train/dt": 1}  # nanochat
# Curves of one program, each to a power: their product is one number at every step.
RELATED: tuple[dict[str, int], ...] = (
    {"tflops": 1, "throughput(tps)": -1},  # torchtitan: FLOPs per token
    {"mfu(%)": 1, "tflops": -1},  # the device's peak
    {"memory/max_reserved(GiB)": 1, "memory/max_reserved(%)": -1},  # the device's memory
    {"memory/max_active(GiB)": 1, "memory/max_active(%)": -1},
    TOKENS_PER_STEP,
    {"train/mfu": 1, "train/tok_per_sec": -1},
    {"throughput": 1, MEGATRON_MS: 1},  # Megatron-LM: FLOPs per iteration
    {"throughput/tokens_per_sec": 1, "throughput/device/tokens_per_sec": -1},  # composer: ranks
    {"items_per_sec": 1, "device/items_per_sec": -1},  # Lightning: ranks
)
LARGEST_EXPONENT = 50.0  # of a loss: beyond it the perplexity is none
SLACK = {"train/tok_per_sec": 1.0}  # cut to a whole number


def lines_of(curves: Curves, step_tokens: int | None = None) -> tuple[tuple[LogLine, ...], tuple[Relation, ...]]:
    """Return the steps with the curves that are related or hold the training loss, and the relations.

    Args:
        step_tokens: tokens per step by nanochat's settings.
    """
    of_perplexity: list[dict[str, int]] = []
    named = {name: [(point.step, point.value, point.time_s) for point in points] for name, points in curves.items()}
    if "lm loss" in curves and "iteration-time" in curves:
        named[MEGATRON_MS] = [(step, value * 1e3, time_s) for step, value, time_s in named["iteration-time"]]
    for perplexity, of in _perplexities(curves).items():
        named[f"exp({of})"] = [
            (step, math.exp(value), time_s) for step, value, time_s in named[of] if abs(value) < LARGEST_EXPONENT
        ]
        of_perplexity.append({perplexity: 1, f"exp({of})": -1})
    is_one_batch = len({point.value for point in curves.get("batch-size", ())}) < 2  # else it grows during the run
    related = [
        powers
        for powers in (*RELATED, *of_perplexity)
        if powers.keys() <= named.keys() and (is_one_batch or MEGATRON_MS not in powers)
    ]
    loss = next((name for pattern in TRAIN_LOSS for name in curves if re.fullmatch(pattern, name)), "")
    wanted = {name for powers in related for name in powers} | {loss, MEGATRON_MS} & named.keys()
    rows: dict[int, dict[str, Figure]] = {}
    times: dict[int, float] = {}
    for name in wanted:
        for step, value, time_s in named[name]:
            if step is not None:
                rows.setdefault(step, {})[name] = Figure(value, SLACK.get(name, 0.0))
                if time_s is not None:
                    times[step] = max(time_s, times.get(step, time_s))
    lines = (
        LogLine(
            step,
            {name: figure for name, figure in rows[step].items() if math.isfinite(figure.value)},
            times.get(step),
            loss in rows[step] and math.isnan(rows[step][loss].value),
        )
        for step in sorted(rows)
    )
    relations = [related_by(powers) for powers in related]
    if step_tokens and TOKENS_PER_STEP in related:
        expected = Figure(float(step_tokens))
        relations[related.index(TOKENS_PER_STEP)] = replace(
            related_by(TOKENS_PER_STEP), expected=expected, source="total_batch_size"
        )
    return tuple(lines), tuple(relations)


def _perplexities(curves: Curves) -> dict[str, str]:
    """Return the curves of perplexities, each with the loss whose exponential it may be."""
    of = {name: re.sub(r"perplexity|ppl", "loss", name) for name in curves}
    return {name: loss for name, loss in of.items() if loss != name and loss in curves}


def related_by(powers: dict[str, int]) -> Relation:
    """Return the relation whose formula is these names with these powers, 1 or -1."""
    above = [name for name, power in powers.items() if power > 0]
    below = [name for name, power in powers.items() if power < 0]
    return Relation(" / ".join([" x ".join(above), *below]), powers)


def merged(lines: Iterable[LogLine]) -> tuple[LogLine, ...]:
    """Return one line per step, in order, with the figures of all of its lines."""
    found: dict[int, LogLine] = {}
    for line in lines:
        other = found.get(line.step, line)
        found[line.step] = LogLine(line.step, other.figures | line.figures, None, other.is_nan or line.is_nan)
    return tuple(found[step] for step in sorted(found))
