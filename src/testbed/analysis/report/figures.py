"""The report's pictures; title and meaning stand around them as text.

All of a page's pictures show a strategy in the same colour and the configurations in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from testbed.analysis.charts.bars import Bar, draw_bars, draw_stacks
from testbed.analysis.charts.loss import Curve, draw_curves
from testbed.analysis.charts.style import row_inches, strategy_colour, strategy_hatch, wrapped
from testbed.analysis.document.model import Link
from testbed.analysis.document.words import digits
from testbed.analysis.report.breakdown import PARTS, Breakdown
from testbed.analysis.runs.comparability import LOSS_NOISE
from testbed.analysis.runs.entries import Entry, Workload

INCHES, LABEL_CHARACTERS = 9.2, 32
LEGEND_CHARACTER_INCHES = 0.072
# Cool is work, orange is waiting for others, yellow waiting for data, grey nothing: apart in lightness as well.
PART_COLOURS = dict(
    zip(PARTS, ("#F0C808", "#9BC8E3", "#2C7FB8", "#6D6D6D", "#12395B", "#D55E00", "#CFCFCF"), strict=True)
)
FULL_MARKERS = ("o", "s", "^", "D", "v", "p", "<", "h", ">", "d")  # of about one weight, unlike + and x


def link_to(entry: Entry) -> Link:
    return Link(entry.number, entry.name, strategy_colour(entry.look))


def links_to(entries: Sequence[Entry]) -> tuple[Link, ...]:
    return tuple(map(link_to, entries))


def repeats_figure(
    entries: Sequence[Entry],
    values: Callable[[Entry], Sequence[float]],
    text: Callable[[Entry], str],
    axis_label: str,
) -> Figure:
    """Draw a row per configuration: bar of the median, whisker of its 95 % interval, a dot per run."""
    bars = [
        Bar(entry.name, values(entry), strategy_colour(entry.look), text(entry), strategy_hatch(entry.look))
        for entry in entries
    ]
    figure, axis = _rows([bar.label for bar in bars])
    draw_bars(axis, bars)
    axis.set_xlim(right=axis.get_xlim()[1] * (1 + 0.011 * max(len(bar.text) for bar in bars)))
    axis.set_xlabel(axis_label)
    axis.xaxis.set_major_locator(MaxNLocator(7))
    return figure


def breakdown_figure(breakdowns: Sequence[tuple[str, Breakdown]]) -> Figure:
    """Draw where an optimizer step's time goes: a stacked bar per configuration, in milliseconds."""
    figure, axis = _rows([name for name, _ in breakdowns], above_inches=0.34)
    rows = [{part: seconds * 1e3 for part, seconds in found.seconds.items()} for _, found in breakdowns]
    draw_stacks(axis, rows, PART_COLOURS, [f"{digits(sum(row.values()))} ms" for row in rows])
    axis.set_xlabel("ms per optimizer step")
    figure.legend(
        *axis.get_legend_handles_labels(), loc="outside upper left", ncols=7, frameon=False, fontsize=8.5,
        handlelength=1.0, handleheight=0.9, columnspacing=1.1, borderaxespad=0.1,
    )  # fmt: skip
    return figure


def loss_figure(workload: Workload) -> Figure:
    """Draw losses against steps and, where a final validation loss compares, each run's minus the reference's."""
    validated = [entry for entry in workload.measured if entry.values("final_validation_loss")]
    with_difference = len(validated) > 1 and workload.reference in validated
    names = [entry.name for entry in workload.entries]
    rows = row_inches([wrapped(name, LABEL_CHARACTERS) for name in names], 0.2) * len(names)
    legend_inches = 0.18 * math.ceil(len(names) / _columns(names))
    figure = Figure(figsize=(INCHES, max(3.4, rows + 0.8) + legend_inches), layout="constrained")
    axes = figure.subplots(1, 1 + with_difference, squeeze=False).ravel()
    _draw_losses(figure, axes[0], workload.entries, by_time=False)
    if with_difference:
        assert workload.reference is not None
        _draw_loss_differences(axes[1], validated, workload.reference)
    return figure


def loss_time_figure(entries: Sequence[Entry], target: float) -> Figure:
    """Draw losses against seconds of training, and a line at the target."""
    figure = Figure(figsize=(INCHES, 3.9 + 0.07 * len(entries)), layout="constrained")
    axis = figure.subplots()
    axis.axhline(target, color="#999999", linewidth=1.0, zorder=1)
    _draw_losses(figure, axis, entries, by_time=True)
    return figure


def scaling_figure(
    points: dict[str, list[tuple[int, float, float | None, float | None]]],
    fits: dict[str, float | None],
    colours: dict[str, str],
    law: str | None = "amdahl",
) -> Figure:
    """Draw speed-up against ranks with its interval; grey: ideal; dashed: the fitted law, amdahl or gustafson.

    `points`: strategy -> (ranks, speed-up, low, high); `fits`: strategy -> serial fraction or None.
    """
    figure = Figure(figsize=(INCHES, 3.6 + 0.085 * (len(points) + 1)), layout="constrained")
    axis = figure.subplots()
    largest = max(ranks for of_strategy in points.values() for ranks, *_ in of_strategy)
    axis.plot([1, largest], [1, largest], color="#AAAAAA", linewidth=1.4, label="ideal: as many times as ranks")
    at_ranks: dict[int, list[str]] = {}  # who shares a number of ranks stands side by side
    for strategy, of_strategy in points.items():
        for ranks, *_ in of_strategy:
            at_ranks.setdefault(ranks, []).append(strategy)
    fine = np.linspace(1, largest, 60)
    for index, (strategy, of_strategy) in enumerate(points.items()):
        colour, marker = colours[strategy], FULL_MARKERS[index % len(FULL_MARKERS)]
        serial = fits.get(strategy)
        told = "" if serial is None else f" (serial fraction {serial:.1%})"
        for ranks, speed_up, low, high in of_strategy:
            beside = at_ranks[ranks].index(strategy) - (len(at_ranks[ranks]) - 1) / 2
            at = ranks + beside * 0.012 * largest
            if low is not None and high is not None:
                axis.plot([at, at], [low, high], color=colour, linewidth=1.8, zorder=3)
            axis.plot(
                at, speed_up, marker, color=colour, markersize=7.5, markeredgecolor="white", zorder=4,
                label=strategy + told if (ranks, speed_up) == of_strategy[-1][:2] else None, linestyle="None",
            )  # fmt: skip
        if serial is not None:
            time = serial + (1 - serial) / fine if law == "amdahl" else 1 / (fine - serial * (fine - 1))
            axis.plot(fine[time > 0], 1 / time[time > 0], color=colour, linewidth=1.1, linestyle=(0, (4, 2)), alpha=0.9)
    axis.set_xlabel("ranks")
    axis.set_ylabel("speed-up over one rank")
    axis.set_xticks(sorted({1, *(ranks for of_strategy in points.values() for ranks, *_ in of_strategy)}))
    axis.set_xlim(1 - 0.06 * largest, largest * 1.06)
    axis.set_ylim(bottom=0)
    axis.grid(axis="both")
    _legend_below(figure, axis, columns=2)
    return figure


def _rows(names: Sequence[str], above_inches: float = 0.0) -> tuple[Figure, Axes]:
    labels = [wrapped(name, LABEL_CHARACTERS) for name in names]
    height = row_inches(labels, 0.4) * len(names) + 0.62 + above_inches
    figure = Figure(figsize=(INCHES, height), layout="constrained")
    axis = figure.subplots()
    axis.set_yticks(range(len(names)), labels, fontsize=9.5)
    axis.set_ylim(len(names) - 0.5, -0.5)
    return figure, axis


def _columns(names: Sequence[str], most: int = 3) -> int:
    """Return the columns of a legend of these names that fit the figure's width."""
    return max(1, min(most, int(INCHES / (0.55 + LEGEND_CHARACTER_INCHES * max(map(len, names), default=0)))))


def _legend_below(figure: Figure, axis: Axes, columns: int = 3) -> None:
    handles, names = axis.get_legend_handles_labels()
    figure.legend(
        handles, names, loc="outside lower left", ncols=_columns(names, columns), frameon=False, fontsize=8.5,
        borderaxespad=0.1,
    )  # fmt: skip


def _draw_losses(figure: Figure, axis: Axes, entries: Sequence[Entry], by_time: bool) -> None:
    curves = [
        Curve(entry.median_run, entry.name, strategy_colour(entry.look), number, number)
        for number, entry in enumerate(entries)
    ]
    draw_curves(axis, curves, by_time)
    axis.set_xlabel("seconds of training" if by_time else "optimizer step")
    axis.set_ylabel("loss (nats per token)")
    axis.set_xlim(left=0)
    axis.xaxis.set_major_locator(MaxNLocator(8 if by_time else 5, integer=not by_time))
    axis.grid(axis="both")
    _legend_below(figure, axis)


def _draw_loss_differences(axis: Axes, entries: Sequence[Entry], reference: Entry) -> None:
    """Draw a row per configuration: each run's final validation loss minus the median of the reference's."""
    centre = float(np.median(reference.values("final_validation_loss")))
    reach = 1.5 * LOSS_NOISE
    for row, entry in enumerate(entries):
        differences = np.array(entry.values("final_validation_loss")) - centre
        reach = max(reach, 1.1 * np.abs(differences).max())
        axis.plot(
            differences, [row] * len(differences), "o", color=strategy_colour(entry.look), markersize=6, alpha=0.75,
            markeredgecolor="white", markeredgewidth=0.6,
        )  # fmt: skip
        axis.plot([np.median(differences)] * 2, [row - 0.3, row + 0.3], color="#111111", linewidth=1.8)
    axis.axvspan(-LOSS_NOISE, LOSS_NOISE, color="#EEEEEE", zorder=0)
    axis.axvline(0, color="#999999", linewidth=0.9, zorder=1)
    axis.set_xlim(-reach, reach)
    axis.set_yticks(range(len(entries)), [wrapped(entry.name, LABEL_CHARACTERS) for entry in entries], fontsize=8)
    axis.set_ylim(len(entries) - 0.4, -0.6)
    axis.xaxis.set_major_locator(MaxNLocator(4))
    axis.set_xlabel("final validation loss minus\nthe reference's; black: median")
    axis.grid(axis="x")
