"""Hold named curves, as trackers keep them, and take numbers out of them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple


class Point(NamedTuple):
    """One value of a curve."""

    step: int | None  # as the program counts: mostly optimizer steps, but samples and epochs occur
    value: float
    time_s: float | None = None  # Unix time at which it was written


Curves = dict[str, list[Point]]

TRAIN_LOSS = (
    r"loss_metrics/global_avg_loss",
    r"loss|train/loss|lm loss",  # transformers has the mean over the run under train_loss
    r"(train|training)[-_/ .]loss(_step)?|Train/Samples/train_loss|loss/train(/total)?",
    r"train/CrossEntropyLoss|train/CE loss|train_loss_epoch",
)


def last(curves: Curves, *names: str) -> float | None:
    """Return the last finite value of the first curve that has one of these names."""
    for name in names:
        for points in named(curves, name):
            finite = [point.value for point in points if math.isfinite(point.value)]
            if finite:
                return finite[-1]
    return None


def named(curves: Curves, pattern: str) -> list[list[Point]]:
    return [points for name, points in curves.items() if re.fullmatch(pattern, name)]


def numbers(values: Mapping[Any, Any]) -> dict[str, float]:
    """Return the finite numbers among values by name. Since transformers 5 some are text."""
    found = {str(name): number(value) for name, value in values.items()}
    return {name: value for name, value in found.items() if value is not None}


def number(value: Any) -> float | None:
    """Return a finite number, also one written as text; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        read = float(value)
    except (ValueError, OverflowError):
        return None
    return read if math.isfinite(read) else None
