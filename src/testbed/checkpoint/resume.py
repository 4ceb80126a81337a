"""With what a start of a run begins: which checkpoint it goes on from, whether that is whole and fits, and loading it.

Rank 0 alone reads whole files, touches the run's folder and decides; the others are told, or told why not.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.distributed.checkpoint.api import CheckpointException

from testbed import run_files, run_lock
from testbed.checkpoint import folder_owner
from testbed.checkpoint.changed_settings import (
    changes_of_data,
    changes_of_work,
    check_changes,
    differences,
    in_words,
    is_same_form,
)
from testbed.checkpoint.newest import is_checkpoint_of, named, newest_whole, set_aside
from testbed.checkpoint.writer import (
    VISIBLE_WITHIN_S,
    Checkpoint,
    CheckpointFailed,
    cause,
    random_state_file,
    read_description,
)
from testbed.config.settings import RunSettings
from testbed.distributed import process_group, watchdog
from testbed.distributed.launch import Launch
from testbed.errors import say
from testbed.io import open_regular
from testbed.metrics import run_directory
from testbed.metrics.file import SCHEMA_VERSION, metrics_version, read_metrics
from testbed.model.tensor_archive import load_tensors

if TYPE_CHECKING:
    from testbed.metrics.recorder import RunRecorder
    from testbed.strategies import Strategy

FULL_STATE = "full_state"  # where an engine whose own files fit one form only leaves what every form can load


@dataclass(frozen=True)
class Start:
    """How this start of the run begins, as rank 0 found out."""

    sha256: dict[str, str]  # of the token files
    checkpoint: Checkpoint | None = None  # None: with the first step
    is_complete: bool = False  # there is nothing left to do
    is_other_run: bool = False  # the checkpoint is of a run in another folder: it begins a new one
    setting_changes: tuple[dict[str, Any], ...] = ()  # {"name", "before", "now"}
    best_val_loss: float = math.inf  # up to the checkpoint
    is_validated: bool = False  # the run's file has the validation after the checkpoint's step
    metrics: dict | None = None  # the run's file so far; only rank 0 has it
    is_record_cut_off: bool = False  # it is known up to the checkpoint only
    steps_done: int = 0  # by the start before this one, as far as rank 0's progress file tells

    @property
    def step(self) -> int:
        """Optimizer steps done by earlier starts."""
        return self.checkpoint.step if self.checkpoint else 0


def begin(
    settings: RunSettings, launch: Launch, check_data: Callable[[], dict[str, str]], refusal: str | None
) -> Start:
    """Decide with what to begin, and make the run's folder this start's own. All ranks call it.

    Args:
        check_data: reads the token files and gives their hashes; only rank 0 calls it.
        refusal: why this rank cannot start, if it found out before.

    Raises:
        ValueError: on every rank, one sentence: what was typed does not go with what was found.
    """
    for other in process_group.gather_objects(refusal):
        if other is not None:
            raise ValueError(other)
    mine = process_group.start_on_rank_0(lambda: _begin(settings, launch, check_data))
    process_group.wait_for_work(mine)
    start, error = process_group.gather_objects(_told(mine) if mine is not None else None)[0]
    if error is not None:
        raise error
    _check_visible(settings, launch)
    return mine.result() if mine is not None else start


def _told(found: Future[Start]) -> tuple[Start | None, Exception | None]:
    """What the other ranks need to know of the decision, or why there is none."""
    error = found.exception()
    if error is None:
        return dataclasses.replace(found.result(), metrics=None), None
    return None, ValueError(str(error)) if isinstance(error, ValueError) else CheckpointFailed(cause(error))


def _check_visible(settings: RunSettings, launch: Launch) -> None:
    """Every rank sees what rank 0 wrote, or checkpoints would be in pieces on several machines.

    Raises:
        ValueError: a rank does not.
    """
    needs_it = settings.checkpointing.save_every or settings.training.stop_at_step or settings.checkpointing.resume
    lock = Path(settings.checkpointing.checkpoint_path) / run_lock.LOCK
    deadline_s = time.monotonic() + (VISIBLE_WITHIN_S if launch.num_nodes > 1 and needs_it else 0.0)
    while not (sees_it := lock.exists()) and time.monotonic() < deadline_s:
        time.sleep(0.5)
    blind = [rank for rank, sees in enumerate(process_group.gather_objects(sees_it)) if not sees]
    if needs_it and blind:
        raise ValueError(
            f"--checkpoint_path {settings.checkpointing.checkpoint_path}: rank {blind[0]} does not see the folder that "
            "rank 0 made; "
            "saving and resuming need a file system that all nodes share"
        )


def _begin(settings: RunSettings, launch: Launch, check_data: Callable[[], dict[str, str]]) -> Start:
    sha256 = check_data()
    directory = Path(settings.checkpointing.checkpoint_path)
    if settings.checkpointing.overwrite:
        folder_owner.check_link(directory)
    else:
        folder_owner.refuse_stranger(directory)
    if settings.checkpointing.resume is None:
        _keep_others_out(directory)
        if settings.checkpointing.overwrite and (held := run_directory.held_files(directory)):
            say(f"--overwrite: replaces in {directory}: {folder_owner.names_of(held)}", flush=True)
        run_directory.claim(directory, settings.checkpointing.overwrite)
        return Start(sha256)
    is_again = False
    if settings.checkpointing.resume == "auto" or (
        is_again := _is_started_again(directory, Path(settings.checkpointing.resume))
    ):
        _keep_others_out(directory)
        folder, skipped = newest_whole(directory)
        if folder is None and is_again:  # it was ended before its first checkpoint
            folder, skipped = named(Path(settings.checkpointing.resume))
    else:
        folder, skipped = named(Path(settings.checkpointing.resume))
        _keep_others_out(directory)
    steps_done = watchdog.steps_done(directory)  # before the folder is cleared
    is_auto = settings.checkpointing.resume == "auto" or is_again
    if folder is None:
        start = _fresh_start(settings, sha256, skipped)
    else:
        start = _fitting_start(settings, launch, sha256, folder, is_auto)
    start = dataclasses.replace(start, steps_done=steps_done)
    if start.is_complete:
        run_lock.let_others_in(directory)
        say(f"--resume: {directory} is already complete, {settings.last_step} steps; nothing is left to do", flush=True)
        return start
    if not start.is_other_run:
        run_directory.reopen(directory, from_the_start=start.checkpoint is None)
        set_aside(directory, start.step, skipped)
    elif is_again:
        run_directory.claim(directory, overwrite=True)
    elif held := run_directory.held_files(directory):
        raise ValueError(
            f"--resume {settings.checkpointing.resume} begins a new run from another run's checkpoint, but "
            "--checkpoint_path "
            f"{directory} already holds one ({held[0].name}); give --resume auto to continue that one, or another "
            "--checkpoint_path"
        )
    if start.checkpoint is not None:
        say(f"--resume: goes on after step {start.step}, from {start.checkpoint.directory}", flush=True)
    return start


def _keep_others_out(directory: Path) -> None:
    """ValueError where another run writes into the folder, or into the one that its checkpoints are a link to."""
    run_lock.keep_others_out(directory)
    run_lock.lock_linked(directory / run_files.CHECKPOINTS)


def _is_started_again(directory: Path, other: Path) -> bool:
    """Whether the folder holds the unfinished run that this very command began with another run's checkpoint: a
    launcher (--max-restarts) or a queue repeats commands."""
    try:
        metrics = read_metrics(directory / run_files.METRICS)
    except ValueError:
        return False
    begun_with = (metrics.get("segments") or [{}])[0].get("resumed_from")
    if begun_with is None or metrics["status"] == "complete":
        return False
    begun = Path(begun_with)  # it, or the folder of checkpoints above it, may be a link
    return other.resolve() in (begun.resolve(), begun.resolve().parent.parent, begun.parent.parent.resolve())


def _fresh_start(settings: RunSettings, sha256: dict[str, str], skipped: dict[Path, str]) -> Start:
    """No whole checkpoint: with the first step. What an earlier start recorded counts as lost."""
    directory = Path(settings.checkpointing.checkpoint_path)
    metrics = None
    if (directory / run_files.METRICS).exists():
        try:
            metrics = read_metrics(directory / run_files.METRICS)
        except ValueError as error:
            raise ValueError(
                f"--resume: {directory} holds no whole checkpoint to go on from, and of its run nothing is known "
                f"({error}); give another --checkpoint_path to begin anew"
            ) from None
        # Earlier versions wrote complete runs only. Of damaged checkpoints a run that was stopped begins anew; one that
        # has done all its steps needs none.
        is_closed = metrics.get("status", "complete") == "complete"
        if is_closed and (not skipped or _is_complete(metrics, settings)):
            _check_is_this_run(metrics, settings, sha256)
            return Start(sha256, is_complete=True)
    held = "no whole checkpoint" if skipped else "no checkpoint"
    say(f"--resume: {directory} holds {held}, so the run begins with its first step", flush=True)
    return Start(sha256, metrics=metrics)


def _check_is_this_run(metrics: dict, settings: RunSettings, sha256: dict[str, str]) -> None:
    """Whether a complete run without checkpoints is what this start would do.

    Raises:
        ValueError: it is another, or a shorter one, and cannot be continued.
    """
    directory, reason = Path(settings.checkpointing.checkpoint_path), "it was written by an earlier version"
    if metrics_version(metrics) == SCHEMA_VERSION:
        config = metrics["training_config"]
        recorded = Checkpoint(
            *(directory, 0, 0.0, 0.0, metrics["hardware"]["world_size"], config["run_type"]),
            *(config.get("mesh", {}), metrics["settings"]),
        )
        changes = [change for change in differences(settings, recorded) if change["before"] is not None]
        changes = changes_of_work(changes) + changes_of_data(metrics, sha256)
        reason = f"it was another: {in_words(changes)}" if changes else None
        if reason is None and not _is_complete(metrics, settings):
            reason = f"it has done fewer than {settings.last_step} steps"
    if reason is not None:
        raise ValueError(
            f"--resume: {directory} holds a complete run without a checkpoint to go on from, and {reason}; give "
            "--overwrite instead to replace it, or another --checkpoint_path"
        )


def _is_complete(metrics: dict, settings: RunSettings) -> bool:
    """Whether a run's file says that all was done that this start would do."""
    done = metrics["steps"][-1]["step"] if metrics.get("steps") else 0
    return metrics.get("status") == "complete" and done >= settings.last_step


def _fitting_start(settings: RunSettings, launch: Launch, sha256: dict[str, str], folder: Path, is_auto: bool) -> Start:
    """The start that goes on from a whole checkpoint.

    Args:
        is_auto: it is the newest, not one that was named: a run that is complete needs none.

    Raises:
        ValueError: it belongs to other work, or does not go with what this start is to do.
    """
    checkpoint = read_description(folder)
    directory = Path(settings.checkpointing.checkpoint_path)
    copy = read_metrics(folder / run_files.METRICS)
    is_other_run = not is_checkpoint_of(directory, folder)
    if not is_other_run:
        folder_owner.check_not_shared(directory, checkpoint, copy)
    metrics = copy if is_other_run else _metrics_of_run(directory, checkpoint, copy)
    changes = differences(settings, checkpoint) + changes_of_data(copy, sha256)
    of_work = changes_of_work(changes)
    check_changes(of_work, settings, folder)
    if is_auto and _is_complete(metrics, settings):
        return Start(sha256, is_complete=True)
    _check_steps_left(checkpoint, settings)
    evaluations = [row for row in metrics["evaluations"] if row["step"] <= checkpoint.step]  # those that stay
    return Start(
        sha256,
        checkpoint,
        is_other_run=is_other_run,
        setting_changes=tuple(changes),
        best_val_loss=math.inf if is_other_run else min((row["val_loss"] for row in evaluations), default=math.inf),
        is_validated=not is_other_run and any(row["step"] == checkpoint.step for row in evaluations),
        metrics=metrics,
        is_record_cut_off=metrics is copy,
    )


def _metrics_of_run(directory: Path, checkpoint: Checkpoint, copy: dict) -> dict:
    """The run's own file, which says what came after the checkpoint too; where it cannot be used, the copy in it."""
    try:
        metrics = read_metrics(directory / run_files.METRICS)
        rows = [row["step"] for row in metrics["steps"] if row["step"] <= checkpoint.step]
        if metrics["run_id"] != copy["run_id"] or rows != [row["step"] for row in copy["steps"]]:
            raise ValueError(f"{run_files.METRICS} lacks rows of steps that {checkpoint.directory} has done")
        return metrics
    except (KeyError, ValueError) as error:
        say(f"--resume: {error}; the copy in the checkpoint is used, and what came after it is not known", flush=True)
        return copy


def _check_steps_left(checkpoint: Checkpoint, settings: RunSettings) -> None:
    if settings.last_step < checkpoint.step:
        raise ValueError(
            f"--resume: {checkpoint.directory} is past the last step of this start, {settings.last_step}; raise "
            "--stop_at_step or --max_train_steps"
        )
    left, needed = (
        settings.last_step - checkpoint.step,
        max(1, settings.measuring.timing_warmup_steps) + settings.measuring.profile_steps,
    )
    if settings.measuring.profile and left < needed:
        raise ValueError(
            f"--profile looks at {settings.measuring.profile_steps} steps after "
            f"{needed - settings.measuring.profile_steps} of warm-up, "
            f"but after {checkpoint.directory} {left} are left; give a smaller --profile_steps, or --resume an earlier "
            "checkpoint"
        )


def record(start: Start, recorder: RunRecorder) -> None:
    """Take over what earlier starts recorded, and say with what this one begins. Only rank 0 has anything to say."""
    if start.metrics is None:
        return
    checkpoint = start.checkpoint
    recorder.segment["resumed_from"] = str(checkpoint.directory) if checkpoint else None
    recorder.segment["setting_changes"] = list(start.setting_changes)
    if start.is_other_run:
        recorder.begin_after(start.step)
        if start.steps_done > start.step:  # this start again, and what it had done before its first checkpoint
            recorder.segment.update(lost_steps=start.steps_done - start.step, lost_s=None)
        recorder.note_other_mathematics(f"steps 1 to {start.step} trained in run {start.metrics['run_id']}")
    elif checkpoint is None:
        recorder.restore(start.metrics, 0, start.steps_done, elapsed_s=0.0, useful_wall_s=0.0)
    else:
        recorder.restore(
            *(start.metrics, start.step, start.steps_done),
            *(checkpoint.elapsed_s, checkpoint.useful_wall_s),
        )
        if start.is_record_cut_off:
            recorder.segment.update(lost_steps=None, lost_s=None)
    if of_work := changes_of_work(start.setting_changes):
        recorder.note_other_mathematics(f"from step {start.step + 1} on {in_words(of_work)}")


def load(start: Start, strategy: Strategy, settings: RunSettings, launch: Launch) -> bool:
    """Put the strategy and this rank's random numbers back. All ranks call it.

    Returns:
        Whether the random numbers go on where they were. On other ranks there is nothing to go on from: each rank then
        draws from a new seed, made of the run's, its rank and the step.

    Raises:
        CheckpointFailed: a file is missing or damaged.
    """
    checkpoint = start.checkpoint
    directory, fault, is_restored = checkpoint.directory, None, False
    try:
        if is_same_form(checkpoint, settings, launch):
            strategy.load_checkpoint(directory)
        else:
            full_state = directory / FULL_STATE
            strategy.load_full_state(full_state if full_state.exists() else directory)
        if checkpoint.world_size == launch.world_size:
            is_restored = _restore_random_state(directory, launch)
    except (Exception, CheckpointException) as error:  # PyTorch's own is no Exception
        fault = error
    faults = process_group.gather_objects(None if fault is None else cause(fault))
    for rank, words in enumerate(faults):
        if words is not None:
            raise CheckpointFailed(
                f"{directory} cannot be read (rank {rank}: {words}); give another to --resume"
            ) from fault
    if not all(process_group.gather_objects(is_restored)):
        torch.manual_seed(seed_of_step(settings.training.seed, launch.rank, checkpoint.step))
        return False
    return True


def seed_of_step(seed: int, rank: int, step: int) -> int:
    """The seed of a rank that goes on from a step at which it had no random numbers."""
    return int(np.random.SeedSequence([seed, rank, step]).generate_state(1, np.uint64)[0])


def _restore_random_state(directory: Path, launch: Launch) -> bool:
    """Whether the file has what this rank's device needs."""
    path = directory / random_state_file(launch.rank)
    with open_regular(path) as file:
        state = load_tensors(file, str(path))
    if not isinstance(state, dict) or not all(isinstance(state.get(kind), torch.Tensor) for kind in {"cpu", *state}):
        raise ValueError(f"{path} holds something else than a rank's random numbers")
    if torch.cuda.is_available() != ("cuda" in state):
        return False
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
    return True
