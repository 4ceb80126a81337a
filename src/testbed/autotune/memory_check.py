"""Refuse what cannot fit into the memory, and warn of what may not, before the model is built."""

from __future__ import annotations

import math
from collections.abc import Sequence

import psutil
import torch

from testbed.autotune.choices import with_micro_batch_left_open
from testbed.autotune.micro_batch import CGROUP, GIB, memory_of_container, with_micro_batch
from testbed.config.run_types import STRATEGIES
from testbed.config.settings import RunSettings
from testbed.distributed.launch import Launch
from testbed.errors import InputError, counted
from testbed.memory_model.job import job_of_settings
from testbed.memory_model.memory import memory_of_ranks, taken
from testbed.model.shape import size_name

FAR_TOO_LARGE = 1.5  # an estimate is off by a tenth where it was measured, so beyond this a run cannot fit
ANY_RUN_TYPE = "a smaller --model (--num_layers, --embedding_size, --vocab_size)"


def check_memory(settings: RunSettings, launch: Launch, device: torch.device) -> str | None:
    """Compare what the run needs with the memory there is; return a line if it may not fit.

    Args:
        settings: with the type of `device`.

    Raises:
        InputError: weights, gradients and optimizer state alone, which no micro batch makes smaller, are larger, or
            the whole estimate is 1.5 times as large.
    """
    with_batch = with_micro_batch_left_open(settings)
    if with_batch.finds_micro_batch:
        with_batch = with_micro_batch(with_batch, 1)
    if with_batch.compute.precision == "auto":  # the smaller one, for what is said is to be certain
        with_batch = with_batch.with_values(precision="bf16")
    ranks = memory_of_ranks(job_of_settings(with_batch))
    has, sharing = memory_here(launch, device)
    where = f"the {has / GIB:.1f} GiB of " + ("this machine" if device.type == "cpu" else "the GPU")
    who = "" if sharing == 1 else f" for its {counted(sharing, 'rank')}"
    held = [rank.moments["forward end"]["weights"] if settings.training.eval_only else rank.states for rank in ranks]
    states = _together(held, launch, sharing)
    batch = f"in micro batches of {with_batch.batch.micro_batch_size_per_gpu} x {settings.data.seq_length} tokens"
    if states > has:
        kinds = "weights" if settings.training.eval_only else "weights, gradients and optimizer state"
        raise InputError(
            f"--run_type {settings.training.run_type} with {_model_of(settings)} cannot fit: {kinds} alone take "
            f"{states / GIB:.1f} GiB{who}, and {where} are all there is; use "
            f"{' or '.join(_ways_out(settings, sharing))}"
        )
    whole = _together([taken(rank, device.type) for rank in ranks], launch, sharing)
    if settings.training.eval_only or whole <= has:
        return None
    smaller = [f"a smaller --micro_batch_size_per_gpu (now {with_batch.batch.micro_batch_size_per_gpu})"]
    smaller = smaller if with_batch.batch.micro_batch_size_per_gpu > 1 else []
    if settings.compute.activation_checkpointing == "none":
        smaller.append("--activation_checkpointing block")
    smaller.append("a shorter --seq_length")
    ways_out = ", ".join([*smaller, *_ways_out(settings, sharing)])
    if whole > FAR_TOO_LARGE * has:
        raise InputError(
            f"--run_type {settings.training.run_type} with {_model_of(settings)} {batch} cannot fit: it takes an "
            f"estimated {whole / GIB:.1f} GiB{who}, and {where} are all there is; it takes less with {ways_out}"
        )
    return (
        f"warning: {_model_of(settings)} {batch} may not fit: an estimated {whole / GIB:.1f} GiB{who}, more than "
        f"{where}; it takes less with {ways_out}"
    )


def memory_here(launch: Launch, device: torch.device) -> tuple[float, int]:
    """Return the bytes of the device, used or not, and how many ranks of this machine share them. Swap does not count:
    every step touches all of the states."""
    if device.type == "cuda":
        sharing = math.ceil(launch.local_world_size / torch.cuda.device_count())
        return torch.cuda.get_device_properties(device).total_memory, sharing
    return min(psutil.virtual_memory().total, memory_of_container(CGROUP)[0]), launch.local_world_size


def _together(of_ranks: Sequence[float], launch: Launch, sharing: int) -> float:
    """Return the bytes of the ranks that share a memory: where a pipeline has other stages elsewhere, its smallest."""
    return sharing * (sum(of_ranks) / len(of_ranks) if sharing == launch.world_size else min(of_ranks))


def _model_of(settings: RunSettings) -> str:
    name = size_name(settings.shape)
    name = f"a model of {settings.shape.describe()}" if name == "custom" else f"--model {name}"
    return f"{name} ({settings.shape.num_parameters / 1e6:,.0f} M parameters)"


def _ways_out(settings: RunSettings, sharing: int) -> list[str]:
    """Return what makes the model states of a rank, or of the machine, smaller."""
    found, entry = [ANY_RUN_TYPE], STRATEGIES[settings.training.run_type]
    if settings.compute.device == "cpu" and sharing > 1 and entry.keeps == "whole":
        found.append("fewer ranks, or --run_type fsdp, whose ranks share the states out")
    elif settings.compute.device == "cuda" and entry.keeps == "whole":
        found.append("--run_type fsdp, or optimized --zero_stage 3, on several GPUs")
    elif settings.compute.device == "cuda" and "offload" in entry.options:
        found.append("--offload optimizer, or more ranks with --zero_stage 3")
    elif settings.compute.device == "cpu" and "zero_stage" in entry.options and sharing > 1:
        found.append("--zero_stage 3")
    return found
