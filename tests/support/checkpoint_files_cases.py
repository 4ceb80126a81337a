"""Share cases among the tests of checkpoint files."""

from __future__ import annotations

import json
from pathlib import Path

from testbed.checkpoint.find import latest_valid
from testbed.checkpoint.folders import read_description
from testbed.checkpoint.manifest import write_manifest
from testbed.errors import InputError
from testbed.run_folder import DESCRIPTION


def flip_a_bit(path: Path, place: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def write_checkpoint(folder: Path) -> Path:
    """Write a whole checkpoint of step 20, whose tensors are none."""
    directory = folder / "checkpoints" / "step_000020"
    directory.mkdir(parents=True)
    content = {
        "step": 20, "elapsed_s": 1.5, "useful_wall_s": 1.5, "world_size": 2, "run_type": "ddp", "mesh": {"data": 2},
        "settings": {"seed": 1, "run_type": "ddp"},
    }  # fmt: skip
    (directory / DESCRIPTION).write_text(json.dumps(content))
    (directory / "__0_0.distcp").write_bytes(b"tensors" * 10)
    write_manifest(directory)
    return directory


def look_at_checkpoint(folder: Path) -> None:
    """Do what --resume auto does. A checkpoint that is skipped is refused, with the reason."""
    _, skipped = latest_valid(folder)
    if skipped:
        raise InputError(f"{next(iter(skipped))}: {next(iter(skipped.values()))}")
    read_description(folder / "checkpoints" / "step_000020")
