"""Say in one sentence why a start of a run ended, and what to do about it."""

from __future__ import annotations

import errno
import math
from pathlib import Path

import torch

from testbed import run_folder
from testbed.autotune.choices import ChoiceContradicts
from testbed.checkpoint.folders import CheckpointFailed, step_folders
from testbed.checkpoint.weights import WeightsUnavailable
from testbed.config.settings import RunSettings
from testbed.data.disk_array import FileChanged
from testbed.distributed.rendezvous import PortTaken, RankMissing, Unreachable
from testbed.distributed.signals import RunStopped
from testbed.distributed.tensors import RanksDiffer
from testbed.errors import first_line
from testbed.metrics.world_step import WorldStep
from testbed.profiling.device_limits import is_out_of_memory
from testbed.run_folder import run_lock
from testbed.run_folder.marks import RunAlreadyFailed
from testbed.train.other_ranks import OtherRanks


class TrainingDiverged(Exception):
    """The loss or the gradient is not finite. Nothing of that step is recorded or saved."""


class ModelDoesNotFit(Exception):
    """The model's weights have no room in memory, whatever the batch is. One sentence."""


# errors that are one sentence already
EXPECTED: tuple[type[Exception], ...] = (TrainingDiverged, WeightsUnavailable, RanksDiffer, CheckpointFailed)
EXPECTED += (ModelDoesNotFit,)
EXPECTED += (ChoiceContradicts, RunAlreadyFailed, run_lock.FolderGone, FileChanged, PortTaken, RankMissing, Unreachable)
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)  # only writing ends so
BROKEN_COLLECTIVE = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer")


def reason_of(error: BaseException, settings: RunSettings, ranks: OtherRanks) -> str | None:
    """Return one sentence for what ended the run; None for an error that says nothing to a user.

    Args:
        settings: with what was chosen, where it was.
    """
    if isinstance(error, RunStopped):
        return error.reason
    if isinstance(error, EXPECTED):
        return str(error)
    if is_out_of_memory(error):
        return out_of_memory_advice(settings, error)
    is_broken = is_broken_collective(error)
    if ranks.directory is not None and (isinstance(error, OSError) or is_broken):
        gone = run_lock.why_gone(ranks.directory)  # no file or no other rank is found, as the folder is not there
        if gone:
            return gone
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        return no_room_advice(error)
    if is_broken:
        return f"{ranks.blocking()}; {ranks.waited()} ({first_line(error)})"
    return None


def with_exit_code(error: BaseException, reason: str, stop: RunStopped | None) -> tuple[str, int]:
    """Return the reason and the exit code. After a stop the code is the stop's, whatever ended the run.

    Args:
        stop: what the run was asked to end for before the error, if anything.
    """
    if isinstance(error, RunStopped):
        return reason, error.exit_code
    if stop is not None:
        return f"{stop.reason}, and nothing could be saved: {reason}", stop.exit_code
    return reason, 2 if isinstance(error, ChoiceContradicts) else 1


def is_broken_collective(error: BaseException) -> bool:
    """Return whether a collective broke or timed out: another rank is gone, or does not come."""
    is_named = isinstance(error, RuntimeError) and any(word in str(error) for word in BROKEN_COLLECTIVE)
    return is_named or isinstance(error, torch.distributed.DistError)


def no_room_advice(error: OSError) -> str:
    """Describe a file that the disk did not take. The files before it are whole."""
    name = f"{error.filename} could not be written" if error.filename else "a file could not be written"
    return f"{name} ({error.strerror}); make room or make it writable, then go on with --resume"


def last_checkpoint(folder: Path) -> str:
    """Name the checkpoint to resume from. --resume checks that it is whole."""
    saved = step_folders(folder / run_folder.CHECKPOINTS)
    return f"last checkpoint: {saved[-1]}" if saved else "no checkpoint was saved"


def out_of_memory_advice(settings: RunSettings, error: BaseException) -> str:
    """Name the micro batch that was too large, and what to give instead."""
    advice = "give a smaller one, or auto; the global batch stays the same"
    if settings.batch.micro_batch_size_per_gpu == 1:
        advice = "give --activation_checkpointing block, or shard the model with --run_type fsdp"
    return (
        f"out of memory with --micro_batch_size_per_gpu {settings.batch.micro_batch_size_per_gpu}; {advice} "
        f"({first_line(error)})"
    )


def model_does_not_fit(settings: RunSettings, error: BaseException) -> ModelDoesNotFit:
    """Return the error of a model that ran out of memory before there was any batch."""
    shape = settings.shape
    dimensions = (
        f"--num_layers {shape.num_layers}, --embedding_size {shape.embedding_size}, --vocab_size {shape.vocab_size}"
    )
    return ModelDoesNotFit(
        "out of memory before the first batch: the model's weights do not fit "
        f"({shape.num_parameters:,} parameters, {4 * shape.num_parameters / 2**30:,.1f} GiB in fp32). --model "
        f"{settings.model.size}, {dimensions} and --max_position_embeddings {shape.max_position_embeddings} make its "
        f"size: give smaller ones ({first_line(error)})"
    )


def raise_if_diverged(step: int, world: WorldStep, precision: str) -> None:
    """Check the loss and the gradient norm of an optimizer step, counted from 1. Raises TrainingDiverged."""
    if not math.isfinite(world.loss):
        raise TrainingDiverged(
            f"the loss of step {step} is {world.loss}; lower --learning_rate or lengthen --warmup_steps"
        )
    assert world.grad_norm is not None
    if not math.isfinite(world.grad_norm) and precision != "fp16":
        raise TrainingDiverged(f"the gradient norm of step {step} is {world.grad_norm}; lower --learning_rate")


def check_validation(step: int, loss: float) -> None:
    """Check the validation loss after a step. Raises TrainingDiverged."""
    if not math.isfinite(loss):
        raise TrainingDiverged(f"the validation loss after step {step} is {loss}; lower --learning_rate")
