"""Go on from a folder that convert_checkpoint.py wrote: weights as `transformers` has them, beside AdamW's state.

Its step and its moments are those of another program, of which no record says the settings. For a strategy to read it,
it is written once more, by names, into a hidden folder beside the run's checkpoints.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import torch

from testbed.checkpoint.adamw_state import MOMENTS, AdamWState
from testbed.checkpoint.folders import Checkpoint, CheckpointFailed
from testbed.checkpoint.formats import Checkpoint as Converted
from testbed.checkpoint.formats import read_checkpoint
from testbed.config.settings import RunSettings
from testbed.distributed import process_group
from testbed.distributed.process_group import raise_on_any_rank
from testbed.errors import InputError, say
from testbed.run_folder import CHECKPOINTS
from testbed.strategies import state_files

_RATES = {"beta1": "adam_beta1", "beta2": "adam_beta2", "eps": "adam_eps", "weight_decay": "weight_decay"}


def described(folder: Path, settings: RunSettings) -> Checkpoint:
    """Return a folder as a checkpoint of the settings of this start, and say in which of them its AdamW was another.
    InputError: it is damaged, or this start has another model or optimizer."""
    _, state = _read(folder, settings)
    values, rates = settings.as_dict(), dataclasses.asdict(state.rates)
    if others := [f"--{flag} {rates[name]:g}" for name, flag in _RATES.items() if rates[name] != values[flag]]:
        say(f"note: AdamW's state in {folder} was made with {', '.join(others)}; this start has others", flush=True)
    if "learning_rate" not in settings.origin.given:
        peak = settings.optimizer.learning_rate
        said = (
            f"its last step had a learning rate of {rates['lr']:g}, and the peak of this start is {peak:g}, the default"
        )
        say(f"note: {said} (--learning_rate)", flush=True)
    run_type, mesh = settings.training.run_type, dataclasses.asdict(settings.plan.mesh)
    return Checkpoint(folder, state.step, 0.0, 0.0, world_size=0, run_type=run_type, mesh=mesh, settings=values)


def unpack(checkpoint: Checkpoint, settings: RunSettings) -> Path:
    """Return a folder with the state by names, which rank 0 writes; the caller deletes it. All ranks call it.
    CheckpointFailed, on every rank: it could not be read or written."""
    name = f".step_{checkpoint.step:06d}.converted.tmp"  # what a start that is killed leaves goes by this ending
    folder = Path(settings.checkpointing.checkpoint_path) / CHECKPOINTS / name

    def write() -> str | None:
        try:
            found, state = _read(checkpoint.directory, settings)
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            state_files.save(_by_names(found, state), folder, group=None)
        except (InputError, OSError) as error:
            return str(error)
        return None

    fault = process_group.by_rank_0(write)
    raise_on_any_rank(None if fault is None else CheckpointFailed(fault))
    return folder


def _read(folder: Path, settings: RunSettings) -> tuple[Converted, AdamWState]:
    name = f"--resume {folder}"
    if settings.as_dict()["optimizer"] != "adamw":
        raise InputError(
            f"{name} holds AdamW's state, and this start has --optimizer {settings.as_dict()['optimizer']}; leave "
            "that out, or give the folder to --init_from, which takes its weights alone"
        )
    found = read_checkpoint(folder, name)  # which has AdamW's state, or `is_converted` would not hold
    if found.optimizer is None or found.shape != settings.shape:
        raise InputError(f"{name} holds another model ({found.shape.describe()}); leave the flags of the shape out")
    return found, found.optimizer


def _by_names(found: Converted, state: AdamWState) -> state_files.State:
    moments = {f"state.{key}.{moment}": state.moments[moment][key] for moment in MOMENTS for key in found.weights}
    steps = {f"state.{key}.step": torch.tensor(float(state.step)) for key in found.weights}
    return {"model": found.weights, "optimizer": moments | steps}
