"""The picture of a comparison with peers: a bar per trainer, a panel per set of precisions."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from testbed.analysis.charts.bars import MEANING_OF_MARKS, Bar, draw_bars
from testbed.analysis.charts.style import COLOURS, STYLE, figure_with_footer, rows_on, save_png
from testbed.analysis.document.words import rate
from testbed.experiments.peers.results_file import (
    Result,
    notes,
    place_in_words,
    results,
    set_title,
    times,
    work_in_words,
)


def plot_peers(content: Mapping[str, Any], path: Path | None = None) -> Figure:
    """Tokens/s of each trainer with runs and intervals, and how many the matrix product alone would allow.

    ValueError where nothing was measured.
    """
    found = results(content)
    names = list(dict.fromkeys(result.set for result in found))
    if not names:
        raise ValueError("no run was measured, so there is nothing to draw")
    colours = {peer: COLOURS[number % len(COLOURS)] for number, peer in enumerate(content["peers"])}
    panels = [[result for result in found if result.set == name] for name in names]
    loud = [note for note in notes(content) if note.startswith(("NOT MEASURED", "LEARNS"))]
    footer = [*loud, f"{work_in_words(content)}.", f"{place_in_words(content)}.", MEANING_OF_MARKS]
    with rc_context(STYLE):
        figure, axes = figure_with_footer(
            [], "Training throughput beside other trainers", [0.5 + 0.58 * len(rows) for rows in panels], footer,
            are_single=False,
        )  # fmt: skip
        for axis, name, rows in zip(axes, names, panels, strict=True):
            _panel(axis, content, rows, colours)
            axis.set_title(set_title(name), fontsize=10, color="#333333", loc="left")
            axis.set_xlabel("tokens/s by the wall clock over all measured steps, higher is better")
    if path is not None:
        save_png(figure, path)
    return figure


def _panel(axis: Axes, content: Mapping[str, Any], rows: list[Result], colours: Mapping[str, str]) -> None:
    draw_bars(axis, [Bar(result.peer, result.tokens_per_s, colours[result.peer], _text(result)) for result in rows])
    rows_on(axis, [f"{result.peer}, {result.precision}" for result in rows])
    for text in axis.texts:  # the line of the matrix product may pass behind it
        text.set_bbox({"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.5})
    right = axis.get_xlim()[1] * 1.45  # room for the text after the longest bar
    for precision in dict.fromkeys(result.precision for result in rows):
        limit = _allowed(content, precision)
        if limit is not None:
            axis.axvline(limit, color="#555555", linewidth=1.1, linestyle=(0, (4, 3)), zorder=0.5)
            axis.annotate(
                f"matrix product, {precision}: {rate(limit)}", (limit, 1), xycoords=("data", "axes fraction"),
                xytext=(-4, 3), textcoords="offset points", ha="right", va="bottom", fontsize=8, color="#555555",
            )  # fmt: skip
            right = max(right, limit * 1.03)
    axis.set_xlim(right=right)


def _text(result: Result) -> str:
    text = rate(result.median_tokens_per_s)
    return text if result.ratio is None else f"{text}   ours / it {times(result)}"


def _allowed(content: Mapping[str, Any], precision: str) -> float | None:
    """Tokens/s at which the model's FLOPs would take the matrix product's whole rate."""
    rates = [ceiling["flops_per_s"] for ceiling in content["ceilings"] if ceiling["precision"] == precision]
    return statistics.median(rates) / content["work"]["flops_per_token_palm"] if rates else None
