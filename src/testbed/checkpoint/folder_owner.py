"""Check that a folder is a run's own before the run writes into it. Only rank 0 does.

A run replaces or deletes files with certain names. In a folder where nothing shows that a run of this program wrote
them, they are other work: a downloaded model, another program's checkpoints.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from testbed.checkpoint.folders import Checkpoint, read_description
from testbed.errors import InputError
from testbed.io import read_json, read_text
from testbed.metrics.file import read_metrics
from testbed.run_folder import (
    BEST,
    CHECKPOINTS,
    COMPLETE,
    EFFECTIVE_CONFIG,
    FAILED,
    LAUNCHER,
    METRICS,
    OWN_FILES,
    PREEMPTED,
    PROFILER_LOGS,
    TENSORBOARD,
    TRACKERS,
)
from testbed.run_folder.reuse import held_files

_SAYS = {  # of each file of settings, some that every version wrote
    EFFECTIVE_CONFIG: {"checkpoint_path", "run_type", "seed"},
    LAUNCHER: {"checkpoint_path", "git_commit", "world_size"},
}
_MARK = re.compile(r"\[Rank \d+\] RUN_(?:COMPLETE|FAILED|PREEMPTED) \S.*timestamp_utc=\S+\n?")


def refuse_stranger(directory: Path) -> None:
    """Refuse a folder that holds what a run would replace and that no run of this program wrote. Nothing is touched.

    A start that was killed early, before its first metrics, has left its settings or a mark; before these it leaves no
    file of such a name.

    Raises:
        InputError: one sentence.
    """
    check_places(directory)
    held = held_files(directory)
    if held and not is_run(directory):
        try:
            read_metrics(directory / METRICS)
            fault = ""
        except ValueError as error:
            fault = f" ({error})"
        raise InputError(
            f"--checkpoint_path {directory} holds {names_of(held)}, which a run would replace, and no record that a "
            f"run of this program wrote it{fault}; give another folder, or move what is there elsewhere"
        )


def check_places(directory: Path) -> None:
    """Refuse a folder in which one of our names would lead a write or a deletion elsewhere.

    Raises:
        InputError: one sentence: a folder of ours is a link to elsewhere, or a file of ours is a folder.
    """
    check_link(directory)
    for name in (BEST, PROFILER_LOGS, TENSORBOARD, TRACKERS):
        if (directory / name).is_symlink():
            raise InputError(
                f"--checkpoint_path {directory}: {name} is a link to {(directory / name).readlink()}, and a run writes "
                f"its own files there; remove the link, or give another folder (only {CHECKPOINTS} may be one)"
            )
    for name in OWN_FILES:
        if (directory / name).is_dir():
            raise InputError(
                f"--checkpoint_path {directory}: {name} is a folder, where a run writes a file; move it elsewhere, or "
                "give another folder"
            )


def check_link(directory: Path) -> None:
    """Refuse a folder of checkpoints that is a link to nothing: the run would begin again, although it has checkpoints.

    A link to a larger disk is fine.

    Raises:
        InputError: it is such a link.
    """
    folder = directory / CHECKPOINTS
    if folder.is_symlink() and not folder.is_dir():
        raise InputError(
            f"--checkpoint_path {directory}: {CHECKPOINTS} is a link to {folder.readlink()}, which is not a folder; "
            "mount or make it, or give another --checkpoint_path"
        )


def check_not_shared(directory: Path, checkpoint: Checkpoint, copy: dict[str, Any]) -> None:
    """Refuse a folder of checkpoints that is a link to another run's, whose checkpoints this one would delete.

    Raises:
        InputError: they are of another run than this folder's metrics; or there are none, and the checkpoint was made
            under another path.
    """
    link = directory / CHECKPOINTS
    if not link.is_symlink():
        return
    try:
        is_own = read_metrics(directory / METRICS)["run_id"] == copy["run_id"]
    except ValueError:
        is_own = checkpoint.settings.get("checkpoint_path") == str(directory)
    if not is_own:
        raise InputError(
            f"--resume: {link} leads to {link.resolve()}, where the checkpoints of another run lie; give each run a "
            f"folder of its own there (to begin a new run with them: another --checkpoint_path and --resume "
            f"{checkpoint.directory})"
        )


def is_run(directory: Path) -> bool:
    """Return whether a run of this program wrote something in this folder: settings, a mark, a checkpoint, metrics.

    The metrics take longest to read. A lock does not count: a start that was refused leaves one too.
    """
    if any(required <= _keys(directory / name) for name, required in _SAYS.items()):
        return True
    if any(_is_mark(directory / name) for name in (COMPLETE, FAILED, PREEMPTED)):
        return True
    if any(_is_checkpoint(path) for path in (directory / CHECKPOINTS).glob("step_*")):
        return True
    try:
        read_metrics(directory / METRICS)
    except ValueError:
        return False
    return True


def names_of(paths: list[Path]) -> str:
    """Return the names for the middle of a sentence. A link is called one."""
    links = {path: " (a link: what it leads to stays)" for path in paths if path.is_symlink()}
    return ", ".join(path.name + links.get(path, "") for path in paths)


def _keys(path: Path) -> set[Any]:
    try:
        content = read_json(path)
    except ValueError:
        return set()
    return set(content) if isinstance(content, dict) else set()


def _is_mark(path: Path) -> bool:
    try:
        return _MARK.fullmatch(read_text(path)) is not None
    except (OSError, ValueError):  # ValueError: it is not UTF-8
        return False


def _is_checkpoint(folder: Path) -> bool:
    try:
        read_description(folder)
    except ValueError:
        return False
    return True
