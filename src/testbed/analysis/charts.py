"""Runs as pictures. Each states what is measured, over how many steps, and what keeps the runs from being comparable.

Figures are built without pyplot: no window system, no global state. Panels never mix two meanings of a quantity.
"""

import itertools
import re
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from testbed.analysis.runs import Run, speed_ups, warnings
from testbed.atomic_file import replacing

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#6A51A3", "#8C6D31")  # Okabe-Ito + 2
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
LINE_STYLES = ("-", (0, (5, 2)), (0, (1, 1.2)), (0, (6, 2, 1, 2)))  # equal work gives equal curves: both must show
STYLE = {
    "font.family": "DejaVu Sans",  # ships with matplotlib, so the pictures look alike on every machine
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.labelcolor": "#333333",
    "xtick.color": "#555555",
    "ytick.color": "#333333",
    "axes.axisbelow": True,
    "grid.color": "#E4E4E4",
    "figure.facecolor": "white",
}
WIDTH_INCHES = 10.0
DPI = 150
MAX_DOTS = 2000  # per run; median and p95 are of all steps
LABEL_CHARACTERS = 34
FOOTER_CHARACTERS = 138  # of a bold line; a line of the same width in normal weight holds a sixth more
FOOTER_LINE_INCHES = 0.175
WARNING_COLOUR = "#B00020"


def training_time_figure(runs: Sequence[Run]) -> Figure | None:
    """Time spent in optimizer steps (2.1) or in the training loop (v1, 2.0) as bars."""

    def text(run: Run, unit: str, size: float) -> str:
        return f"{_digits(run.training_time_s / size)} {unit}{_counted(run.work.get('optimizer_steps'))}"

    bars = [(run, run.training_time_meaning, run.training_time_s) for run in runs if run.training_time_s]
    units = (("s", 1, 0), ("min", 60, 180), ("h", 3600, 3 * 3600))
    return _bars_by_meaning(runs, "Training time", "training time ({unit}), lower is better", bars, text, units)


def throughput_figure(runs: Sequence[Run]) -> Figure | None:
    """Tokens per second as bars, with the speed-up where the work is equal."""
    speed_up_of = dict(zip(runs, speed_ups(runs), strict=True))

    def text(run: Run, unit: str, size: float) -> str:
        speed_up = speed_up_of[run]
        compared = f"  {speed_up:.2f}x" if isinstance(speed_up, float) and run is not runs[0] else ""
        return f"{_rate(run.tokens_per_s)}{compared}{_counted(len(run.step_times_s))}"

    bars = [(run, run.tokens_per_s_meaning, run.tokens_per_s) for run in runs if run.tokens_per_s]
    return _bars_by_meaning(runs, "Training throughput", "{unit}, higher is better", bars, text, (("tokens/s", 1, 0),))


def memory_figure(runs: Sequence[Run]) -> Figure | None:
    """Peak memory: the bar is the largest rank, a dot each rank."""

    def text(run: Run, unit: str, size: float) -> str:
        ranks = len(run.memory_bytes_per_rank)
        return f"{_digits(run.peak_memory_bytes / size)} {unit}" + f"  (largest of {ranks} ranks)" * (ranks > 1)

    def dots(run: Run) -> tuple[int, ...]:
        return run.memory_bytes_per_rank if len(run.memory_bytes_per_rank) > 1 else ()

    bars = [(run, run.memory_meaning, run.peak_memory_bytes) for run in runs if run.peak_memory_bytes]
    units = (("MiB", 2**20, 0), ("GiB", 2**30, 2**30))
    return _bars_by_meaning(runs, "Peak memory", "peak memory ({unit})", bars, text, units, dots, "A dot is one rank.")


def inference_figure(runs: Sequence[Run]) -> Figure | None:
    """Generated tokens per second, from v1 files, which alone carry inference."""

    def text(run: Run, unit: str, size: float) -> str:
        latency_s = run.inference_latency_s
        return _digits(run.inference_tokens_per_s) + (f"  ({latency_s:.3f} s in all)" if latency_s else "")

    meaning = "v1: 100 greedy tokens, batch 1, no key-value cache, no warm-up, measured once"
    bars = [(run, meaning, run.inference_tokens_per_s) for run in runs if run.inference_tokens_per_s]
    units = (("tokens/s", 1, 0),)
    return _bars_by_meaning(runs, "Inference performance", "{unit}, higher is better", bars, text, units)


def loss_vs_steps_figure(runs: Sequence[Run]) -> Figure | None:
    """Training loss as a line, validation loss as markers, against the optimizer step."""
    return _loss_figure(runs, "Loss against optimizer steps", "optimizer step", by_time=False)


def loss_vs_time_figure(runs: Sequence[Run]) -> Figure | None:
    """The same against seconds of training; beside it validation loss against wall time, where a file has that."""
    return _loss_figure(runs, "Loss against time", "training time (s)", by_time=True)


def step_time_figure(runs: Sequence[Run]) -> Figure | None:
    """Every measured step as a dot, one row per run, with median and p95."""
    shown = [(index, run) for index, run in enumerate(runs) if len(run.step_times_s)]
    if not shown:
        return None
    medians_s = [run.step_time_median_s for _, run in shown]
    use_log = max(run.step_times_s.max() for _, run in shown) > 8 * min(medians_s)
    unit, per_second = ("s", 1) if max(medians_s) >= 10 else ("ms", 1e3)
    notes = ["A dot is one optimizer step on its slowest rank; warm-up steps are left out of dots, median and p95."]
    notes += _not_shown(runs, [run for _, run in shown])
    with rc_context(STYLE):
        figure, (axis,) = _figure(runs, "Step time distribution", [0.85 * len(shown)], notes)
        for row, (index, run) in enumerate(shown):
            times, colour = run.step_times_s * per_second, COLOURS[index % len(COLOURS)]
            median, p95 = run.step_time_median_s * per_second, run.step_time_p95_s * per_second
            dots = times[:: -(-len(times) // MAX_DOTS)]
            # A fixed pattern instead of random jitter: the same runs give the same picture.
            offsets = ((np.arange(len(dots)) * 0.618034) % 1 - 0.5) * 0.42
            axis.scatter(dots, row + offsets, s=13, color=colour, alpha=0.45, linewidths=0)
            axis.plot([median] * 2, [row - 0.28, row + 0.28], color="#111111", linewidth=2.2)
            axis.plot([p95] * 2, [row - 0.28, row + 0.28], color="#111111", linewidth=1.4, linestyle=(0, (2, 1.5)))
            warmup = f"{run.num_warmup_steps} warm-up left out"
            text = f"median {_digits(median)} {unit} | p95 {_digits(p95)} {unit} | n = {len(times):,} ({warmup})"
            axis.annotate(
                text, (0, row - 0.34), xycoords=("axes fraction", "data"), xytext=(4, 0), textcoords="offset points",
                va="bottom", fontsize=8.5, color="#333333",
            )  # fmt: skip
        _name_rows(axis, [run for _, run in shown])
        axis.set_ylim(len(shown) - 0.6, -0.75)
        if use_log:
            axis.set_xscale("log", subs=(2, 5))
            axis.xaxis.set_minor_formatter("{x:,g}")
        axis.xaxis.set_major_formatter("{x:,g}")
        axis.set_xlabel(f"step time ({unit}{', log scale' if use_log else ''}); solid: median, dashed: p95")
        axis.grid(axis="x")
    return figure


CHARTS: dict[str, tuple[str, Callable[[Sequence[Run]], Figure | None]]] = {
    "training time": ("training_time_comparison.png", training_time_figure),
    "training throughput": ("training_throughput_comparison.png", throughput_figure),
    "loss against steps": ("loss_vs_steps.png", loss_vs_steps_figure),
    "loss against time": ("loss_vs_time.png", loss_vs_time_figure),
    "memory": ("memory_comparison.png", memory_figure),
    "step time": ("step_time_distribution.png", step_time_figure),
    "inference performance": ("inference_performance_comparison.png", inference_figure),
}


def write_charts(runs: Sequence[Run], output_dir: Path) -> dict[str, Path]:
    """Write every chart that these runs have data for; returns name -> PNG. OSError when the folder cannot be written.

    An earlier call's chart that these runs have no data for is removed: it would show other runs than its neighbours.
    """
    output_dir = Path(output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    saved = {}
    for name, (file_name, build) in CHARTS.items():
        path = output_dir / file_name
        figure = build(runs)
        if figure is None:
            path.unlink(missing_ok=True)
            continue
        with replacing(path) as temporary, rc_context(STYLE):
            figure.savefig(temporary, format="png", dpi=DPI)
        saved[name] = path
    return saved


def comparison_table(runs: Sequence[Run]) -> str:
    """The runs as plain text: a list of their names, then one column per run; "n/a" is what a file does not record."""

    def number(value: float | None, form: str, factor: float = 1) -> str:
        return "n/a" if value is None else format(value * factor, form)

    def kind_of_memory(run: Run) -> str:
        return "" if not run.memory_bytes_per_rank else " RSS" if "RSS" in run.memory_meaning else " CUDA"

    columns = [
        {
            "": f"[{index}]",
            "ranks": number(run.world_size, ",d"),
            "optimizer steps": number(run.work.get("optimizer_steps"), ",d"),
            "global batch (sequences)": number(run.work.get("global_batch_size"), ",d"),
            "median step (ms)": number(run.step_time_median_s, ",.1f", 1e3),
            "p95 step (ms)": number(run.step_time_p95_s, ",.1f", 1e3),
            "measured steps": f"{len(run.step_times_s):,}" if len(run.step_times_s) else "n/a",
            "tokens/s": _rate(run.tokens_per_s) + (" per rank" if run.version == "1" else ""),
            "speed-up over [1]": f"{speed_up:.2f}x" if isinstance(speed_up, float) else speed_up,
            "training time (s)": number(run.training_time_s, ",.2f"),
            "final training loss": number(run.final_train_loss, ".4f"),
            "final validation loss": number(run.final_validation_loss, ".4f"),
            "peak memory (MiB, largest rank)": number(run.peak_memory_bytes, ",.0f", 2**-20) + kind_of_memory(run),
            "MFU": number(run.mfu, ".1%"),
        }
        for index, (run, speed_up) in enumerate(zip(runs, speed_ups(runs), strict=True), start=1)
    ]
    names = list(columns[0])
    name_width = max(map(len, names))
    widths = [max(map(len, column.values())) for column in columns]
    lines = [f"[{index}] {run.full_label}" for index, run in enumerate(runs, start=1)] + [""]
    for name in names:
        cells = [column[name].rjust(width) for column, width in zip(columns, widths, strict=True)]
        lines.append("   ".join([name.ljust(name_width), *cells]))
    return "\n".join(lines)


def _bars_by_meaning(
    runs: Sequence[Run],
    title: str,
    axis_label: str,
    bars: list[tuple[Run, str, float]],
    text: Callable[[Run, str, float], str],
    units: Sequence[tuple[str, float, float]],
    dots: Callable[[Run], Sequence[float]] = lambda run: (),
    note: str = "",
) -> Figure | None:
    """Horizontal bars of (run, meaning, value), one panel per meaning: two meanings on one axis would compare.

    Each panel takes the last of `units` (name, size, from which largest value on); `text` writes a bar's label in it,
    or in a smaller one where it would be below 1.
    """

    def unit_for(value: float) -> tuple[str, float]:
        return next((name, size) for name, size, smallest in reversed(units) if value >= smallest)

    if not bars:
        return None
    panels: dict[str, list] = {}
    for run, meaning, value in bars:
        panels.setdefault(meaning, []).append((run, value))
    notes = [note] if note and any(dots(run) for run, _, _ in bars) else []
    notes += ["Panels measure different things and do not compare."] if len(panels) > 1 else []
    notes += _not_shown(runs, [run for run, _, _ in bars])
    with rc_context(STYLE):
        figure, axes = _figure(runs, title, [0.35 + 0.58 * len(panel) for panel in panels.values()], notes)
        for axis, (meaning, panel) in zip(axes, panels.items(), strict=True):
            largest = max(value for _, value in panel)
            unit, size = unit_for(largest)
            for row, (run, value) in enumerate(panel):
                unfit = run.instrumented or run.status != "complete"
                axis.barh(
                    row, value / size, height=0.62, color=_colour(runs, run), alpha=0.55 if unfit else 0.92,
                    hatch="///" if unfit else None, edgecolor="white", linewidth=0,
                )  # fmt: skip
                ranks = [rank / size for rank in dots(run)]
                offsets = np.linspace(-0.2, 0.2, len(ranks))
                axis.scatter(ranks, row + offsets, s=16, color="white", edgecolors="#222222", linewidths=0.9, zorder=3)
                label = text(run, *unit_for(largest if value >= size else value))
                axis.annotate(
                    label, (value / size, row), xytext=(7, 0), textcoords="offset points",
                    va="center", fontsize=9.5, color="#222222",
                )  # fmt: skip
            _name_rows(axis, [run for run, _ in panel])
            axis.set_ylim(len(panel) - 0.5, -0.5)
            axis.set_xlim(0, largest / size * 1.42)  # room for the text after the longest bar
            axis.set_title(meaning, fontsize=9, color="#555555", loc="left")
            axis.set_xlabel(axis_label.format(unit=unit))
            axis.xaxis.set_major_formatter("{x:,g}")
            axis.grid(axis="x")
    return figure


def _loss_figure(runs: Sequence[Run], title: str, x_label: str, by_time: bool) -> Figure | None:
    def x_of(points: tuple) -> tuple[list, list]:
        pairs = [(point.train_time_s if by_time else point.step, point.loss) for point in points]
        pairs = [(x, loss) for x, loss in pairs if x is not None]
        return [x for x, _ in pairs], [loss for _, loss in pairs]

    lines = {run: run.train_times_s if by_time else run.train_steps for run in runs}
    points = {run: x_of(run.validation_losses)[0] + x_of(run.epoch_losses)[0] for run in runs}
    shown = [run for run in runs if len(lines[run]) or points[run]]
    if not shown:
        return None
    window = max(1, max(map(len, lines.values())) // 40)
    smoothed = {run for run in shown if 1 < window <= len(lines[run]) // 4}  # a short run would lose its ends
    # The sum of step times leaves out what the wall clock of a whole run has: validation, saving, logging.
    wall = {run: [(p.elapsed_s, p.loss) for p in run.validation_losses if p.elapsed_s is not None] for run in shown}
    with_wall_time = by_time and any(wall.values())
    notes = ["Filled markers: validation loss."]
    if any(len(lines[run]) for run in set(shown) - smoothed):
        notes.insert(0, f"{'Other lines' if smoothed else 'Lines'}: training loss of each step.")
    if smoothed:
        notes.insert(0, f"Line over a pale one: training loss, mean over {window} steps, and of each step.")
    if any(x_of(run.epoch_losses)[0] for run in shown):
        notes.append("Hollow markers: training loss, mean over an epoch.")
    notes = [" ".join(notes), *_not_shown(runs, shown)]
    with rc_context(STYLE):
        figure, (axis, *wall_axis) = _figure(runs, title, [4.4], notes, columns=2 if with_wall_time else 1)
        for order, run in enumerate(shown):
            colour, index = _colour(runs, run), runs.index(run)
            look = index + index // len(COLOURS)  # the ninth run has the first one's colour, and nothing else of it
            marker, style = MARKERS[look % len(MARKERS)], LINE_STYLES[look % len(LINE_STYLES)]
            width, size = 1.6 + 1.6 * 0.5**order, max(6.0, 12.5 * 0.65**order)
            label = _wrapped(run.full_label, 52)
            x, losses = lines[run], run.train_losses
            if len(x):
                steps_in_mean = window if run in smoothed else 1
                if steps_in_mean > 1:
                    axis.plot(x, losses, color=colour, alpha=0.25, linewidth=0.8)
                # "valid" keeps whole windows only, each drawn at its middle: no value from outside the run.
                smooth = np.convolve(losses, np.full(steps_in_mean, 1 / steps_in_mean), mode="valid")
                middle = x[steps_in_mean // 2 :][: len(smooth)]
                line = {"color": colour, "linewidth": width, "linestyle": style, "label": label, "markersize": 11}
                axis.plot(middle, smooth, marker="." if len(smooth) == 1 else None, **line)  # a line of one is no line
                label = None
            # Later runs are drawn thinner and smaller: at equal work they fall on top of each other.
            for losses_at, face in ((run.validation_losses, colour), (run.epoch_losses, "white")):
                x, losses = x_of(losses_at)
                if x:
                    edge = "white" if face is colour else colour
                    axis.plot(
                        x, losses, marker, markersize=size, color=face, markeredgecolor=edge, markeredgewidth=0.9,
                        label=label, zorder=4,
                    )  # fmt: skip
                    label = None
            if with_wall_time and wall[run]:
                wall_axis[0].plot(
                    *zip(*wall[run], strict=True), color=colour, linewidth=width, linestyle=style, marker=marker,
                    markersize=size, markeredgecolor="white", markeredgewidth=0.9,
                )  # fmt: skip
        axis.set_xlabel(x_label)
        earlier = "\nv1 and 2.0: wall time of the training loops" * any(run.version != "2.1" for run in shown)
        titles = [f"Sum of step times; evaluation, saving and logging excluded{earlier}"] if by_time else []
        if with_wall_time:
            titles.append("Validation loss; evaluation, saving and logging included")
            wall_axis[0].set_xlabel("wall time since the first step began (s)")
        axis.set_ylabel("loss (nats per token)")
        for each, meaning in itertools.zip_longest([axis, *wall_axis], titles, fillvalue=""):
            each.set_title(meaning, fontsize=9, color="#555555", loc="left")
            each.set_xlim(left=0)
            each.xaxis.set_major_formatter("{x:,g}")
            each.grid(axis="both")
        axis.legend(loc="best", frameon=True, framealpha=0.9, edgecolor="#DDDDDD", fontsize=9)
    return figure


def _figure(
    runs: Sequence[Run], title: str, panel_inches: list[float], notes: list[str], columns: int = 1
) -> tuple[Figure, Sequence[Axes]]:
    """A figure with stacked panels, or `columns` in a row with one y axis; title above, notes and warnings below."""
    several = len(runs) > 1
    caveat = "One run each: no interval, so a small difference may be noise." if several else "One run: no interval."
    footer = [
        (line, "#666666") for note in [*notes, caveat] for line in textwrap.wrap(note, FOOTER_CHARACTERS * 7 // 6)
    ]
    footer += [(line, WARNING_COLOUR) for note in warnings(runs) for line in textwrap.wrap(note, FOOTER_CHARACTERS)]
    footer_inches = FOOTER_LINE_INCHES * len(footer) + 0.12
    title_inches = 0.5
    height = title_inches + sum(panel_inches) + 0.75 * len(panel_inches) + footer_inches
    figure = Figure(figsize=(WIDTH_INCHES, height), layout="constrained")
    bottom = footer_inches / height
    figure.get_layout_engine().set(rect=(0.008, bottom, 0.984, 1 - bottom - title_inches / height), hspace=0.06)
    figure.text(0.012, 1 - 0.16 / height, title, fontsize=15, fontweight="bold", color="#111111", va="top")
    for line, (text, colour) in enumerate(footer):
        y = (footer_inches - 0.04 - FOOTER_LINE_INCHES * line) / height
        weight = "bold" if colour == WARNING_COLOUR else "normal"
        figure.text(0.012, y, text, fontsize=8.5, color=colour, weight=weight, va="top")
    rows = len(panel_inches)
    return figure, figure.subplots(rows, columns, squeeze=False, sharey="row", height_ratios=panel_inches).ravel()


def _name_rows(axis: Axes, runs: Sequence[Run]) -> None:
    labels = [_wrapped(run.full_label, LABEL_CHARACTERS) for run in runs]
    axis.set_yticks(range(len(runs)), labels, fontsize=9)
    axis.tick_params(axis="y", length=0)


def _wrapped(label: str, width: int) -> str:
    """`label` in lines of `width` characters, broken after commas where that is enough."""
    parts = textwrap.wrap(re.sub("(?<!,) ", "\u00a0", label), width, break_long_words=False)
    return "\n".join(textwrap.fill(part.replace("\u00a0", " "), width) for part in parts)


def _colour(runs: Sequence[Run], run: Run) -> str:
    return COLOURS[runs.index(run) % len(COLOURS)]


def _digits(value: float) -> str:
    """Four significant digits, zeros kept: 13.80, 8.000, 1,364; all of a larger number's: 61,440."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:#.4g}".rstrip(".")


def _rate(tokens_per_s: float | None) -> str:
    return "n/a" if tokens_per_s is None else format(tokens_per_s, ",.0f" if tokens_per_s >= 10 else ".3g")


def _counted(steps: int | None) -> str:
    return f"  (n = {steps:,} step{'s' * (steps > 1)})" if steps else ""


def _not_shown(runs: Sequence[Run], shown: Sequence[Run]) -> list[str]:
    missing = [run.full_label for run in runs if run not in shown]
    return [f"Not shown (not in the file): {'; '.join(missing)}."] if missing else []
