"""Repeats as bars: the median as the bar, its 95 % interval as a whisker, every run as a dot."""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from testbed.analysis.charts.style import (
    COLOURS,
    LABEL_CHARACTERS,
    STYLE,
    figure_with_footer,
    rows_on,
    save_png,
    wrapped,
)
from testbed.analysis.document.words import digits
from testbed.analysis.runs.load import Run, load_run

# What plot_results draws: title, axis, the Run's number and the Run's words for what that number means.
QUANTITIES = {
    "training_time": ("Training time", "seconds, lower is better", "training_time_s", "training_time_meaning"),
    "tokens_per_second": ("Training throughput", "tokens/s, higher is better", "tokens_per_s", "tokens_per_s_meaning"),
    "peak_memory": ("Peak memory", "MiB, largest rank", "peak_memory_mib", "memory_meaning"),
    "inference": ("Inference performance", "tokens/s, higher is better", "inference_tokens_per_s", "inference_meaning"),
}
MEANING_OF_MARKS = "Bar: median over runs. Dot: one run. Whisker: 95 % interval of the median, from five runs on."


@dataclass(frozen=True)
class Bar:
    """One row: `values` has one number per run; `text` stands at its end."""

    label: str
    values: Sequence[float]
    colour: str
    text: str
    hatch: str | None = None

    @property
    def median(self) -> float:
        return float(np.median(self.values))

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % of the median; None where there are too few repeats for one."""
        return _interval(tuple(self.values))


@functools.lru_cache(maxsize=1024)  # a bootstrap takes a while, and a page draws each picture twice
def _interval(values: tuple[float, ...]) -> tuple[float, float] | None:
    from testbed.analysis.statistics import median_interval  # scipy: a second that a chart of single runs does not owe

    _, low, high = median_interval(values)
    return None if low is None or high is None else (low, high)


def draw_bars(axis: Axes, bars: Sequence[Bar]) -> None:
    """Draw the rows from the top; the caller names the rows and the axis. Bars begin at zero."""
    largest = max(max([*bar.values, *(bar.interval or ())]) for bar in bars)
    for row, bar in enumerate(bars):
        axis.barh(
            row, bar.median, height=0.62, color=bar.colour, alpha=0.5, hatch=bar.hatch, edgecolor="white", linewidth=0
        )
        axis.plot([bar.median] * 2, [row - 0.31, row + 0.31], color=bar.colour, linewidth=2.4, solid_capstyle="butt")
        # A fixed pattern instead of random jitter: the same runs give the same picture.
        # Above and below in turn, so that the whisker in the middle stays free.
        runs = np.arange(len(bar.values))
        offsets = (0.13 + (runs * 0.618034) % 1 * 0.13) * (-1) ** runs * (len(runs) > 1)
        axis.scatter(bar.values, row + offsets, s=13, color="white", edgecolors="#222222", linewidths=0.7, zorder=3)
        reach = max(bar.values)
        if interval := bar.interval:
            axis.plot(interval, [row, row], color="#111111", linewidth=1.6, zorder=4)
            for end in interval:
                axis.plot([end] * 2, [row - 0.09, row + 0.09], color="#111111", linewidth=1.6, zorder=4)
            reach = max(reach, interval[1])
        axis.annotate(
            bar.text, (reach, row), xytext=(8, 0), textcoords="offset points", va="center",
            fontsize=9.5, color="#222222",
        )  # fmt: skip
    axis.set_xlim(0, largest * 1.02 or 1)
    axis.xaxis.set_major_formatter("{x:,g}")
    axis.grid(axis="x")


def plot_results(metrics: Mapping[str, Any], quantity: str, path: str | Path | None = None) -> Figure:
    """Repeats side by side: a bar for the median, a dot for each run, a whisker for the median's 95 % interval.

    Args:
        metrics: label -> its repeats: a list of `Run`s, of paths to training_metrics.json files (or the folders that
            hold one), or of plain numbers, seconds, tokens/s or MiB; a single one stands for a list of one. Instead of
            repeats a label may have {quantity: repeats}, of which those of `quantity` are drawn.
        quantity: "training_time", "tokens_per_second", "peak_memory" or "inference".
        path: where the picture is saved as a PNG, replacing what is there in one move; None: nowhere.

    Returns:
        The figure. Runs that are instrumented or did not finish are left out, and it says so.

    Raises:
        ValueError: an unknown quantity, nothing to draw, a number that is no measurement, or runs whose files measure
            the quantity differently (a per-rank and a global throughput share no axis), or a quantity as a label.
        OSError: the picture cannot be written.
    """
    if quantity not in QUANTITIES:
        raise ValueError(f"plot_results draws {' or '.join(map(repr, QUANTITIES))}, not {quantity!r}")
    if swapped := [label for label in metrics if label in QUANTITIES]:
        raise ValueError(
            f"{swapped[0]!r} is a quantity; plot_results takes {{label: repeats}} or {{label: {{quantity: repeats}}}}"
        )
    title, axis_label, _, _ = QUANTITIES[quantity]
    bars, left_out, first_runs = [], [], []
    meanings: set[str] = set()
    for number, (label, given) in enumerate(metrics.items()):
        values: list[float] = []
        unfit = 0
        given = _of_quantity(given, quantity, label) if isinstance(given, Mapping) else given
        for item in [given] if isinstance(given, Run | str | Path | numbers.Real) else given:
            item = load_run(Path(item)) if isinstance(item, str | Path) else item
            value, meaning = _measured(item, quantity, label)
            if value is not None and not values and isinstance(item, Run):
                first_runs.append(item)
            meanings |= set() if meaning is None else {meaning}
            values += [] if value is None else [value]
            unfit += value is None
        if unfit:
            left_out.append(f"{label}: {unfit} run{'s' * (unfit > 1)}")
        if values:
            text = f"{digits(float(np.median(values)))}  (n = {len(values)})"
            bars.append(Bar(wrapped(label, LABEL_CHARACTERS), values, COLOURS[number % len(COLOURS)], text))
    if not bars:
        raise ValueError(
            f"no {quantity} to plot: no finished run without a profiler among {list(metrics) or 'nothing'}"
        )
    if len(meanings) > 1:
        raise ValueError(f"these runs do not measure {quantity} alike: {'; '.join(sorted(meanings))}")
    notes = [MEANING_OF_MARKS]
    notes += [f"Left out, not finished, instrumented or not recorded: {'; '.join(left_out)}."] if left_out else []
    with rc_context(STYLE):
        figure, (axis,) = figure_with_footer(first_runs, title, [0.35 + 0.58 * len(bars)], notes, are_single=False)
        draw_bars(axis, bars)
        axis.set_xlim(right=axis.get_xlim()[1] * 1.25)  # room for the text after the longest bar
        rows_on(axis, [bar.label for bar in bars])
        axis.set_title("".join(meanings), fontsize=9, color="#555555", loc="left")
        axis.set_xlabel(axis_label)
    if path is not None:
        save_png(figure, Path(path))
    return figure


def _of_quantity(given: Mapping, quantity: str, label: str) -> Any:
    if quantity not in given:
        raise ValueError(f"{label} has no {quantity!r}, but {', '.join(map(repr, given)) or 'nothing'}")
    return given[quantity]


def _measured(item: Any, quantity: str, label: str) -> tuple[float | None, str | None]:
    """The number in `item` and what it means; None, None for a run that may not enter a headline."""
    if isinstance(item, numbers.Real) and not isinstance(item, bool):
        if not math.isfinite(item) or item < 0:
            raise ValueError(f"{label}: {item} is no {quantity}; a measurement is finite and not negative")
        return float(item), None
    if not isinstance(item, Run):
        raise ValueError(f"{label}: plot_results takes Runs, paths and numbers, not {type(item).__name__}")
    _, _, number, meaning = QUANTITIES[quantity]
    if number == "peak_memory_mib":
        value = None if item.peak_memory_bytes is None else item.peak_memory_bytes / 2**20
    else:
        value = getattr(item, number)
    if item.status != "complete" or item.instrumented or value is None:
        return None, None
    return float(value), getattr(item, meaning)
