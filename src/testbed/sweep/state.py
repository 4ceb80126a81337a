"""sweep.json: plan and progress of a sweep; rules for continuing one.

Whether a run is finished is read from its training_metrics.json, not from sweep.json.
"""

from __future__ import annotations

import dataclasses
import json
import os
import reprlib
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from testbed import typed_json
from testbed.errors import InputError, counted
from testbed.io import holding_together, now_utc, read_json, write_text
from testbed.metrics.fields.types import Number
from testbed.metrics.file import SCHEMA_VERSION, metrics_version, read_metrics
from testbed.run_folder import METRICS
from testbed.sweep.plan import COMPLETE, FAILED, NOT_APPLICABLE, PENDING, Cell, work_arguments
from testbed.sweep.request import Protocol

SWEEP_FILE = "sweep.json"
SCHEMA = 1
FOLDERS_ABOVE_A_RUN = 3  # <out_dir>/<cell>/run_<k>/training_metrics.json


@dataclass
class Sweep:
    """Content of sweep.json. `warmup_runs`: one row per deleted warm-up run."""

    protocol: Protocol
    command_line: str
    git_commit: str
    cells: list[Cell]
    target_val_loss: Number | None = None
    created_utc: str = field(default_factory=now_utc)
    warmup_runs: list[dict[str, Any]] = field(default_factory=list)
    git_dirty: bool | None = None  # None: not known, as in files of before this field
    earlier_commits: list[str] = field(default_factory=list)  # of runs kept with --allow_mismatch

    def write(self, out_dir: Path) -> None:
        """Replace sweep.json in one move. OSError from the disk."""
        write_text(out_dir / SWEEP_FILE, json.dumps({"schema": SCHEMA, **dataclasses.asdict(self)}, indent=1) + "\n")


def read_sweep(out_dir: Path) -> Sweep | None:
    """Return the sweep in a folder; None if there is none. Raises InputError if sweep.json cannot be read."""
    path = out_dir / SWEEP_FILE
    if not os.path.lexists(path):
        return None
    try:
        content = read_json(path, "it")
        found = content.get("schema") if isinstance(content, dict) else None
        if found != SCHEMA:
            raise InputError(f"its schema is {reprlib.repr(found)}, known is {SCHEMA}")
        return typed_json.check(content, Sweep, may_hold_more=True)
    except InputError as error:
        raise InputError(f"{path} is not a sweep's file ({error}); give another folder") from None


def sweeps_above(runs: Iterable[Path]) -> dict[Path, Sweep]:
    """Return the sweep above each of these metrics files, by its folder. InputError if a sweep.json cannot be read."""
    folders = {folder for run in runs for folder in list(run.absolute().parents)[:FOLDERS_ABOVE_A_RUN]}
    return {folder: sweep for folder in sorted(folders) if (sweep := read_sweep(folder))}


def take_over(sweep: Sweep, out_dir: Path, allow_mismatch: bool) -> str:
    """Mark the finished runs of this sweep in the folder, and return a summary.

    Raises:
        InputError: the folder holds another sweep, runs of no sweep, or runs of other code or data.
    """
    earlier = read_sweep(out_dir)
    notes = []
    if earlier is None:
        check_no_foreign_runs(sweep.cells, out_dir)
    else:
        notes = continue_sweep(earlier, sweep, out_dir, allow_mismatch)
    kept, unsure = keep_finished_runs(sweep, out_dir, allow_mismatch)
    num_runs = sum(cell.status != NOT_APPLICABLE for cell in sweep.cells)
    return "\n".join([f"{counted(num_runs, 'run')} in {out_dir}, {kept} of them finished", *notes, *unsure])


def continue_sweep(earlier: Sweep, wanted: Sweep, out_dir: Path, allow_mismatch: bool) -> list[str]:
    """Check that `wanted` is the earlier sweep, or extends it; copy what is known of its runs.

    Returns:
        Notes on what was added.

    Raises:
        InputError: it is another sweep; names the difference.
    """
    way_out = "give another --out_dir, or ask for the same again"
    for name in ("protocol", "target_val_loss"):
        ours, theirs = getattr(wanted, name), getattr(earlier, name)
        if ours != theirs:
            raise InputError(f"--out_dir {out_dir} holds a sweep with --{name} {theirs}, not {ours}; {way_out}")
    if earlier.git_commit != wanted.git_commit and not allow_mismatch:
        raise InputError(
            f"--out_dir {out_dir} holds a sweep of commit {earlier.git_commit[:8]}, and the code is now at "
            f"{wanted.git_commit[:8]}: runs of different code are not repeats; give another --out_dir, or "
            "--allow_mismatch if the difference cannot matter (each run's file names its commit)"
        )
    ours = {cell.folder: cell for cell in wanted.cells}
    theirs = {cell.folder: cell for cell in earlier.cells}
    for folder, old in theirs.items():
        new = ours.get(folder)
        if new is None:
            kind = "profiled run" if old.profiled else "repeat"
            raise InputError(
                f"--out_dir {out_dir} holds a sweep with {old.variant} on {counted(old.ranks, 'rank')}, batch size "
                f"{old.batch_size}, {kind} {old.repeat}, which this call does not ask for; {way_out} or more"
            )
        with holding_together(out_dir / SWEEP_FILE):
            difference = _differing_flags(work_arguments(old.command), work_arguments(new.command))
        if difference:
            raise InputError(f"--out_dir {out_dir} holds a sweep with {difference}; {way_out}")
        if old.status != NOT_APPLICABLE:  # that can change: more devices, say
            new.seconds, new.started_utc = old.seconds, old.started_utc
    wanted.created_utc, wanted.warmup_runs = earlier.created_utc, earlier.warmup_runs
    commits = dict.fromkeys([*earlier.earlier_commits, earlier.git_commit])
    wanted.earlier_commits = [commit for commit in commits if commit != wanted.git_commit]
    names_before = {cell.name for cell in earlier.cells}
    added = sorted({cell.name for cell in wanted.cells} - names_before)
    if not added or not any(cell.status == COMPLETE for cell in earlier.cells):
        return []
    return [
        f"added to a sweep that had begun: {', '.join(added)}. Their first runs are not interleaved with the earlier "
        "ones, so a drift of the machine between then and now counts as a difference; started_utc in sweep.json says "
        "when each run was made"
    ]


def _differing_flags(old: list[str], new: list[str]) -> str:
    """Return in words the flags in which two commands differ; empty if none."""
    before, now = by_flag(old), by_flag(new)
    differing = [flag for flag in {**before, **now} if before.get(flag) != now.get(flag)]
    return ", ".join(
        f"{flag} {before[flag]} (this call: {now.get(flag, 'none')})".replace("  ", " ")
        if flag in before
        else f"no {flag} (this call: {now[flag] or 'set'})"
        for flag in differing
    )


def by_flag(arguments: list[str]) -> dict[str, str]:
    """Return `--steps 7 --profile` as {"--steps": "7", "--profile": ""}; of a repeated flag the last counts."""
    values, flag = {}, ""
    for word in arguments:
        if word.startswith("--"):
            flag, _, value = word.partition("=")
            values[flag] = value
        else:
            values[flag] = f"{values.get(flag, '')} {word}".strip()
    return values


def keep_finished_runs(sweep: Sweep, out_dir: Path, allow_mismatch: bool) -> tuple[int, list[str]]:
    """Mark cells with a finished run of their command as complete; return their number, and notes.

    Raises:
        InputError: a finished run is of other code or data.
    """
    kept: dict[str, dict[str, Any]] = {}
    for cell in sweep.cells:
        if cell.status in (PENDING, COMPLETE):
            metrics = metrics_of(cell, out_dir)
            cell.status, cell.reason = PENDING, None
            if metrics is not None and is_run_of(metrics, cell):
                cell.status, kept[cell.folder] = COMPLETE, metrics
                if cell.seconds is None:
                    cell.seconds = metrics["summary"]["total_wall_time_sec"]
    if not allow_mismatch:
        _check_one_code_and_data(kept, sweep, out_dir)
    notes = []
    if sweep.git_dirty and any(metrics["git_dirty"] for metrics in kept.values()):
        notes.append("finished runs were made with files changed, as now; whether with the same changes, no file says")
    return len(kept), notes


def _check_one_code_and_data(kept: dict[str, dict[str, Any]], sweep: Sweep, out_dir: Path) -> None:
    way_out = "remove it and it is made again, give another --out_dir, or --allow_mismatch if it cannot matter"
    first = next(iter(kept), "")
    for folder, metrics in kept.items():
        commit, is_dirty = metrics["git_commit"], metrics["git_dirty"]
        data, data_of_first = (each["training_config"]["dataset_sha256"] for each in (metrics, kept[first]))
        if commit != sweep.git_commit:
            fault = f"was made by commit {str(commit)[:8]}, and the sweep is of {sweep.git_commit[:8]}"
        elif None not in (is_dirty, sweep.git_dirty) and is_dirty != sweep.git_dirty:
            states = ("as its commit has them", "changed since its commit")
            fault = f"was made with files {states[is_dirty]}, and now they are {states[not is_dirty]}"
        elif data != data_of_first:
            fault = f"was made from other data than {first}"
        else:
            continue
        raise InputError(f"{out_dir / folder} holds a finished run that {fault}: these are not repeats; {way_out}")


def check_no_foreign_runs(cells: Sequence[Cell], out_dir: Path) -> None:
    """Check that no folder of the plan holds a run without a sweep.json. Raises InputError."""
    for cell in cells:
        if (out_dir / cell.folder / METRICS).exists():
            raise InputError(
                f"--out_dir {out_dir} has no {SWEEP_FILE}, but {cell.folder} holds a run that the sweep would replace; "
                "give another --out_dir"
            )


def metrics_of(cell: Cell, out_dir: Path) -> dict[str, Any] | None:
    """Return the file of the cell's run; None if there is none to read."""
    try:
        return read_metrics(out_dir / cell.folder / METRICS)
    except ValueError:
        return None


def is_run_of(metrics: dict[str, Any], cell: Cell) -> bool:
    """Return whether the file is of a finished run of the cell's command, started from any folder."""
    if metrics_version(metrics) != SCHEMA_VERSION:  # no program of this sweep wrote it
        return False
    try:
        made_by = work_arguments(shlex.split(metrics["command_line"]))
    except ValueError:  # quotes that do not close; not gpt2.py's
        return False
    is_same = made_by == cell.gpt2_arguments and metrics["hardware"].get("num_devices") == cell.ranks
    return is_same and metrics["status"] == COMPLETE


def comparisons(cells: Sequence[Cell], out_dir: Path) -> list[str]:
    """Return the commands that compare the configurations which ran on equal ranks and batches: each with the first."""
    places: dict[tuple[int, int], list[str]] = {}
    for cell in cells:
        names = places.setdefault((cell.ranks, cell.batch_size), [])
        if cell.status == COMPLETE and not cell.profiled and cell.name not in names:
            names.append(cell.name)
    folder = {name: shlex.quote(str(out_dir / name)) for names in places.values() for name in names}
    return [
        f"python scripts/compare_runs.py {folder[name]} --against {folder[first]}"
        for first, *others in filter(None, places.values())
        for name in others
    ]


def shortfalls(cells: Sequence[Cell]) -> list[str]:
    """Return a line per configuration that did not run as planned: what failed and why, what is missing."""
    lines = []
    for name in dict.fromkeys(cell.name for cell in cells):
        of_name = [cell for cell in cells if cell.name == name]
        words = []
        for status in (NOT_APPLICABLE, FAILED):
            if reasons := [cell.reason for cell in of_name if cell.status == status]:
                count = f"{len(reasons)} " if status == FAILED else ""
                words.append(f"{count}{status}: {reasons[0]}")
        if missing := sum(cell.status not in (NOT_APPLICABLE, FAILED, COMPLETE) for cell in of_name):
            words.append(f"{missing} not made yet")
        if any(cell.oversubscribed for cell in of_name):
            words.append("oversubscribed: fewer cores than threads")
        if words:
            lines.append(f"{name}: {'; '.join(words)}")
    return lines
