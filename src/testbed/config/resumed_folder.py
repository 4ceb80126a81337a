"""Check what --resume names first of all: where a folder is mistyped, nothing else is to be blamed. No torch."""

from __future__ import annotations

import re
from pathlib import Path

from testbed.config.flag_types import AUTO
from testbed.config.initial_file import LLMC, SUFFIXES, as_a_folder, file_of_another_in, is_file_of_another, llmc_states
from testbed.errors import InputError
from testbed.io import not_a_folder
from testbed.run_folder import CHECKPOINTS, DESCRIPTION


def check_resumed(resume: str | None) -> None:
    """Raise InputError where --resume names something that holds no checkpoint."""
    if resume in (None, AUTO):
        return
    path = Path(resume)
    if is_file_of_another(path) and path.is_file():
        raise InputError(f"--resume {path} is a file, but a run is resumed from a folder; {_way_out(path)}")
    fault = not_a_folder(path) or (None if _holds_checkpoint(path) else "holds no checkpoint")
    if fault is None:
        return
    way_out = "give auto, a run's folder, or a checkpoint such as DIR/checkpoints/step_000020"
    if (file := file_of_another_in(path)) is not None:
        way_out = f"there is {file}: {_way_out(file)}"
    raise InputError(f"--resume {path} {fault}; {way_out}")


def _way_out(file: Path) -> str:
    """Return what to do with a file of another program, which may hold no optimizer's state."""
    if SUFFIXES[file.suffix.lower()] != LLMC or llmc_states(file):
        return as_a_folder(file, "give --resume")
    return f"--init_from {file} trains its weights further"


def _holds_checkpoint(folder: Path) -> bool:
    """Return whether a folder is a checkpoint or a run's that has saved; whether they are whole is looked at later."""
    is_checkpoint = re.fullmatch(r"step_\d+", folder.name) or (folder / DESCRIPTION).exists()
    return bool(is_checkpoint) or (folder / CHECKPOINTS).is_dir()
