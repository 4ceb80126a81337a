"""Count what an audit could check, and say what it took columns of tables for and which files it passed over."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import dataclass
from pathlib import Path

from testbed.analysis.document.words import counted
from testbed.analysis.runs.load import METRICS_FILE, files_of_runs
from testbed.audit.reported import TABLE, Reported
from testbed.audit.tables.columns import Column, Grid
from testbed.audit.tables.rules import checks_of
from testbed.audit.tables.sentences import quotes_on
from testbed.sweep.state import SWEEP_FILE

QUOTED = ("time_s", "rate", "train_loss", "val_loss", "mfu", "tflops", "world_size", "global_batch_size",
          "optimizer_steps", "micro_batch_size")  # fmt: skip
OF_EACH_RANK = ("rank_times_s", "rank_rates", "rank_train_losses")
OF_OUR_RUN = ("steps", "evaluations", "epochs")  # a row of them has several


@dataclass(frozen=True)
class Checked:
    """`figures`: how many could contradict another one or a limit. `columns`: a line for each table that was read."""

    figures: int
    columns: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    rows: int = 0
    rules: int = 0  # of tables, that had a figure to check
    quotes: tuple[str, ...] = ()  # sentences that bear on rows of tables

    @property
    def in_words(self) -> str:
        """Return what was read of tables, and how much of everything could be checked."""
        read = f"read {counted(len(self.columns), 'table')}, {counted(self.rows, 'row')}; " if self.columns else ""
        by = f" by {counted(self.rules, 'rule')}" if self.rules else ""
        return f"{read}{counted(self.figures, 'figure')} could be checked{by}"


def checked_in(items: Sequence[Reported], paths: Sequence[Path], nothing_read: Sequence[Path]) -> Checked:
    """Return what could be checked in `items`; `nothing_read` are files of `paths` that say nothing."""
    runs = [item for item in items if item.form != TABLE]
    figures = sum(_of_run(item, len(runs) > 1) for item in runs)
    files = [item for item in items if item.form == TABLE]
    tables: list[Grid] = [grid for item in files for grid in item.details["grids"]]
    counts = [checks_of(grid) for grid in tables]
    skipped = dict.fromkeys(
        [*nothing_read, *(file for path in paths if path.is_dir() for file in _beside(path, items))]
    )
    return Checked(
        figures + sum(number for number, _ in counts),
        tuple(map(columns_in_words, tables)),
        tuple(map(str, skipped)),
        sum(len(grid.lines) for grid in tables),
        max((rules for _, rules in counts), default=0),
        tuple(f"{item.name}, {text}" for item in files for text in quotes_on(item.details["quotes"])),
    )


def _of_run(item: Reported, is_compared: bool) -> int:
    """Return the figures of a run that a rule compares. What it quotes once needs another run beside it."""
    sections = [item.run.record.get(name) for name in OF_OUR_RUN] if item.run else [item.losses]
    rows = [len(one) for one in sections if isinstance(one, Sized)]  # an earlier file may hold anything there
    ranks = (len(getattr(item, name)) for name in OF_EACH_RANK)
    quoted = sum(getattr(item, name) is not None for name in QUOTED) if is_compared or item.run else 0
    return sum(rows) + sum(number for number in ranks if number > 1) + quoted


def columns_in_words(grid: Grid) -> str:
    """Return what each heading of a table was taken for, and which were not understood."""
    known = [f"`{column.heading}` as {_name(column)}" for column in grid.columns
             if (column.quantity or column.word) and not column.is_of_words]  # fmt: skip
    in_rows = dict.fromkeys(_name(column) for column in grid.columns if column.is_of_words)
    passed_over = [f"`{column.heading}`" for column in grid.columns if not column.quantity and not column.word]
    parts = [", ".join(known or ["no column"])]
    parts += [f"in the words of its rows: {', '.join(in_rows)}"] if in_rows else []
    parts += [f"not understood: {', '.join(passed_over)}"] if passed_over else []
    return f"{grid.place(0)}: {'; '.join(parts)}"


def _name(column: Column) -> str:
    return str(column.quantity or column.word).removeprefix("any_").replace("_", " ")


def _beside(folder: Path, items: Sequence[Reported]) -> list[Path]:
    """Return the files of a folder that were not read, but for those that belong to a run that was."""
    files = [path for path in files_of_runs(folder) if path.is_file()]
    read = {item.path.absolute() for item in items}
    of_runs = {path.parent for path in files if path.name in (METRICS_FILE, SWEEP_FILE)} | {
        path if path.is_dir() else path.parent for path in (item.path for item in items if item.form != TABLE)
    }
    return [path for path in files if path.absolute() not in read and not of_runs & set(path.parents)]
