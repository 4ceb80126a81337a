"""The report people read: verdicts first, then strategies against each other, and where every number comes from.

One content, two forms: a single HTML page that loads nothing (pictures inside it, no script, a content security policy
that forbids the rest) and GitHub markdown. Which numbers stand where is decided in sections.py and
details.py, which words in words.py.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import quote

from testbed.analysis.charts.style import rate
from testbed.analysis.report import details, scaling, sections
from testbed.analysis.report.cautions import Caution, warnings_of
from testbed.analysis.report.entries import Entry, Subject, subject_of
from testbed.analysis.report.figures import NARROW, WIDE, data_uri
from testbed.analysis.report.headlines import Headline, headlines
from testbed.analysis.report.sections import Picture, Section, Table
from testbed.analysis.report.words import Verdict, in_order, joined, verdicts
from testbed.analysis.runs.load import Run
from testbed.errors import printable
from testbed.io import write_text

TEMPLATE = "page.html.jinja"


@dataclass(frozen=True)
class Source:
    """One run in the appendix: all that is needed to find it, and to run it again."""

    number: int
    run: Run
    commit: str
    file: str  # relative to the report
    address: str  # the same as a link
    figures: tuple[tuple[str, str], ...]  # name, value


@dataclass(frozen=True)
class Report:
    """What both forms are rendered from."""

    subject: Subject
    title: str
    lead: str
    headlines: list[Headline]
    verdicts: list[Verdict]
    warnings: list[Caution]
    sections: list[Section]
    absent: list[str]
    sources: list[tuple[Entry, list[Source]]]


def write_html(runs: Sequence[Run], path: Path, target_val_loss: float | None = None) -> None:
    """Write one self-contained HTML page about `runs`, as `load_run` gives them.

    Args:
        path: replaced in one move. Links to the runs' files are relative to it.
        target_val_loss: of the time to loss; None: the sweep's, else the lowest loss that every run reached.

    Raises:
        ValueError: no run, or a sweep.json above a run that cannot be read.
        OSError: from the disk.
    """
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.tests |= {
        "entry": lambda value: isinstance(value, Entry),
        "runs": lambda value: isinstance(value, sections.RunNumbers),
        "table": lambda value: isinstance(value, Table),
    }
    environment.globals |= {
        "wide": lambda picture: data_uri(picture.draw, WIDE),
        "narrow": lambda picture: data_uri(picture.draw, NARROW),
        "ranges": details.ranges,
    }
    template = resources.files("testbed.analysis.report").joinpath(TEMPLATE).read_text(encoding="utf-8")
    report = report_of(runs, path.parent, target_val_loss)
    write_text(Path(path), printable(environment.from_string(template).render(report=report), kept="\n\t"))


def report_of(runs: Sequence[Run], folder: Path, target_val_loss: float | None = None) -> Report:
    """Everything the report says; paths are relative to `folder`."""
    subject = subject_of(runs)
    target = subject.target_loss if target_val_loss is None else target_val_loss
    studies = scaling.studies(subject, target)
    made: list[tuple[str, Section | None]] = [
        ("speed-ups: no finished run without a profiler", sections.overview(subject)),
        ("throughput: no finished run without a profiler", sections.throughput(subject)),
        ("scaling: needs a run on one rank and equal work on more", scaling.scaling(subject, studies)),
        ("time to loss: needs several validations, --eval_every STEPS", sections.time_to_loss(subject, target)),
        ("losses", sections.learning(subject)),
        ("breakdown of the step: train with --profile", sections.step_breakdown(subject)),
        ("collectives: train with --profile", details.communication(subject)),
        ("pipeline bubble: a pipeline, trained with --profile", details.pipelines(subject)),
        ("memory", sections.memory(subject)),
        ("MFU and utilization", details.machine_use(subject)),
        ("", details.environment(subject)),
    ]
    return Report(
        subject=subject,
        title=_title(subject),
        lead=_lead(subject),
        headlines=headlines(subject),
        verdicts=in_order([*scaling.scaling_verdicts(subject, studies), *verdicts(subject)]),
        warnings=warnings_of(subject),
        sections=[section for _, section in made if section is not None],
        absent=[name for name, section in made if section is None],
        sources=[(entry, [_source(subject, run, Path(folder)) for run in entry.runs]) for entry in subject.entries],
    )


def pictures_of(report: Report) -> list[Picture]:
    return [part for section in report.sections for part in section.parts if isinstance(part, Picture)]


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
    about = [
        f"{len(runs)} run{'s' * (len(runs) > 1)}{when} in {len(subject.entries)} "
        f"configuration{'s' * (len(subject.entries) > 1)}",
        joined([f"{protocol.replace('_', ' ')} scaling" for protocol in subject.protocols]).replace(
            "time to loss scaling", "time to loss"
        )
        if subject.protocols
        else "",
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
    return Source(subject.number_of(run), run, _commit(run), file, address, tuple(figures.items()))


def _commit(run: Run) -> str:
    commit = run.git_commit
    if not commit or commit == "unknown":
        return "unknown"
    dirty: Any = run.record.get("git_dirty")
    return commit[:12] + (" + CHANGED FILES" if dirty else "" if dirty is False else " (dirty or not: not recorded)")
