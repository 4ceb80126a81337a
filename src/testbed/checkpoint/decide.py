"""Decide how a start of a run begins: whether the checkpoint fits, what is left to do, what counts as lost."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testbed import run_folder
from testbed.checkpoint import folder_owner
from testbed.checkpoint.adamw_state import RATES, rates_of
from testbed.checkpoint.changed_settings import (
    changes_of_data,
    changes_of_work,
    check_changes,
    differences,
    in_words,
)
from testbed.checkpoint.find import Found, is_checkpoint_of
from testbed.checkpoint.folders import CONVERTED, Checkpoint, described_shape, read_description
from testbed.config.settings import RunSettings
from testbed.distributed.launch import Launch
from testbed.errors import InputError, say
from testbed.metrics.file import SCHEMA_VERSION, metrics_version, read_metrics


@dataclass(frozen=True)
class Start:
    """How this start of the run begins, as rank 0 decided."""

    sha256: dict[str, str]  # of the token files
    checkpoint: Checkpoint | None = None  # None: with the first step
    is_complete: bool = False  # there is nothing left to do
    is_other_run: bool = False  # the checkpoint is of a run in another folder: it begins a new one
    setting_changes: tuple[dict[str, Any], ...] = ()  # {"name", "before", "now"}
    best_val_loss: float = math.inf  # up to the checkpoint
    validations_since_best: int = 0
    is_validated: bool = False  # the run's file has the validation after the checkpoint's step
    metrics: dict | None = None  # the run's file so far; only rank 0 has it
    is_record_cut_off: bool = False  # it is known up to the checkpoint only
    steps_done: int = 0  # of the start before this one, as far as rank 0's progress file tells

    @property
    def step(self) -> int:
        """Optimizer steps done by earlier starts."""
        return self.checkpoint.step if self.checkpoint else 0


def decide_start(settings: RunSettings, launch: Launch, sha256: dict[str, str], found: Found, steps_done: int) -> Start:
    """Decide how to begin, from the settings and from what --resume led to. Nothing is written.

    Args:
        steps_done: optimizer steps of the start before this one, as far as rank 0's progress file tells.

    Raises:
        InputError: one sentence: what was found is other work, or does not go with what this start is to do.
    """
    if found.folder is None:
        return _fresh_start(settings, sha256, found.skipped, steps_done)
    return _fitting_start(settings, launch, sha256, found, steps_done)


def _fresh_start(settings: RunSettings, sha256: dict[str, str], skipped: dict[Path, str], steps_done: int) -> Start:
    """Begin with the first step: there is no whole checkpoint. What an earlier start recorded counts as lost."""
    directory = Path(settings.checkpointing.checkpoint_path)
    metrics = None
    if (directory / run_folder.METRICS).exists():
        try:
            metrics = read_metrics(directory / run_folder.METRICS)
        except ValueError as error:
            raise InputError(
                f"--resume: {directory} holds no whole checkpoint to go on from, and of its run nothing is known "
                f"({error}); give another --checkpoint_path to begin a new run"
            ) from None
        # Earlier versions wrote complete runs only. Of damaged checkpoints a run that was stopped begins anew; one that
        # has done all its steps needs none.
        is_closed = metrics.get("status", "complete") == "complete"
        if is_closed and (not skipped or _is_complete(metrics, settings)):
            _check_is_this_run(metrics, settings, sha256)
            return Start(sha256, is_complete=True, metrics=metrics)
    held = "no whole checkpoint" if skipped else "no checkpoint"
    say(f"--resume: {directory} holds {held}, so the run begins with its first step", flush=True)
    return Start(sha256, metrics=metrics, steps_done=steps_done)


def _check_is_this_run(metrics: dict, settings: RunSettings, sha256: dict[str, str]) -> None:
    """Check that a complete run without checkpoints is what this start would do.

    Raises:
        InputError: it is another, or a shorter one, and cannot be continued.
    """
    directory = Path(settings.checkpointing.checkpoint_path)
    reason: str | None = "it was written by an earlier version"
    if metrics_version(metrics) == SCHEMA_VERSION:
        config = metrics["training_config"]
        recorded = Checkpoint(
            directory,
            step=0,
            elapsed_s=0.0,
            useful_wall_s=0.0,
            world_size=metrics["hardware"]["world_size"],
            run_type=config["run_type"],
            mesh=config.get("mesh", {}),
            settings=metrics["settings"],
        )
        changes = [change for change in differences(settings, recorded) if change["before"] is not None]
        changes = changes_of_work(changes) + changes_of_data(metrics, sha256)
        reason = f"it was another: {in_words(changes)}" if changes else None
        if reason is None and not _is_complete(metrics, settings):
            reason = f"it has done fewer than {settings.last_step} steps"
    if reason is not None:
        raise InputError(
            f"--resume: {directory} holds a complete run without a checkpoint to go on from, and {reason}; give "
            "--overwrite instead to replace it, or another --checkpoint_path"
        )


def _is_complete(metrics: dict, settings: RunSettings) -> bool:
    """Return whether a run's file says that all was done that this start would do."""
    done = metrics["steps"][-1]["step"] if metrics.get("steps") else 0
    patience, since_best = settings.training.early_stop_patience, _since_best(metrics.get("evaluations") or [])
    is_out_of_patience = patience is not None and since_best >= patience
    return metrics.get("status") == "complete" and (done >= settings.last_step or is_out_of_patience)


def _since_best(evaluations: list[dict[str, Any]]) -> int:
    """Return how many validations came after the first of the lowest loss."""
    losses = [row["val_loss"] for row in evaluations]
    return len(losses) - 1 - losses.index(min(losses)) if losses else 0


def _fitting_start(
    settings: RunSettings, launch: Launch, sha256: dict[str, str], found: Found, steps_done: int
) -> Start:
    """Go on from a whole checkpoint.

    Raises:
        InputError: it belongs to other work, or does not go with what this start is to do.
    """
    folder, directory = found.folder, Path(settings.checkpointing.checkpoint_path)
    assert folder is not None
    checkpoint = read_description(folder)
    if checkpoint.run_type == CONVERTED:
        _check_steps_left(checkpoint, settings)
        return Start(sha256, of_converted(checkpoint, settings), is_other_run=True, steps_done=steps_done)
    copy = read_metrics(folder / run_folder.METRICS)
    if (version := metrics_version(copy)) != SCHEMA_VERSION:
        raise InputError(
            f"--resume: {folder / run_folder.METRICS} is of version {version}, and this program goes on from "
            f"{SCHEMA_VERSION}; give another checkpoint"
        )
    is_other_run = not is_checkpoint_of(directory, folder)
    if not is_other_run:
        folder_owner.check_not_shared(directory, checkpoint, copy)
    metrics = copy if is_other_run else _metrics_of_run(directory, checkpoint, copy)
    changes = differences(settings, checkpoint) + changes_of_data(copy, sha256)
    check_changes(changes_of_work(changes), settings, folder)
    if not found.is_named and _is_complete(metrics, settings):
        return Start(sha256, is_complete=True, metrics=metrics)
    if not found.is_named and not is_other_run:
        _check_not_finished_later(metrics, checkpoint)
    _check_steps_left(checkpoint, settings)
    evaluations = [row for row in metrics["evaluations"] if row["step"] <= checkpoint.step]  # those that stay
    return Start(
        sha256,
        checkpoint,
        is_other_run=is_other_run,
        setting_changes=tuple(changes),
        best_val_loss=math.inf if is_other_run else min((row["val_loss"] for row in evaluations), default=math.inf),
        validations_since_best=0 if is_other_run else _since_best(evaluations),
        is_validated=not is_other_run and any(row["step"] == checkpoint.step for row in evaluations),
        metrics=metrics,
        is_record_cut_off=metrics is copy,
        steps_done=steps_done,
    )


def of_converted(checkpoint: Checkpoint, settings: RunSettings) -> Checkpoint:
    """Return a checkpoint of convert_checkpoint.py without ranks, and say what this start has otherwise: it goes on
    under the settings of this start, as no record says those of the other program.

    Raises:
        InputError: it has another model or optimizer.
    """
    name, whole = f"--resume {checkpoint.directory}", "the folder that convert_checkpoint.py wrote"
    values, before = settings.as_dict(), dataclasses.asdict(rates_of([checkpoint.settings.get(key) for key in RATES]))
    if values["optimizer"] != "adamw":
        raise InputError(
            f"{name} holds AdamW's state, and this start has --optimizer {values['optimizer']}; leave that out, or "
            f"give {whole} to --init_from, which takes the weights alone"
        )
    if (shape := described_shape(checkpoint)) != settings.shape:
        held = ", ".join(f"--{size} {number}" for size, number in dataclasses.asdict(shape).items())
        raise InputError(f"{name} holds another model: give {held}, or {whole} to --resume and no shape")
    others = [f"--{key} {before[key]:g}" for key in RATES if key != "learning_rate" and before[key] != values[key]]
    if others:
        say(f"note: AdamW's state was made with {', '.join(others)}; this start has others", flush=True)
    if "learning_rate" not in settings.origin.given:
        said = f"its last step had a learning rate of {before['learning_rate']:g}, and the peak of this start is"
        say(f"note: {said} {values['learning_rate']:g}, the default (--learning_rate)", flush=True)
    return dataclasses.replace(checkpoint, world_size=0)


def _check_not_finished_later(metrics: dict, checkpoint: Checkpoint) -> None:
    """Check that the run did not finish after the checkpoint: its weights and rows would be trained over.

    Raises:
        InputError: names the finished step, and that of the checkpoint.
    """
    ended = (metrics.get("segments") or [{}])[-1].get("ended")
    done = metrics["steps"][-1]["step"] if metrics["steps"] else 0
    if ended == "complete" and done > checkpoint.step:
        raise InputError(
            f"--resume: the run is complete with {done} steps, but its last whole checkpoint is of step "
            f"{checkpoint.step}, so training from there would replace the finished weights; to begin another run "
            f"there, give --resume {checkpoint.directory} and another --checkpoint_path"
        )


def _metrics_of_run(directory: Path, checkpoint: Checkpoint, copy: dict) -> dict:
    """Return the run's own file, which has what came after the checkpoint, or the checkpoint's copy of it."""
    try:
        metrics = read_metrics(directory / run_folder.METRICS)
        rows = [row["step"] for row in metrics["steps"] if row["step"] <= checkpoint.step]
        if metrics["run_id"] != copy["run_id"] or rows != [row["step"] for row in copy["steps"]]:
            raise InputError(f"{run_folder.METRICS} lacks rows of steps that {checkpoint.directory} has done")
        return metrics
    except (KeyError, ValueError) as error:
        say(f"--resume: {error}; the copy in the checkpoint is used, and what came after it is not known", flush=True)
        return copy


def _check_steps_left(checkpoint: Checkpoint, settings: RunSettings) -> None:
    if settings.last_step < checkpoint.step:
        raise InputError(
            f"--resume: {checkpoint.directory} is past the last step of this start, {settings.last_step}; raise "
            "--stop_at_step or --max_train_steps"
        )
    left, needed = (
        settings.last_step - checkpoint.step,
        max(1, settings.measuring.timing_warmup_steps) + settings.measuring.profile_steps,
    )
    if settings.measuring.profile and left < needed:
        raise InputError(
            f"--profile looks at {settings.measuring.profile_steps} steps after "
            f"{needed - settings.measuring.profile_steps} of warm-up, "
            f"but after {checkpoint.directory} {left} are left; give a smaller --profile_steps, or --resume an earlier "
            "checkpoint"
        )
