"""Empty the folder of an earlier run for a new one, or clear it for a run that is resumed. No torch."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from testbed.errors import InputError
from testbed.run_folder import (
    CHECKPOINTS,
    COMPLETE,
    EFFECTIVE_CONFIG,
    FAILED,
    INFERENCE,
    LAUNCHER,
    METRICS,
    OWN_FILES,
    OWN_FOLDERS,
    PREEMPTED,
)

# what `io.replacing`, marks, distributed/watchdog.py and checkpoint/writer.py leave when they are killed; others hide
# files here too
_LEFTOVER = re.compile(rf"\.(?:{'|'.join(map(re.escape, OWN_FILES))})\.(?:rank\d+\.)?\d+\.tmp|\.rank\d+\.progress")
_HALF_CHECKPOINT = re.compile(r"\.step_\d+(?:\.\w+)*\.tmp")


def claim(directory: Path, overwrite: bool) -> None:
    """Delete an earlier run's files from a locked folder, for a new run. Only rank 0 calls it.

    Raises:
        InputError: it holds a run and --overwrite was not given.
    """
    held = held_files(directory)
    if held and not overwrite:
        raise InputError(
            f"--checkpoint_path {directory} already holds a run ({held[0].name}); give --overwrite to replace it, "
            "--resume to continue it, or another folder"
        )
    # what shows that it is a run goes last: a start that is killed here leaves nothing that looks like a stranger's
    for path in (*reversed(held), *_leftovers(directory)):
        _delete(path)


def held_files(directory: Path) -> list[Path]:
    """Return the files and folders with the names of a run's own. Empty folders do not count."""
    paths = [directory / name for name in (*OWN_FILES, *OWN_FOLDERS)]
    return [path for path in paths if os.path.lexists(path) and not (path.is_dir() and not any(path.iterdir()))]


def reopen(directory: Path, from_the_start: bool) -> None:
    """Prepare a locked folder for a run that continues in it.

    Args:
        from_the_start: no step is kept, so only checkpoints and the files that identify the run stay.
    """
    kept = {METRICS, LAUNCHER, EFFECTIVE_CONFIG, CHECKPOINTS}
    ended = (COMPLETE, FAILED, PREEMPTED, INFERENCE)  # what was measured is of weights that will be others
    for name in [name for name in (*OWN_FILES, *OWN_FOLDERS) if name not in kept] if from_the_start else ended:
        _delete(directory / name)
    halves = [path for path in (directory / CHECKPOINTS).glob(".step_*.tmp") if _HALF_CHECKPOINT.fullmatch(path.name)]
    for half in (*halves, *_leftovers(directory)):
        _delete(half)


def _leftovers(directory: Path) -> list[Path]:
    """Return hidden files that a killed start left: half-written files and progress files."""
    return [path for path in directory.glob(".*") if _LEFTOVER.fullmatch(path.name)]


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():  # of a link goes the link, whatever it leads to
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
