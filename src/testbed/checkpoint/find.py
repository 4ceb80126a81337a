"""Find the checkpoint that a start of a run resumes from. Only rank 0 does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from testbed import run_folder
from testbed.checkpoint.folders import ABANDONED, DAMAGED, free_name, other_step, step_folders
from testbed.checkpoint.manifest import MANIFEST, why_damaged
from testbed.config.settings import RunSettings
from testbed.errors import InputError, say
from testbed.metrics.file import read_metrics
from testbed.run_folder import DESCRIPTION, run_lock

PERHAPS_WHOLE = "perhaps whole, but "  # how the reason for a checkpoint begins that cannot be read


@dataclass(frozen=True)
class Found:
    """Checkpoint that --resume found, if any."""

    folder: Path | None  # a whole checkpoint; None: the run begins with its first step
    skipped: dict[Path, str]  # later checkpoints that are not whole, with the reason
    is_named: bool  # --resume gave a path, and this run has not begun with it before
    is_repeated: bool  # --resume gave a path, and the unfinished run in the folder began with it


def find(settings: RunSettings) -> Found:
    """Find the checkpoint that --resume asks for, and lock the run's folder.

    Raises:
        InputError: one sentence: there is none under that name, it is damaged, or another run writes into the folder.
    """
    directory = Path(settings.checkpointing.checkpoint_path)
    if settings.checkpointing.resume == "auto":
        lock(directory)
        return Found(*latest_valid(directory), is_named=False, is_repeated=False)
    assert settings.checkpointing.resume is not None
    path = Path(settings.checkpointing.resume)
    if _is_begun_with(directory, path):
        lock(directory)
        folder, skipped = latest_valid(directory)
        if folder is None:  # it was ended before its first checkpoint
            folder, skipped = resolve(path)
        return Found(folder, skipped, is_named=False, is_repeated=True)
    folder, skipped = resolve(path)
    lock(directory)
    return Found(folder, skipped, is_named=True, is_repeated=False)


def lock(directory: Path) -> None:
    """Lock the run's folder, and the one that its checkpoints are a link to.

    Raises:
        InputError: another run writes into one of them.
    """
    run_lock.acquire(directory)
    run_lock.lock_linked(directory / run_folder.CHECKPOINTS)


def _is_begun_with(directory: Path, other: Path) -> bool:
    """Return whether the folder holds an unfinished run that began with this checkpoint of another run.

    A launcher (--max-restarts) or a queue repeats commands: then resume that run.
    """
    try:
        metrics = read_metrics(directory / run_folder.METRICS)
    except ValueError:
        return False
    begun_with = (metrics.get("segments") or [{}])[0].get("resumed_from")
    if begun_with is None or metrics["status"] == "complete":
        return False
    begun = Path(begun_with)  # it, or the folder of checkpoints above it, may be a link
    return other.resolve() in (begun.resolve(), begun.resolve().parent.parent, begun.parent.parent.resolve())


def latest_valid(directory: Path) -> tuple[Path | None, dict[Path, str]]:
    """Return the last checkpoint in a run's folder that is whole, or None, and the later ones that are not.

    Each of those comes with the reason, which is also printed.

    Raises:
        InputError: none is whole, and one cannot be read: it may be whole, so the run must not begin again. Or a whole
            one has the name of another step: what follows would rename or delete it.
    """
    for folder in step_folders(directory / run_folder.CHECKPOINTS):
        _check_name(folder)
    skipped: dict[Path, str] = {}
    for folder in reversed(step_folders(directory / run_folder.CHECKPOINTS)):
        fault = _fault_of(folder)
        if fault is None:
            return folder, skipped
        skipped[folder] = fault
        say(f"--resume: {folder} is skipped: {fault}", flush=True)
    for fault in reversed(skipped.values()):
        if fault.startswith(PERHAPS_WHOLE):
            raise InputError(
                f"--resume: no whole checkpoint in {directory}, and {fault.removeprefix(PERHAPS_WHOLE)}; make it "
                "readable, or give another --checkpoint_path to begin a new run"
            )
    return None, skipped


def _fault_of(folder: Path) -> str | None:
    """Return why a checkpoint is not whole, after PERHAPS_WHOLE if it cannot be read. None: it is whole."""
    try:
        return why_damaged(folder)
    except OSError as error:
        return f"{PERHAPS_WHOLE}{error.filename or folder} cannot be read ({error.strerror or error})"


def resolve(path: Path) -> tuple[Path, dict[Path, str]]:
    """Return the checkpoint that --resume PATH names, and the ones that were skipped.

    PATH is a checkpoint, or a run's folder: then its last whole checkpoint is meant.

    Raises:
        InputError: there is none, or it is damaged.
    """
    if not (path / DESCRIPTION).exists() and not (path / MANIFEST).exists():
        folder, skipped = latest_valid(path)
        if folder is None:
            raise InputError(
                f"--resume {path} holds no whole checkpoint; give a folder such as {path}/checkpoints/step_000020, a "
                "run's folder, or auto"
            )
        return folder, skipped
    fault = _fault_of(path)
    if fault is not None:
        raise InputError(
            f"--resume {path} is damaged: {fault.removeprefix(PERHAPS_WHOLE)}; give another checkpoint, or auto"
        )
    _check_name(path)
    return path, {}


def _check_name(folder: Path) -> None:
    """Refuse a whole checkpoint that has another step's name. A damaged one fails its manifest.

    Raises:
        InputError: one sentence with both steps.
    """
    step = other_step(folder)
    fault = None if step is None else _fault_of(folder)
    if step is None or not (fault is None or fault.startswith(PERHAPS_WHOLE)):
        return
    raise InputError(
        f"--resume: {folder} is named as a checkpoint of another step than the {step} that its {DESCRIPTION} says; "
        f"nothing was touched: name it step_{step:06d}, or move it out of the run's folder"
    )


def is_checkpoint_of(directory: Path, folder: Path) -> bool:
    """Return whether a checkpoint is one of the run in `directory`.

    Links are followed: the folder of checkpoints may be on a larger disk, and so may one of them.
    """
    own = [*(directory / run_folder.CHECKPOINTS).glob("step_*")]
    return any(path.samefile(folder) for path in own if path.exists())


def quarantine(directory: Path, step: int, skipped: dict[Path, str]) -> None:
    """Rename later checkpoints: damaged ones, and those of steps that are now trained again.

    Only the damaged ones are deleted later on.
    """
    for folder in step_folders(directory / run_folder.CHECKPOINTS):
        ending = DAMAGED if not skipped.get(folder, PERHAPS_WHOLE).startswith(PERHAPS_WHOLE) else ABANDONED
        if folder in skipped or int(folder.name.removeprefix("step_")) > step:
            aside = free_name(folder.with_name(folder.name + ending))
            folder.replace(aside)
            say(f"--resume: {folder} is now {aside.name}", flush=True)
