"""Find the files of runs under a folder: every program that looks for runs looks with this."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

from testbed.run_folder import CHECKPOINTS

_STEP_FOLDER = re.compile(r"\.?step_\d+")


def files_of_runs(directory: Path, name: str = "*") -> list[Path]:
    """Find what is called `name` at any depth under `directory`, sorted by path, but for what lies in checkpoints.

    A checkpoint keeps copies of the run's files as they were at its step: no run of its own, and no repeat.
    """
    return sorted(path for path in Path(directory).rglob(name) if not _is_in_checkpoint(path))


def _is_in_checkpoint(path: Path) -> bool:
    """Return whether it lies in RUN/checkpoints/step_N, whole, damaged or half written. A folder of runs may be called
    checkpoints too, and what is in it counts."""
    folders = path.absolute().parts[:-1]
    return any(above == CHECKPOINTS and _STEP_FOLDER.match(folder) for above, folder in itertools.pairwise(folders))
