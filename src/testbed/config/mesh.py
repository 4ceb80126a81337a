"""Spread a step over ranks: the mesh that the flags ask for, the batch and its micro batches. No torch.

Each function raises InputError, one sentence for the first rule that is broken.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

from testbed.config.compatibility import check_combination
from testbed.config.flag_types import AUTO
from testbed.config.run_types import ALL_OPTIONS, HOW_AXES_WORK, STRATEGIES
from testbed.distributed.mesh import MeshSizes
from testbed.errors import InputError, counted

STAGES_PER_RANK = {"gpipe": 1, "1f1b": 1, "interleaved_1f1b": 2, "zero_bubble": 2}  # only interleaved may have others
DEFAULT_GLOBAL_BATCH = 32  # whatever the world size, so that runs without batch flags do equal work
LARGEST_MICRO_BATCH = 4


def options_of_run_type(values: Mapping[str, Any], typed: frozenset[str]) -> dict[str, Any]:
    """Return the flags of some run types only: value or default for those of this run type, None for the others.

    One of another run type must not be typed. From a --config file it is dropped, so that the file serves both.
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


def spread_over_ranks(values: Mapping[str, Any], world_size: int) -> tuple[dict[str, Any], MeshSizes]:
    """Return the values with mesh, precision and batch filled in, and the mesh: all that needs no data.

    Args:
        values: with the model's dimensions and the options of the run type.
    """
    entry, mesh = STRATEGIES[values["run_type"]], _mesh_sizes(values, world_size)
    if entry.keeps == "axes":
        _check_axes(values, mesh, entry.options)
    sizes = {name: size for name, size in mesh.flags().items() if name in entry.options}
    reshards = values["reshard_after_forward"]
    if reshards is None and "reshard_after_forward" in entry.options:
        reshards = "off" if mesh.pipeline > 1 else "on"  # a stage computes again and again in one step
    values = {
        **values,
        **sizes,
        "stages_per_rank": _stages_per_rank(values, mesh),
        "reshard_after_forward": reshards,
    }
    check_combination(values)
    if values["matmul"] == "fp8":
        values["precision"] = "bf16"  # of all other products
    is_one_at_a_time = entry.keeps == "stages" and "pipeline_schedule" not in entry.options
    most = sys.maxsize if is_one_at_a_time else LARGEST_MICRO_BATCH  # then the whole batch passes through at once
    values |= batch_arithmetic(values, mesh.data, most, at_least=1 if is_one_at_a_time else mesh.pipeline)
    check_schedule(values, mesh)
    return values, mesh


def _mesh_sizes(values: Mapping[str, Any], world_size: int) -> MeshSizes:
    """Return the mesh on `world_size` ranks; ranks that no flag claims are data parallel."""
    run_type = values["run_type"]
    own = STRATEGIES[run_type].options
    if world_size == 1 and STRATEGIES[run_type].cuts_model:
        raise InputError(
            f"--run_type {run_type} cuts the model over ranks, but there is one; start it with torchrun "
            "--nproc-per-node 2 (or more), or use --run_type baseline"
        )
    tensor = (values["tensor_parallel_size"] or world_size) if "tensor_parallel_size" in own else 1
    context = values["context_parallel_size"] or 1
    pipeline = (values["pipeline_stages"] or max(1, world_size // tensor)) if "pipeline_stages" in own else 1
    claimed = pipeline * tensor * context
    if world_size % claimed:
        sizes = {"pipeline_stages": pipeline, "tensor_parallel_size": tensor, "context_parallel_size": context}
        flags = [f"--{name} {size}" for name, size in sizes.items() if name in own and (size > 1 or len(own) == 1)]
        raise InputError(
            f"{' x '.join(flags)} does not divide {counted(world_size, 'rank')}: every mesh is data x pipeline x "
            "tensor x context ranks",
            f"; give a size that divides it, or start a multiple of {counted(claimed, 'rank')}",
        )
    data = world_size // claimed
    shard = (values["shard_size"] or data * context) if "shard_size" in own else 1
    _check_shards(shard, data, context)
    if values["num_heads"] % tensor:
        heads, whole = values["num_heads"], "" if values["tensor_parallel_size"] else ", all ranks,"
        raise InputError(
            f"--tensor_parallel_size {tensor}{whole} does not divide --num_heads {heads}: every rank takes as many "
            f"whole heads; on {counted(world_size, 'rank')} possible are {_divisors(math.gcd(heads, world_size))}"
        )
    _check_sequence(values, tensor, context)
    return MeshSizes(data, pipeline, tensor, shard, context)


def _check_shards(shard: int, data: int, context: int) -> None:
    """Check that every copy of the weights lies on as many data ranks, with all their context ranks."""
    if shard == 1 or (data * context % shard == 0 and shard % context == 0):
        return
    ranks = f"{counted(data, 'data rank')}, those that no other axis claims"
    possible = _divisors(data)
    if context > 1:
        ranks = f"{data * context} data x context ranks in whole groups of --context_parallel_size {context}"
        possible = ", ".join(["1", *(str(context * size) for size in range(1, data + 1) if data % size == 0)])
    raise InputError(
        f"--shard_size {shard} does not divide the {ranks}: every copy of the weights lies on as many; give one of "
        f"{possible}"
    )


def _check_sequence(values: Mapping[str, Any], tensor: int, context: int) -> None:
    """Check that ranks can share a sequence: two chunks for each context rank, an equal piece for each tensor rank."""
    length, is_cut = values["seq_length"], values["sequence_parallel"] == "on"
    if is_cut and tensor == 1:
        raise InputError(
            "--sequence_parallel on with --tensor_parallel_size 1: it is for tensor ranks; leave it out, or give a "
            "larger size"
        )
    unit = math.lcm(2 * context if context > 1 else 1, context * tensor if is_cut else 1)
    if length % unit:
        flags = f"--context_parallel_size {context}" if context > 1 else ""
        flags += f"{' and ' if flags else ''}--sequence_parallel on with {tensor} tensor ranks" if is_cut else ""
        needs = "need" if context > 1 and is_cut else "needs"
        raise InputError(
            f"--seq_length {length} is not a multiple of {unit}, which {flags} {needs}; the next that is: "
            f"{-(-length // unit) * unit}"
        )


def _check_axes(values: Mapping[str, Any], mesh: MeshSizes, defaults: Mapping[str, Any]) -> None:
    """Refuse what says how an axis works where that has one rank; a default is in every saved configuration."""
    for axis, size in mesh.flags().items():
        for name in HOW_AXES_WORK.get(axis, ()) if size == 1 else ():
            if values[name] not in (None, defaults[name]):
                raise InputError(
                    f"--{name} {values[name]} with --{axis} 1 does nothing; leave it out, or give --{axis} 2"
                )


def _stages_per_rank(values: Mapping[str, Any], mesh: MeshSizes) -> int | None:
    """Return the stages on each pipeline rank; None without a schedule."""
    schedule, given = values["pipeline_schedule"], values["stages_per_rank"]
    usual = STAGES_PER_RANK.get(schedule, 1)
    number = given or usual
    if number != usual and schedule != "interleaved_1f1b":
        raise InputError(
            f"--stages_per_rank {number} with --pipeline_schedule {schedule}: it runs exactly "
            f"{counted(usual, 'stage')} on each rank; leave the flag out, or use interleaved_1f1b"
        )
    pieces = values["num_layers"] + 2
    if mesh.pipeline * number > pieces:
        raise InputError(
            f"--pipeline_stages {mesh.pipeline} x {number} stages per rank = {mesh.pipeline * number} stages, but "
            f"--num_layers {values['num_layers']}, the embedding and the head are {pieces} pieces; lower one of them"
        )
    return None if schedule is None else number


def batch_arithmetic(
    values: Mapping[str, Any], data_world_size: int, most: int = LARGEST_MICRO_BATCH, at_least: int = 1
) -> dict[str, int | None]:
    """Return global batch, micro batch and accumulation: global batch = micro batch x accumulation x data ranks.

    With --grad_accum_steps the global batch follows, otherwise the accumulation. With a micro batch of "auto" both are
    None until the device is known.

    Args:
        most: the largest micro batch that is chosen if no flag gives it.
        at_least: micro batches that a step should have, if possible (a pipeline needs some to be busy).
    """
    given, accumulation = values["micro_batch_size_per_gpu"], values["grad_accum_steps"]
    micro_batch = 1 if given == AUTO else given  # the smallest that may be found
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
            micro_batch = _largest_that_divides(global_batch, data_world_size, most, at_least)
        sequences_per_round = micro_batch * data_world_size
        if global_batch % sequences_per_round:
            nearest = max(1, round(global_batch / sequences_per_round)) * sequences_per_round
            raise InputError(
                f"--global_batch_size {global_batch}{default} is not a multiple of --micro_batch_size_per_gpu "
                f"{micro_batch} x {data_world_size} data ranks = {sequences_per_round}",
                f"; the nearest that is: {nearest}",
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
        "micro_batch_size_per_gpu": None if given == AUTO else micro_batch,
        "grad_accum_steps": None if given == AUTO else accumulation,
    }


def _largest_that_divides(global_batch: int, data_world_size: int, largest: int, at_least: int) -> int:
    share = global_batch // data_world_size if global_batch % data_world_size == 0 else 1
    largest = max(1, min(largest, share // at_least))
    return next(size for size in range(largest, 0, -1) if share % size == 0)


def check_schedule(values: Mapping[str, Any], mesh: MeshSizes) -> None:
    """Check that the pipeline schedule can run the micro batches of a step."""
    if mesh.pipeline == 1:
        return
    schedule, count = values["pipeline_schedule"], values["grad_accum_steps"]
    if schedule in ("1f1b", "interleaved_1f1b", "zero_bubble") and count < mesh.pipeline:
        smaller = (
            "a smaller --micro_batch_size_per_gpu"
            if values["micro_batch_size_per_gpu"] > 1
            else "--pipeline_schedule gpipe"
        )
        raise InputError(
            f"--pipeline_schedule {schedule} needs at least as many micro batches as pipeline ranks, {mesh.pipeline}, "
            f"but a step has {count}; give {smaller} or a larger --global_batch_size"
        )
    if schedule != "interleaved_1f1b":
        return
    rounds = max(1, count // mesh.pipeline)
    if count % rounds:
        raise InputError(
            f"--pipeline_schedule interleaved_1f1b takes micro batches in {rounds} equal rounds, but a step "
            f"has {count}; choose batch sizes that make it a multiple of {mesh.pipeline}"
        )


def _divisors(number: int) -> str:
    return ", ".join(str(size) for size in range(1, number + 1) if number % size == 0)
