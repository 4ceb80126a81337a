"""Sizes of the device mesh that the flags ask for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from testbed.config.run_types import ALL_OPTIONS, STRATEGIES
from testbed.distributed.mesh import MeshSizes
from testbed.errors import InputError, counted

TWO_STAGES_PER_RANK = ("interleaved_1f1b", "zero_bubble")


def options_of_run_type(values: Mapping[str, Any], typed: frozenset[str]) -> dict[str, Any]:
    """Return the flags of some run types only: value or default for those of this run type, None for the others.

    Raises:
        InputError: a flag was typed that this run type does not have. One from a --config file is dropped, so that
            the file of one run type serves another.
    """
    run_type = values["run_type"]
    own = STRATEGIES[run_type].options
    for name in sorted(typed & ALL_OPTIONS - own.keys()):
        owners = ", ".join(other for other, entry in STRATEGIES.items() if name in entry.options)
        raise InputError(f"--{name} belongs to --run_type {owners}, not to {run_type}; leave it out")
    options = dict.fromkeys(ALL_OPTIONS)
    for name, default in own.items():
        options[name] = values[name] if values[name] is not None else default
    return options


def mesh_sizes(values: Mapping[str, Any], world_size: int) -> MeshSizes:
    """Return the mesh on `world_size` ranks; ranks that no flag claims are data parallel.

    Raises:
        InputError: the sizes do not divide the world size.
    """
    run_type = values["run_type"]
    own = STRATEGIES[run_type].options
    if world_size == 1 and STRATEGIES[run_type].cuts_model:
        raise InputError(
            f"--run_type {run_type} cuts the model over ranks, but there is one; start it with torchrun "
            "--nproc-per-node 2 (or more), or use --run_type baseline"
        )
    tensor = (values["tensor_parallel_size"] or world_size) if "tensor_parallel_size" in own else 1
    pipeline = (values["pipeline_stages"] or max(1, world_size // tensor)) if "pipeline_stages" in own else 1
    if world_size % (pipeline * tensor):
        flags = [
            f"--{name} {size}"
            for name, size in (("pipeline_stages", pipeline), ("tensor_parallel_size", tensor))
            if name in own
        ]
        raise InputError(
            f"{' x '.join(flags)} does not divide the {counted(world_size, 'rank')} that the launcher started: "
            "every mesh is data x pipeline x tensor ranks; give a size that divides it, or start a multiple of "
            f"{counted(pipeline * tensor, 'rank')}"
        )
    data = world_size // (pipeline * tensor)
    shard = (values["shard_size"] or data) if "shard_size" in own else 1
    if data % shard:
        raise InputError(
            f"--shard_size {shard} does not divide the {counted(data, 'rank')}: every copy of the weights lies on as "
            f"many ranks; give one of {_divisors(data)}"
        )
    return MeshSizes(data, pipeline, tensor, shard)


def stages_per_rank(values: Mapping[str, Any]) -> int | None:
    """Return the stages on each pipeline rank; None without a schedule.

    Raises:
        InputError: the schedule cannot run with the given number.
    """
    schedule, given = values["pipeline_schedule"], values["stages_per_rank"]
    if schedule is None:
        return None
    number = given or (2 if schedule in TWO_STAGES_PER_RANK else 1)
    if schedule in ("gpipe", "1f1b") and number != 1:
        raise InputError(
            f"--stages_per_rank {number} with --pipeline_schedule {schedule}: it runs one stage on each rank; use "
            "interleaved_1f1b"
        )
    if schedule == "zero_bubble" and number != 2:
        raise InputError(
            f"--stages_per_rank {number} with --pipeline_schedule zero_bubble: its V shape has exactly two stages on "
            "each rank; leave the flag out"
        )
    return number


def _divisors(number: int) -> str:
    return ", ".join(str(size) for size in range(1, number + 1) if number % size == 0)
