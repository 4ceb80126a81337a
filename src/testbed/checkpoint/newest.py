"""Which checkpoints of a run are whole, and out of the way with those that no start should take for it. Rank 0's."""

from __future__ import annotations

from pathlib import Path

from testbed import run_files
from testbed.checkpoint.manifest import MANIFEST, why_damaged
from testbed.checkpoint.writer import ABANDONED, DAMAGED, DESCRIPTION, free_name, other_step, step_folders
from testbed.errors import say

PERHAPS_WHOLE = "perhaps whole, but "  # how the reason begins of a checkpoint that the disk does not show


def newest_whole(directory: Path) -> tuple[Path | None, dict[Path, str]]:
    """The checkpoint with the most steps in a run's folder whose files are what its manifest says, or None; and those
    after it that are not, each with the reason, which is also said.

    Raises:
        ValueError: none is whole, and of one it is not known, as it cannot be read: nothing should begin anew then. Or
            a whole one has the name of another step: what follows would set it aside or delete it.
    """
    for folder in step_folders(directory / run_files.CHECKPOINTS):
        _check_name(folder)
    skipped: dict[Path, str] = {}
    unreadable = None
    for folder in reversed(step_folders(directory / run_files.CHECKPOINTS)):
        try:
            reason = why_damaged(folder)
        except OSError as error:
            unreadable = f"{error.filename or folder} cannot be read ({error.strerror or error})"
            reason = PERHAPS_WHOLE + unreadable
        if reason is None:
            return folder, skipped
        skipped[folder] = reason
        say(f"--resume: {folder} is skipped: {reason}", flush=True)
    if unreadable is not None:
        raise ValueError(
            f"--resume: no whole checkpoint in {directory}, and {unreadable}; make it readable, or give another "
            "--checkpoint_path to begin anew"
        )
    return None, skipped


def named(path: Path) -> tuple[Path, dict[Path, str]]:
    """The checkpoint that --resume PATH names: a checkpoint's own folder, or the newest whole one of a run's folder and
    those that were skipped.

    Raises:
        ValueError: there is none, or it is damaged.
    """
    if not (path / DESCRIPTION).exists() and not (path / MANIFEST).exists():
        folder, skipped = newest_whole(path)
        if folder is None:
            raise ValueError(
                f"--resume {path} holds no whole checkpoint; give a folder such as {path}/checkpoints/step_000020, a "
                "run's folder, or auto"
            )
        return folder, skipped
    try:
        reason = why_damaged(path)
    except OSError as error:
        reason = f"{error.filename or path} cannot be read ({error.strerror or error})"
    if reason is not None:
        raise ValueError(f"--resume {path} is damaged: {reason}; give another checkpoint, or auto")
    _check_name(path)
    return path, {}


def _check_name(folder: Path) -> None:
    """Refuse a whole checkpoint that has another step's name; a damaged one is told by its manifest.

    Raises:
        ValueError: one sentence with both steps.
    """
    step = other_step(folder)
    if step is None or _is_damaged(folder):
        return
    raise ValueError(
        f"--resume: {folder} is named as a checkpoint of another step than the {step} that its {DESCRIPTION} says; "
        f"nothing was touched: name it step_{step:06d}, or move it out of the run's folder"
    )


def _is_damaged(folder: Path) -> bool:
    try:
        return why_damaged(folder) is not None
    except OSError:  # perhaps whole
        return False


def is_checkpoint_of(directory: Path, folder: Path) -> bool:
    """Whether a checkpoint is one of the run in `directory`, whatever links lead there: the folder of checkpoints may
    lie on a larger disk, and so may one of them."""
    own = [*(directory / run_files.CHECKPOINTS).glob("step_*")]
    return any(path.samefile(folder) for path in own if path.exists())


def set_aside(directory: Path, step: int, skipped: dict[Path, str]) -> None:
    """Take from later checkpoints their names: damaged ones, and those of steps that are now trained again. Only the
    damaged are deleted later on."""
    for folder in step_folders(directory / run_files.CHECKPOINTS):
        ending = DAMAGED if not skipped.get(folder, PERHAPS_WHOLE).startswith(PERHAPS_WHOLE) else ABANDONED
        if folder in skipped or int(folder.name.removeprefix("step_")) > step:
            aside = free_name(folder.with_name(folder.name + ending))
            folder.replace(aside)
            say(f"--resume: {folder} is now {aside.name}", flush=True)
