"""The report on scaling: speed-up against ranks, one protocol at a time, and the law fitted to it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from testbed.analysis.charts.style import strategy_colour
from testbed.analysis.comparison.two_arms import NO_CLAIM
from testbed.analysis.document.model import Block, Cell, Picture, Section, Verdict, plain, table_of
from testbed.analysis.document.words import between, times
from testbed.analysis.report.figures import link_to, links_to, scaling_figure
from testbed.analysis.runs.entries import Entry, Subject
from testbed.analysis.scaling.report import scaling_report
from testbed.analysis.scaling.tables import CELLS, fit_lines
from testbed.analysis.statistics import NOT_ENOUGH

LAWS = {"strong": "amdahl", "weak": "gustafson"}


@dataclass(frozen=True)
class ScalingStudy:
    """Runs of one protocol: their scaling report, or the sentence that says why there is none."""

    protocol: str
    report: dict[str, Any] | None
    refusal: str

    @property
    def name(self) -> str:
        return self.protocol.replace("_", " ")


def studies(subject: Subject, target: float | None) -> list[ScalingStudy]:
    """Return a scaling report for each sweep, and one for the runs of none as strong scaling."""
    groups, taken = [], set()
    for out_dir, sweep in subject.sweeps.items():
        folders = {out_dir / cell.folder: cell for cell in sweep.cells}
        runs = [run for run in subject.runs if run.path.absolute().parent in folders]
        cells = {run.path.parent: folders[run.path.absolute().parent] for run in runs}
        groups.append((sweep.protocol, runs, cells, sweep.target_val_loss if target is None else target))
        taken |= set(runs)
    rest = [run for entry in subject.measured for run in entry.measured_runs if run not in taken]
    found = []
    for protocol, runs, cells, aim in [*groups, ("strong", rest, {}, target)]:
        try:
            if runs:
                found.append(ScalingStudy(protocol, scaling_report(runs, protocol, target=aim, cells=cells), ""))
        except ValueError as error:
            found.append(ScalingStudy(protocol, None, str(error)))
    return found


def scaling_verdicts(subject: Subject, of_studies: Sequence[ScalingStudy]) -> list[Verdict]:
    """Return what weak scaling and time to loss come to. Strong scaling compares equal work, as the other verdicts."""
    return [
        _verdict(study, row, _entries(subject, study.report)[row["name"], row["batch_size"]])
        for study in of_studies
        if study.report is not None and study.protocol != "strong"
        for row in study.report["arms"]
        if row["speedup"] and row["verdict"]
    ]


def _verdict(study: ScalingStudy, row: dict[str, Any], entry: Entry) -> Verdict:
    assert study.report is not None
    ratio = times(row["speedup"]["ratio"])
    interval = between(row["speedup"]["low"], row["speedup"]["high"], times)
    numbers = (f"95 % interval {interval}, " if interval else "") + f"n = {row['n']}"
    if row["verdict"] == NOT_ENOUGH:
        claim = f"Not enough repeats for a claim on {study.name}: {entry.name}"
        return Verdict(NO_CLAIM, claim, f"ratio {ratio}, {numbers}")
    if study.protocol == "weak":
        claim = f"Weak scaling: {entry.name} does {ratio}x as much per second as {row['reference']}"
        return Verdict(row["verdict"], claim, f"efficiency {row['efficiency']['ratio']:.0%}, {numbers}")
    aim = study.report["protocol"]["target_val_loss"]
    claim = f"{entry.name} reaches validation loss {aim:g} {ratio}x as soon as {row['reference']}"
    return Verdict(row["verdict"], claim, numbers)


def scaling(subject: Subject, of_studies: Sequence[ScalingStudy]) -> Section | None:
    """Return speed-up and efficiency against ranks, one protocol at a time, with the law that belongs to it."""
    parts: list[Block] = []
    paragraphs: list[str] = []
    for number, study in enumerate(of_studies, start=1):
        if study.report is None:
            paragraphs.append(f"No scaling report: {study.refusal}.")
        elif len({row["ranks"] for row in study.report["arms"] if row["speedup"]}) > 1:
            parts += _blocks(study, _entries(subject, study.report), number)
            paragraphs += [f"{warning.rstrip('.')}." for warning in study.report["warnings"]]
    return Section("Scaling", [*dict.fromkeys(paragraphs), *parts], "scaling") if parts else None


def _blocks(study: ScalingStudy, entry_of: dict[tuple, Entry], number: int) -> list[Block]:
    """Return the picture, the table and a sentence for each fitted law."""
    assert study.report is not None
    columns: dict[str, Callable[[dict], Cell]] = {
        "configuration": lambda row: link_to(entry_of[row["name"], row["batch_size"]]),
        **{name: CELLS[name] for name in ("n", "tokens/s (all ranks)", "speed-up", "efficiency", "verdict")},
        "against": lambda row: row["reference"] if row["speedup"] and row["verdict"] else "",
    }
    rows = sorted(study.report["arms"], key=lambda row: entry_of[row["name"], row["batch_size"]].number)
    table = table_of(rows, columns, "Speed-up and efficiency", text=("configuration", "verdict", "against"))
    fits = [plain(line) for line in fit_lines(study.report)]
    if fits:
        law = LAWS[study.protocol].capitalize()
        fits.insert(
            0,
            f"{law}'s law, fitted to every run of a strategy: a description of these points, not a cause. "
            "Communication, imbalance and slower clocks go in.",
        )
    return [_picture(study, entry_of, number), table, *fits]


def _entries(subject: Subject, report: dict[str, Any]) -> dict[tuple, Entry]:
    """Return the configuration that each row of a scaling report is about, by the row's name and batch size."""
    entry_of = {str(run.path): entry for entry in subject.entries for run in entry.runs}
    return {(row["name"], row["batch_size"]): entry_of[row["metrics_paths"][0]] for row in report["arms"]}


def _picture(study: ScalingStudy, entry_of: dict[tuple, Entry], number: int) -> Picture:
    assert study.report is not None
    law = LAWS.get(study.protocol)
    several_batches = len({item["batch_size"] for item in study.report["strategies"]}) > 1
    points: dict[str, list] = {}
    fits, colours, entries = {}, {}, set()
    for item in study.report["strategies"]:
        name = item["strategy_name"] + (f", batch {item['batch_size']}" if several_batches else "")
        for row in study.report["arms"]:
            is_its_own = (row["strategy"], row["batch_size"]) == (item["strategy"], item["batch_size"])
            if is_its_own and (speed_up := row["speedup"]):
                entry = entry_of[row["name"], row["batch_size"]]
                points.setdefault(name, []).append((row["ranks"], *(speed_up[key] for key in ("ratio", "low", "high"))))
                colours[name] = strategy_colour(entry.look)
                entries.add(entry)
        fits[name] = item["fits"][law]["serial_fraction"] if law else None
    caption = "Dots: ratio of medians; bar: its 95 % interval. Grey: the ideal."
    if law:
        caption += (
            f" Dashed: {law.capitalize()}'s law with the fitted serial fraction; away from the measured rank counts it "
            "is the law that speaks, not a measurement."
        )
    links = links_to(sorted(entries, key=lambda entry: entry.number))
    draw = functools.partial(scaling_figure, points, fits, colours, law=law)
    return Picture(f"scaling_{number}", f"{study.name.capitalize()} scaling", caption, links, draw)
