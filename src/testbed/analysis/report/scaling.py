"""The report on scaling: speed-up against ranks, one protocol at a time, and the law fitted to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testbed.analysis.charts.style import strategy_colour
from testbed.analysis.document.model import Block, Cell, Picture, RunLinks, Section, Table, Verdict
from testbed.analysis.document.words import Number, between, joined, times
from testbed.analysis.report.details import without_unknown
from testbed.analysis.report.figures import link_to, links_to, scaling_figure
from testbed.analysis.report.verdicts import NO_CLAIM
from testbed.analysis.runs.entries import Entry, Subject
from testbed.analysis.runs.load import Run
from testbed.analysis.scaling.report import scaling_report
from testbed.analysis.statistics import NOT_ENOUGH

LAWS = {"strong": "amdahl", "weak": "gustafson"}


@dataclass(frozen=True)
class ScalingStudy:
    """Runs of one protocol and their scaling report, or the sentence that says why there is none."""

    protocol: str
    report: dict[str, Any] | None
    refusal: str


def studies(subject: Subject, target: float | None) -> list[ScalingStudy]:
    """A scaling report for each sweep, and one for the runs of none as strong scaling."""
    found = []
    for protocol, runs, cells, aim in _runs_of_studies(subject, target):
        try:
            found.append(ScalingStudy(protocol, scaling_report(runs, protocol, target=aim, cells=cells), ""))
        except ValueError as error:
            found.append(ScalingStudy(protocol, None, str(error)))
    return found


def scaling_verdicts(subject: Subject, of_studies: Sequence[ScalingStudy]) -> list[Verdict]:
    """What weak scaling and time to loss come to; strong scaling compares equal work, which the others say already."""
    found = []
    for study in of_studies:
        if study.report is None or study.protocol == "strong":
            continue
        entry_of = _entries(subject, study.report)
        aim = study.report["protocol"]["target_val_loss"]
        for row in study.report["arms"]:
            if not row["speedup"] or not row["verdict"]:
                continue
            entry, ratio = entry_of[id(row)], times(row["speedup"]["ratio"])
            numbers = f"n = {row['n']}"
            if interval := _interval(row["speedup"]):
                numbers = f"95 % interval {interval}, {numbers}"
            if row["verdict"] == NOT_ENOUGH:
                kind, claim = (
                    NO_CLAIM,
                    f"Not enough repeats for a claim on {study.protocol.replace('_', ' ')}: {entry.name}",
                )
                numbers = f"ratio {ratio}, {numbers}"
            elif study.protocol == "weak":
                kind = row["verdict"]
                efficiency = f"{row['efficiency']['ratio']:.0%}"
                claim = f"Weak scaling: {entry.name} does {ratio}x as much per second as {row['reference']}"
                numbers = f"efficiency {efficiency}, {numbers}"
            else:
                kind = row["verdict"]
                claim = f"{entry.name} reaches validation loss {aim:g} {ratio}x as soon as {row['reference']}"
            found.append(Verdict(kind, claim, numbers))
    return found


def scaling(subject: Subject, of_studies: Sequence[ScalingStudy]) -> Section | None:
    """Speed-up and efficiency against ranks, one protocol at a time, with the law that belongs to it."""
    parts: list[Block] = []
    paragraphs: list[str] = []
    for number, study in enumerate(of_studies, start=1):
        protocol, report = study.protocol, study.report
        if report is None:
            paragraphs.append(f"No scaling report: {study.refusal}.")
            continue
        rows = [row for row in report["arms"] if row["speedup"]]
        if len({row["ranks"] for row in rows}) < 2:
            continue
        shown = _entries(subject, report)
        picture = _scaling_picture(report, rows, shown, protocol, number)
        parts += [picture] if picture else []
        columns = ["configuration", "n", "speed-up", "95 % interval", "efficiency", "against"]
        table: list[list[Cell]] = [
            [
                link_to(shown[id(row)]),
                str(row["n"]),
                Number(row["speedup"] and row["speedup"]["ratio"], times, unit="x"),
                _interval(row["speedup"]),
                Number(row["efficiency"] and row["efficiency"]["ratio"], ".0%"),
                _against(row),
            ]
            for row in sorted(report["arms"], key=lambda row: shown[id(row)].number)
        ]
        parts.append(Table(columns, table, "Speed-up and efficiency", (0, 5)))
        fits, notes = _fit_rows(report, protocol, shown)
        if fits:
            columns = ["strategy", "serial fraction", "95 % interval", "speed-up at most", "runs"]
            title = f"{LAWS[protocol].capitalize()}'s law, fitted to every run of a strategy"
            note = "A description of these points, not a cause: communication, imbalance and slower clocks go in"
            parts.append(Table(*without_unknown(columns, fits), title, (0,), f"{note}{notes}."))
        paragraphs += [f"{warning.rstrip('.')}." for warning in report["warnings"]]
    return Section("Scaling", [*dict.fromkeys(paragraphs), *parts], "scaling") if parts else None


def _entries(subject: Subject, report: dict[str, Any]) -> dict[int, Entry]:
    """The configuration that each row of a scaling report is about."""
    entry_of = {str(run.path): entry for entry in subject.entries for run in entry.runs}
    return {id(row): entry_of[row["metrics_paths"][0]] for row in report["arms"]}


def _runs_of_studies(
    subject: Subject, target: float | None
) -> list[tuple[str, list[Run], dict[Path, dict], float | None]]:
    """What one scaling report is made of: the runs of each sweep, and those of none, as strong scaling."""
    found, taken = [], set()
    for out_dir, sweep in subject.sweeps.items():
        folders = {out_dir / cell["folder"]: cell for cell in sweep["cells"]}
        runs = [run for run in subject.runs if run.path.absolute().parent in folders]
        cells = {run.path.parent: folders[run.path.absolute().parent] for run in runs}
        aim = sweep.get("target_val_loss") if target is None else target
        if runs:
            found.append((sweep["protocol"], runs, cells, aim))
            taken |= set(runs)
    rest = [run for entry in subject.measured for run in entry.measured if run not in taken]
    return [*found, *([("strong", rest, {}, target)] if rest else [])]


def _scaling_picture(
    report: dict[str, Any], rows: Sequence[dict], shown: dict[int, Entry], protocol: str, number: int
) -> Picture | None:
    points: dict[str, list] = {}
    colours: dict[str, str] = {}
    several_batches = len({row["batch_size"] for row in rows}) > 1
    for row in sorted(rows, key=lambda row: (row["ranks"], shown[id(row)].number)):
        entry, speed_up = shown[id(row)], row["speedup"]
        name = entry.strategy + (f", batch {row['batch_size']}" if several_batches else "")
        points.setdefault(name, []).append((row["ranks"], speed_up["ratio"], speed_up["low"], speed_up["high"]))
        colours[name] = strategy_colour(entry.look)
    if not any(ranks > 1 for of_strategy in points.values() for ranks, *_ in of_strategy):
        return None
    law = LAWS.get(protocol)
    fits = {}
    for item in report["strategies"] if law else []:
        of_item = next((each for each in rows if each["strategy"] == item["strategy"]), None)
        if of_item is None:  # refused, as the table says
            continue
        name = shown[id(of_item)].strategy + (f", batch {item['batch_size']}" if several_batches else "")
        fits[name] = item["fits"][law]["serial_fraction"]
    caption = "Dots: ratio of medians; bar: its 95 % interval. Grey: the ideal." + (
        f" Dashed: {law.capitalize()}'s law with the fitted serial fraction; away from the measured rank counts "
        "it is the law that speaks, not a measurement."
        if law
        else ""
    )
    entries = sorted({shown[id(row)] for row in rows}, key=lambda entry: entry.number)
    title = f"{protocol.replace('_', ' ').capitalize()} scaling"
    return Picture(
        f"scaling_{number}",
        title,
        caption,
        links_to(entries),
        lambda look: scaling_figure(points, fits, colours, look, law=law),
    )


def _fit_rows(report: dict[str, Any], protocol: str, shown: dict[int, Entry]) -> tuple[list[list], str]:
    """The fits, and their notes in sentences that name the strategies only where these differ."""
    if protocol not in LAWS:
        return [], ""
    rows: list[list] = []
    noted: dict[str, list[str]] = {}
    names = {row["strategy"]: shown[id(row)].strategy for row in report["arms"]}
    several_batches = len({item["batch_size"] for item in report["strategies"]}) > 1
    for item in report["strategies"]:
        name = names[item["strategy"]] + (f", batch {item['batch_size']}" if several_batches else "")
        fit = item["fits"][LAWS[protocol]]
        if fit["serial_fraction"] is None:
            continue
        interval = between(fit["low"], fit["high"], "{:.1%}".format)
        members = [
            shown[id(row)]
            for row in report["arms"]
            if (row["strategy"], row["batch_size"]) == (item["strategy"], item["batch_size"])
        ]
        numbers = tuple(sorted(number for entry in members for number in entry.run_numbers))
        rows.append([name, Number(fit["serial_fraction"], ".1%"), interval, _limit(fit), RunLinks(numbers)])
        for note in fit["notes"]:
            noted.setdefault(note, []).append(name)
    words = [
        f"; {'' if len(strategies) == len(rows) else joined(strategies) + ': '}{note}"
        for note, strategies in noted.items()
    ]
    return rows, "".join(words)


def _limit(fit: dict[str, Any]) -> Number:
    """Amdahl's 1 / s with the interval of s turned round; n/a without one, or where it reaches 0 and bounds nothing."""
    low, high, limit = fit["low"], fit["high"], fit["limit_of_speedup"]
    if (limit or 0) <= 1 or low is None or high is None or low <= 0:
        return Number(None, ".1f")
    return Number(limit, ".1f", 1 / high, 1 / low, unit="x")


def _interval(ratio: dict[str, Any] | None) -> str:
    return between(ratio["low"], ratio["high"], times) if ratio else ""


def _against(row: dict[str, Any]) -> str:
    if not row["speedup"]:
        return row["reason"] or ""
    is_itself = row["speedup"]["low"] is None and row["verdict"] is None
    return "reference" if is_itself else row["reference"]
