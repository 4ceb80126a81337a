"""Loss as curves: training loss as lines, validation loss as markers, against steps or against time."""

import itertools
import math
from collections.abc import Sequence
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
from testbed.analysis.runs.load import Run

LEGEND_CHARACTERS, LEGEND_COLUMNS = 52, 2


def loss_vs_steps_figure(runs: Sequence[Run]) -> Figure | None:
    """Training loss as a line, validation loss as markers, against the optimizer step."""
    return _loss_figure(runs, "Loss against optimizer steps", "optimizer step", by_time=False)


def loss_vs_time_figure(runs: Sequence[Run]) -> Figure | None:
    """The same against seconds of training; beside it validation loss against wall time, where a file has that."""
    return _loss_figure(runs, "Loss against time", "training time (s)", by_time=True)


def _loss_figure(runs: Sequence[Run], title: str, x_label: str, by_time: bool) -> Figure | None:
    def x_of(points: tuple) -> tuple[list, list]:
        pairs = [(point.train_time_s if by_time else point.step, point.loss) for point in points]
        pairs = [(x, loss) for x, loss in pairs if x is not None]
        return [x for x, _ in pairs], [loss for _, loss in pairs]

    lines = {run: run.train_times_s if by_time else run.train_steps for run in runs}
    points = {run: x_of(run.validation_losses)[0] + x_of(run.epoch_losses)[0] for run in runs}
    shown = [run for run in runs if len(lines[run]) or points[run]]
    if not shown:
        return None
    window = max(1, max(map(len, lines.values())) // 40)
    smoothed = {run for run in shown if 1 < window <= len(lines[run]) // 4}  # a short run would lose its ends
    # The sum of step times leaves out what the wall clock of a whole run has: validation, saving, logging.
    wall = {run: [(p.elapsed_s, p.loss) for p in run.validation_losses if p.elapsed_s is not None] for run in shown}
    with_wall_time = by_time and any(wall.values())
    notes = ["Filled markers: validation loss."]
    if any(len(lines[run]) for run in set(shown) - smoothed):
        notes.insert(0, f"{'Other lines' if smoothed else 'Lines'}: training loss of each step.")
    if smoothed:
        notes.insert(0, f"Line over a pale one: training loss, mean over {window} steps, and of each step.")
    if any(x_of(run.epoch_losses)[0] for run in shown):
        notes.append("Hollow markers: training loss, mean over an epoch.")
    notes = [" ".join(notes), *not_shown(runs, shown)]
    lines_per_row = max(wrapped(run.full_label, LEGEND_CHARACTERS).count("\n") + 1 for run in shown)
    legend_inches = 0.14 + 0.165 * lines_per_row * math.ceil(len(shown) / LEGEND_COLUMNS)
    with rc_context(STYLE):
        figure, (axis, *wall_axis) = figure_with_footer(
            runs, title, [4.4 + legend_inches], notes, columns=2 if with_wall_time else 1
        )
        for order, run in enumerate(shown):
            colour, index = colour_of(runs, run), runs.index(run)
            look = index + index // len(COLOURS)  # the ninth run has the first one's colour, and nothing else of it
            marker, style = MARKERS[look % len(MARKERS)], LINE_STYLES[look % len(LINE_STYLES)]
            width, size = 1.6 + 1.6 * 0.5**order, max(6.0, 12.5 * 0.65**order)
            label: str | None = wrapped(run.full_label, LEGEND_CHARACTERS)
            x, losses = lines[run], run.train_losses
            if len(x):
                steps_in_mean = window if run in smoothed else 1
                if steps_in_mean > 1:
                    axis.plot(x, losses, color=colour, alpha=0.25, linewidth=0.8)
                # "valid" keeps whole windows only, each drawn at its middle: no value from outside the run.
                smooth = np.convolve(losses, np.full(steps_in_mean, 1 / steps_in_mean), mode="valid")
                middle = x[steps_in_mean // 2 :][: len(smooth)]
                line: dict[str, Any] = {"color": colour, "linewidth": width, "linestyle": style, "label": label}
                line["markersize"] = 11
                axis.plot(middle, smooth, marker="." if len(smooth) == 1 else None, **line)  # a line of one is no line
                label = None
            # Later runs are drawn thinner and smaller: at equal work they fall on top of each other.
            for losses_at, face in ((run.validation_losses, colour), (run.epoch_losses, "white")):
                at, known = x_of(losses_at)
                if at:
                    edge = "white" if face is colour else colour
                    axis.plot(
                        at, known, marker, markersize=size, color=face, markeredgecolor=edge, markeredgewidth=0.9,
                        label=label, zorder=4,
                    )  # fmt: skip
                    label = None
            if with_wall_time and wall[run]:
                wall_axis[0].plot(
                    *zip(*wall[run], strict=True), color=colour, linewidth=width, linestyle=style, marker=marker,
                    markersize=size, markeredgecolor="white", markeredgewidth=0.9,
                )  # fmt: skip
        axis.set_xlabel(x_label)
        earlier = "\nv1 and 2.0: wall time of the training loops" * any(run.version != "2.2" for run in shown)
        titles = [f"Sum of step times; evaluation, saving and logging excluded{earlier}"] if by_time else []
        if with_wall_time:
            titles.append("Validation loss; evaluation, saving and logging included")
            wall_axis[0].set_xlabel("wall time since the first step began (s)")
        axis.set_ylabel("loss (nats per token)")
        for each, meaning in itertools.zip_longest([axis, *wall_axis], titles, fillvalue=""):
            assert isinstance(each, Axes)  # there are no more titles than panels
            each.set_title(meaning, fontsize=9, color="#555555", loc="left")
            each.set_xlim(left=0)
            each.xaxis.set_major_formatter("{x:,g}")
            each.grid(axis="both")
        _legend_below(figure, axis, legend_inches)
    return figure


def _legend_below(figure: Figure, axis: Axes, inches: float) -> None:
    """Between the axes and the footer: however the losses run, it covers none of them."""
    engine, height = figure.get_layout_engine(), figure.get_figheight()
    assert isinstance(engine, ConstrainedLayoutEngine)
    left, bottom, width, above = engine.get()["rect"]
    engine.set(rect=(left, bottom + inches / height, width, above - inches / height))
    legend = figure.legend(
        *axis.get_legend_handles_labels(), loc="upper left", bbox_to_anchor=(0.012, bottom + inches / height),
        ncols=LEGEND_COLUMNS, frameon=False, fontsize=9, borderaxespad=0.0,
    )  # fmt: skip
    legend.set_in_layout(False)
