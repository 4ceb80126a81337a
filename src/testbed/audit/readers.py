"""Find the files of runs and read them, whatever their format: by the name of a file first, then by its content."""

from __future__ import annotations

import csv
import io
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from testbed.analysis.runs.load import METRICS_FILE, files_of_runs, load_run
from testbed.audit import curves, earlier, logs
from testbed.audit.printed_setup import plain_precision, set_up
from testbed.audit.reported import BATCH, DEVICE, MODEL, PRECISION, ROW, SAYS_NOTHING, TABLE, Reported, from_run
from testbed.audit.tables.read import SUFFIXES, no_table_in, tables_in
from testbed.audit.text import LOOKED_AT, log_lines, text_of
from testbed.audit.words import count_in_name, said_in_name
from testbed.errors import InputError
from testbed.io import missing, read_json
from testbed.sweep.state import SWEEP_FILE

OTHER_PAGES = {".rst": "pandoc {} -t gfm -o page.md", ".ipynb": "jupyter nbconvert --to markdown {}"}
EXPORT = "the curves of W&B, MLflow and Lightning are read as CSV: a column step, and one for each metric"
LEAST_OF_A_PAGE = 5  # lines of steps
# names that say nothing of a run
OF_PROGRAMS = ("metrics", "output", "trainer_state", "train", "log", "main", "stdout", "summary", "progress", "history")
# what W&B, Lightning, Hydra, timm and others call the settings that they store beside such a file
STORED = ("config", "hparams", "args", "params", "settings", "meta", "metadata", "wandb-metadata")
_UUID = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"  # by which modded-nanogpt names its logs
# a line of YAML, or W&B's three: the name, a description, the value
_SETTING = re.compile(
    r"(?m)^([\w./-]{1,60}):(?:\n(?: +\w+:.*\n)*? +value:)? +['\"]?([^\s'\"#][^\n'\"#]{0,80}?)['\"]? *$"
)
Read = Callable[[Path], list[Reported]]


def read_reported(
    paths: Sequence[Path],
    columns: Mapping[str, str] | None = None,
    nothing_read: list[Path] | None = None,
) -> list[Reported]:
    """Read every run that the files and folders of `paths` hold, in their order. `columns` makes a typed file a table.

    InputError, one sentence that names the file: it does not exist, cannot be read, or is of no known format. In a
    folder, files of no known format are passed over; those that say nothing of a run are added to `nothing_read`.
    """
    paths = [*map(Path, paths)]
    named = [each for path in paths for each in _files_of(path)]
    if columns and not any(is_typed and file.suffix.lower() in SUFFIXES for file, is_typed in named):
        raise InputError(f"--columns names the columns of tables; type one, as {', '.join(SUFFIXES)}, and no folder")
    found: list[Reported] = []
    folders = set()
    for file, is_typed in dict.fromkeys(named):
        reader = reader_of(file, is_typed) or read_metrics
        if columns and is_typed and file.suffix.lower() in SUFFIXES:
            reader = partial(read_table, named=columns)
        elif reader in OF_FOLDERS and (reader, file.parent) in folders:  # read with the others
            continue
        folders.add((reader, file.parent))
        try:
            found += map(_completed, reader(file))
        except InputError:
            if is_typed or reader is read_metrics:
                raise
            if nothing_read is not None:  # in a folder, a file of such a name may be anything
                nothing_read.append(file)
    if not found:
        raise InputError(f"{', '.join(map(str, paths))}: no run was found in a format that is known")
    runs = curves.one_per_run(found)
    return _without_comparisons(runs, [path for path in paths if path.is_dir()])


def _files_of(path: Path) -> list[tuple[Path, bool]]:
    """Return a file, or the files of a folder that may tell of a run, by name, and whether each was typed.

    A log in or below the folder of a metrics file repeats it.
    """
    if not path.exists():
        raise InputError(f"{path} {missing(path)}")
    if not path.is_dir():
        return [(path, True)]
    files = [file for file in files_of_runs(path) if file.is_file()]
    with_metrics = {file.parent for file in files if file.name == METRICS_FILE}
    is_sweep = any(file.name == SWEEP_FILE for file in files)
    kept = [
        (file, False) for file in files
        if file.name == METRICS_FILE
        or (reader_of(file) is not None and not is_sweep and not with_metrics.intersection(file.parents))
    ]  # fmt: skip
    if not kept:
        raise InputError(f"{path}{'/' * (path.name != '')} holds no file of a format that is known")
    return kept


def _without_comparisons(found: list[Reported], folders: Sequence[Path]) -> list[Reported]:
    """Return the runs, logs and curves marked as no claim where a folder that was typed holds several.

    Such a folder keeps whatever a project ever ran. To compare two of its runs, type both.
    """
    for folder in folders:
        many = [number for number, item in enumerate(found)
                if item.form in (*logs.FORMS, *curves.FORMS) and item.path.is_relative_to(folder)]  # fmt: skip
        for number in many if len(many) > 1 else ():
            found[number] = replace(found[number], is_claim=False)
    return found


def reader_of(path: Path, is_typed: bool = False) -> Read | None:
    """Return what reads a file, by its name, or of one that is typed else by its content; None: nothing does."""
    if path.name == METRICS_FILE:
        return read_metrics
    if named := next((read for name, read in READERS.items() if re.fullmatch(name, path.name)), None):
        return named
    if not is_typed:
        return None
    try:
        content = read_json(path)
    except InputError:
        return read_metrics if path.suffix == ".json" else read_text_log
    return curves.read_trainer_state if isinstance(content, dict) and "log_history" in content else read_metrics


def read_metrics(path: Path) -> list[Reported]:
    """Read the run of a training_metrics.json."""
    return [from_run(load_run(path))]


def read_text_log(path: Path) -> list[Reported]:
    """Read the runs of a text log, or else the tables of a text.

    Raises:
        InputError: it is neither, or says nothing of a run.
    """
    if command := OTHER_PAGES.get(path.suffix.lower()):
        raise InputError(f"{path} is no page that is read; make Markdown of it: {command.format(path)}")
    whole = text_of(path)
    text = log_lines(whole)
    tables = tables_in(path, whole)
    try:
        runs = _runs_of_log(path, text)
    except InputError:
        if tables:
            return tables
        raise
    return [*runs, *tables]


def _runs_of_log(path: Path, text: str) -> list[Reported]:
    if program := logs.program_of(text):
        found = list(_runs_of_program(path, text, program))
    elif re.search("(?i)timing breakdown", text):
        found = earlier.timing_log_runs(path, text)
    elif curves.PRINTED.search(text):
        ends = "\n".join(line[: logs.LONGEST_LINE] for line in f"{text[:LOOKED_AT]}\n{text[-LOOKED_AT:]}".splitlines())
        found = [logs.as_it_ran(run, ends, text) for run in curves.read_printed_trainer(path, text)]
    elif re.search("wandb: Run summary|elapsed_time_per_iteration", text):
        found = earlier.wandb_log_runs(path, text)
    else:
        raise InputError(
            f"{path} is not a known log of {logs.KNOWN}, transformers or wandb, and has {no_table_in(path, text)}; "
            f"{EXPORT}"
        )
    if path.suffix.lower() == ".md" and not program and len(curves.PRINTED.findall(text)) < LEAST_OF_A_PAGE:
        found = [run for run in found if run.form != curves.PRINTED_TRAINER]
    runs = [run for run in found if run.has_figures]
    if not runs:
        raise InputError(f"{path} {SAYS_NOTHING}")
    return runs


def _runs_of_program(path: Path, text: str, program: logs.Program) -> Iterator[Reported]:
    """Yield the run of a log, or each of a page that shows several. A few lines in a text are no run."""
    is_page = path.suffix.lower() == ".md"
    fenced = re.finditer(r"(?ms)^```[^\n]*$(.*?)^```", text if is_page else "")
    shown = [match for match in fenced if _is_log(match[1], program)]
    if len(shown) > 1:
        for match in shown:  # nothing says that they are compared
            line = text.count("\n", 0, match.start()) + 1
            yield replace(logs.read_log(path, match[1], program), name=f"{path}:{line}", is_claim=False)
    elif _is_log(text, program) or not (is_page or program is logs.PROGRAMS[-1]):
        yield logs.read_log(path, text, program)


def _is_log(text: str, program: logs.Program) -> bool:
    return len({*re.findall(program.line, text[:LOOKED_AT])}) >= LEAST_OF_A_PAGE


def _completed(run: Reported) -> Reported:
    """Return a log's or a curve's run with what is said beside it: by settings that were stored, or by names."""
    if run.run is not None or run.form in (ROW, TABLE):
        return run
    for known in (*_stored_beside(run.path), _said_by_name(run.path)):
        settings = {name: said for name, said in known.pop("settings").items() if said} | run.settings
        new = {name: value for name, value in known.items() if value and getattr(run, name) is None}
        run = replace(run, settings=settings, **new)
    if run.global_batch_size or run.micro_batch_size:
        run = replace(run, settings={name: said for name, said in run.settings.items() if name != BATCH})
    return logs.with_unit(run) if run.form in logs.OF_ANY else run


# field of `Reported` -> what the name of a file says of it
IN_NAMES = {"world_size": "devices", "global_batch_size": "batch", "micro_batch_size": "micro_batch",
            "sequence_length": "length"}  # fmt: skip


def _said_by_name(path: Path) -> dict[str, Any]:
    """Return what the name of a file says of its run; where a program gave it, what its folder's says."""
    name = re.sub(_UUID, "", path.parent.name if path.stem in OF_PROGRAMS else path.stem)
    known: dict[str, Any] = {field: count_in_name(said, name) for field, said in IN_NAMES.items()}
    known["device_name"] = said_in_name(DEVICE, name)
    known["settings"] = {MODEL: said_in_name(MODEL, name), PRECISION: plain_precision(said_in_name(PRECISION, name)),
                         BATCH: str(count_in_name("any_batch", name) or "")}  # fmt: skip
    return known


def _stored_beside(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the settings that are stored beside a log or curves: under its name, or where a program gave that, under
    the names that programs give them. A checkpoint's config.json is of its model."""
    stems = (path.stem, *(STORED if path.stem in OF_PROGRAMS and path.stem != "trainer_state" else ()))
    for stem, suffix in itertools.product(stems, (".yaml", ".yml", ".json")):
        file = path.with_name(stem + suffix)
        if file == path or not _is_file(file):
            continue
        # the batch of Lightning is what each process loads
        of_each = {"batch_size": "micro_batch_size"} if file.name == "hparams.yaml" else {}
        told = _in_json(file) if suffix == ".json" else _SETTING.findall(text_of(file))
        yield set_up((of_each.get(name, name), value) for name, value in told)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # its name is too long
        return False


def _in_json(file: Path) -> Iterator[tuple[str, str]]:
    """Yield the names and values in the objects of a file, as `zero.stage`; none if it is damaged."""
    try:
        left = [("", read_json(file))]
    except InputError:  # the log is read without it
        return
    if isinstance(left[0][1], dict) and left[0][1].keys() & {"architectures", "model_type"}:  # transformers' model
        return
    while left:
        place, value = left.pop()
        if isinstance(value, dict):
            left += [(f"{place}.{name}".strip("."), each) for name, each in value.items()]
        elif not isinstance(value, list):
            yield place.removesuffix(".enabled"), str(value)


def read_csv(path: Path) -> list[Reported]:
    """Read curves by their steps, also as W&B exports them, or a table of results.

    Raises:
        InputError: it is none of them.
    """
    text = text_of(path)
    try:
        rows = [
            row for row in csv.reader(io.StringIO(text), strict=True) if row and not row[0].lstrip().startswith("#")
        ]
    except csv.Error as error:
        raise InputError(f"{path} is not CSV: {error}") from None
    header = [name.strip() for name in rows[0]] if rows else []
    found = tables_in(path, text)
    if curves.is_curves(header) and (not found or _rises(header, rows[1:])):
        return curves.read_curves_csv(path, header, rows[1:])
    if found:
        return found
    raise InputError(
        f"{path} is not CSV that is known: {curves.no_curves_in(header)}, and it has {no_table_in(path, text)}"
    )


def _rises(header: Sequence[str], rows: Sequence[Sequence[str]]) -> bool:
    """Return whether the rows of a CSV are steps of one run, and no runs: their steps go up, and never down."""
    at = next(place for place, name in enumerate(header) if name.lower() in curves.STEP)
    cells = [row[at].strip() for row in rows if len(row) == len(header)]
    steps = [float(cell) for cell in cells if re.fullmatch(r"\d{1,15}(?:\.\d+)?", cell)]
    return steps == sorted(steps) and len({*steps}) > 1


def read_table(path: Path, named: Mapping[str, str] | None = None) -> list[Reported]:
    """Read the tables of a Markdown, CSV or TSV file, the columns by their headings or as `--columns` names them.

    Raises:
        InputError: there is no table with a known result.
    """
    text = text_of(path)
    if found := tables_in(path, text, named):
        return found
    raise InputError(f"{path} has {no_table_in(path, text)}")


# name of the file -> what reads it
READERS: dict[str, Read] = {
    r".*\.csv": read_csv,
    r".*\.tsv": read_table,
    r".*\.jsonl": curves.read_json_lines,
    r".*\.(log|out|err|txt|md)": read_text_log,
    r".*\.tex": read_table,
    r".*trainer_state.*\.json": curves.read_trainer_state,
    r".*tfevents.*": curves.read_event_files,
    r"(rank\d+|eval)_results_epoch\d+\.json": earlier.read_rank_files,
}
OF_FOLDERS = (curves.read_event_files, earlier.read_rank_files)  # of all such files in a folder
