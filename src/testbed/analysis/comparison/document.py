"""A comparison of two arms in words: what was measured, the verdict, its power, the losses; and as JSON."""

from __future__ import annotations

from typing import Any

import numpy as np

from testbed.analysis.comparison.two_arms import NO_CLAIM, NOT_COMPARED, WORSE, Comparison, Losses, Quantity
from testbed.analysis.document import terminal
from testbed.analysis.document.model import Block, Cell, Document, Section, Statement, Statements, Table, Verdict
from testbed.analysis.document.words import Number, between, counted, gap, times
from testbed.analysis.runs.arms import Arm, arm_names, device_of
from testbed.analysis.statistics import (
    DEFAULT_MARGIN,
    EQUAL,
    FASTER,
    FURTHER_APART,
    MIN_REPEATS,
    NO_DIFFERENCE,
    NOT_ENOUGH,
    SLOWER,
    Ratio,
    equality,
    median_interval,
    repeats_needed,
    repeats_to_show,
)

EFFECT_OF_INTEREST = 0.05  # the difference for which a comparison says how many repeats would find it
_SCALE = {"s": (1e3, "ms", ",.2f"), "bytes": (2**-20, "MiB", ",.1f"), "tokens/s": (1, "tokens/s", ",.1f")}


def verdict_of(comparison: Comparison) -> Verdict:
    """Return `ddp on 2 ranks is 1.61x as fast as baseline on 1 rank (95 % interval 1.55 to 1.66, n = 5 and 5)`."""
    if comparison.kind == NOT_COMPARED:
        claim = f"{comparison.name_a} is not compared with {comparison.name_b}: {'; '.join(unequal_work(comparison))}"
        return Verdict(NOT_COMPARED, claim)
    return _measured(comparison)


def labelled_verdict(comparison: Comparison) -> str:
    """Return the verdict; of unequal work or instrumented runs what was measured all the same, after a label in
    capitals."""
    label = f"INSTRUMENTED: {'; '.join(comparison.instrumented)}. " if comparison.instrumented else ""
    label += f"NOT EQUAL WORK: {'; '.join(unequal_work(comparison))}. " if comparison.mismatches else ""
    return label + _measured(comparison).sentence


def interval(ratio: Ratio) -> str:
    return between(ratio.low, ratio.high, times)


def power(comparison: Comparison) -> str:
    """Return what these repeats could have shown, and how many would show the difference at hand and one of 5 %."""
    ratio = comparison.ratio
    if ratio.noise is None or ratio.planning_noise is None:
        return "One run each: the noise is unknown, so nothing says what would be detected."
    needed = [(EFFECT_OF_INTEREST, "a difference")]
    observed = abs(ratio.ratio - 1)
    if ratio.verdict in (NO_DIFFERENCE, NOT_ENOUGH) and observed > 0.0005:
        needed.insert(0, (observed, "the observed difference"))
    plans = " and ".join(
        f"{what} of {_percent(effect)} takes {_runs_of_each(repeats_needed(ratio.planning_noise, effect))}"
        for effect, what in needed
    )
    could = ""
    if ratio.minimum_detectable_effect is not None:
        count = f"{ratio.n_a} runs of each" if ratio.n_a == ratio.n_b else f"{ratio.n_a} and {ratio.n_b} runs"
        effect = _percent(ratio.minimum_detectable_effect)
        could = f"{count} would detect a difference of {effect} in 80 % of cases. "
    return (
        f"{could}Detecting {plans}. Computed from the noise of one run, {_percent(ratio.noise)} here and with 80 % "
        f"confidence below {_percent(ratio.planning_noise)}."
    )


def equal_within(comparison: Comparison, margin: float) -> str:
    """Return whether the throughputs are shown to be equal within the margin; of unequal work after a label."""
    ratio, names = comparison.ratio, f"{comparison.name_a} and {comparison.name_b}"
    label = "NOT EQUAL WORK. " if comparison.mismatches else ""
    bounds = f"{times(1 / (1 + margin))} to {times(1 + margin)}"
    found = equality(ratio, margin)
    if found == EQUAL:
        return f"{label}The throughputs of {names} are equal within {within(margin)}: the interval is in {bounds}."
    if found == FURTHER_APART:
        return f"{label}The throughputs of {names} differ by more than {within(margin)}."
    why = f"a claim takes {MIN_REPEATS} runs each" if found == NOT_ENOUGH else f"the interval leaves {bounds}"
    plan = ""
    if ratio.planning_noise is not None:
        needed = _runs_of_each(repeats_to_show(ratio.planning_noise, margin))
        plan = f" If they are equal, {needed} show it in 80 % of cases."
    return f"{label}Not shown that the throughputs of {names} are equal within {within(margin)}: {why}.{plan}"


def within(margin: float) -> str:
    """Return `2 %`, `0.5 %`."""
    return f"{100 * margin:.4g} %"


def about_losses(comparison: Comparison) -> list[str]:
    """Return a sentence for each kind of loss that both arms have."""
    found = []
    for losses in comparison.losses:
        size = f"{losses.name} differs by {gap(losses.difference)}"
        if comparison.mismatches:
            found.append(f"{size}; after unequal work that says nothing.")
            continue
        worse = comparison.name_a if losses.difference > 0 else comparison.name_b
        more, whose = ("more", f"; {worse} is worse") if losses.is_unequal else ("not more", "")
        found.append(f"{size}, {more} than {losses.noise:.4f} ({losses.noise_source}){whose}.")
    return found


def _measured(comparison: Comparison) -> Verdict:
    """Return what the throughputs say, whether the work was equal or not."""
    ratio, a, b = comparison.ratio, comparison.name_a, comparison.name_b
    kind = ratio.verdict if comparison.kind == NOT_COMPARED else comparison.kind
    numbers = (
        f"95 % interval {interval(ratio)}, " if ratio.low is not None else ""
    ) + f"n = {ratio.n_a} and {ratio.n_b}"
    speed, worse = times(ratio.ratio), comparison.learns_worse
    if kind == WORSE:
        claim = f"{a} is faster than {b} but learns worse, so it is not faster: {_gap(comparison)}"
        return Verdict(WORSE, claim, f"{speed}x its throughput, {numbers}")
    learning = f"; {worse} learns worse, {_gap(comparison)}" if worse else ""
    if kind in (FASTER, SLOWER):
        slower = "slower: " if kind == SLOWER else ""
        return Verdict(kind, f"{a} is {slower}{speed}x as fast as {b}{learning}", numbers)
    if kind == NO_DIFFERENCE:
        missed = f"; a difference below {ratio.minimum_detectable_effect:.1%} would go unnoticed"
        claim = f"No detectable difference between {a} and {b}{learning}"
        return Verdict(kind, claim, f"ratio {speed}, {numbers}{missed}")
    claim = f"Not enough repeats for a claim about {a} against {b}{learning}"
    return Verdict(NO_CLAIM, claim, f"ratio {speed}, {numbers}; a claim takes {MIN_REPEATS} each")


def _gap(comparison: Comparison) -> str:
    """Return the losses that make one arm the worse."""
    last = [losses for losses in comparison.losses if losses.is_unequal][-1]
    medians = f"{np.median(last.a):.4f} against {np.median(last.b):.4f}"
    return f"{last.name.lower()} {medians}, apart by more than {last.noise:.4f} ({last.noise_source})"


def unequal_work(comparison: Comparison) -> list[str]:
    """Return the fields in which the work differs, then in one part all that some file does not record."""
    parts = [str(mismatch) for mismatch in comparison.mismatches if not mismatch.is_unknown]
    unknown = [mismatch.field.replace("_", " ") for mismatch in comparison.mismatches if mismatch.is_unknown]
    return [*parts, *([f"not recorded on both sides: {', '.join(unknown)}"] if unknown else [])]


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.1f} %"


def _runs_of_each(needed: int) -> str:
    return f"{needed:,} runs of each" if needed <= 1000 else "more than 1,000 runs of each"


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
        "mismatches": [
            {"field": item.field, **dict(zip("ab", item.in_words, strict=True)), "is_unknown": item.is_unknown}
            for item in comparison.mismatches
        ],
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
