"""A comparison of two arms as text for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import numpy as np

from testbed.analysis.comparison.two_arms import Comparison, Losses, Quantity
from testbed.analysis.runs.arms import arm_names, device_of
from testbed.analysis.statistics import median_interval

WIDTH = 110
_SCALE = {"s": (1e3, "ms", ",.2f"), "bytes": (2**-20, "MiB", ",.1f"), "tokens/s": (1, "tokens/s", ",.1f")}


def comparison_text(comparison: Comparison) -> str:
    """The two arms, a table of what was measured, the verdict, and what stands in its way."""
    parts = [_legend(comparison), _table(comparison)]
    parts.append("\n".join(_wrapped("Verdict: ", comparison.verdict_sentence())))
    parts.append("\n".join(_wrapped("Power:   ", comparison.power_sentence())))
    if losses := comparison.loss_sentences():
        parts.append("\n".join(line for text in losses for line in _wrapped("Losses:  ", text)))
    if comparison.not_counted:
        lines = [f"  {run.path}: {reason}" for run, reason in comparison.not_counted]
        parts.append("\n".join(["Not counted:", *lines]))
    return "\n\n".join(parts)


def _legend(comparison: Comparison) -> str:
    lines = []
    sides = ((comparison.name_a, comparison.a), (comparison.name_b, comparison.b))
    for (name, arm), own in zip(sides, arm_names([arm for _, arm in sides]), strict=True):
        count = f"{len(arm.runs)} run{'s' * (len(arm.runs) > 1)}"
        lines += _wrapped(f"{name}  ", f"{own} ({device_of(arm.runs[0])}): {count}")
    differing = ", ".join(comparison.settings) or "nothing: they are repeats of one configuration"
    return "\n".join([*lines, *_wrapped("", f"They differ in: {differing}")])


def _table(comparison: Comparison) -> str:
    header = ("median (95 % interval)", comparison.name_a, comparison.name_b, "ratio (95 % interval)")
    rows = [header, *(_quantity_row(quantity) for quantity in comparison.quantities)]
    rows += [("median (smallest to largest)", "", "", "difference"), *map(_loss_row, comparison.losses)]
    if not comparison.losses:
        rows.pop()
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines)


def _quantity_row(quantity: Quantity) -> tuple[str, str, str, str]:
    factor, unit, digits = _SCALE[quantity.unit]
    ratio = quantity.ratio
    return (
        f"{quantity.name}, {unit}",
        *(_interval(values and [value * factor for value in values], digits) for values in (quantity.a, quantity.b)),
        "n/a" if ratio is None else _range(ratio.ratio, ratio.low, ratio.high, ".3f"),
    )


def _loss_row(losses: Losses) -> tuple[str, str, str, str]:
    texts = (f"{np.median(values):.4f} ({min(values):.4f} to {max(values):.4f})" for values in (losses.a, losses.b))
    return (losses.name.lower(), *texts, f"{losses.difference:+.4f}")


def _interval(values: Sequence[float] | None, digits: str) -> str:
    return _range(*median_interval(values), digits) if values else "n/a"


def _range(middle: float, low: float | None, high: float | None, digits: str) -> str:
    return f"{middle:{digits}}" + (f" ({low:{digits}} to {high:{digits}})" if low is not None else "")


def _wrapped(start: str, text: str) -> list[str]:
    return textwrap.wrap(start + text, WIDTH, subsequent_indent=" " * len(start), break_on_hyphens=False)
