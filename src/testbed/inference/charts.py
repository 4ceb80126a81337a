"""Pictures of an inference_metrics.json: quality against bytes, speed of one request, latency against load.

Titles are made from the intervals: slower is called slower, and within noise is no difference.
"""

from __future__ import annotations

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
    bounded,
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
)
from testbed.io import write_text

TABLES_FILE = "inference_tables.md"
MEANING_OF_MARKS = "Bar: median. Dot: one repeat. Whisker: 95 % interval of the median, from five repeats on."
TITLE_CHARACTERS = 95  # of a panel's title in a line
LABEL_GAP = 0.062  # between two labels beside the Pareto picture, in its heights


def quality_figure(content: Mapping[str, Any]) -> Figure | None:
    """Perplexity against bytes in memory; joined are the schemes that no other one beats in both."""
    points = {name: each for name, each in measured_schemes(content).items() if each["perplexity"] is not None}
    if not points:
        return None
    notes = [
        "Whisker: 95 % interval of the perplexity over windows. Beside a name: its perplexity over that of "
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
            axis.plot(
                x, y, MARKERS[number % len(MARKERS)], color=_colour(number), markersize=9, markeredgecolor="white",
                zorder=3, label=name,
            )  # fmt: skip
        axis.set_xlim(0, 1.04 * max(_place(each)[0] for each in points.values()))
        axis.margins(y=0.12)
        axis.set_xlabel("weights in memory (MiB), counted from the tensors")
        axis.set_ylabel("perplexity, lower is better")
        axis.xaxis.set_major_formatter("{x:,g}")
        axis.yaxis.set_major_formatter("{x:,g}")
        axis.grid(axis="both")
        _labels_beside(axis, points)
    return figure


def _figure(
    content: Mapping[str, Any], title: str, panel_inches: list[float], notes: list[str], columns: int = 1
) -> tuple[Figure, Sequence[Axes]]:
    """As all pictures of these files begin: which weights and where it was measured stand below."""
    loud = [f"UNFINISHED: the file's status is {content['status']}."] * (content["status"] != "complete")
    footer = [*loud, *notes, f"{model_in_words(content)}; {place_in_words(content)}."]
    return figure_with_footer([], title, panel_inches, footer, columns, are_single=False)


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _place(scheme: Mapping[str, Any]) -> tuple[float, float]:
    return scheme["bytes_in_memory"] / 2**20, scheme["perplexity"]["value"]


def non_dominated(points: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The schemes than which no other one has both no more bytes and no higher perplexity, and less of one of them."""

    def is_beaten(name: str) -> bool:
        x, y = _place(points[name])
        others = [_place(each) for other, each in points.items() if other != name]
        return any(other_x <= x and other_y <= y and (other_x, other_y) != (x, y) for other_x, other_y in others)

    return [name for name in points if not is_beaten(name)]


def quality_title(points: Mapping[str, Mapping[str, Any]]) -> str:
    """How small the weights can be with no loss of quality that counts; how large the smallest loss is otherwise."""
    title = "Quality against bytes"
    whole = points.get(REFERENCE)
    smaller = {
        name: each
        for name, each in points.items()
        if whole is not None and each["bytes_in_memory"] < whole["bytes_in_memory"]
    }
    judged = {name: quality_verdict(each["perplexity_ratio"]) for name, each in smaller.items()}
    if not judged or "" in judged.values():
        return title
    harmless = [name for name, verdict in judged.items() if verdict != WORSE]
    if harmless:
        name = min(harmless, key=lambda name: smaller[name]["bytes_in_memory"])
        most = f"no detectable loss (at most {_signed(smaller[name]['perplexity_ratio']['high'] - 1)})"
        assert whole is not None  # else no scheme is smaller
        said = most if judged[name] == NO_DIFFERENCE else f"perplexity {judged[name]}"
        return f"{name}: {smaller[name]['bytes_in_memory'] / whole['bytes_in_memory']:.0%} of the bytes, {said}"
    least = min(each["perplexity_ratio"]["value"] for each in smaller.values())
    return f"Every smaller scheme is worse, by {least - 1:.2%} of perplexity or more"


def _labels_beside(axis: Axes, points: Mapping[str, Mapping[str, Any]]) -> None:
    """Names in a column right of the axes, in the order of their points, as far apart as reading needs."""
    low, high = axis.get_ylim()
    order = sorted(enumerate(points.items()), key=lambda item: _place(item[1][1])[1])
    heights = _spread([(_place(each)[1] - low) / (high - low) for _, (_, each) in order], LABEL_GAP)
    for height, (number, (name, each)) in zip(heights, order, strict=True):
        ratio = each["perplexity_ratio"]
        said = "" if ratio is None or name == REFERENCE else "  " + _change(ratio)
        axis.annotate(
            f"{name}{said}", _place(each), xytext=(1.02, height), textcoords="axes fraction", va="center", fontsize=9,
            color="#222222", arrowprops={"arrowstyle": "-", "color": _colour(number), "alpha": 0.6, "linewidth": 0.8,
                                               "relpos": (0, 0.5), "shrinkA": 1},
        )  # fmt: skip


def _change(ratio: Mapping[str, Any]) -> str:
    return bounded(ratio["value"] - 1, _less_one(ratio["low"]), _less_one(ratio["high"]), _signed)


def _signed(share: float) -> str:
    return f"{round(share, 4) + 0.0:+.2%}"  # no -0.00%


def _less_one(bound: float | None) -> float | None:
    return None if bound is None else bound - 1


def _spread(heights: Sequence[float], gap: float) -> list[float]:
    """Ascending numbers moved apart to at least `gap`, as little as that takes from the lowest up, then down from 1."""
    spread: list[float] = []
    for height in heights:
        spread.append(height if not spread else max(height, spread[-1] + gap))
    ceiling = 1.0
    for index in reversed(range(len(spread))):
        spread[index] = min(spread[index], ceiling)
        ceiling = spread[index] - gap
    return spread


def speed_figure(content: Mapping[str, Any]) -> Figure | None:
    """Decode rate of one request at a time: a bar per scheme, and one per module that DeepSpeed makes of them."""
    schemes = {
        name: each
        for name, each in measured_schemes(content).items()
        if each["latency"] is not None and decode_rates(each["latency"])
    }
    panels, titles, notes = [], [], []
    if schemes:
        ratios = {name: each["speed_ratio"] for name, each in schemes.items() if name != REFERENCE}
        panels.append({name: (decode_rates(each["latency"]), each["speed_ratio"]) for name, each in schemes.items()})
        titles.append(f"Schemes: {speed_in_words(ratios, REFERENCE)}")
        notes += speed_notes(content)
    arms = measured_arms(content)
    if arms:
        compared = {WRAPPED[name]: each for name, each in content["wrapped"]["comparisons"].items() if name in arms}
        panels.append(
            {WRAPPED[name]: (arm["decode_tokens_per_s"], compared.get(WRAPPED[name])) for name, arm in arms.items()}
        )
        titles.append(f"The same weights wrapped: {speed_in_words(compared, WRAPPED['plain'])}")
    if not panels:
        return None
    notes += [f"Not measured: {reason}" for reason in unmeasured(content)]
    with rc_context(STYLE):
        heights = [0.35 + 0.5 * len(rows) for rows in panels]
        title = "Decode rate of one request at a time"
        figure, axes = _figure(content, title, heights, [MEANING_OF_MARKS, *notes])
        for axis, rows, words in zip(axes, panels, titles, strict=True):
            bars = [Bar(name, rates, _colour(number), _beside(rates, ratio))
                    for number, (name, (rates, ratio)) in enumerate(rows.items())]  # fmt: skip
            draw_bars(axis, bars)
            rows_on(axis, [bar.label for bar in bars])
            axis.set_xlim(right=axis.get_xlim()[1] * 1.75)  # room for the text after the longest bar
            axis.set_title(textwrap.fill(words, TITLE_CHARACTERS), fontsize=10, color="#333333", loc="left")
            axis.set_xlabel("tokens/s after the first token, higher is better")
    return figure


def _beside(rates: Sequence[float], ratio: Mapping[str, Any] | None) -> str:
    median = f"{rate(statistics.median(rates))}  (n = {len(rates)})"
    if ratio is None:
        return median
    return f"{median}\n{bounded(ratio['ratio'], ratio['low'], ratio['high'], '{:.2f}'.format, 'x')} {ratio['verdict']}"


def speed_in_words(ratios: Mapping[str, Mapping[str, Any] | None], reference: str) -> str:
    """`bf16 faster, int8 slower than none`; what makes no detectable difference is said to make none."""
    verdicts = {name: ratio["verdict"] for name, ratio in ratios.items() if ratio is not None}
    said = []
    for verdict in (FASTER, SLOWER):
        names = [name for name, found in verdicts.items() if found == verdict]
        said += [f"{', '.join(names)} {verdict}"] if names else []
    words = f"{', '.join(said)} than {reference}" if said else ""
    alike = [name for name, found in verdicts.items() if found == NO_DIFFERENCE]
    others = [name for name, found in verdicts.items() if found not in (FASTER, SLOWER, NO_DIFFERENCE)]
    parts = [words] if words else []
    parts += [f"{NO_DIFFERENCE} with {', '.join(alike)}"] if alike else []
    parts += [f"no claim about {', '.join(others)}"] if others else []
    return "; ".join(parts) or f"{reference} alone"


def load_figure(content: Mapping[str, Any]) -> Figure | None:
    """Latency and throughput against load: closed loops by requests at once, open ones by requests per second."""
    load = content["load"]
    kinds = [(kind, name) for kind, name in (("closed", "concurrency"), ("open", "rate_per_s")) if load and load[kind]]
    if not kinds:
        return None
    labels = {
        "closed": ("Closed loop: the next request when one is answered", "requests at once"),
        "open": ("Open loop: requests arrive at random", "requests per second offered"),
    }
    marks = {"closed": saturating_concurrency(content), "open": limiting_rate(content)}
    meanings = {
        "closed": "where throughput stops growing",
        "open": "the highest rate at which most requests start at once",
    }
    marked = [f"{meanings[kind]} ({kind})" for kind, _ in kinds if marks[kind] is not None]
    notes = [f"Dotted: {', '.join(marked)}."] * bool(marked)
    refused = sum(point["rejected"] for kind, _ in kinds for point in load[kind])
    notes += [f"{refused:,} requests found the queue full and have no latency: crosses mark such loads."] * bool(
        refused
    )
    with rc_context(STYLE):
        title, *more = saturation_in_words(content) or ["Latency against load"]
        notes += [*(f"{words}." for words in more), *load_notes(content)[:2]]
        figure, axes = _figure(content, title, [2.9, 1.9], notes, columns=len(kinds))
        for column, (kind, name) in enumerate(kinds):
            points = sorted(load[kind], key=lambda point: point[name])
            upper, lower = axes[column], axes[column + len(kinds)]
            loads = [point[name] for point in points]
            for number, percent in enumerate(("p50", "p95")):
                _line(upper, loads, [point["latency_s"][percent] for point in points], number, f"latency {percent}")
            first = [point["time_to_first_token_s"]["p50"] for point in points]
            _line(upper, loads, first, 2, "first token p50")
            _line(lower, loads, [point["tokens_per_s"] for point in points], 3, "tokens/s")
            for point in points:
                if point["rejected"]:
                    lower.plot(point[name], point["tokens_per_s"], "x", color="#B00020", markersize=11, zorder=5)
            where = marks[kind]
            for axis in (upper, lower):
                axis.set_xlim(0, 1.06 * max(loads))
                axis.set_xlabel(labels[kind][1])
                axis.grid(axis="both")
                axis.xaxis.set_major_formatter("{x:,g}")
                if where is not None:
                    axis.axvline(where, color="#222222", linewidth=1.4, linestyle=(0, (1, 1.5)), zorder=1.5)
                axis.xaxis.set_major_locator(MaxNLocator(integer=True))
            upper.set_title(labels[kind][0], fontsize=9, color="#555555", loc="left")
        highest = max(
            point["latency_s"]["p95"] or point["latency_s"]["p50"] or 0 for kind, _ in kinds for point in load[kind]
        )
        lowest = min(point["time_to_first_token_s"]["p50"] or highest for kind, _ in kinds for point in load[kind])
        if highest > 20 * lowest > 0:
            axes[0].set_yscale("log", subs=(2, 5))
            axes[0].yaxis.set_minor_formatter("{x:,g}")
        else:
            axes[0].set_ylim(bottom=0)
        axes[0].yaxis.set_major_formatter("{x:,g}")
        axes[len(kinds)].yaxis.set_major_formatter("{x:,g}")
        axes[len(kinds)].set_ylim(bottom=0)
        axes[0].set_ylabel("seconds")
        axes[len(kinds)].set_ylabel("tokens/s")
        if axes[0].lines:
            axes[0].legend(frameon=False, fontsize=9, loc="best")
    return figure


def _line(axis: Axes, x: Sequence[float], y: Sequence[float | None], number: int, label: str) -> None:
    known = [(each, value) for each, value in zip(x, y, strict=True) if value is not None]
    if known:
        axis.plot(
            *zip(*known, strict=True), color=_colour(number), linestyle=LINE_STYLES[number], linewidth=1.8,
            marker=MARKERS[number], markersize=6, markeredgecolor="white", label=label,
        )  # fmt: skip


CHARTS: dict[str, tuple[str, Callable[[Mapping[str, Any]], Figure | None]]] = {
    "quality against bytes": ("quality_vs_bytes.png", quality_figure),
    "decode rate": ("decode_rate.png", speed_figure),
    "latency against load": ("latency_vs_load.png", load_figure),
}


def write_inference_charts(content: Mapping[str, Any], output_dir: Path) -> dict[str, Path]:
    """Write the tables and every picture that the file has data for; returns name -> path. OSError when that fails.

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
