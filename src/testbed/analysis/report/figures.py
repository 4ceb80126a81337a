"""The report's pictures, each in a wide and in a narrow form: title and meaning stand beside them as text.

All of a page's pictures show a strategy in the same colour and the configurations in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from testbed.analysis.charts.repeats import Bar, draw_bars
from testbed.analysis.charts.style import LINE_STYLES, MARKERS, strategy_colour, strategy_hatch, wrapped
from testbed.analysis.document.model import Link, Look
from testbed.analysis.document.words import digits
from testbed.analysis.report.breakdown import PARTS, Breakdown
from testbed.analysis.runs.comparability import LOSS_NOISE
from testbed.analysis.runs.entries import Entry, Workload

# Cool is work, orange is waiting for others, yellow waiting for data, grey nothing: apart in lightness as well.
PART_COLOURS = dict(
    zip(
        PARTS,
        ("#F0C808", "#9BC8E3", "#2C7FB8", "#6D6D6D", "#12395B", "#D55E00", "#CFCFCF"),
        strict=True,
    )
)
DARK_PARTS = ("backward", "synchronise", "optimizer", "exposed communication")
FULL_MARKERS = ("o", "s", "^", "D", "v", "p", "<", "h", ">", "d")  # of about one weight, unlike + and x
SMALLEST_LABELLED = 0.07  # of the longest bar


def link_to(entry: Entry) -> Link:
    return Link(entry.number, entry.name, strategy_colour(entry.look))


def links_to(entries: Sequence[Entry]) -> tuple[Link, ...]:
    return tuple(map(link_to, entries))


def repeats_figure(
    entries: Sequence[Entry],
    values: Callable[[Entry], Sequence[float]],
    text: Callable[[Entry], str],
    axis_label: str,
    look: Look,
) -> Figure:
    """A row per configuration: bar of the median, whisker of its 95 % interval, a dot per run."""
    bars = [
        Bar(entry.name, values(entry), strategy_colour(entry.look), text(entry), strategy_hatch(entry.look))
        for entry in entries
    ]
    figure, axis = _rows(look, len(bars))
    draw_bars(axis, [Bar(bar.label, bar.values, bar.colour, "", bar.hatch) for bar in bars] if look.is_narrow else bars)
    _name_rows(axis, [bar.label for bar in bars], look, [bar.text for bar in bars])
    if not look.is_narrow:
        axis.set_xlim(right=axis.get_xlim()[1] * (1 + 0.011 * max(len(bar.text) for bar in bars)))
    axis.set_xlabel(axis_label)
    axis.xaxis.set_major_locator(MaxNLocator(4 if look.is_narrow else 7))
    return figure


def breakdown_figure(breakdowns: Sequence[tuple[str, Breakdown]], look: Look) -> Figure:
    """Where an optimizer step's time goes: a stacked bar per configuration, in milliseconds."""
    shown = [part for part in PARTS if any(parts.seconds.get(part) for _, parts in breakdowns)]
    figure, axis = _rows(look, len(breakdowns), above_inches=0.5 if look.is_narrow else 0.34)
    longest = max(sum(parts.seconds.values()) for _, parts in breakdowns) * 1e3
    for row, (_, parts) in enumerate(breakdowns):
        left = 0.0
        for part in shown:
            width = parts.seconds.get(part, 0.0) * 1e3
            axis.barh(
                row, width, left=left, height=0.62, color=PART_COLOURS[part], edgecolor="white", linewidth=0.8,
                label=part if row == 0 else None,
            )  # fmt: skip
            if width > SMALLEST_LABELLED * longest * (1.6 if look.is_narrow else 1):
                colour = "white" if part in DARK_PARTS else "#222222"
                axis.text(left + width / 2, row, digits(width), ha="center", va="center", fontsize=8.5, color=colour)
            left += width
    totals = [f"{digits(sum(parts.seconds.values()) * 1e3)} ms" for _, parts in breakdowns]
    if not look.is_narrow:
        for row, ((_, parts), total) in enumerate(zip(breakdowns, totals, strict=True)):
            end = sum(parts.seconds.values()) * 1e3
            axis.annotate(total, (end, row), xytext=(7, 0), textcoords="offset points", va="center", fontsize=9.5)
    _name_rows(axis, [name for name, _ in breakdowns], look, totals)
    axis.set_xlim(0, longest * (1.01 if look.is_narrow else 1.14))
    axis.xaxis.set_major_formatter("{x:,g}")
    axis.grid(axis="x")
    axis.set_xlabel("ms per optimizer step")
    figure.legend(
        *axis.get_legend_handles_labels(), loc="outside upper left", ncols=3 if look.is_narrow else 7, frameon=False,
        fontsize=8.5, handlelength=1.0, handleheight=0.9, columnspacing=1.1, borderaxespad=0.1,
    )  # fmt: skip
    return figure


def loss_figure(workload: Workload, look: Look) -> Figure:
    """Losses against steps, and beside them each validation loss minus the reference's, where equal work overlaps."""
    with_difference = bool(workload.reference and workload.reference.values("final_validation_loss"))
    with_difference = with_difference and len(_validated(workload)) > 1
    panels = 1 + with_difference
    size = (look.inches, 3.4 + 0.19 * len(workload.entries) * (1 if look.is_narrow else 0.4))
    if look.is_narrow and with_difference:
        size = (look.inches, size[1] + 1.0 + 0.36 * len(workload.entries))
    figure = Figure(figsize=size, layout="constrained")
    rows, columns = (panels, 1) if look.is_narrow else (1, panels)
    heights = [3, 0.4 + 0.36 * len(workload.entries)][:panels] if look.is_narrow else None
    axes = figure.subplots(rows, columns, squeeze=False, height_ratios=heights).ravel()
    for index, entry in enumerate(workload.entries):
        _draw_losses(axes[0], entry, index)
    axes[0].set_ylabel("loss (nats per token)")
    axes[0].set_xlabel("optimizer step")
    axes[0].grid(axis="both")
    axes[0].xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes[0].set_xlim(left=0)
    if with_difference:
        _draw_loss_differences(axes[1], workload, look)
    _legend_below(figure, axes[0], look, columns=3)
    return figure


def loss_time_figure(entries: Sequence[Entry], target: float, look: Look) -> Figure:
    """Loss against seconds of training, of each configuration the run of median throughput."""
    figure = Figure(
        figsize=(look.inches, 3.9 + 0.2 * len(entries) / (1 if look.is_narrow else 3)), layout="constrained"
    )
    axis = figure.subplots()
    axis.axhline(target, color="#999999", linewidth=1.0, zorder=1)
    for index, entry in enumerate(entries):
        run = sorted(entry.measured, key=lambda run: run.tokens_per_s or 0.0)[(len(entry.measured) - 1) // 2]
        colour = strategy_colour(entry.look)
        style, marker = LINE_STYLES[index % len(LINE_STYLES)], MARKERS[index % len(MARKERS)]
        smooth, middle = _smoothed(run.train_losses), run.train_times_s
        middle = middle[(len(middle) - len(smooth) + 1) // 2 :][: len(smooth)]
        axis.plot(middle, smooth, color=colour, linewidth=1.6, linestyle=style, label=entry.name)
        points = [(point.train_time_s, point.loss) for point in run.validation_losses if point.train_time_s is not None]
        if points:
            axis.plot(
                *zip(*points, strict=True), marker, color=colour, markersize=6, markeredgecolor="white",
                markeredgewidth=0.6, linestyle="None", zorder=4,
            )  # fmt: skip
    axis.set_xlabel("seconds of training")
    axis.set_ylabel("loss (nats per token)")
    axis.set_xlim(left=0)
    axis.xaxis.set_major_locator(MaxNLocator(5 if look.is_narrow else 8))
    axis.grid(axis="both")
    _legend_below(figure, axis, look, columns=3)
    return figure


def scaling_figure(
    points: dict[str, list[tuple[int, float, float | None, float | None]]],
    fits: dict[str, float | None],
    colours: dict[str, str],
    look: Look,
    law: str | None = "amdahl",
) -> Figure:
    """Speed-up against ranks with its interval; grey: ideal; dashed: the fitted law, amdahl or gustafson.

    `points`: strategy -> (ranks, speed-up, low, high); `fits`: strategy -> serial fraction or None.
    """
    legend_inches = 0.17 * (len(points) + 1) / (1 if look.is_narrow else 2)
    figure = Figure(figsize=(look.inches, 3.6 + legend_inches), layout="constrained")
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
    _legend_below(figure, axis, look, columns=2)
    return figure


def _rows(look: Look, count: int, above_inches: float = 0.0) -> tuple[Figure, Axes]:
    row_inches = 0.56 if look.is_narrow else 0.4
    figure = Figure(figsize=(look.inches, row_inches * count + 0.62 + above_inches), layout="constrained")
    engine = figure.get_layout_engine()
    assert isinstance(engine, ConstrainedLayoutEngine)
    engine.set(h_pad=0.03, w_pad=0.03)
    return figure, figure.subplots()


def _name_rows(axis: Axes, names: Sequence[str], look: Look, texts: Sequence[str]) -> None:
    """Names to the left where there is room for them; on a narrow picture above each row, numbers at the right end."""
    if look.is_narrow:
        axis.set_yticks([])
        axis.set_ylim(len(names) - 0.6, -0.85)
        across = axis.get_yaxis_transform()
        for row, (name, text) in enumerate(zip(names, texts, strict=True)):
            shown = name if len(name) + len(text) <= look.label_characters + 6 else name[: look.label_characters] + "…"
            axis.text(0, row - 0.36, shown, transform=across, fontsize=8.5, va="bottom", color="#222222")
            axis.text(1, row - 0.36, text, transform=across, fontsize=8.5, va="bottom", ha="right", color="#222222")
        axis.spines["left"].set_visible(False)
        return
    axis.set_yticks(range(len(names)), [wrapped(name, look.label_characters) for name in names], fontsize=9.5)
    axis.set_ylim(len(names) - 0.5, -0.5)


def _legend_below(figure: Figure, axis: Axes, look: Look, columns: int) -> None:
    figure.legend(
        *axis.get_legend_handles_labels(), loc="outside lower left", ncols=1 if look.is_narrow else columns,
        frameon=False, fontsize=8.5, borderaxespad=0.1,
    )  # fmt: skip


def _smoothed(losses: np.ndarray) -> np.ndarray:
    """Mean over a fortieth of the run, whole windows only: no value from outside it."""
    window = max(1, len(losses) // 40)
    return np.convolve(losses, np.full(window, 1 / window), mode="valid") if len(losses) else losses


def _validated(workload: Workload) -> list[Entry]:
    return [entry for entry in workload.measured if entry.values("final_validation_loss")]


def _validation_table(entry: Entry) -> tuple[list[int], np.ndarray]:
    """Steps that every measured run validated at, and the losses there, one row per run."""
    losses = [{point.step: point.loss for point in run.validation_losses} for run in entry.measured]
    losses = [each for each in losses if each]
    shared = set.intersection(*map(set, losses)) if losses else set()
    steps = sorted(step for step in shared if step is not None)
    return steps, np.array([[each[step] for step in steps] for each in losses])


def _draw_losses(axis: Axes, entry: Entry, index: int) -> None:
    """Median over the runs at each step; a band from the lowest to the highest run where seeds differ."""
    runs = [run for run in (entry.measured or entry.runs) if len(run.train_losses)]
    marker, style = MARKERS[index % len(MARKERS)], LINE_STYLES[index % len(LINE_STYLES)]
    width = 1.4 + 1.8 * 0.6**index  # later ones are thinner and smaller: at equal work they fall on top of each other
    label: str | None = entry.name
    colour = strategy_colour(entry.look)
    if runs:
        length = min(len(run.train_losses) for run in runs)
        losses = np.array([run.train_losses[:length] for run in runs])
        lines = np.array([_smoothed(row) for row in losses])
        middle = runs[0].train_steps[(length - lines.shape[1] + 1) // 2 :][: lines.shape[1]]
        axis.plot(
            middle,
            np.median(lines, axis=0),
            color=colour,
            linewidth=width,
            linestyle=style,
            label=label,
        )
        if len(runs) > 1:
            axis.fill_between(middle, lines.min(axis=0), lines.max(axis=0), color=colour, alpha=0.12, linewidth=0)
        label = None
    steps, losses = _validation_table(entry)
    if steps:
        axis.plot(
            steps, np.median(losses, axis=0), marker, color=colour, markersize=max(2.5, 11 - 1.3 * index),
            markeredgecolor="white", markeredgewidth=0.5, linestyle="None", label=label, zorder=4,
        )  # fmt: skip


def _draw_loss_differences(axis: Axes, workload: Workload, look: Look) -> None:
    """A row per configuration: each run's final validation loss minus the median of the reference's."""
    shown = _validated(workload)
    assert workload.reference is not None  # the caller looked
    centre = float(np.median(workload.reference.values("final_validation_loss")))
    reach = 1.5 * LOSS_NOISE
    for row, entry in enumerate(shown):
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
    characters = 20 if look.is_narrow else look.label_characters
    axis.set_yticks(range(len(shown)), [wrapped(entry.name, characters) for entry in shown], fontsize=8)
    axis.set_ylim(len(shown) - 0.4, -0.6)
    axis.xaxis.set_major_locator(MaxNLocator(3 if look.is_narrow else 4))
    axis.set_xlabel("final validation loss minus\nthe reference's; black: median")
    axis.grid(axis="x")
