"""Run the trials of the audit on public files: planted figures, clean rows, broken files."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from testbed.errors import InputError
from testbed.experiments.field_audit.material import GROUPS, TABLE, Material
from testbed.experiments.field_audit.mutation import mutate
from testbed.experiments.field_audit.planting import Planted, clean_rows, plant
from testbed.experiments.field_audit.review import with_interval


def chosen(arguments: argparse.Namespace, materials: Sequence[Material]) -> dict[str, Any] | None:
    """Return the trial that was asked for, with its results; None: none was."""
    folder, seed = arguments.folder, arguments.seed
    if arguments.plant:
        return {"what": "changed figures found", "results": _planted(materials, folder, arguments.plant, seed)}
    if arguments.clean:
        return {"what": "clean rows with a finding", "results": _clean(materials, folder, arguments.clean, seed)}
    if arguments.mutate:
        counted = mutate(materials, folder, arguments.mutate, seed)
        said = f"{len(counted['tracebacks']):,} tracebacks, {len(counted['slow']):,} slower than 10 s"
        result = {"material": "all", "said": f"{said}, of {counted['files']:,}"} | counted
        return {"what": "broken files", "results": [result]}
    return None


def _planted(materials: Sequence[Material], folder: Path, number: int, seed: int) -> list[dict[str, Any]]:
    """Return the result of each group of files, tables and logs apart."""
    results = []
    for is_tuned, words in GROUPS.items():
        own = [material for material in materials if material.tuned is is_tuned]
        planted = plant(own, folder, number, seed) if own else []
        for what, of_tables in (("tables", True), ("logs", False)):
            some = [one for one in planted if (one.material.kind == TABLE) is of_tables]
            if some:
                missed = [_where(one) for one in some if not one.is_found]
                said = with_interval(len(some) - len(missed), len(some))
                results.append({"material": f"{what}, {words}", "said": said, "missed": missed})
    return results


def _where(one: Planted) -> str:
    where = f"{one.material.repository}/{one.material.path}:{one.line}"
    return where if one.material.figures_withheld else f"{where} {one.before} -> {one.after}"


def _clean(materials: Sequence[Material], folder: Path, number: int, seed: int) -> list[dict[str, Any]]:
    rows = clean_rows(materials, folder, number, seed)
    if not rows:
        raise InputError(f"--clean {number}: no file of the list is marked as clean")
    accused = [f"{material.repository}/{material.path}:{line}" for material, line, is_accused in rows if is_accused]
    return [{"material": "files listed as clean", "said": with_interval(len(accused), len(rows)), "rows": accused}]
