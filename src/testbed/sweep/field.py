"""The field of a race: the run types of the registry on each number of ranks, and what of them may vary. No torch.

Of a mesh whose axes are not named the plan's best products race.

A configuration that cannot run here, or that the plan says cannot win, is left out with the reason.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from testbed.config.flags import parse_command_line
from testbed.config.run_types import ALL_OPTIONS, STRATEGIES
from testbed.config.settings import RunSettings
from testbed.distributed.launch import Launch
from testbed.distributed.mesh import MeshSizes
from testbed.errors import InputError, counted
from testbed.memory_model.devices import GIB
from testbed.memory_model.memory import fits, memory_of, needs
from testbed.planner.automatic import MESH, best_meshes, job_on
from testbed.planner.candidates import MOST_TOKENS
from testbed.planner.machines import as_measured, machine_here
from testbed.planner.step_time import Constants, step_time
from testbed.sweep.plan import PENDING, Cell, cell_of, check_cells, compile_alike, settings_of, why_not_applicable
from testbed.sweep.request import Request, Variant, parse_variants

OVER = ("micro_batch", "compile", "zero_stage", "bucket", "recompute", "schedule")
# what --over adds to the run types that have a flag, one value at a time; one that is the default adds nothing
_ADDED: dict[str, Mapping[str, Sequence[str]]] = {
    "zero_stage": {"zero_stage": ("0", "2", "3")},
    "bucket": {"bucket_cap_mb": ("5", "100"), "reduce_bucket_size": ("5000000", "50000000")},
    "schedule": {"pipeline_schedule": ("gpipe", "interleaved_1f1b", "zero_bubble")},
    "recompute": {"activation_checkpointing": ("selective", "block")},
}
MOST_MESHES = 3  # on one number of ranks


@dataclass(frozen=True)
class Prediction:
    """Seconds of an optimizer step with a 90 % interval.

    `is_scored`: the interval is of this kind of device. One without is an order to race in, and excludes nothing.
    """

    seconds: float
    low: float
    high: float
    label: str  # "calibrated ..." or "uncalibrated ..."
    does_not_fit: str | None = None  # why the memory does not suffice
    is_scored: bool = True


def predictions_of(
    cells: Sequence[Cell], settings: Mapping[str, RunSettings], constants: Constants
) -> dict[str, Prediction]:
    """Return the plan's prediction of each configuration on this computer, by its name.

    Raises:
        InputError: the planner does not know the GPU.
    """
    found = {}
    for cell in cells:
        machine = as_measured(machine_here(cell.ranks, None, None), constants.calibration)
        job = job_on(settings[cell.name], machine)
        time, memory, device = step_time(job, machine, constants), memory_of(job), machine.device
        lack = None
        if not fits(memory, device):
            lack = f"needs {needs(memory, device) / GIB:.1f} GiB of {device.memory_bytes / GIB:.1f}"
        # the published runs, which widths without a calibration come from, are of GPUs
        is_scored = constants.calibration is not None or device.kind == "cuda"
        found[cell.name] = Prediction(time.seconds, time.low, time.high, time.label, lack, is_scored)
    return found


@dataclass
class Field:
    """Cells of the first round, which race, and those that do not, by name with the reason."""

    cells: list[Cell]
    left_out: dict[str, str]
    settings: dict[str, RunSettings]  # by the name of the configuration
    note: str | None = None  # what was changed to make the runs alike


def field_of(request: Request, over: Sequence[str], constants: Constants) -> Field:
    """Return the field of a race: every variant of the request on every number of ranks, checked as in a sweep.

    Args:
        over: of OVER, what else may vary.
        constants: of the plan, which proposes meshes.

    Raises:
        InputError: none of them can run, or their work is not equal.
    """
    cells, left_out = [], {}
    for batch_size, ranks, variant in itertools.product(request.batch_sizes, request.ranks, request.variants):
        if (reason := _why_not(variant, ranks, request)) is not None:
            left_out[f"{variant.text} on {counted(ranks, 'rank')}"] = reason
            continue
        try:
            named = _meshes(variant, ranks, batch_size, request, constants)
        except InputError as error:
            left_out[f"{variant.text} on {counted(ranks, 'rank')}"] = str(error)
            continue
        variants = itertools.chain(*(_variants(each, ranks, batch_size, over, request) for each in named))
        cells += [cell_of(request, each, ranks, batch_size, repeat=1) for each in variants]
    cells = list({cell.name: cell for cell in cells}.values())
    note = compile_alike(cells, request.machine)
    if not cells:
        raise InputError(f"no configuration can race: {next(iter(left_out.values()))}")
    settings = check_cells(cells, allow_mismatch=False, protocol=request.protocol)
    left_out |= {cell.name: str(cell.reason) for cell in cells if cell.status != PENDING}
    return Field([cell for cell in cells if cell.status == PENDING], left_out, settings, note)


def prune(field: Field, predictions: Mapping[str, Prediction]) -> Field:
    """Return the field in the order of predicted time, without what does not fit and what cannot win.

    A configuration cannot win whose whole interval lies above the interval of another one that fits. One without a
    prediction races, after the others.
    """
    left_out = dict(field.left_out)
    fits = {name: each for name, each in predictions.items() if each.does_not_fit is None}
    best = min((each.high for each in fits.values() if each.is_scored), default=float("inf"))
    cells = []
    for cell in field.cells:
        said = predictions.get(cell.name)
        if said is not None and said.does_not_fit is not None:
            left_out[cell.name] = f"the plan: {said.does_not_fit}"
        elif said is not None and said.is_scored and said.low > best:
            left_out[cell.name] = f"the plan: {said.low:.3g} s a step at best, and another one {best:.3g} s at worst"
        else:
            cells.append(cell)
    if not cells:
        raise InputError(f"no configuration can race: {next(iter(left_out.values()))}")
    order = {name: each.seconds for name, each in fits.items()}
    cells.sort(key=lambda cell: order.get(cell.name, float("inf")))
    return dataclasses.replace(field, cells=cells, left_out=left_out)


def _why_not(variant: Variant, ranks: int, request: Request) -> str | None:
    reason = why_not_applicable(variant, ranks, request.machine)
    if reason is None and ranks == 1 and not variant.is_one_process and not variant.arguments:
        return "on one rank it is the baseline with more work around it"
    return reason


def _meshes(variant: Variant, ranks: int, batch_size: int, request: Request, constants: Constants) -> list[Variant]:
    """Return the variant, or if it names no axis the best meshes of the plan. InputError: why there is none."""
    if variant.run_type != MESH or parse_command_line(list(variant.arguments)).explicit & MeshSizes().flags().keys():
        return [variant]
    words = cell_of(request, variant, ranks, batch_size, repeat=1).gpt2_arguments
    shapes = best_meshes(words, Launch(0, 0, ranks, ranks), constants, MOST_MESHES)
    return [_with(variant, *(f"{name}={value}" for name, value in shape.items())) for shape in shapes]


def _variants(
    variant: Variant, ranks: int, batch_size: int, over: Sequence[str], request: Request
) -> Iterator[Variant]:
    """Yield a variant with the cores of its ranks, and what `over` makes of it, one flag at a time."""
    base = _with(variant, *_threads(variant, ranks, request))
    if "compile" in over:
        yield _with(base, "compile=on")
        base = _with(base, "compile=off")
    yield base
    own = STRATEGIES[variant.run_type].options
    set_already = {word.removeprefix("--") for word in variant.arguments if word.startswith("--")}
    for name in over:
        settings = [
            f"{flag}={value}"
            for flag, values in _ADDED.get(name, {}).items()
            if flag in own or flag not in ALL_OPTIONS
            for value in values
        ]
        if name == "micro_batch":
            settings = _micro_batches(base, ranks, batch_size, request)
        for setting in settings:
            if setting.partition("=")[0] not in set_already:
                yield _with(base, setting)


def _threads(variant: Variant, ranks: int, request: Request) -> list[str]:
    """Return the flag with which the ranks of a CPU share all cores."""
    machine = request.machine
    threads = machine.num_cores // ranks
    is_open = machine.kind == "cpu" and machine.threads_per_rank is None and variant.threads_per_rank is None
    return [f"threads_per_rank={threads}"] if is_open and threads > 1 else []


def _micro_batches(variant: Variant, ranks: int, batch_size: int, request: Request) -> list[str]:
    """Return every power of two that divides a rank's share of the batch, but for the default."""
    try:
        settings = settings_of(cell_of(request, variant, ranks, batch_size, repeat=1))
    except ValueError:
        return []  # check_cells says why
    share = settings.batch.global_batch_size // settings.plan.data_world_size
    most = min(share, MOST_TOKENS[request.machine.kind] // settings.data.seq_length)
    sizes = [2**power for power in range(most.bit_length()) if 2**power <= most and share % 2**power == 0]
    default = settings.batch.micro_batch_size_per_gpu
    return [f"micro_batch_size_per_gpu={size}" for size in sizes if size != default]


def _with(variant: Variant, *settings: str) -> Variant:
    """Return a variant with more settings, as --run_types has it."""
    if not settings:
        return variant
    text = variant.text + ("+" if ":" in variant.text else ":") + "+".join(settings)
    return parse_variants(text)[0]
