"""Draw measured runs as bars in panels, with dashed lines at what the hardware allows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from testbed.analysis.charts.bars import Bar, draw_bars
from testbed.analysis.charts.style import STYLE, figure_with_footer, rows_on

GREY = "#555555"


@dataclass(frozen=True)
class Panel:
    """Bars under a heading. `limits`: name -> a value that gets a dashed line; the name may be empty."""

    title: str
    bars: Sequence[Bar]
    limits: Mapping[str, float] = field(default_factory=dict)


def draw_panels(title: str, panels: Sequence[Panel], notes: list[str], unit: str) -> Figure:
    """Return a figure with a panel below the other. `unit`: of the bars, and which direction is better."""
    with rc_context(STYLE):
        heights = [0.5 + 0.5 * len(panel.bars) for panel in panels]
        figure, axes = figure_with_footer([], title, heights, notes, are_single=False)
        for axis, panel in zip(axes, panels, strict=True):
            _draw(axis, panel)
            axis.set_title(panel.title, fontsize=10, color="#333333", loc="left")
            axis.set_xlabel(unit)
    return figure


def _draw(axis: Axes, panel: Panel) -> None:
    draw_bars(axis, list(panel.bars))
    rows_on(axis, [bar.label for bar in panel.bars])
    for text in axis.texts:  # the line of a limit may pass behind it
        text.set_bbox({"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.5})
    right = axis.get_xlim()[1] * 1.45  # room for the text after the longest bar
    for name, limit in panel.limits.items():
        axis.axvline(limit, color=GREY, linewidth=1.1, linestyle=(0, (4, 3)), zorder=0.5)
        axis.annotate(
            name, (limit, 1), xycoords=("data", "axes fraction"), xytext=(-4, 3), textcoords="offset points",
            ha="right", va="bottom", fontsize=8, color=GREY,
        )  # fmt: skip
        right = max(right, limit * 1.05)
    axis.set_xlim(right=right)
