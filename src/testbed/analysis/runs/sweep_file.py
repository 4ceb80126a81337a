"""sweep.json as analysis reads it: the plan and state of a sweep, which scripts/run_scaling_benchmarks.py writes."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from testbed.errors import InputError
from testbed.io import read_json

SWEEP_FILE = "sweep.json"
FOLDERS_ABOVE_A_RUN = 3  # <out_dir>/<cell>/run_<k>/training_metrics.json
# the type of each field of a cell that analysis reads, and what a message calls it
_TEXT, _NUMBER = ((str,), "text"), ((int,), "a whole number")
_CELL = {"name": _TEXT, "variant": _TEXT, "ranks": _NUMBER, "batch_size": _NUMBER, "folder": _TEXT, "status": _TEXT}
_OPTIONAL = {
    "run_type": _TEXT, "reason": _TEXT, "seed": _NUMBER,
    "command": ((list,), "a list of words"), "profiled": ((bool,), "true or false"),
}  # fmt: skip
PROTOCOLS = ("strong", "weak", "time_to_loss")


def read_sweep(out_dir: Path) -> dict[str, Any]:
    """Return the sweep.json in `out_dir`; empty where there is none. InputError when it is not what a sweep writes."""
    path = Path(out_dir) / SWEEP_FILE
    if not os.path.lexists(path):
        return {}
    try:
        sweep = read_json(path)
        missing = {name for cell in sweep["cells"] for name in _CELL if name not in cell}
        if missing or sweep["protocol"] not in PROTOCOLS:
            protocol = f"protocol {reprlib.repr(sweep['protocol'])}"
            raise InputError(f"lacks {', '.join(sorted(missing))}" if missing else protocol)
        target = sweep.get("target_val_loss")
        if target is not None and (not isinstance(target, int | float) or isinstance(target, bool)):
            raise InputError(f"target_val_loss {reprlib.repr(target)} is not a number")
        for cell in sweep["cells"]:
            _check_types(cell)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is not the plan of a sweep: {error}") from None
    return sweep


def sweeps_above(runs: Iterable[Path]) -> dict[Path, dict[str, Any]]:
    """Return the sweep.json above each of these metrics files, by its folder. InputError names a file that is none."""
    folders = {folder for run in runs for folder in list(run.absolute().parents)[:FOLDERS_ABOVE_A_RUN]}
    return {folder: sweep for folder in sorted(folders) if (sweep := read_sweep(folder))}


def _check_types(cell: dict[str, Any]) -> None:
    for name, (types, words) in (_CELL | _OPTIONAL).items():
        value = cell.get(name)
        is_absent = value is None and (name in _OPTIONAL or name == "batch_size")
        if not is_absent and (not isinstance(value, types) or (isinstance(value, bool) and bool not in types)):
            raise InputError(f"{name} {reprlib.repr(value)} of a cell is not {words}")
    if "\0" in cell["folder"]:
        raise InputError(f"folder {reprlib.repr(cell['folder'])} of a cell is no path")
    if not all(isinstance(word, str) for word in cell.get("command") or ()):
        raise InputError(f"command {reprlib.repr(cell['command'])} of a cell is not a list of words")
