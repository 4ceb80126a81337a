"""sweep.json as analysis reads it: the plan and state of a sweep, which scripts/run_scaling_benchmarks.py writes."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict, get_args

from testbed import typed_json
from testbed.errors import InputError
from testbed.io import read_json
from testbed.metrics.fields.types import Number, Whole

SWEEP_FILE = "sweep.json"
FOLDERS_ABOVE_A_RUN = 3  # <out_dir>/<cell>/run_<k>/training_metrics.json
Protocol = Literal["strong", "weak", "time_to_loss"]
PROTOCOLS = get_args(Protocol)


class CellRow(TypedDict):
    name: str
    variant: str
    ranks: Whole
    batch_size: Whole | None
    folder: str
    status: str
    run_type: NotRequired[str | None]
    reason: NotRequired[str | None]
    seed: NotRequired[Whole | None]
    command: NotRequired[list[str] | None]
    profiled: NotRequired[bool | None]


class SweepRows(TypedDict):
    """What analysis needs of a sweep. A file may hold more."""

    protocol: Protocol
    cells: list[CellRow]
    target_val_loss: NotRequired[Number | None]


def read_sweep(out_dir: Path) -> dict[str, Any]:
    """Return the sweep.json in `out_dir`; empty where there is none. InputError when it is not what a sweep writes."""
    path = Path(out_dir) / SWEEP_FILE
    if not os.path.lexists(path):
        return {}
    try:
        sweep = read_json(path)
        typed_json.check(sweep, SweepRows, may_hold_more=True)
        for index, cell in enumerate(sweep["cells"]):
            if "\0" in cell["folder"]:
                raise InputError(f"cells[{index}].folder {cell['folder']!r} is not a path")
    except InputError as error:
        raise InputError(f"{path} is not the plan of a sweep: {error}") from None
    return sweep


def sweeps_above(runs: Iterable[Path]) -> dict[Path, dict[str, Any]]:
    """Return the sweep.json above each of these metrics files, by its folder. InputError names a file that is none."""
    folders = {folder for run in runs for folder in list(run.absolute().parents)[:FOLDERS_ABOVE_A_RUN]}
    return {folder: sweep for folder in sorted(folders) if (sweep := read_sweep(folder))}
