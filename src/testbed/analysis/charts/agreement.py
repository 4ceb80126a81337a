"""Runs of several strategies on the same work as one picture: their losses, and how far each lies from the first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from testbed.analysis.charts.style import LINE_STYLES, STYLE, WIDTH_INCHES, colour, save_png
from testbed.analysis.runs.comparability import differing_work
from testbed.analysis.runs.load import Run
from testbed.errors import InputError

TOLERANCE = 5e-6  # of the tests, for loss and gradient norm in fp32: float32 sums in another order
SMALLEST = 1e-8  # what a log axis shows for a difference of exactly zero


def differences_of(runs: Sequence[Run], name: str = "train_losses") -> list[np.ndarray]:
    """Return |value - value of the first run| of each optimizer step, for every run but the first.

    Args:
        name: "train_losses" or "grad_norms".

    Raises:
        InputError: the runs did not do equal work, so that a difference would mean nothing.
    """
    for run in runs[1:]:
        if differences := differing_work((runs[0], run)):
            fields = ", ".join(difference.field for difference in differences)
            raise InputError(f"{run.path} and {runs[0].path} did not do equal work: {fields}")
    first, *others = (getattr(run, name) for run in runs)
    return [np.abs(values - first) for values in others]


def agreement_table(runs: Sequence[Run]) -> str:
    """Return a line per run in Markdown: losses, peak memory of the largest rank, and how far its steps lie from the
    first run's."""
    losses, norms = differences_of(runs), differences_of(runs, "grad_norms")
    cells = [("(the reference)", "", ""), *map(_largest_and_first, losses, norms)]
    lines = [
        "| run | loss of the last step | largest difference of the loss | of the gradient norm | first step over "
        f"{TOLERANCE:g} | validation loss | peak memory, largest rank |",
        "|---|---|---|---|---|---|---|",
    ]
    for run, differences in zip(runs, cells, strict=True):
        memory = f"{run.peak_memory_bytes / 2**20:,.0f} MiB" if run.peak_memory_bytes else "n/a"
        row = (run.full_label, f"{run.final_train_loss:.5f}", *differences, f"{run.final_validation_loss:.5f}", memory)
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def _largest_and_first(losses: np.ndarray, norms: np.ndarray) -> tuple[str, str, str]:
    over = np.flatnonzero(np.maximum(losses, norms) > TOLERANCE)
    return f"{losses.max():.1e}", f"{norms.max():.1e}", str(over[0] + 1) if len(over) else f"none of {len(losses)}"


def agreement_figure(runs: Sequence[Run]) -> Figure:
    """Draw every run's training loss, and below the differences from the first run's on a log scale."""
    differences = differences_of(runs)
    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_INCHES, 8.4), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=[1, 1])
        for number, run in enumerate(runs):
            # later lines are thinner: where all agree, each still shows beside the one below it
            look = {"color": colour(number), "linestyle": LINE_STYLES[number % len(LINE_STYLES)]}
            width = 1.2 + 5.0 * 0.75**number
            above.plot(run.train_steps, run.train_losses, linewidth=width, label=run.full_label, **look)
            if number:
                shown = np.maximum(differences[number - 1], SMALLEST)
                below.plot(run.train_steps, shown, linewidth=0.7, marker=".", markersize=4, **look)
        above.set_title("Training loss of each optimizer step", loc="left", fontweight="bold")
        above.set_ylabel("loss (nats per token)")
        above.legend(fontsize=8, frameon=False)
        nearest = float(runs[0].train_losses.max())
        spacing = float(np.spacing(np.float32(nearest)))
        below.set_title(f"Difference from {runs[0].full_label}", loc="left", fontweight="bold")
        below.set_ylabel(f"|loss - reference| (nats per token; {SMALLEST:g} stands for none)")
        below.set_xlabel("optimizer step")
        below.set_yscale("log")
        below.yaxis.set_major_formatter("{x:.0e}")  # the usual one writes formulas
        below.set_ylim(bottom=SMALLEST / 2)
        below.axhline(spacing, color="#888888", linewidth=1)
        said = f"float32 cannot tell losses near {nearest:.0f} apart that lie closer than this"
        place = {"xycoords": ("axes fraction", "data"), "ha": "right", "va": "bottom"}
        below.annotate(said, (0.99, spacing), fontsize=8, color="#555555", **place)
        for axis in (above, below):
            axis.grid(axis="y")
    return figure


def write_agreement_figure(runs: Sequence[Run], path: Path) -> None:
    """Draw `agreement_figure` into a PNG that appears whole."""
    figure = agreement_figure(runs)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_png(figure, path)
