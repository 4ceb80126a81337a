"""Take the plan's best run for the ranks of a start, for `--run_type auto`, and its meshes for a race. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from testbed.config.automatic_run_type import SETS, Taken
from testbed.config.check import check_run
from testbed.config.flags import ParsedFlags, parse_command_line
from testbed.config.mesh import batch_arithmetic
from testbed.config.run_types import PLAIN, REFERENCE, can_find_micro_batch, run_types_with
from testbed.config.settings import RunSettings
from testbed.distributed.launch import Launch
from testbed.distributed.mesh import MeshSizes
from testbed.errors import InputError
from testbed.memory_model.job import Job, Machine, job_of
from testbed.planner.candidates import possible, precision_of
from testbed.planner.command import arguments_of, mesh_of
from testbed.planner.machines import as_measured, machine_here
from testbed.planner.measured_rates import constants_here
from testbed.planner.plan import plan, three
from testbed.planner.step_time import Constants

(MESH,) = run_types_with(keeps="axes")
# what all candidates share, as it was given
_GIVEN = SETS | {"precision", "optimizer", "dropout", "attention", "matmul"}


def job_on(settings: RunSettings, machine: Machine) -> Job:
    """Return a run of src/gpt2.py as the formulas see it. A micro batch that it is still to find counts as if nothing
    had been said of it."""
    values = settings.by_flag()
    if settings.finds_micro_batch:
        values |= batch_arithmetic(values, settings.plan.data_world_size)
    values |= {"precision": precision_of(values["precision"], machine.device)}
    return job_of(values, settings.plan.mesh, settings.shape, machine)


def best_plan(asked: ParsedFlags, launch: Launch) -> Taken | None:
    """Return the fastest run that fits on the ranks of this start; None if nothing can be planned here."""
    settings, own = _plain_run(asked, launch)
    try:
        constants = constants_here()
        machine = as_measured(machine_here(launch.world_size, launch.local_world_size, None), constants.calibration)
    except InputError:
        return None
    jobs, _ = possible(settings.shape, settings.data.seq_length, settings.batch.global_batch_size, machine, own)
    runs = [run for run in plan(jobs, machine, constants) if run.fits]
    if not runs:
        return None
    best, time = runs[0].job, runs[0].time
    found = parse_command_line(arguments_of(best))
    flags: dict[str, Any] = {name: found.values[name] for name in sorted(found.explicit & SETS)}
    assert best.run_type is not None
    if machine.device.kind == "cuda" and can_find_micro_batch(best.run_type, best.layout.pipeline):
        flags.pop("micro_batch_size_per_gpu", None)  # found on the device, where memory is known
    interval = f"{three(time.low)} to {three(time.high)}"
    why = f"the plan's fastest of {len(runs)} that fit, {three(time.seconds)} s a step ({interval}, {time.label})"
    return Taken(best.run_type, flags, why)


def best_meshes(words: Sequence[str], launch: Launch, constants: Constants, most: int) -> list[dict[str, Any]]:
    """Return the fastest meshes of several axes that fit, each with its fastest schedule, as flags beyond `words`: the
    sizes that are not 1, and whether the ranks left hold shards or copies.

    Args:
        words: flags of src/gpt2.py. What they leave open is as the program fills it in.
        most: meshes that are returned.

    Raises:
        InputError: there is none, a given flag is refused, or the planner does not know the GPU.
    """
    asked = parse_command_line(list(words))
    machine = as_measured(machine_here(launch.world_size, None, None), constants.calibration)
    settings, own = _plain_run(asked, Launch(0, 0, 1, 1))  # whose batch need not divide among the ranks
    own = {"activation_checkpointing": "none", **own, "run_type": MESH}
    of_plan, refused = possible(
        settings.shape, settings.data.seq_length, settings.batch.global_batch_size, machine, own
    )
    proposed: dict[Job, dict[str, Any]] = {}
    reason = refused.get(MESH, "none fits")
    for job in of_plan:
        shape = {name: value for name, value in _shape(job).items() if name not in asked.explicit}
        if shape not in proposed.values():
            added = [word for name, value in shape.items() for word in (f"--{name}", str(value))]
            try:
                proposed[job_on(check_run(parse_command_line([*words, *added]), launch).settings, machine)] = shape
            except InputError as error:  # a schedule that needs more micro batches; another one may do
                reason = str(error)
    best: dict[MeshSizes, dict[str, Any]] = {}
    for run in plan(proposed, machine, constants):
        if run.fits:
            best.setdefault(mesh_of(run.job), proposed[run.job])
    if not best:
        raise InputError("no product of axes fits into the memory") if proposed else InputError(reason)
    return [*best.values()][:most]


def _shape(job: Job) -> dict[str, Any]:
    """Return the flags of a mesh. `shard_size` is always one: left out it is not 1, but all ranks that are left."""
    sizes = mesh_of(job).flags()
    found: dict[str, Any] = {name: size for name, size in sizes.items() if size > 1 or name == "shard_size"}
    found |= {"pipeline_schedule": job.schedule} if job.schedule else {}
    found |= {"stages_per_rank": job.layout.virtual_stages} if job.layout.virtual_stages > 2 else {}
    return found | ({"sequence_parallel": "on"} if job.layout.sequence_parallel else {})


def _plain_run(asked: ParsedFlags, launch: Launch) -> tuple[RunSettings, dict[str, Any]]:
    """Return what was asked as a plain run, for its shape and batch, and the given flags that candidates share."""
    own = {name: asked.values[name] for name in asked.explicit & _GIVEN if asked.values[name] is not None}
    left_out = asked.explicit & SETS
    others = {"run_type": PLAIN if launch.is_distributed else REFERENCE, "choice": None, "resume": None}
    plain = ParsedFlags(
        {**asked.values, **dict.fromkeys(left_out), **others},
        asked.typed - left_out - {"choice"},
        asked.configured - left_out,
        asked.from_deepspeed,
    )
    return check_run(plain, launch).settings, own
