"""Bars of PNG files and of the report: of repeats (median, 95 % interval, a dot for each run), and of parts."""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from testbed.analysis.charts.style import (
    LABEL_CHARACTERS,
    STYLE,
    colour,
    colour_of,
    figure_with_footer,
    ink_on,
    not_shown,
    row_inches,
    rows_on,
    save_png,
    wrapped,
)
from testbed.analysis.document.words import counted, digits, rate
from testbed.analysis.runs.comparability import marks_of
from testbed.analysis.runs.load import Run, load_run
from testbed.errors import InputError

SMALLEST_LABELLED = 0.075  # part of a bar of parts, of the longest bar
MEANING_OF_MARKS = "Bar: median over runs. Dot: one run. Whisker: 95 % interval of the median, from five runs on."


@dataclass(frozen=True)
class Bar:
    """One row: `values` has one number per run; `text` stands at its end. `dots` None: one for each value."""

    label: str
    values: Sequence[float]
    colour: str
    text: str
    hatch: str | None = None
    dots: Sequence[float] | None = None

    @property
    def median(self) -> float:
        return float(np.median(self.values))

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % of the median; None where there are too few repeats for one."""
        return _interval(tuple(self.values))

    @property
    def reach(self) -> float:
        """The rightmost value that is drawn."""
        return max([*self.values, *(self.dots or ()), *(self.interval or ())])

    def over(self, size: float) -> Bar:
        """Return the bar in a unit of `size`."""
        dots = None if self.dots is None else [value / size for value in self.dots]
        return replace(self, values=[value / size for value in self.values], dots=dots)


@functools.lru_cache(maxsize=1024)  # a bootstrap takes a while
def _interval(values: tuple[float, ...]) -> tuple[float, float] | None:
    from testbed.analysis.statistics import median_interval  # scipy: a second that a chart of single runs does not owe

    _, low, high = median_interval(values)
    return None if low is None or high is None else (low, high)


def draw_bars(axis: Axes, bars: Sequence[Bar]) -> None:
    """Draw the rows from the top; the caller names the rows and the axis. Bars begin at zero."""
    for row, bar in enumerate(bars):
        axis.barh(
            row, bar.median, height=0.62, color=bar.colour, alpha=0.5, hatch=bar.hatch, edgecolor="white", linewidth=0
        )
        axis.plot([bar.median] * 2, [row - 0.31, row + 0.31], color=bar.colour, linewidth=2.4, solid_capstyle="butt")
        dots = bar.values if bar.dots is None else bar.dots
        # A fixed pattern instead of random jitter: the same runs give the same picture.
        # Above and below in turn, so that the whisker in the middle stays free.
        order = np.arange(len(dots))
        offsets = (0.13 + (order * 0.618034) % 1 * 0.13) * (-1) ** order * (len(dots) > 1)
        axis.scatter(dots, row + offsets, s=13, color="white", edgecolors="#222222", linewidths=0.7, zorder=3)
        if interval := bar.interval:
            axis.plot(interval, [row, row], color="#111111", linewidth=1.6, zorder=4)
            for end in interval:
                axis.plot([end] * 2, [row - 0.09, row + 0.09], color="#111111", linewidth=1.6, zorder=4)
        axis.annotate(
            bar.text, (bar.reach, row), xytext=(8, 0), textcoords="offset points", va="center",
            fontsize=9.5, color="#222222",
        )  # fmt: skip
    axis.set_xlim(0, max(bar.reach for bar in bars) * 1.02 or 1)
    axis.xaxis.set_major_formatter("{x:,g}")
    axis.grid(axis="x")


def draw_stacks(
    axis: Axes,
    rows: Sequence[Mapping[str, float]],
    colours: Mapping[str, str],
    totals: Sequence[str],
    form: Callable[[float], str] = digits,
    reach: float = 0.0,
) -> None:
    """Draw the rows from the top, each as parts side by side, with a part's number in it where there is room.

    Args:
        rows: part -> its size.
        colours: of every part, in the order in which parts are drawn; a part that no row has is left out.
        totals: a text for the end of each row.
        form: writes the size of a part.
        reach: the axis will show at least this much.
    """
    parts = [part for part in colours if any(row.get(part) for row in rows)]
    longest = max(sum(row.values()) for row in rows) or 1.0
    for number, (row, total) in enumerate(zip(rows, totals, strict=True)):
        left = 0.0
        for part in parts:
            width, colour = row.get(part, 0.0), colours[part]
            axis.barh(
                number, width, left=left, height=0.6, color=colour, edgecolor="white", linewidth=0.7,
                label=part if number == 0 else None,
            )  # fmt: skip
            if width > SMALLEST_LABELLED * max(longest, reach):
                place = (left + width / 2, number)
                axis.text(*place, form(width), ha="center", va="center", fontsize=8.5, color=ink_on(colour))
            left += width
        axis.annotate(
            total, (left, number), xytext=(6, 0), textcoords="offset points", va="center", fontsize=9.5,
            color="#222222", bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5}, zorder=5,
        )  # fmt: skip
    axis.set_xlim(0, longest * 1.16)
    axis.xaxis.set_major_formatter("{x:,g}")
    axis.grid(axis="x")


@dataclass(frozen=True)
class Quantity:
    """Describe the quantity that bars show: its attribute of a run, the attribute with its meaning, and its format.

    `units`: (name, size, smallest value that is written in it). `dots`: the attribute with the values behind it.
    """

    title: str
    axis: str
    value: str
    meaning: str
    units: Sequence[tuple[str, float, float]] = (("tokens/s", 1, 0),)
    form: Callable[[float], str] = digits
    dots: str = ""
    note: str = ""

    def unit_for(self, value: float) -> tuple[str, float]:
        return next((name, size) for name, size, smallest in reversed(self.units) if value >= smallest)

    def written(self, value: float, largest: float) -> str:
        """Return `value` in the unit of the largest, or in a smaller one where it would be below 1."""
        _, size = self.unit_for(largest)
        unit, size = self.unit_for(largest if value >= size else value)
        return self.form(value / size) + (f" {unit}" if len(self.units) > 1 else "")


TIMES = (("s", 1, 0), ("min", 60, 180), ("h", 3600, 3 * 3600))
SIZES = (("MiB", 2**20, 0), ("GiB", 2**30, 2**30))
QUANTITIES = {
    "training_time": Quantity(
        "Training time", "training time ({unit}), lower is better", "training_time_s", "training_time_meaning", TIMES
    ),
    "tokens_per_second": Quantity(
        "Training throughput", "{unit}, higher is better", "tokens_per_s", "tokens_per_s_meaning", form=rate
    ),
    "peak_memory": Quantity(
        "Peak memory", "peak memory ({unit}), largest rank", "peak_memory_bytes", "memory_meaning", SIZES,
        dots="memory_bytes_per_rank", note="A dot is one rank.",
    ),
    "inference": Quantity(
        "Inference performance", "{unit}, higher is better", "inference_tokens_per_s", "inference_meaning",
        dots="inference_repeats_tokens_per_s",
        note="A dot is one repeat of the same request in one process: their spread says nothing of another start.",
    ),
}  # fmt: skip


def runs_figure(
    runs: Sequence[Run], name: str, title: str = "", after: Callable[[Run], str] = lambda run: ""
) -> Figure | None:
    """Return a bar for each run that has the quantity; `after` stands behind its number. None without any."""
    quantity = QUANTITIES[name]
    shown = [run for run in runs if getattr(run, quantity.value)]
    if not shown:
        return None
    marks, bars = marks_of(runs), []
    for run in shown:
        dots = getattr(run, quantity.dots) if quantity.dots else ()
        hatch = "///" if run.instrumented or run.status != "complete" else None
        bar = Bar(
            marks[run] + run.full_label, [getattr(run, quantity.value)], colour_of(runs, run), after(run), hatch,
            dots if len(dots) > 1 else (),
        )  # fmt: skip
        bars.append((getattr(run, quantity.meaning), bar))
    notes = [quantity.note] * any(bar.dots for _, bar in bars) + not_shown(runs, shown)
    return _figure(runs, quantity, bars, notes, title)


def _figure(
    runs: Sequence[Run], quantity: Quantity, bars: Sequence[tuple[str, Bar]], notes: list[str], title: str = "",
    are_single: bool = True,
) -> Figure:  # fmt: skip
    """Draw a panel for each meaning: two meanings on one axis would compare. Values are in s, bytes or tokens/s."""
    panels: dict[str, list[Bar]] = {}
    for meaning, bar in bars:
        panels.setdefault(meaning, []).append(bar)
    notes = [*notes, *["Panels measure different things and do not compare."] * (len(panels) > 1)]
    labels = {meaning: [wrapped(bar.label, LABEL_CHARACTERS) for bar in panel] for meaning, panel in panels.items()}
    heights = [0.35 + row_inches(rows, 0.58) * len(rows) for rows in labels.values()]
    with rc_context(STYLE):
        figure, axes = figure_with_footer(runs, title or quantity.title, heights, notes, are_single=are_single)
        for axis, (meaning, panel) in zip(axes, panels.items(), strict=True):
            largest = max(bar.reach for bar in panel)
            unit, size = quantity.unit_for(largest)
            shown = [replace(bar, text=quantity.written(bar.median, largest) + bar.text).over(size) for bar in panel]
            draw_bars(axis, shown)
            room = max(0.2, 0.015 * max(len(bar.text) for bar in shown))  # for the text after the longest bar
            axis.set_xlim(right=axis.get_xlim()[1] * (1 + room))
            rows_on(axis, labels[meaning])
            axis.set_title(meaning, fontsize=9, color="#555555", loc="left")
            axis.set_xlabel(quantity.axis.format(unit=unit))
    return figure


def plot_results(metrics: Mapping[str, Any], quantity: str, path: str | Path | None = None) -> Figure:
    """Draw repeats next to each other: a bar for the median, a dot for each run, a whisker for its 95 % interval.

    Args:
        metrics: label -> its repeats: a list of `Run`s, of paths to training_metrics.json files (or the folders that
            hold one), or of plain numbers, seconds, tokens/s or MiB; a single one stands for a list of one.
        quantity: "training_time", "tokens_per_second", "peak_memory" or "inference".
        path: where the picture is saved as a PNG, replacing what is there in one move; None: nowhere.

    Returns:
        The figure. Runs that are instrumented or did not finish are left out, and it says so.

    Raises:
        InputError: an unknown quantity, nothing to draw, a number that measures nothing, or runs whose files measure
            the quantity differently (a per-rank and a global throughput share no axis).
        OSError: the picture cannot be written.
    """
    if quantity not in QUANTITIES:
        raise InputError(f"plot_results draws {' or '.join(map(repr, QUANTITIES))}, not {quantity!r}")
    bars, left_out, measured = [], [], []
    for number, (label, given) in enumerate(metrics.items()):
        items = _repeats(given, quantity, label)
        values = [value for item in items if (value := _measured(item, quantity, label)) is not None]
        if len(values) < len(items):
            left_out.append(f"{label}: {counted(len(items) - len(values), 'run')}")
        if values:
            runs = [item for item in items if isinstance(item, Run) and _measured(item, quantity, label) is not None]
            measured.append(runs)
            bars.append(Bar(label, values, colour(number), f"  (n = {len(values)})"))
    if not bars:
        raise InputError(
            f"no {quantity} to plot: no finished run without a profiler among {list(metrics) or 'nothing'}"
        )
    meanings = sorted({getattr(run, QUANTITIES[quantity].meaning) for runs in measured for run in runs})
    if len(meanings) > 1:
        raise InputError(f"these runs do not measure {quantity} alike: {'; '.join(meanings)}")
    notes = [MEANING_OF_MARKS]
    notes += [f"Left out, not finished, instrumented or not recorded: {'; '.join(left_out)}."] if left_out else []
    examples = [runs[0] for runs in measured if runs]
    marks = marks_of(examples)
    labels = [(marks[runs[0]] if runs else "") + bar.label for bar, runs in zip(bars, measured, strict=True)]
    named = [("".join(meanings), replace(bar, label=label)) for bar, label in zip(bars, labels, strict=True)]
    figure = _figure(examples, QUANTITIES[quantity], named, notes, are_single=False)
    if path is not None:
        save_png(figure, Path(path))
    return figure


def _repeats(given: Any, quantity: str, label: str) -> list[Run | float]:
    """Return the runs and numbers that a label has; a number in the quantity's first unit becomes one in its base."""
    found: list[Run | float] = []
    for item in [given] if isinstance(given, Run | str | Path | numbers.Real) else given:
        item = load_run(Path(item)) if isinstance(item, str | Path) else item
        if not isinstance(item, Run | numbers.Real) or isinstance(item, bool):
            raise InputError(f"{label}: plot_results takes Runs, paths and numbers, not {type(item).__name__}")
        found.append(item if isinstance(item, Run) else float(item) * QUANTITIES[quantity].units[0][1])
    return found


def _measured(item: Run | float, quantity: str, label: str) -> float | None:
    """Return the number in `item`; None for a run that may not enter a headline."""
    if not isinstance(item, Run):
        if not math.isfinite(item) or item < 0:
            raise InputError(f"{label}: {item} is no {quantity}; a measurement is finite and not negative")
        return item
    value = getattr(item, QUANTITIES[quantity].value)
    return None if item.status != "complete" or item.instrumented or value is None else float(value)
