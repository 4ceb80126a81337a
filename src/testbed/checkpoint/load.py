"""Load a checkpoint: the strategy's state and this rank's random numbers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.distributed.checkpoint.api import CheckpointException

from testbed.checkpoint.changed_settings import is_same_form
from testbed.checkpoint.folders import FULL_STATE, Checkpoint, CheckpointFailed, random_state_file
from testbed.config.run_types import STRATEGIES
from testbed.config.settings import RunSettings
from testbed.distributed import process_group
from testbed.distributed.launch import Launch
from testbed.distributed.process_group import raise_on_any_rank, root_cause
from testbed.errors import InputError
from testbed.io import open_regular
from testbed.model.tensor_archive import load_tensors

if TYPE_CHECKING:
    from testbed.strategies import Strategy


def load(checkpoint: Checkpoint, strategy: Strategy, settings: RunSettings, launch: Launch) -> bool:
    """Restore the strategy and this rank's random numbers. All ranks call it.

    Returns:
        Whether the random numbers go on where they were. With another number of ranks they cannot: each rank then draws
        from a new seed, made of the run's seed, its rank and the step.

    Raises:
        CheckpointFailed: a file is missing or damaged.
    """
    directory, cause, is_restored = checkpoint.directory, None, False
    try:
        if is_same_form(checkpoint, settings, launch):
            strategy.load_checkpoint(directory)
        elif (saved_by := STRATEGIES.get(checkpoint.run_type)) and saved_by.state_layout == "per_rank":
            raise InputError(
                "each rank saved weights of its own, which other ranks have no place for; resume with --run_type "
                f"{checkpoint.run_type} on {checkpoint.world_size} ranks and with its flags"
            )
        else:
            full_state = directory / FULL_STATE
            strategy.load_full_state(full_state if full_state.exists() else directory)
        if checkpoint.world_size == launch.world_size:
            is_restored = _restore_random_state(directory, launch, settings.compute.device)
    except (Exception, CheckpointException) as error:  # PyTorch's own is not an Exception
        cause = error
    failed = None
    if cause is not None:
        failed = CheckpointFailed(
            f"{directory} cannot be read (rank {launch.rank}: {root_cause(cause)}); give another to --resume"
        )
    raise_on_any_rank(failed, cause)
    if not all(process_group.gather_objects(is_restored)):
        torch.manual_seed(process_group.seed_of_rank(settings.training.seed, launch.rank, checkpoint.step))
        return False
    return True


def _restore_random_state(directory: Path, launch: Launch, device_type: str) -> bool:
    """Restore this rank's random numbers. Returns whether the file has those of its device."""
    path = directory / random_state_file(launch.rank)
    with open_regular(path) as file:
        state = load_tensors(file, str(path))
    if not isinstance(state, dict) or not all(isinstance(state.get(kind), torch.Tensor) for kind in {"cpu", *state}):
        raise InputError(f"{path} holds something else than a rank's random numbers")
    if (device_type == "cuda") != ("cuda" in state):
        return False
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
    return True
