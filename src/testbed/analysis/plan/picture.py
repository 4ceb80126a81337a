"""Draw a plan: memory by kind against the device's, and the step by part, a bar for each run."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import blended_transform_factory

from testbed.analysis.charts.bars import draw_stacks
from testbed.analysis.charts.style import STYLE, WARNING_COLOUR, figure_with_footer, rows_on
from testbed.analysis.document.words import digits
from testbed.planner.plan import PlannedRun, name_of, settings_of

GIB = 2**30
MOST_ROWS = 12
# Blue is work, green the optimizer, orange and red waiting for others or for the schedule, grey overhead.
MEMORY_COLOURS = {
    "weights": "#12395B",
    "gradients": "#2C7FB8",
    "optimizer": "#009E73",
    "activations": "#F0C808",
    "logits": "#E69F00",
    "buffers": "#CC79A7",
    "fragmentation": "#CFCFCF",
    "context": "#8A8A8A",
    "heap and libraries": "#CFCFCF",
}
TIME_COLOURS = {
    "matrix products": "#12395B",
    "attention": "#2C7FB8",
    "head": "#56B4E9",
    "elementwise": "#9BC8E3",
    "optimizer": "#009E73",
    "exposed communication within a node": "#F0A050",
    "exposed communication between nodes": "#D55E00",
    "bubble": "#CC79A7",
    "host": "#8A8A8A",
    "offload": "#8C6D31",
    "stragglers": "#CFCFCF",
}
OTHERS = ("#6A51A3", "#F0C808", "#222222")
Bars = Sequence[Mapping[str, float]]


def plan_figure(runs: Sequence[PlannedRun], title: str, notes: list[str]) -> Figure:
    """Return a figure with two panels of one row per run, one below the other, so that a phone can show it."""
    shown = list(runs[:MOST_ROWS])
    labels = [f"{number}  {name_of(run.job)}\n{settings_of(run.job)}" for number, run in enumerate(shown, start=1)]
    memory = [{kind: size / GIB for kind, size in run.memory_by_kind.items()} for run in shown]
    times = [{part: seconds * 1e3 for part, seconds in run.time.parts.items()} for run in shown]
    if len(runs) > len(shown):
        notes = [*notes, f"The first {len(shown)} of {len(runs)}."]
    with rc_context(STYLE):
        inches = 0.9 + 0.46 * len(shown)
        figure, (above, below) = figure_with_footer([], title, [inches, inches], notes, are_single=False)
        totals = [f"{run.needs_bytes / GIB:.1f} GiB" + ("" if run.fits else ", does not fit") for run in shown]
        limit = runs[0].machine.device.memory_bytes / GIB
        _stack(above, memory, MEMORY_COLOURS, totals, limit)
        _limit(above, limit)
        above.set_xlabel("GiB per device at the peak of a step")
        _stack(below, times, TIME_COLOURS, [f"{digits(run.time.seconds * 1e3)} ms" for run in shown])
        for row, run in enumerate(shown):
            low, high = run.time.low * 1e3, run.time.high * 1e3
            below.plot([low, high], [row + 0.4] * 2, color="#111111", linewidth=1.2, solid_capstyle="butt")
            for end in (low, high):
                below.plot([end] * 2, [row + 0.34, row + 0.46], color="#111111", linewidth=1.2)
        reach = max(run.time.high for run in shown) * 1e3
        below.set_xlim(right=max(below.get_xlim()[1], reach * 1.04))
        below.set_xlabel("ms per optimizer step; black line: the interval that holds 90 % of such predictions")
        for axis in (above, below):
            rows_on(axis, labels)
    return figure


def _stack(axis: Axes, rows: Bars, colours: Mapping[str, str], totals: Sequence[str], limit: float = 0.0) -> None:
    """Draw the rows on an axis that shows `limit`; parts without a colour of their own get one of OTHERS."""
    unnamed = dict.fromkeys(name for row in rows for name in row if name not in colours)
    others = dict(itertools.zip_longest(unnamed, OTHERS[: len(unnamed)], fillvalue="#222222"))
    draw_stacks(axis, rows, {**colours, **others}, totals, _two_digits, limit)
    figure = axis.get_figure()
    assert figure is not None
    # from the figure's left edge on, above the labels too: long names of meshes leave the axis itself little width
    place = blended_transform_factory(figure.transFigure, axis.transAxes)
    axis.legend(
        loc="lower left", bbox_to_anchor=(0.01, 1), bbox_transform=place, ncols=4, frameon=False, fontsize=8.5,
        borderaxespad=0.2,
    )  # fmt: skip


def _two_digits(value: float) -> str:
    return digits(value) if value >= 100 else f"{value:.2g}"


def _limit(axis: Axes, limit: float) -> None:
    axis.axvline(limit, color=WARNING_COLOUR, linewidth=1.4, linestyle=(0, (4, 3)))
    axis.set_xlim(right=max(axis.get_xlim()[1], limit * 1.08))
    axis.annotate(
        f"the device has {limit:.1f}", (limit, 1), xycoords=("data", "axes fraction"), xytext=(-3, 2),
        textcoords="offset points", ha="right", va="bottom", fontsize=8.5, color=WARNING_COLOUR,
    )  # fmt: skip
