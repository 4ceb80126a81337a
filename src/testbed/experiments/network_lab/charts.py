"""Draw the network study: what a step takes over each link, and what helps over a slow one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from testbed.analysis.charts.bars import MEANING_OF_MARKS, Bar
from testbed.analysis.charts.style import COLOURS, LABEL_CHARACTERS, save_png, wrapped
from testbed.experiments.network_lab.bounds import bound_s
from testbed.experiments.network_lab.results import pictures, steps_of, summaries, tokens_of
from testbed.experiments.network_lab.tables import what_was_measured
from testbed.experiments.panels import Panel, draw_panels

EXPOSED = (
    "Exposed: communication not covered by computing; idle: neither of the two, of a pipeline its bubble. In profiled "
    "runs of their own, of the rank that waits least."
)
BOUND = (
    "Dashed: a ring all-reduce of the gradients in fp32 at the rate of the link; in bf16 they are half as many bytes. "
    "A pipeline has a bound of its own: activations, and the gradient of the tied embedding."
)
LEFT_OUT = "Four micro batches per step are in the table alone: their step is another amount of work."
WORTH_SAYING = 0.02  # of a step
MANY = "More hosts than 2 share the cores of this machine: compare them with each other, not with 2."


def plot_study(content: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw what there is into a folder; returns the pictures."""
    drawn = []
    for name, (title, panels) in pictures(content).items():
        path = folder / f"network_{name}.png"
        figure = _figure(content, title, panels)
        save_png(figure, path)
        drawn.append(path)
    return drawn


def _figure(content: Mapping[str, Any], title: str, panels: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figure:
    drawn = [arm for rows in panels.values() for arm in rows]
    notes = [what_was_measured(content).replace("`", "").replace("*", ""), MEANING_OF_MARKS, EXPOSED]
    notes += [BOUND] if any(bound_s(content, arm["hosts"], arm["link"]) is not None for arm in drawn) else []
    notes += [LEFT_OUT] if any(arm["lever"] for arm in drawn) and _has_larger_steps(content) else []
    notes += [MANY] if any(arm["hosts"] > 2 for arm in drawn) else []
    of_places = [_panel(content, place, rows) for place, rows in panels.items()]
    return draw_panels(title, of_places, notes, "median optimizer step of a run, ms, lower is better")


def _has_larger_steps(content: Mapping[str, Any]) -> bool:
    """Return whether a lever's steps take another number of tokens than those of the others."""
    of_levers = [arm["name"] for arm in content["arms"] if arm["lever"] is not None and steps_of(content, arm["name"])]
    return len({tokens_of(content, name) for name in of_levers}) > 1


def _panel(content: Mapping[str, Any], place: str, rows: Sequence[Mapping[str, Any]]) -> Panel:
    found = {summary.arm: summary for summary in summaries(content)}
    strategies = list(dict.fromkeys(arm["strategy"] for arm in content["arms"]))
    colours = {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(strategies)}  # in every picture
    bars = []
    for arm in rows:
        summary = found[arm["name"]]
        waits = [(summary.exposed_s, "exposed"), (summary.idle_s, "idle")]
        least_s = WORTH_SAYING * summary.median_step_s
        worth_it = [(seconds, name) for seconds, name in waits if seconds is not None and seconds > least_s]
        exposed = "".join(f", {1000 * seconds:,.0f} {name}" for seconds, name in worth_it)
        times = [1000 * seconds for seconds in steps_of(content, arm["name"])]
        text = f"{1000 * summary.median_step_s:,.0f} ms{exposed}"
        bars.append(Bar(wrapped(arm["title"], LABEL_CHARACTERS), times, colours[arm["strategy"]], text))
    bound = bound_s(content, rows[0]["hosts"], rows[0]["link"])
    return Panel(place, bars, {} if bound is None else {"": 1000 * bound})
