"""Checkpoints to resume from: a folder appears whole or not at all, and says what it continues.

DIR/checkpoints/step_000020/ holds what the strategy wrote, one random state per rank, and checkpoint.json.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint.api import CheckpointException

from testbed import distributed
from testbed.automatic_choices import as_decided_before
from testbed.earlier_settings import in_todays_terms
from testbed.launch import Launch
from testbed.metrics_file import read_metrics
from testbed.run_directory import CHECKPOINTS, METRICS
from testbed.settings import RunSettings
from testbed.strategies import Strategy

DESCRIPTION = "checkpoint.json"
KEPT = 2  # should the disk damage the newest, delete its folder and resume from the one before

# what may differ between the start that saved and the start that resumes: none of it changes the work
FREE_TO_CHANGE = (
    "checkpoint_path stop_at_step eval_every save_every keep_best max_val_steps num_workers steps_per_print "
    "timing_warmup_steps timing_sample_every profile profile_steps profile_mode tensorboard quiet_nccl_monitor "
    "sample_prompt sample_tokens threads_per_rank enforce_global_batch_size deepspeed_config"
).split()


class CheckpointFailed(Exception):
    """A checkpoint could not be written or read."""


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint on disk."""

    directory: Path
    step: int  # optimizer steps done
    elapsed_s: float  # wall time of training up to here
    world_size: int
    settings: dict
    metrics: dict | None = None  # the run's file, once it was found fit to be continued


def save(strategy: Strategy, settings: RunSettings, launch: Launch, step: int, elapsed_s: float) -> None:
    """Write a checkpoint of optimizer step `step`. All ranks call it."""
    folder = Path(settings.checkpoint_path) / CHECKPOINTS
    final, temporary = folder / f"step_{step:06d}", folder / f".step_{step:06d}.tmp"
    if launch.rank == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    try:
        _write(strategy, settings, launch, step, elapsed_s, temporary)
    except BaseException:
        if launch.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)  # half a checkpoint would keep a full disk full
        raise
    if launch.rank == 0:
        shutil.rmtree(final, ignore_errors=True)
        temporary.replace(final)
        for old in sorted(folder.glob("step_*"))[:-KEPT]:
            shutil.rmtree(old)
    distributed.wait_for_everyone()


def _write(
    strategy: Strategy, settings: RunSettings, launch: Launch, step: int, elapsed_s: float, temporary: Path
) -> None:
    distributed.wait_for_everyone()
    try:
        strategy.save_checkpoint(temporary)
    except CheckpointException as error:  # no Exception
        raise CheckpointFailed(f"the checkpoint of step {step} could not be written ({_cause(error)})") from error
    torch.save(_random_state(), temporary / f"random_state_rank{launch.rank}.pt")
    distributed.wait_for_everyone()
    if launch.rank == 0:
        description = {
            "step": step,
            "elapsed_s": elapsed_s,
            "world_size": launch.world_size,
            "settings": settings.as_dict(),
        }
        (temporary / DESCRIPTION).write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
        _flush_to_disk(temporary)


def newest(directory: Path) -> Checkpoint | None:
    """The checkpoint with the most steps under a run's folder, or None."""
    found = []
    for description_file in (directory / CHECKPOINTS).glob(f"step_*/{DESCRIPTION}"):
        content = json.loads(description_file.read_text(encoding="utf-8"))
        found.append(Checkpoint(description_file.parent, **content))
    return max(found, key=lambda checkpoint: checkpoint.step, default=None)


def find_for_resume(settings: RunSettings, launch: Launch) -> Checkpoint:
    """The checkpoint that --resume continues.

    Raises:
        ValueError: there is none, or it belongs to other work.
    """
    checkpoint = newest(Path(settings.checkpoint_path))
    if checkpoint is None:
        raise ValueError(
            f"--resume: {settings.checkpoint_path} holds no checkpoint; a run writes them with --save_every or "
            "--stop_at_step"
        )
    if checkpoint.world_size != launch.world_size:
        raise ValueError(
            f"--resume: {checkpoint.directory} was saved by {checkpoint.world_size} ranks, this start has "
            f"{launch.world_size}; start as many"
        )
    now = as_decided_before(settings, checkpoint.settings).as_dict()
    saved = in_todays_terms(checkpoint.settings)
    now = {name: value for name, value in now.items() if value or name in saved}  # a flag that came later
    for name in sorted(now.keys() | saved.keys()):
        if name not in FREE_TO_CHANGE and now.get(name) != saved.get(name):
            raise ValueError(
                f"--resume: --{name} is {now.get(name)!r}, but {checkpoint.directory} was trained with "
                f"{saved.get(name)!r}; give the same value"
            )
    if settings.last_step < checkpoint.step:
        raise ValueError(
            f"--resume: {checkpoint.directory} is past the last step of this start, {settings.last_step}; raise "
            "--stop_at_step or --max_train_steps"
        )
    metrics = read_metrics(Path(settings.checkpoint_path) / METRICS)
    rows = [row["step"] for row in metrics["steps"][: checkpoint.step]]
    if rows != list(range(1, checkpoint.step + 1)):
        raise ValueError(
            f"--resume: {METRICS} lacks rows of the {checkpoint.step} steps that {checkpoint.directory} has done; "
            "such a run cannot be continued without a hole in its record"
        )
    return dataclasses.replace(checkpoint, metrics=metrics)


def load(checkpoint: Checkpoint, strategy: Strategy, launch: Launch) -> None:
    """Put the strategy and this rank's random state back. All ranks call it.

    Raises:
        CheckpointFailed: a file is missing or damaged.
    """
    try:
        strategy.load_checkpoint(checkpoint.directory)
        state = torch.load(checkpoint.directory / f"random_state_rank{launch.rank}.pt", weights_only=True)
    except (Exception, CheckpointException) as error:  # PyTorch's own is no Exception
        raise CheckpointFailed(
            f"{checkpoint.directory} cannot be read ({_cause(error)}); delete that folder to resume from the one before"
        ) from error
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def _cause(error: BaseException) -> str:
    """The first line of what went wrong; PyTorch's distributed checkpoint wraps each rank's."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _random_state() -> dict[str, torch.Tensor]:
    """Dropout's random numbers; the data order needs none, it follows from the seed and the step."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _flush_to_disk(directory: Path) -> None:
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb+") as file:
                os.fsync(file.fileno())
