"""Draw an inference_metrics.json: quality against bytes, speed of one request, latency against load.

Titles are made from the intervals: slower is called slower, and a difference within noise is not named.
"""

from __future__ import annotations

import dataclasses
import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from testbed.analysis.charts.bars import Bar, draw_bars
from testbed.analysis.charts.style import (
    COLOURS,
    LINE_STYLES,
    MARKERS,
    STYLE,
    WARNING_COLOUR,
    figure_with_footer,
    rows_on,
    save_png,
)
from testbed.analysis.document.words import rate
from testbed.analysis.statistics import FASTER, NO_DIFFERENCE, SLOWER
from testbed.inference.report import (
    REFERENCE,
    WORSE,
    WRAPPED,
    decode_rates,
    limiting_rate,
    load_notes,
    measured_arms,
    measured_schemes,
    model_in_words,
    place_in_words,
    quality_notes,
    quality_verdict,
    report,
    saturating_concurrency,
    saturation_in_words,
    speed_notes,
    unmeasured,
    with_bounds,
)
from testbed.io import write_text

TABLES_FILE = "inference_tables.md"
MEANING_OF_MARKS = "Bar: median. Dot: one repeat. Whisker: 95 % interval of the median, from five repeats on."
TITLE_CHARACTERS = 95  # of a panel's title in a line


def _figure(
    content: Mapping[str, Any], title: str, panel_inches: list[float], notes: list[str], columns: int = 1
) -> tuple[Figure, Sequence[Axes]]:
    """Return a figure whose footer says which weights were measured, and where."""
    loud = [f"UNFINISHED: the file's status is {content['status']}."] * (content["status"] != "complete")
    footer = [*loud, *notes, f"{model_in_words(content)}; {place_in_words(content)}."]
    return figure_with_footer([], title, panel_inches, footer, columns, are_single=False)


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def quality_figure(content: Mapping[str, Any]) -> Figure | None:
    """Draw perplexity against bytes in memory; joined are the schemes that no other one beats in both."""
    points = measured_schemes(content, "perplexity")
    if not points:
        return None
    notes = [
        "Whisker: 95 % interval of the perplexity over windows. After a name: its perplexity over that of "
        f"{REFERENCE}, windows paired. Line: no other scheme is both smaller and better.",
        *quality_notes(content),
    ]
    with rc_context(STYLE):
        figure, (axis,) = _figure(content, quality_title(points), [0.8 + max(3.2, 0.27 * len(points))], notes)
        joined = sorted((points[name] for name in non_dominated(points)), key=lambda each: each["bytes_in_memory"])
        axis.plot(*zip(*map(_place, joined), strict=True), color="#999999", linewidth=1.4, zorder=1)
        for number, (name, each) in enumerate(points.items()):
            (x, y), found = _place(each), each["perplexity"]
            if found["low"] is not None:
                axis.plot([x, x], [found["low"], found["high"]], color=_colour(number), alpha=0.45, linewidth=1.6)
            marker, label = MARKERS[number % len(MARKERS)], name + _change(each["perplexity_ratio"])
            axis.plot(x, y, marker, color=_colour(number), markersize=9, markeredgecolor="white", zorder=3, label=label)
        axis.set_xlim(0, 1.04 * max(_place(each)[0] for each in points.values()))
        axis.margins(y=0.12)
        axis.set_xlabel("weights in memory (MiB), counted from the tensors")
        axis.set_ylabel("perplexity, lower is better")
        axis.xaxis.set_major_formatter("{x:,g}")
        axis.yaxis.set_major_formatter("{x:,g}")
        axis.grid(axis="both")
        axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=9)
    return figure


def _place(scheme: Mapping[str, Any]) -> tuple[float, float]:
    return scheme["bytes_in_memory"] / 2**20, scheme["perplexity"]["value"]


def _change(ratio: Mapping[str, Any] | None) -> str:
    """Return `  +8.00% [+7.95%, +8.05%]`."""
    return "" if ratio is None else f"  {with_bounds(ratio, _signed)}"


def _signed(ratio: float) -> str:
    return f"{round(ratio - 1, 4) + 0.0:+.2%}"  # no -0.00%


def non_dominated(points: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the schemes that no other one beats: no more bytes, no higher perplexity, and less of one of them."""

    def is_beaten(name: str) -> bool:
        x, y = _place(points[name])
        others = [_place(each) for other, each in points.items() if other != name]
        return any(other_x <= x and other_y <= y and (other_x, other_y) != (x, y) for other_x, other_y in others)

    return [name for name in points if not is_beaten(name)]


def quality_title(points: Mapping[str, Mapping[str, Any]]) -> str:
    """Say how small the weights can be with no loss of quality that counts, or how large the smallest loss is."""
    title, whole = "Quality against bytes", points.get(REFERENCE)
    if whole is None:
        return title
    smaller = {name: each for name, each in points.items() if each["bytes_in_memory"] < whole["bytes_in_memory"]}
    judged = {name: quality_verdict(each["perplexity_ratio"]) for name, each in smaller.items()}
    if not judged or "" in judged.values():
        return title
    harmless = [name for name, verdict in judged.items() if verdict != WORSE]
    if not harmless:
        least = min(each["perplexity_ratio"]["value"] for each in smaller.values())
        return f"Every smaller scheme is worse, by {least - 1:.2%} of perplexity or more"
    name = min(harmless, key=lambda name: smaller[name]["bytes_in_memory"])
    said = f"perplexity {judged[name]}"
    if judged[name] == NO_DIFFERENCE:
        said = f"no detectable loss (at most {_signed(smaller[name]['perplexity_ratio']['high'])})"
    return f"{name}: {smaller[name]['bytes_in_memory'] / whole['bytes_in_memory']:.0%} of the bytes, {said}"


@dataclasses.dataclass(frozen=True)
class _Panel:
    """Bars of decode rates, and what they show."""

    title: str
    rows: Mapping[str, tuple[Sequence[float], Mapping[str, Any] | None]]  # name -> rates, ratio to the reference


def speed_figure(content: Mapping[str, Any]) -> Figure | None:
    """Draw the decode rate of one request at a time: a bar per scheme, and one per module that DeepSpeed makes."""
    schemes = measured_schemes(content, "latency")
    schemes = {name: each for name, each in schemes.items() if decode_rates(each["latency"])}
    panels, notes = [], []
    if schemes:
        rows = {name: (decode_rates(each["latency"]), each["speed_ratio"]) for name, each in schemes.items()}
        panels.append(_Panel(f"Schemes: {speed_in_words(rows, REFERENCE)}", rows))
        notes += speed_notes(content)
    if arms := measured_arms(content):
        compared = content["wrapped"]["comparisons"]
        rows = {WRAPPED[name]: (arm["decode_tokens_per_s"], compared.get(name)) for name, arm in arms.items()}
        panels.append(_Panel(f"The same weights wrapped: {speed_in_words(rows, WRAPPED['plain'])}", rows))
    if not panels:
        return None
    notes += [f"Not measured: {reason}" for reason in unmeasured(content)]
    with rc_context(STYLE):
        heights = [0.35 + 0.5 * len(panel.rows) for panel in panels]
        title = "Decode rate of one request at a time"
        figure, axes = _figure(content, title, heights, [MEANING_OF_MARKS, *notes])
        for axis, panel in zip(axes, panels, strict=True):
            bars = [
                Bar(name, rates, _colour(number), _text_of(rates, ratio))
                for number, (name, (rates, ratio)) in enumerate(panel.rows.items())
            ]
            draw_bars(axis, bars)
            rows_on(axis, [bar.label for bar in bars])
            axis.set_xlim(right=axis.get_xlim()[1] * 1.75)  # room for the text after the longest bar
            axis.set_title(textwrap.fill(panel.title, TITLE_CHARACTERS), fontsize=10, color="#333333", loc="left")
            axis.set_xlabel("tokens/s after the first token, higher is better")
    return figure


def _text_of(rates: Sequence[float], ratio: Mapping[str, Any] | None) -> str:
    median = f"{rate(statistics.median(rates))}  (n = {len(rates)})"
    return median if ratio is None else f"{median}\n{with_bounds(ratio, '.2f', 'x')} {ratio['verdict']}"


def speed_in_words(rows: Mapping[str, tuple[Any, Mapping[str, Any] | None]], reference: str) -> str:
    """Return `bf16 faster, int8 slower than none`; what makes no detectable difference is said to make none."""
    verdicts = {name: ratio["verdict"] for name, (_, ratio) in rows.items() if ratio is not None and name != reference}

    def named(*wanted: str) -> str:
        return ", ".join(name for name, verdict in verdicts.items() if verdict in wanted)

    said = ", ".join(f"{named(verdict)} {verdict}" for verdict in (FASTER, SLOWER) if named(verdict))
    parts = [f"{said} than {reference}"] if said else []
    parts += [f"{NO_DIFFERENCE} with {named(NO_DIFFERENCE)}"] if named(NO_DIFFERENCE) else []
    others = named(*(set(verdicts.values()) - {FASTER, SLOWER, NO_DIFFERENCE}))
    parts += [f"no claim about {others}"] if others else []
    return "; ".join(parts) or f"{reference} alone"


LOOPS = {  # kind of loop -> its load in a point of the file, title, axis, meaning of the dotted line
    "closed": (
        *("concurrency", "Closed loop: the next request when one is answered", "requests at once"),
        "where throughput stops growing (closed)",
    ),
    "open": (
        *("rate_per_s", "Open loop: requests arrive at random", "requests per second offered"),
        "the highest rate at which most requests start at once (open)",
    ),
}
LATENCIES = (
    ("latency_s", "p50", "latency p50"),
    ("latency_s", "p95", "latency p95"),
    ("time_to_first_token_s", "p50", "first token p50"),
)


def load_figure(content: Mapping[str, Any]) -> Figure | None:
    """Draw latency and throughput against load: closed loops by requests at once, open ones by requests per second."""
    load = content["load"]
    kinds = [kind for kind in LOOPS if load and load[kind]]
    if not kinds:
        return None
    marks = {"closed": saturating_concurrency(content), "open": limiting_rate(content)}
    points = [point for kind in kinds for point in load[kind]]
    marked = [LOOPS[kind][3] for kind in kinds if marks[kind] is not None]
    notes = [f"Dotted: {', '.join(marked)}."] * bool(marked)
    if refused := sum(point["rejected"] for point in points):
        notes.append(f"{refused:,} requests found the queue full and have no latency: crosses mark such loads.")
    with rc_context(STYLE):
        title, *more = saturation_in_words(content) or ["Latency against load"]
        notes += [*(f"{words}." for words in more), *load_notes(content)[:2]]
        figure, axes = _figure(content, title, [2.9, 1.9], notes, columns=len(kinds))
        latency, throughput = axes[: len(kinds)], axes[len(kinds) :]
        for upper, lower, kind in zip(latency, throughput, kinds, strict=True):
            _draw_loop(upper, lower, load[kind], kind, marks[kind])
        highest = max(point["latency_s"]["p95"] or point["latency_s"]["p50"] or 0 for point in points)
        lowest = min(point["time_to_first_token_s"]["p50"] or highest for point in points)
        if highest > 20 * lowest > 0:
            latency[0].set_yscale("log", subs=(2, 5))
            latency[0].yaxis.set_minor_formatter("{x:,g}")
        else:
            latency[0].set_ylim(bottom=0)
        throughput[0].set_ylim(bottom=0)
        for axis, label in ((latency[0], "seconds"), (throughput[0], "tokens/s")):
            axis.yaxis.set_major_formatter("{x:,g}")
            axis.set_ylabel(label)
        if latency[0].lines:
            latency[0].legend(frameon=False, fontsize=9, loc="best")
    return figure


def _draw_loop(upper: Axes, lower: Axes, points: Sequence[Mapping[str, Any]], kind: str, mark: float | None) -> None:
    """Draw one kind of loop: latency above, throughput below, a dotted line at `mark`."""
    name, title, label, _ = LOOPS[kind]
    points = sorted(points, key=lambda point: point[name])
    loads = [point[name] for point in points]
    for number, (field, percent, words) in enumerate(LATENCIES):
        _line(upper, loads, [point[field][percent] for point in points], number, words)
    _line(lower, loads, [point["tokens_per_s"] for point in points], 3, "tokens/s")
    for point in points:
        if point["rejected"]:
            lower.plot(point[name], point["tokens_per_s"], "x", color=WARNING_COLOUR, markersize=11, zorder=5)
    for axis in (upper, lower):
        axis.set_xlim(0, 1.06 * max(loads))
        axis.set_xlabel(label)
        axis.grid(axis="both")
        axis.xaxis.set_major_formatter("{x:,g}")
        if mark is not None:
            axis.axvline(mark, color="#222222", linewidth=1.4, linestyle=(0, (1, 1.5)), zorder=1.5)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    upper.set_title(title, fontsize=9, color="#555555", loc="left")


def _line(axis: Axes, x: Sequence[float], y: Sequence[float | None], number: int, label: str) -> None:
    known = [(each, value) for each, value in zip(x, y, strict=True) if value is not None]
    if known:
        look = {"linewidth": 1.8, "marker": MARKERS[number], "markersize": 6, "markeredgecolor": "white"}
        shown: Any = {"color": _colour(number), "linestyle": LINE_STYLES[number], "label": label, **look}
        axis.plot(*zip(*known, strict=True), **shown)


CHARTS: dict[str, tuple[str, Callable[[Mapping[str, Any]], Figure | None]]] = {
    "quality against bytes": ("quality_vs_bytes.png", quality_figure),
    "decode rate": ("decode_rate.png", speed_figure),
    "latency against load": ("latency_vs_load.png", load_figure),
}


def write_inference_charts(content: Mapping[str, Any], output_dir: Path) -> dict[str, Path]:
    """Write the tables and every picture that the file has data for; return name -> path. OSError when that fails.

    An earlier call's picture that this file has no data for is removed: it would show other numbers than the others.
    """
    output_dir.mkdir(parents=True, exist_ok=True)
    saved = {}
    for name, (file_name, build) in CHARTS.items():
        path, figure = output_dir / file_name, build(content)
        if figure is None:
            path.unlink(missing_ok=True)
            continue
        save_png(figure, path)
        saved[name] = path
    saved["tables"] = output_dir / TABLES_FILE
    write_text(saved["tables"], report(content) + "\n")
    return saved
