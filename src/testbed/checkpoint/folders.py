"""Read what lies in a run's folder of checkpoints, by name and by checkpoint.json. No torch.

DIR/checkpoints/step_000020/ is a finished checkpoint; step_000020.damaged and step_000020.abandoned are out of the way.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testbed.checkpoint.manifest import MANIFEST
from testbed.config.initial_file import checked_shape
from testbed.errors import InputError
from testbed.io import read_json
from testbed.model.shape import ModelShape
from testbed.run_folder import CHECKPOINTS, DESCRIPTION, METRICS

STEP_FOLDER = re.compile(r"step_(\d+)")
DAMAGED_FOLDER = re.compile(r"step_\d+\.damaged(\.\d+)?")
DAMAGED, ABANDONED = ".damaged", ".abandoned"  # endings of folders that no start resumes from
_SIZES = ("num_layers", "num_heads", "embedding_size", "vocab_size", "max_position_embeddings")
VISIBLE_WITHIN_S = 60.0  # a network file system shows a folder's new files after at most this time
FULL_STATE = "full_state"  # DeepSpeed's copy of the state that any strategy can load
CONVERTED = "converted"  # the run type of what convert_checkpoint.py wrote


class CheckpointFailed(Exception):
    """A checkpoint could not be written or read."""


@dataclass(frozen=True)
class Checkpoint:
    """The content of checkpoint.json, and the folder that it lies in."""

    directory: Path
    step: int  # optimizer steps done
    elapsed_s: float  # wall time since the first step began, over all starts up to here
    useful_wall_s: float  # wall time of all starts that led to here, without what was lost on the way
    world_size: int
    run_type: str
    mesh: dict[str, int]
    settings: dict[str, Any]


def step_folders(folder: Path) -> list[Path]:
    """Return the finished checkpoints in a folder, by step. It does not check that they are whole."""
    steps = [(int(match[1]), path) for path in folder.glob("step_*") if (match := STEP_FOLDER.fullmatch(path.name))]
    return [path for _, path in sorted(steps) if path.is_dir()]


def damaged_folders(folder: Path) -> list[Path]:
    """Return the checkpoints that were found damaged: they have such a name and a file that only a checkpoint has."""
    named = [path for path in folder.glob("step_*") if DAMAGED_FOLDER.fullmatch(path.name)]
    return [path for path in named if any((path / name).is_file() for name in (DESCRIPTION, MANIFEST))]


def is_own(folder: Path) -> bool:
    """Return whether a folder is a checkpoint of the step in its name, and so may be deleted for a newer one."""
    try:
        return folder.name == f"step_{read_description(folder).step:06d}"
    except ValueError:
        return False


def other_step(folder: Path) -> int | None:
    """Return the step in a checkpoint's description if its name has another one: it was renamed.

    None: they agree, or one of the two has none.
    """
    named = STEP_FOLDER.fullmatch(folder.name.removesuffix(DAMAGED).removesuffix(ABANDONED))
    try:
        step = read_description(folder).step
    except ValueError:
        return None
    return step if named is not None and int(named[1]) != step else None


def read_description(directory: Path) -> Checkpoint:
    """Read a checkpoint's description.

    Raises:
        InputError: one sentence: checkpoint.json is missing, damaged, or of an earlier version.
    """
    content = read_json(directory / DESCRIPTION)
    kinds: dict[str, Any] = {"step": int, "elapsed_s": float, "useful_wall_s": float, "world_size": int}
    kinds |= {"run_type": str, "mesh": dict, "settings": dict}
    least = {"step": 1, "world_size": 1, "elapsed_s": 0, "useful_wall_s": 0}
    for name, kind in kinds.items():
        value: Any = content.get(name) if isinstance(content, dict) else None
        is_kind = type(value) is kind or (kind is float and type(value) is int)
        if not is_kind or (name in least and not least[name] <= value < math.inf):
            raise InputError(f"{directory / DESCRIPTION}: {name} is {value!r:.80}, which no checkpoint says")
    return Checkpoint(directory, **{name: content[name] for name in kinds})


def described_shape(checkpoint: Checkpoint) -> ModelShape:
    """Return the shape of a checkpoint's model. InputError: its description says none."""
    held = checkpoint.settings
    return checked_shape(f"its {DESCRIPTION}", tuple(map(held.get, _SIZES)), held.get("gelu", "tanh"))


def tokenizer_of_saved(folder: Path, name: str) -> str | None:
    """Return the name of the tokenizer that a checkpoint's run was trained with; None where its record has none."""
    record = read_json(folder / METRICS, f"{name}: {folder / METRICS}") if (folder / METRICS).is_file() else None
    config = record.get("training_config") if isinstance(record, dict) else None
    tokenizer = config.get("tokenizer") if isinstance(config, dict) else None
    return tokenizer if isinstance(tokenizer, str) else None


def checkpoint_in(path: Path) -> Path | None:
    """Return the checkpoint that a path names: itself, or the newest of a run's folder. None: there is none."""
    if (path / DESCRIPTION).is_file():
        return path
    return max(step_folders(path / CHECKPOINTS), key=lambda folder: int(folder.name[5:]), default=None)


def random_state_file(rank: int) -> str:
    """Return the name of the file with a rank's random numbers."""
    return f"random_state_rank{rank}.pt"


def remove(folder: Path) -> None:
    """Delete a checkpoint so that at no moment half of one has its name. Of a link only the link is deleted."""
    hidden = folder.with_name(f".{folder.name}.old.tmp")
    for path in (hidden, folder):
        if path.is_symlink():
            path.unlink()
    shutil.rmtree(hidden, ignore_errors=True)
    if folder.exists():
        folder.replace(hidden)
        shutil.rmtree(hidden, ignore_errors=True)


@contextlib.contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """Give an empty folder that takes the name and the place of `path` when the block ends without an exception."""
    temporary = path.with_name(f".{path.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        remove(path)
        temporary.rename(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def free_name(path: Path) -> Path:
    """Return `path`, or if it exists the first of PATH.2, PATH.3, ... that does not."""
    names = itertools.chain([path], (path.with_name(f"{path.name}.{number}") for number in itertools.count(2)))
    return next(name for name in names if not os.path.lexists(name))
