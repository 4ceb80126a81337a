"""Draw a comparison with peers: a bar per trainer, a panel per set of precisions."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from testbed.analysis.charts.bars import MEANING_OF_MARKS, Bar
from testbed.analysis.charts.style import COLOURS, save_png
from testbed.analysis.document.words import rate
from testbed.errors import InputError
from testbed.experiments.panels import Panel, draw_panels
from testbed.experiments.peers.results_file import Result, results
from testbed.experiments.peers.table import notes, place_in_words, set_title, times, work_in_words


def plot_peers(content: Mapping[str, Any], path: Path | None = None) -> Figure:
    """Draw the tokens/s of each trainer with runs and intervals, and the rate that the matrix product would allow.

    InputError where nothing was measured.
    """
    found = results(content)
    names = list(dict.fromkeys(result.set for result in found))
    if not names:
        raise InputError("no run was measured, so there is nothing to draw")
    panels = [_panel(content, name, [result for result in found if result.set == name]) for name in names]
    loud = [note for note in notes(content) if note.startswith(("NOT MEASURED", "LEARNS"))]
    footer = [*loud, f"{work_in_words(content)}.", f"{place_in_words(content)}.", MEANING_OF_MARKS]
    unit = "tokens/s by the wall clock over all measured steps, higher is better"
    figure = draw_panels("Training throughput of this and other trainers", panels, footer, unit)
    if path is not None:
        save_png(figure, path)
    return figure


def _panel(content: Mapping[str, Any], name: str, rows: list[Result]) -> Panel:
    colours = {peer: COLOURS[number % len(COLOURS)] for number, peer in enumerate(content["peers"])}
    bars = [
        Bar(f"{result.peer}, {result.precision}", result.tokens_per_s, colours[result.peer], _text(result))
        for result in rows
    ]
    limits = {}
    for precision in dict.fromkeys(result.precision for result in rows):
        limit = _allowed(content, precision)
        if limit is not None:
            limits[f"matrix product, {precision}: {rate(limit)}"] = limit
    return Panel(set_title(name), bars, limits)


def _text(result: Result) -> str:
    text = rate(result.median_tokens_per_s)
    return text if result.ratio is None else f"{text}   ours / it {times(result)}"


def _allowed(content: Mapping[str, Any], precision: str) -> float | None:
    """Return the tokens/s at which the model's FLOPs would take the matrix product's whole rate."""
    rates = [ceiling["flops_per_s"] for ceiling in content["ceilings"] if ceiling["precision"] == precision]
    return statistics.median(rates) / content["work"]["flops_per_token_palm"] if rates else None
