"""The report people read: verdicts first, then strategies against each other, and where every number comes from.

One document, written as a page or as Markdown, and in short as text for a terminal. sections.py, details.py and
scaling.py decide which numbers stand where; verdicts.py, headlines.py and cautions.py decide what is claimed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

from testbed.analysis.document import markdown, terminal
from testbed.analysis.document.model import Document, Section, Source, Table
from testbed.analysis.document.words import counted, joined, rate
from testbed.analysis.report import details, scaling, sections
from testbed.analysis.report.cautions import cautions
from testbed.analysis.report.certified import cautions_on_noise, certified
from testbed.analysis.report.figures import link_to
from testbed.analysis.report.headlines import headlines
from testbed.analysis.report.held_back import held_back
from testbed.analysis.report.predictions import predictions
from testbed.analysis.report.verdicts import in_order, verdicts
from testbed.analysis.runs.entries import Subject, subject_of
from testbed.analysis.runs.load import Run
from testbed.analysis.statistics import DEFAULT_MARGIN
from testbed.io import replacing, write_text


def write_html(
    runs: Sequence[Run], path: Path, target_val_loss: float | None = None, margin: float = DEFAULT_MARGIN
) -> None:
    """Write one self-contained HTML page about `runs`, as `load_run` gives them.

    Args:
        path: replaced in one move. Links to the runs' files are relative to it.
        target_val_loss: of the time to loss; None: the sweep's, else the lowest loss that every run reached.
        margin: fraction within which throughputs count as equal.

    Raises:
        InputError: no run, or a sweep.json above a run that cannot be read.
        OSError: from the disk.
    """
    from testbed.analysis.document import html

    write_text(Path(path), html.page(report_of(runs, path.parent, target_val_loss, margin)))


def write_markdown(
    runs: Sequence[Run], path: Path, target_val_loss: float | None = None, margin: float = DEFAULT_MARGIN
) -> None:
    """Write the report to `path` and its pictures to `<name>_pictures/` beside it. Errors as in `write_html`."""
    from testbed.analysis.document.pictures import svg

    path = Path(path)
    report = report_of(runs, path.parent, target_val_loss, margin)
    folder = path.with_name(f"{path.stem}_pictures")
    folder.mkdir(parents=True, exist_ok=True)
    for picture in report.pictures:
        with replacing(folder / f"{picture.name}.svg") as temporary:
            temporary.write_bytes(svg(picture.draw))
    write_text(path, markdown.text(report, folder.name) + "\n")


def summary(runs: Sequence[Run]) -> str:
    """Return what a terminal shows of the report: the table of configurations, the verdicts and the cautions."""
    report = report_of(runs, Path())
    tables = [
        block
        for section in report.sections
        for block in section.blocks
        if section.anchor == sections.OVERVIEW and isinstance(block, Table)
    ]
    return terminal.text(replace(report, sections=[Section(blocks=tables)], notes=()))


def report_of(
    runs: Sequence[Run], folder: Path, target_val_loss: float | None = None, margin: float = DEFAULT_MARGIN
) -> Document:
    """Return everything the report says; paths are relative to `folder`. Arguments as of `write_html`."""
    subject = subject_of(runs)
    target = subject.target_loss if target_val_loss is None else target_val_loss
    studies = scaling.studies(subject, target)
    made: list[tuple[str, Section | None]] = [
        ("speed-ups: no finished run without a profiler", sections.overview(subject, margin)),
        ("throughput: no finished run without a profiler", sections.throughput(subject)),
        ("scaling: needs a run on one rank and equal work on more", scaling.scaling(subject, studies)),
        ("time to loss: needs several validations, --eval_every STEPS", sections.time_to_loss(subject, target)),
        ("losses", sections.learning(subject)),
        ("predicted against measured: needs a calibration.json or a known GPU", predictions(subject)),
        ("breakdown of the step: train with --profile", sections.step_breakdown(subject)),
        ("what holds a run back: --watch_collectives", held_back(subject)),
        ("collectives: train with --profile", details.communication(subject)),
        ("pipeline bubble: a pipeline, trained with --profile", details.pipelines(subject)),
        ("memory", sections.memory(subject)),
        ("MFU and utilization", details.machine_use(subject)),
        ("noise of the machine: scripts/more/certify_machine.py", certified(subject)),
        ("", details.environment(subject)),
    ]
    absent = [name for name, section in made if section is None]
    return Document(
        title=_title(subject),
        lead=_lead(subject),
        headlines=headlines(subject),
        verdicts=in_order([*scaling.scaling_verdicts(subject, studies), *verdicts(subject, margin)]),
        cautions=[*cautions(subject), *cautions_on_noise(subject)],
        sections=[section for _, section in made if section is not None],
        notes=[[f"Not in these files: {'; '.join(absent)}."]] if absent else (),
        sources=[
            (link_to(entry), [_source(subject, run, Path(folder)) for run in entry.runs]) for entry in subject.entries
        ],
    )


def _title(subject: Subject) -> str:
    strategies = list(dict.fromkeys(entry.strategy for entry in subject.entries))
    ranks = sorted({entry.ranks for entry in subject.entries if entry.ranks})
    where = f" on {joined([str(count) for count in ranks])} rank{'s' * (ranks != [1])}" if ranks else ""
    if len(strategies) == 1:
        return strategies[0] + where
    return f"{len(strategies)} strategies{where}"


def _lead(subject: Subject) -> str:
    runs = subject.runs
    days = sorted({run.record["timestamp_utc"][:10] for run in runs if run.record.get("timestamp_utc")})
    when = "" if not days else f" of {days[0]}" if len(days) == 1 else f" from {days[0]} to {days[-1]}"
    models = {run.record.get("training_config", {}).get("model_name") for run in runs} - {None}
    devices = {
        run.record.get("hardware", {}).get("gpu_name") or run.record.get("hardware", {}).get("cpu_name") for run in runs
    }
    protocols = [protocol.replace("_", " ") for protocol in subject.protocols]
    protocols = [name if name == "time to loss" else f"{name} scaling" for name in protocols]
    about = [
        f"{counted(len(runs), 'run')}{when} in {counted(len(subject.entries), 'configuration')}",
        joined(protocols) if protocols else "",
        f"model {joined(sorted(models))}" if models else "",
        joined(sorted(devices - {None})) if devices - {None} else "",
    ]
    return "; ".join(part for part in about if part) + "."


def _source(subject: Subject, run: Run, folder: Path) -> Source:
    file = os.path.relpath(run.path.absolute(), folder.absolute())
    losses, record = run.final_validation_loss, run.record
    figures = {
        "run id": run.run_id or "not recorded",
        "commit": _commit(run),
        "status": run.status + (", INSTRUMENTED" if run.instrumented else ""),
        "seed": "not recorded" if run.work.get("seed") is None else str(run.work["seed"]),
        "tokens/s": rate(run.tokens_per_s),
        "validation loss": "n/a" if losses is None else f"{losses:.4f}",
        "began": record.get("timestamp_utc") or "not recorded",
    }
    # "./" keeps a folder that is called like an address ("javascript:...") a folder.
    address = quote(file if file.startswith(".") else f"./{file}")
    command = run.command_line or "command not recorded"
    return Source(subject.number_of(run), tuple(figures.items()), file, address, command)


def _commit(run: Run) -> str:
    commit = run.git_commit
    if not commit or commit == "unknown":
        return "unknown"
    dirty = run.record.get("git_dirty")
    return commit[:12] + (" + CHANGED FILES" if dirty else "" if dirty is False else " (dirty or not: not recorded)")
