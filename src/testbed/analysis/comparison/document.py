"""A comparison of two arms as a document: what was measured, the verdict, and what stands in its way."""

from __future__ import annotations

from typing import Any

import numpy as np

from testbed.analysis.comparison.sentences import (
    EFFECT_OF_INTEREST,
    about_losses,
    equal_within,
    labelled_verdict,
    power,
)
from testbed.analysis.comparison.two_arms import Comparison, Losses, Quantity
from testbed.analysis.document import terminal
from testbed.analysis.document.model import Block, Cell, Document, Section, Statement, Statements, Table
from testbed.analysis.document.words import Number, counted, gap
from testbed.analysis.runs.arms import Arm, arm_names, device_of
from testbed.analysis.runs.comparability import Mismatch
from testbed.analysis.statistics import DEFAULT_MARGIN, equality, median_interval

_SCALE = {"s": (1e3, "ms", ",.2f"), "bytes": (2**-20, "MiB", ",.1f"), "tokens/s": (1, "tokens/s", ",.1f")}


def comparison_text(comparison: Comparison, margin: float = DEFAULT_MARGIN) -> str:
    """Return `document_of` as text for a terminal."""
    return terminal.text(document_of(comparison, margin), terminal.WIDTH)


def document_of(comparison: Comparison, margin: float) -> Document:
    """Return everything but the comparison's warnings, which a program says on stderr.

    `margin` is the fraction within which throughputs count as equal.
    """
    said = [
        ("Verdict: ", labelled_verdict(comparison)),
        ("Equal:   ", equal_within(comparison, margin)),
        ("Power:   ", power(comparison)),
    ]
    losses = tuple(Statement("Losses:  ", text) for text in about_losses(comparison))
    blocks: list[Block] = [_legend(comparison), _table(comparison), *((Statement(*each),) for each in said)]
    blocks += [losses] if losses else []
    not_counted = [f"  {run.path}: {reason}" for run, reason in comparison.not_counted]
    return Document(
        sections=[Section(blocks=blocks)], notes=[["Not counted:", *not_counted]] if comparison.not_counted else ()
    )


def _legend(comparison: Comparison) -> Statements:
    sides = ((comparison.name_a, comparison.a), (comparison.name_b, comparison.b))
    names = arm_names([arm for _, arm in sides])
    told = [
        Statement(f"{name}  ", f"{own} ({device_of(arm.runs[0])}): {counted(len(arm.runs), 'run')}")
        for (name, arm), own in zip(sides, names, strict=True)
    ]
    differing = ", ".join(comparison.settings) or "nothing: they are repeats of one configuration"
    return (*told, Statement("", f"They differ in: {differing}"))


def _table(comparison: Comparison) -> Table:
    header = ("median (95 % interval)", comparison.name_a, comparison.name_b, "ratio (95 % interval)")
    rows = [_quantity_row(quantity) for quantity in comparison.quantities]
    if comparison.losses:
        rows += [("median (smallest to largest)", "", "", "difference"), *map(_loss_row, comparison.losses)]
    return Table(header, rows)


def _quantity_row(quantity: Quantity) -> tuple[Cell, ...]:
    factor, unit, form = _SCALE[quantity.unit]
    medians = (median_interval([value * factor for value in values or ()]) for values in (quantity.a, quantity.b))
    ratio = quantity.ratio
    return (
        f"{quantity.name}, {unit}",
        *(Number(median, form, low, high) for median, low, high in medians),
        Number(None, ".3f") if ratio is None else Number(ratio.ratio, ".3f", ratio.low, ratio.high),
    )


def _loss_row(losses: Losses) -> tuple[Cell, ...]:
    sides = (Number(float(np.median(each)), ".4f", min(each), max(each)) for each in (losses.a, losses.b))
    return (losses.name.lower(), *sides, Number(losses.difference, _signed_gap))


def _signed_gap(difference: float) -> str:
    return f"{difference:+.4f}" if abs(difference) >= 0.00005 else gap(difference)


def json_of(comparison: Comparison, margin: float = DEFAULT_MARGIN) -> dict[str, Any]:
    """Return everything for a program; times in seconds, memory in bytes, throughput in tokens/s."""
    ratio = comparison.ratio
    return {
        "verdict": ratio.verdict,
        "is_equal_work": not comparison.mismatches,
        "instrumented": list(comparison.instrumented),
        "learns_worse": comparison.learns_worse,
        "worse_side": comparison.worse_side,
        "sentences": [
            labelled_verdict(comparison),
            equal_within(comparison, margin),
            power(comparison),
            *about_losses(comparison),
        ],
        "ratio": {name: getattr(ratio, name) for name in ("ratio", "low", "high", "n_a", "n_b")},
        "equivalence": {"margin": margin, "verdict": equality(ratio, margin)},
        "noise": ratio.noise,
        "planning_noise": ratio.planning_noise,
        "minimum_detectable_effect": ratio.minimum_detectable_effect,
        "repeats_to_detect": {f"{EFFECT_OF_INTEREST:.0%}": ratio.repeats_to_detect(EFFECT_OF_INTEREST)},
        "mismatches": [_mismatch_json(mismatch) for mismatch in comparison.mismatches],
        "settings_that_differ": list(comparison.settings),
        "quantities": [_quantity_json(quantity) for quantity in comparison.quantities],
        "losses": [
            {**vars(losses), "difference": losses.difference, "is_unequal": losses.is_unequal}
            for losses in comparison.losses
        ],
        "a": _arm_json(comparison.name_a, comparison.a),
        "b": _arm_json(comparison.name_b, comparison.b),
        "not_counted": [{"path": str(run.path), "reason": reason} for run, reason in comparison.not_counted],
        "warnings": list(comparison.warnings),
    }


def _mismatch_json(mismatch: Mismatch) -> dict[str, Any]:
    a, b = mismatch.in_words
    return {"field": mismatch.field, "a": a, "b": b, "is_unknown": mismatch.is_unknown}


def _quantity_json(quantity: Quantity) -> dict[str, Any]:
    ratio = quantity.ratio
    return {
        **vars(quantity),
        "ratio": ratio and {name: getattr(ratio, name) for name in ("ratio", "low", "high")},
        "a_median_low_high": quantity.a and median_interval(quantity.a),
        "b_median_low_high": quantity.b and median_interval(quantity.b),
    }


def _arm_json(name: str, arm: Arm) -> dict[str, Any]:
    recorded = ("run_id", "git_commit", "command_line")
    runs = [{"path": str(run.path), **{key: getattr(run, key) for key in recorded}} for run in arm.runs]
    return {"name": name, "label": arm.label, "runs": runs}
