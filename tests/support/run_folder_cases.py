"""Share cases among the tests of run folder."""

from __future__ import annotations

import shutil
from pathlib import Path


def move_to_larger_disk(path: Path, disk: Path) -> None:
    disk.mkdir(exist_ok=True)
    shutil.move(path, disk / path.name)
    path.symlink_to(disk / path.name)
