"""Write the study of predictions in Markdown, and draw it: the blocks of docs/results/planner/README.md. No torch."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from testbed.analysis.charts.style import COLOURS, STYLE, save_png
from testbed.experiments.calibration.study_file import MOST_ERROR, WITHIN_BEST, error_of

PICTURE = "predicted_measured.png"
PAGE = f"""# Predicted from a calibration, and measured

`python scripts/plan.py --calibrate`, then `python scripts/planner_study.py`, as root.
[planner.md](../../planner.md#calibrate) says what is measured and how a step is predicted.
`python scripts/maintain/update_docs.py` fills the tables of this page in. To draw the picture too:
`python scripts/planner_study.py --tables docs/results/planner --into docs/results/planner/README.md`

<!-- made by: scripts/maintain/update_docs.py planner study -->

<!-- end of planner study -->

![Predicted against measured]({PICTURE})

## What the plan would choose

A set is all run types that do the same work on the same ranks over the same link.

<!-- made by: scripts/maintain/update_docs.py planner choices -->

<!-- end of planner choices -->

## Every configuration

<!-- made by: scripts/maintain/update_docs.py planner predictions -->

<!-- end of planner predictions -->

## Memory of processes on CPU cores

`python scripts/planner_study.py --memory`. glibc gives freed memory back at once here
(`MALLOC_MMAP_THRESHOLD_=65536`), so the resident set is what is alive. Usually src/gpt2.py keeps it for the next
step, which is faster and takes more. The formulas were corrected on these runs, so the errors are not blind.

<!-- made by: scripts/maintain/update_docs.py planner memory -->

<!-- end of planner memory -->
"""


def blocks(content: Mapping[str, Any]) -> dict[str, str]:
    """Return Markdown by the name of its place in the page."""
    return {
        "planner study": f"{what_was_measured(content)}\n\n{summary_table(content)}",
        "planner choices": choices_table(content),
        "planner predictions": predictions_table(content),
    }


def what_was_measured(content: Mapping[str, Any]) -> str:
    """Return a paragraph: the runs, the machine, the calibration, and what came out."""
    hardware, made, found = content["hardware"], content["calibration"], content["results"]
    runs = sum(len(row["measured_s"]) for row in content["rows"])
    missing = f" **{len(content['not_measured'])} runs failed.**" if content["not_measured"] else ""
    commits = ", ".join(f"`{commit}`" for commit in content["git_commits"])
    everything = found["errors"]["all"]
    return (
        f"{runs} runs of {len(content['rows'])} configurations, {content['steps']} steps each, the first "
        f"{content['warmup_steps']} warm-up, one thread per rank, on {hardware['cpu_cores_visible']} cores "
        f"({hardware['cpu_name']}), PyTorch {content['env'].get('torch_version')}, commit {commits}.{missing} The "
        f"calibration took {made.get('seconds')} s and {made['whole_steps']} whole steps, none of them of these sizes. "
        f"Median error {everything['median']:.1%}, 90th percentile {everything['p90']:.1%}; "
        f"{found['covered']:.0%} of the runs lie in their 90 % interval. "
        f"The plan's choice is within {WITHIN_BEST:.0%} of the best measured in "
        f"{found['chosen_well']} of {len(found['choices'])} sets."
    )


def summary_table(content: Mapping[str, Any]) -> str:
    """Return a row per group of runs: all, by ranks and link, by run type."""
    lines = ["| runs | n | median error | 90th percentile |", "|---|---:|---:|---:|"]
    for name, errors in content["results"]["errors"].items():
        over = " (more than asked for)" if errors["median"] > MOST_ERROR else ""
        lines.append(f"| {name} | {errors['rows']} | {errors['median']:.1%}{over} | {errors['p90']:.1%} |")
    return "\n".join(lines)


def choices_table(content: Mapping[str, Any]) -> str:
    """Return a row per set of runs that do the same work on the same devices."""
    lines = [
        "| work | ranks | link | candidates | the plan's choice | best measured | slower by |",
        "|---|---:|---|---:|---|---|---:|",
    ]
    for each in content["results"]["choices"]:
        place = f"| {each['work']} | {each['ranks']} | {each['link']} | {each['rows']} "
        lines.append(f"{place}| {each['chosen']} | {each['best']} | {each['loss']:.1%} |")
    return "\n".join(lines)


def predictions_table(content: Mapping[str, Any]) -> str:
    """Return a row per configuration."""
    lines = [
        "| work | run type | ranks | link | measured (ms) | predicted (ms) [90 % interval] | error | largest part |",
        "|---|---|---:|---|---:|---:|---:|---|",
    ]
    for row in content["rows"]:
        measured = statistics.median(row["measured_s"])
        bounds = f"{1000 * row['predicted_s']:.1f} [{1000 * row['low_s']:.1f}, {1000 * row['high_s']:.1f}]"
        largest = max(row["parts"], key=lambda part: row["parts"][part])
        place = f"| {row['work']} | {row['kind']} | {row['ranks']} | {row['link']} "
        lines.append(f"{place}| {1000 * measured:.1f} | {bounds} | {error_of(row):+.1%} | {largest} |")
    return "\n".join(lines)


def draw(content: Mapping[str, Any], folder: Path) -> Path:
    """Draw predicted against measured, a colour per number of ranks and link. Returns the picture."""
    path = folder / PICTURE
    save_png(_figure(content), path)
    return path


def _figure(content: Mapping[str, Any]) -> Figure:
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in content["rows"]:
        groups.setdefault(f"{row['ranks']} rank{'s' * (row['ranks'] > 1)}, {row['link']}", []).append(row)
    with rc_context(STYLE):
        figure = Figure(figsize=(7, 6.4), layout="constrained")
        axis = figure.subplots()
        for colour, (name, rows) in zip(COLOURS, groups.items(), strict=False):
            measured = [1000 * statistics.median(row["measured_s"]) for row in rows]
            predicted = [1000 * row["predicted_s"] for row in rows]
            below = [1000 * max(row["predicted_s"] - row["low_s"], 0.0) for row in rows]
            above = [1000 * max(row["high_s"] - row["predicted_s"], 0.0) for row in rows]
            axis.errorbar(measured, predicted, yerr=[below, above], fmt="o", markersize=5, color=colour, label=name,
                          elinewidth=0.7, alpha=0.85)  # fmt: skip
        ends = [1000 * value(row) for row in content["rows"] for value in (_least, _most)]
        line = [min(ends) * 0.9, max(ends) * 1.1]
        axis.plot(line, line, color="#555555", linewidth=1)
        axis.fill_between(line, [0.92 * x for x in line], [1.08 * x for x in line], color="#555555", alpha=0.12,
                          linewidth=0)  # fmt: skip
        axis.set(xscale="log", yscale="log", xlim=line, ylim=line)
        for direction in (axis.xaxis, axis.yaxis):
            direction.set_major_locator(LogLocator(subs=(1, 2, 5)))
            direction.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            direction.set_minor_formatter(NullFormatter())
        axis.set_xlabel("measured optimizer step, ms")
        axis.set_ylabel("predicted, ms, with its 90 % interval")
        axis.set_title("Predicted from a calibration against measured; shaded: 8 % off", fontsize=11, loc="left")
        axis.legend(frameon=False)
    return figure


def _least(row: Mapping[str, Any]) -> float:
    return min(row["low_s"], *row["measured_s"])


def _most(row: Mapping[str, Any]) -> float:
    return max(row["high_s"], *row["measured_s"])
