"""Loss as curves: training loss as lines, validation loss as markers, against steps or against time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from testbed.analysis.charts.style import (
    COLOURS,
    LINE_STYLES,
    MARKERS,
    STYLE,
    colour_of,
    figure_with_footer,
    not_shown,
    wrapped,
)
from testbed.analysis.runs.comparability import marks_of
from testbed.analysis.runs.load import Point, Run

LEGEND_CHARACTERS, LEGEND_COLUMNS = 52, 2


def loss_vs_steps_figure(runs: Sequence[Run]) -> Figure | None:
    """Draw training loss as a line and validation loss as markers against the optimizer step."""
    return _loss_figure(runs, by_time=False)


def loss_vs_time_figure(runs: Sequence[Run]) -> Figure | None:
    """Draw the same against seconds of training; next to it validation loss against wall time, where a file has it."""
    return _loss_figure(runs, by_time=True)


@dataclass(frozen=True)
class Curve:
    """A run as it is drawn: `look` numbers its marker and line style, `order` its place from the back."""

    run: Run
    label: str
    colour: str
    look: int
    order: int

    @property
    def style(self) -> dict[str, Any]:
        """Later runs are drawn thinner and smaller: at equal work they fall on top of each other."""
        return {
            "color": self.colour,
            "linestyle": LINE_STYLES[self.look % len(LINE_STYLES)],
            "marker": MARKERS[self.look % len(MARKERS)],
            "linewidth": 1.4 + 1.8 * 0.5**self.order,
            "markersize": max(5.0, 12.5 * 0.65**self.order),
        }


def _loss_figure(runs: Sequence[Run], by_time: bool) -> Figure | None:
    shown = [run for run in runs if len(_x(run, by_time)) or any(_points(run, by_time))]
    if not shown:
        return None
    # The sum of step times leaves out what the wall clock of a whole run has: validation, saving, logging.
    has_wall_time = by_time and any(_wall_times(run) for run in shown)
    marks, curves = marks_of(runs), []
    for order, run in enumerate(shown):
        index = runs.index(run)
        look = index + index // len(COLOURS)  # the ninth run has the first one's colour, and nothing else of it
        curves.append(
            Curve(run, wrapped(marks[run] + run.full_label, LEGEND_CHARACTERS), colour_of(runs, run), look, order)
        )
    lines_per_row = max(curve.label.count("\n") + 1 for curve in curves)
    legend_inches = 0.14 + (0.168 * lines_per_row + 0.063) * math.ceil(len(shown) / LEGEND_COLUMNS)
    title = f"Loss against {'time' if by_time else 'optimizer steps'}"
    notes = [_legend_in_words(shown, by_time), *not_shown(runs, shown)]
    with rc_context(STYLE):
        figure, axes = figure_with_footer(runs, title, [4.4 + legend_inches], notes, columns=1 + has_wall_time)
        draw_curves(axes[0], curves, by_time)
        for curve in curves if has_wall_time else ():
            points = np.array(_wall_times(curve.run)).reshape(-1, 2)
            axes[1].plot(points[:, 0], points[:, 1], markeredgecolor="white", markeredgewidth=0.9, **curve.style)
        _name_axes(axes, shown, by_time)
        _legend_below(figure, axes[0], legend_inches)
    return figure


def draw_curves(axis: Axes, curves: Sequence[Curve], by_time: bool) -> None:
    """Draw training losses as lines, means over some steps where runs are long; validation losses as markers."""
    windows = _windows([curve.run for curve in curves], by_time)
    for curve in curves:
        run, look, window = curve.run, curve.style, windows[curve.run]
        label: str | None = curve.label
        x = _x(run, by_time)
        if len(x):
            if window > 1:
                axis.plot(x, run.train_losses, color=curve.colour, alpha=0.25, linewidth=0.8)
            # "valid" keeps whole windows only, each drawn at its middle: no value from outside the run.
            means = np.convolve(run.train_losses, np.full(window, 1 / window), mode="valid")
            marker = {"marker": "." if len(means) == 1 else None, "markersize": 11}  # a line of one point is not a line
            axis.plot(x[window // 2 :][: len(means)], means, label=label, **{**look, **marker})
            label = None
        for points, is_hollow in zip(_points(run, by_time), (False, True), strict=True):
            if points:
                face, edge = ("white", curve.colour) if is_hollow else (curve.colour, "white")
                marks = {"color": face, "markeredgecolor": edge, "linestyle": "None", "label": label}
                axis.plot(*zip(*points, strict=True), markeredgewidth=0.9, zorder=4, **{**look, **marks})
                label = None


def _windows(runs: Sequence[Run], by_time: bool) -> dict[Run, int]:
    """Return the steps in a mean: a fortieth of the longest run; one for a short run, which would lose its ends."""
    lengths = {run: len(_x(run, by_time)) for run in runs}
    window = max(1, max(lengths.values()) // 40)
    return {run: window if window <= length // 4 else 1 for run, length in lengths.items()}


def _x(run: Run, by_time: bool) -> np.ndarray:
    return run.train_times_s if by_time else run.train_steps


def _points(run: Run, by_time: bool) -> tuple[list[tuple[Any, float]], ...]:
    """Return (x, loss) of the validations and of the epochs' means."""

    def known(points: Sequence[Point]) -> list[tuple[Any, float]]:
        pairs = [(point.train_time_s if by_time else point.step, point.loss) for point in points]
        return [(x, loss) for x, loss in pairs if x is not None]

    return known(run.validation_losses), known(run.epoch_losses)


def _wall_times(run: Run) -> list[tuple[float, float]]:
    """Return (seconds, loss) of the validations that record their wall time."""
    return [(point.elapsed_s, point.loss) for point in run.validation_losses if point.elapsed_s is not None]


def _legend_in_words(shown: Sequence[Run], by_time: bool) -> str:
    windows = _windows(shown, by_time)
    window = max(windows.values())
    words = [f"Line over a pale one: training loss, mean over {window} steps, and of each step."] * (window > 1)
    if any(len(_x(run, by_time)) and windows[run] == 1 for run in shown):
        words.append(f"{'Other lines' if words else 'Lines'}: training loss of each step.")
    words.append("Filled markers: validation loss.")
    if any(_points(run, by_time)[1] for run in shown):
        words.append("Hollow markers: training loss, mean over an epoch.")
    return " ".join(words)


def _name_axes(axes: Sequence[Axes], shown: Sequence[Run], by_time: bool) -> None:
    earlier = "\nv1 and 2.0: wall time of the training loops" * any(run.version != "2.2" for run in shown)
    titles = ["", ""]
    if by_time:
        titles = [f"Sum of step times; evaluation, saving and logging excluded{earlier}",
                  "Validation loss; evaluation, saving and logging included"]  # fmt: skip
    labels = ["training time (s)" if by_time else "optimizer step", "wall time since the first step began (s)"]
    axes[0].set_ylabel("loss (nats per token)")
    for axis, title, label in zip(axes, titles, labels, strict=False):
        axis.set_title(title, fontsize=9, color="#555555", loc="left")
        axis.set_xlabel(label)
        axis.set_xlim(left=0)
        axis.xaxis.set_major_formatter("{x:,g}")
        axis.grid(axis="both")


def _legend_below(figure: Figure, axis: Axes, inches: float) -> None:
    """Put the legend between the axes and the footer: however the losses run, it covers none of them."""
    engine, height = figure.get_layout_engine(), figure.get_figheight()
    assert isinstance(engine, ConstrainedLayoutEngine)
    left, bottom, width, above = engine.get()["rect"]
    engine.set(rect=(left, bottom + inches / height, width, above - inches / height))
    legend = figure.legend(
        *axis.get_legend_handles_labels(), loc="upper left", bbox_to_anchor=(0.012, bottom + inches / height),
        ncols=LEGEND_COLUMNS, frameon=False, fontsize=9, borderaxespad=0.0,
    )  # fmt: skip
    legend.set_in_layout(False)
