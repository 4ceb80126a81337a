"""Batch arithmetic: global batch, micro batch, gradient accumulation, data ranks. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from testbed.errors import InputError

DEFAULT_GLOBAL_BATCH = 32  # whatever the world size, so that runs without batch flags do equal work
LARGEST_MICRO_BATCH = 4


def batch_arithmetic(
    values: Mapping[str, Any], data_world_size: int, largest_micro_batch: int = LARGEST_MICRO_BATCH, at_least: int = 1
) -> dict[str, int]:
    """Return global batch, micro batch and accumulation: global batch = micro batch x accumulation x data ranks.

    With --grad_accum_steps the global batch follows, otherwise the accumulation. A micro batch of "auto" is 1 until the
    device is known.

    Args:
        largest_micro_batch: the most that is chosen if no flag gives it.
        at_least: micro batches that a step should have, if possible (a pipeline needs some to be busy).

    Raises:
        InputError: the given numbers contradict each other or do not divide.
    """
    micro_batch, accumulation = values["micro_batch_size_per_gpu"], values["grad_accum_steps"]
    if micro_batch == "auto":
        if accumulation is not None:
            raise InputError(
                f"--micro_batch_size_per_gpu auto with --grad_accum_steps {accumulation}: the number of micro batches "
                "follows from their size; leave one of them out, and give --global_batch_size for the work of a step"
            )
        micro_batch = 1
    global_batch = values["global_batch_size"]
    if accumulation is not None:
        micro_batch = micro_batch or LARGEST_MICRO_BATCH
        product = micro_batch * accumulation * data_world_size
        if global_batch is not None and global_batch != product:
            raise InputError(
                f"--global_batch_size {global_batch} is not --micro_batch_size_per_gpu {micro_batch} x "
                f"--grad_accum_steps {accumulation} x {data_world_size} data ranks = {product}; leave one of them out"
            )
        global_batch = product
    else:
        default = "" if global_batch else " (the default)"
        global_batch = global_batch or DEFAULT_GLOBAL_BATCH
        if micro_batch is None:
            micro_batch = _largest_that_divides(global_batch, data_world_size, largest_micro_batch, at_least)
        sequences_per_round = micro_batch * data_world_size
        if global_batch % sequences_per_round:
            below = global_batch // sequences_per_round * sequences_per_round
            nearest = [size for size in (below, below + sequences_per_round) if size > 0]
            raise InputError(
                f"--global_batch_size {global_batch}{default} is not a multiple of --micro_batch_size_per_gpu "
                f"{micro_batch} x {data_world_size} data ranks = {sequences_per_round}; the nearest that is: "
                f"{min(nearest, key=lambda size: abs(size - global_batch))}"
            )
        accumulation = global_batch // sequences_per_round
    enforced = values["enforce_global_batch_size"]
    if enforced is not None and enforced != global_batch:
        raise InputError(
            f"--enforce_global_batch_size {enforced}, but the global batch is {global_batch} = {micro_batch} x "
            f"{accumulation} x {data_world_size} data ranks"
        )
    return {
        "global_batch_size": global_batch,
        "micro_batch_size_per_gpu": micro_batch,
        "grad_accum_steps": accumulation,
        "data_world_size": data_world_size,
    }


def _largest_that_divides(global_batch: int, data_world_size: int, largest: int, at_least: int) -> int:
    share = global_batch // data_world_size if global_batch % data_world_size == 0 else 1
    largest = max(1, min(largest, share // at_least))
    return next(size for size in range(largest, 0, -1) if share % size == 0)
