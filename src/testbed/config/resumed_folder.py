"""Check what --resume names first of all: where a folder is mistyped, nothing else is to be blamed. No torch."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path

from testbed.config.flag_types import AUTO
from testbed.config.initial_file import LLMC, SUFFIXES, as_a_folder, is_file_of_another
from testbed.errors import InputError
from testbed.io import not_a_folder
from testbed.run_folder import CHECKPOINTS, DESCRIPTION

MOST_NEAR = 3  # folders that a sentence names


def check_resumed(resume: str | None) -> None:
    """Raise InputError where --resume names something that holds no checkpoint; near folders that do are named."""
    if resume in (None, AUTO):
        return
    path = Path(resume)
    if is_file_of_another(path) and path.is_file():
        way_out = f"--init_from {path} trains its weights further"
        if SUFFIXES[path.suffix.lower()] != LLMC:  # which holds no state of an optimizer
            command, folder = as_a_folder(path)
            way_out = f"make one of it: {command}; then give --resume {folder}"
        raise InputError(f"--resume {path} is a file, and a run goes on from a folder; {way_out}")
    fault = not_a_folder(path) or (None if _holds_checkpoint(path) else "holds no checkpoint")
    if fault is None:
        return
    near = near_runs(path)
    way_out = f"did you mean {' or '.join(map(str, near))}?"
    if not near:
        way_out = "give auto, a run's folder, or a checkpoint such as DIR/checkpoints/step_000020"
    raise InputError(f"--resume {path} {fault}; {way_out}")


def near_runs(path: Path) -> list[Path]:
    """Return folders with a checkpoint that may be meant by a path without one: below it, or of a name like it.

    Of a run's checkpoints it is the run, which resumes from its newest valid one.
    """
    if path.name == CHECKPOINTS and any(map(_holds_checkpoint, _folders_in(path))):
        return [path.parent]
    return [folder for folder in (*_folders_in(path), *_alike(path)) if _holds_checkpoint(folder)][:MOST_NEAR]


def _holds_checkpoint(folder: Path) -> bool:
    """Return whether a folder is a checkpoint or a run's that has saved; whether they are whole is looked at later."""
    is_checkpoint = re.fullmatch(r"step_\d+", folder.name) or (folder / DESCRIPTION).exists()
    return bool(is_checkpoint) or (folder / CHECKPOINTS).is_dir()


def _alike(path: Path) -> list[Path]:
    """Return folders whose names are like a path's, also where a folder above it is mistyped."""
    parent = path.parent if path.parent.is_dir() else next(iter(_alike(path.parent)), None)
    if parent is None or parent == path:
        return []
    if parent != path.parent and (parent / path.name).is_dir():
        return [parent / path.name]
    names = [folder.name for folder in _folders_in(parent) if folder.name != path.name]
    return [parent / name for name in difflib.get_close_matches(path.name, names, n=2 * MOST_NEAR)]


def _folders_in(folder: Path) -> list[Path]:
    try:
        return [folder / entry.name for entry in sorted(os.scandir(folder), key=lambda one: one.name) if entry.is_dir()]
    except OSError:
        return []
