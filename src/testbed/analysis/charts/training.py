"""Draw runs. Each picture states what is measured, over how many steps, and what keeps the runs from being comparable.

Figures are built without pyplot: no window system, no global state. Panels never mix two meanings of a quantity.
"""

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from testbed.analysis.charts.bars import plot_results, runs_figure
from testbed.analysis.charts.loss import loss_vs_steps_figure, loss_vs_time_figure
from testbed.analysis.charts.style import (
    LABEL_CHARACTERS,
    STYLE,
    colour_of,
    figure_with_footer,
    not_shown,
    row_inches,
    rows_on,
    save_png,
    wrapped,
)
from testbed.analysis.document.model import Cell, Table
from testbed.analysis.document.terminal import table_lines
from testbed.analysis.document.words import UNKNOWN, Number, digits, rate
from testbed.analysis.runs.comparability import cores_of, marks_of, note_on_cores, speed_ups
from testbed.analysis.runs.entries import Entry, subject_of
from testbed.analysis.runs.load import Run, on_one_peak
from testbed.metrics.busy_machine import signs_of_other_work

TITLE_CHARACTERS = 72  # of the title's type in a figure's width
CORES, GENERATED = "cores (ranks x threads)", "generated tokens/s, batch 1"
SKIPPED = "skipped steps (fp16 overflow)"
TABLE_CHARACTERS = 88  # of a line under the table
MAX_DOTS = 2000  # per run; median and p95 are of all steps


def _steps(number: int | None) -> str:
    return f"  (n = {number:,} step{'s' * (number > 1)})" if number else ""


training_time_figure = partial(
    runs_figure, name="training_time", after=lambda run: _steps(run.work.get("optimizer_steps"))
)
memory_figure = partial(
    runs_figure, name="peak_memory",
    after=lambda run: f"  (largest of {ranks} ranks)" if (ranks := len(run.memory_bytes_per_rank)) > 1 else "",
)  # fmt: skip


def throughput_figure(runs: Sequence[Run]) -> Figure | None:
    """Draw tokens per second, with the speed-up where the work is equal."""
    speed_up_of = dict(zip(runs, speed_ups(runs), strict=True))

    def after(run: Run) -> str:
        speed_up = speed_up_of[run]
        compared = f"  {speed_up:.2f}x" if isinstance(speed_up, float) and run is not runs[0] else ""
        if compared and note_on_cores((runs[0], run)):
            compared += f" on {cores_of(run)} cores for {cores_of(runs[0])}"
        return compared + _steps(len(run.step_times_s))

    return runs_figure(runs, "tokens_per_second", after=after)


def inference_figure(runs: Sequence[Run]) -> Figure | None:
    """Draw generated tokens per second. v1 measured once and without a cache, runs with --run_inference_benchmark
    several times with one: panels of their own."""

    def after(run: Run) -> str:
        return f"  ({run.inference_latency_s:.3f} s in all)" if run.inference_latency_s else ""

    return runs_figure(runs, "inference", _inference_title([run for run in runs if run.inference_tokens_per_s]), after)


def _inference_title(runs: Sequence[Run]) -> str:
    """Return what two runs show and no more: a difference is of these runs alone, and one that their own repeats do
    not tell from noise is none."""
    title = "Inference performance"
    if len(runs) != 2 or runs[0].inference_meaning != runs[1].inference_meaning:
        return title
    first, second = runs
    repeats = [run.inference_repeats_tokens_per_s for run in (second, first)]
    if min(map(len, repeats)) > 1:
        from testbed.analysis.statistics import NO_DIFFERENCE, compare  # scipy: a second that v1 alone does not owe

        if compare(*repeats).verdict == NO_DIFFERENCE:
            return f"{title}: {NO_DIFFERENCE} between two runs"
    assert first.inference_tokens_per_s is not None and second.inference_tokens_per_s is not None
    ratio = second.inference_tokens_per_s / first.inference_tokens_per_s
    if f"{ratio:.2f}" == "1.00":
        return f"{title}: two runs within half a per cent"
    how = f"{'faster' if ratio > 1 else 'slower'} than"
    names = [run.label.partition(",")[0] for run in (first, second)]
    said = f"Inference: {names[1]} {how} {names[0]}, {ratio:.2f}x (one run each)"
    if len(said) > TITLE_CHARACTERS or names[0] == names[1]:
        said = f"Inference: the second run {how} the first, {ratio:.2f}x (one run each)"
    return said


def step_time_figure(runs: Sequence[Run]) -> Figure | None:
    """Draw every measured step as a dot, one row per run, with median and p95."""
    shown = [(index, run) for index, run in enumerate(runs) if len(run.step_times_s)]
    if not shown:
        return None
    medians_s = [median_s for _, run in shown if (median_s := run.step_time_median_s) is not None]
    use_log = max(run.step_times_s.max() for _, run in shown) > 8 * min(medians_s)
    unit, per_second = ("s", 1) if max(medians_s) >= 10 else ("ms", 1e3)
    meaning = "A dot is one optimizer step on its slowest rank; warm-up steps are left out of dots, median and p95."
    notes = [meaning, *not_shown(runs, [run for _, run in shown])]
    marks = marks_of(runs)
    labels = [wrapped(marks[run] + run.full_label, LABEL_CHARACTERS) for _, run in shown]
    with rc_context(STYLE):
        figure, (axis,) = figure_with_footer(
            runs, "Step time distribution", [row_inches(labels, 0.85) * len(shown)], notes
        )
        for row, (_, run) in enumerate(shown):
            times, colour = run.step_times_s * per_second, colour_of(runs, run)
            assert run.step_time_median_s is not None and run.step_time_p95_s is not None
            median, p95 = run.step_time_median_s * per_second, run.step_time_p95_s * per_second
            dots = times[:: -(-len(times) // MAX_DOTS)]
            # A fixed pattern instead of random jitter: the same runs give the same picture.
            offsets = ((np.arange(len(dots)) * 0.618034) % 1 - 0.5) * 0.42
            axis.scatter(dots, row + offsets, s=13, color=colour, alpha=0.45, linewidths=0)
            axis.plot([median] * 2, [row - 0.28, row + 0.28], color="#111111", linewidth=2.2)
            axis.plot([p95] * 2, [row - 0.28, row + 0.28], color="#111111", linewidth=1.4, linestyle=(0, (2, 1.5)))
            warmup = f"{run.num_warmup_steps} warm-up left out"
            text = f"median {digits(median)} {unit} | p95 {digits(p95)} {unit} | n = {len(times):,} ({warmup})"
            axis.annotate(
                text, (0, row - 0.34), xycoords=("axes fraction", "data"), xytext=(4, 0), textcoords="offset points",
                va="bottom", fontsize=8.5, color="#333333",
            )  # fmt: skip
        rows_on(axis, labels)
        axis.set_ylim(len(shown) - 0.6, -0.75)
        if use_log:
            axis.set_xscale("log", subs=(2, 5))
            axis.xaxis.set_minor_formatter("{x:,g}")
        axis.xaxis.set_major_formatter("{x:,g}")
        axis.set_xlabel(f"step time ({unit}{', log scale' if use_log else ''}); solid: median, dashed: p95")
        axis.grid(axis="x")
    return figure


# What is drawn -> its file, its quantity where it is one of charts/bars.py, and the figure of single runs.
CHARTS: dict[str, tuple[str, str, Callable[[Sequence[Run]], Figure | None]]] = {
    "training time": ("training_time_comparison.png", "training_time", training_time_figure),
    "training throughput": ("training_throughput_comparison.png", "tokens_per_second", throughput_figure),
    "loss against steps": ("loss_vs_steps.png", "", loss_vs_steps_figure),
    "loss against time": ("loss_vs_time.png", "", loss_vs_time_figure),
    "memory": ("memory_comparison.png", "peak_memory", memory_figure),
    "step time": ("step_time_distribution.png", "", step_time_figure),
    "inference performance": ("inference_performance_comparison.png", "inference", inference_figure),
}


def write_charts(runs: Sequence[Run], output_dir: Path) -> dict[str, Path]:
    """Write every chart that these runs have data for; return name -> PNG. OSError when the folder cannot be written.

    Where configurations were repeated, a picture shows configurations: their median with a dot for each run, or where
    there is room for one run only, the run of median throughput; those without a run to quote are left out. An earlier
    call's chart that these runs have no data for is removed: it would show other runs than its neighbours.
    """
    output_dir = Path(output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    saved = {}
    repeated = _repeated(runs)
    shown = list(map(_median_run, repeated)) or runs
    for name, (file_name, quantity, build) in CHARTS.items():
        path = output_dir / file_name
        figure = (_plot_repeats(repeated, quantity) if quantity else None) or build(shown)
        if figure is None:
            path.unlink(missing_ok=True)
            continue
        save_png(figure, path)
        saved[name] = path
    return saved


def _repeated(runs: Sequence[Run]) -> list[Entry]:
    """Return the configurations that give a throughput, or none where no configuration was repeated."""
    entries = subject_of(runs).measured if runs else []
    return entries if any(len(entry.runs) > 1 for entry in entries) else []


def _plot_repeats(entries: Sequence[Entry], quantity: str) -> Figure | None:
    """Draw repeats. None where the files measure the quantity differently, or not at all: single runs get panels."""
    try:
        return plot_results({entry.name: entry.runs for entry in entries}, quantity)
    except ValueError:
        return None


def _median_run(entry: Entry) -> Run:
    """Return the run of median throughput, named as what it is, with all seeds of its configuration."""
    runs = entry.measured_runs
    count = f"the median run of {len(runs)}" if len(runs) > 1 else "one run"
    seeds = " ".join(sorted({str(run.work.get("seed")) for run in runs}))
    run = entry.median_run
    return replace(run, label=f"{entry.name} ({count})", work=run.work | {"seed": seeds}, num_repeats=len(runs))


def comparison_table(runs: Sequence[Run], notes: Sequence[str] = ()) -> str:
    """Return the runs as plain text: a list of their names, then one column per run; "n/a": not in the file.

    `notes` are sentences to print below the table.
    """
    runs, peaks = on_one_peak(runs)
    columns = [_column(run, speed_up) for run, speed_up in zip(runs, speed_ups(runs), strict=True)]
    # What only some kinds of runs have is a row where one of these runs has it.
    names = [
        name
        for name in columns[0]
        if name not in (CORES, SKIPPED, GENERATED) or any(str(c[name]) != UNKNOWN for c in columns)
    ]
    header = ["", *(f"[{index}]" for index in range(1, len(runs) + 1))]
    table = Table(header, [[name, *(column[name] for column in columns)] for name in names], text_columns=(0,))
    lines = [f"[{index}] {run.full_label}" for index, run in enumerate(runs, start=1)]
    lines += ["", *table_lines(table)]
    busy = [f"[{number}]: {sign}." for number, run in enumerate(runs, 1) for sign in signs_of_other_work(run.record)]
    for note in filter(None, [note_on_cores(runs), *busy, *peaks, *notes]):
        lines += ["", *textwrap.wrap(note, TABLE_CHARACTERS)]
    return "\n".join(lines)


def _column(run: Run, speed_up: float | str) -> dict[str, Cell]:
    """Return one run in the table, by the name of the row."""
    mib = None if run.peak_memory_bytes is None else run.peak_memory_bytes / 2**20
    kind = "" if mib is None else " RSS" if "RSS" in run.memory_meaning else " CUDA"
    median_s, p95_s = run.step_time_median_s, run.step_time_p95_s
    is_v1 = run.version == "1"
    return {
        "ranks": Number(run.world_size, ",d"),
        CORES: Number(cores_of(run), ",d"),
        "optimizer steps": Number(run.work.get("optimizer_steps"), ",d"),
        SKIPPED: Number(int(np.isnan(run.grad_norms).sum()) or None, ",d"),
        "global batch (sequences)": Number(run.work.get("global_batch_size"), ",d"),
        "median step (ms)": Number(median_s and median_s * 1e3, ",.1f"),
        "p95 step (ms)": Number(p95_s and p95_s * 1e3, ",.1f"),
        "measured steps": Number(len(run.step_times_s) or None, ",d"),
        "tokens/s": rate(run.tokens_per_s) + " per rank" * is_v1,
        "speed-up over [1], n = 1": speed_up if isinstance(speed_up, str) else Number(speed_up, ".2f", unit="x"),
        "training time (s)": Number(run.training_time_s, ",.2f"),
        "final training loss": Number(run.final_train_loss, ".4f"),
        "final validation loss": Number(run.final_validation_loss, ".4f"),
        "peak memory (MiB, largest rank)": (Number(mib, ",.0f"), kind),
        "MFU": Number(run.mfu, ".1%"),
        GENERATED: Number(run.inference_tokens_per_s or None, ",.1f", unit=" no cache" * is_v1),
    }
