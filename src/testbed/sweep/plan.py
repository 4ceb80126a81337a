"""Plan the runs of a sweep: their commands and order, and cells that cannot run. No torch.

A cell is one configuration: variant x ranks x batch size. Each repeat of it is one run and one row of sweep.json.
"""

from __future__ import annotations

import dataclasses
import itertools
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from testbed.config.check import check_run
from testbed.config.compatibility import auto_compile_blocker
from testbed.config.flag import Kind
from testbed.config.flags import parse_command_line
from testbed.config.run_types import STRATEGIES
from testbed.config.settings import Plan, RunSettings
from testbed.config.table import FLAGS
from testbed.distributed.launch import Launch
from testbed.errors import InputError, value_text
from testbed.metrics.fields.types import Whole
from testbed.sweep.request import SET_BY_SWEEP, Machine, Request, Variant, folder_name

PENDING, RUNNING, COMPLETE, FAILED, NOT_APPLICABLE = "pending", "running", "complete", "failed", "not applicable"
SIDES = ("a", "b")  # of a pair of equal runs
_PLANNED = {field.name for field in dataclasses.fields(Plan)}  # what several flags come to
# Values of RunSettings in which the cells of one batch size must agree, else their times do not compare. The sweep
# itself sets some flags alike, and validation costs no step time.
EQUAL_WORK = tuple(
    dict.fromkeys(
        flag.compared_as if flag.compared_as in _PLANNED else name
        for name, flag in FLAGS.items()
        if flag.kind is Kind.WORK and name not in SET_BY_SWEEP and flag.compared_as != "val_tokens"
    )
)
# With time_to_loss they must learn the same task; the recipe may be what is compared.
EQUAL_TASK = tuple(name for name, flag in FLAGS.items() if flag.is_task)


@dataclass
class Cell:
    """One run of the plan, a row of sweep.json. `folder` is relative to --out_dir, `seconds` are wall seconds.

    `repeat` counts from 1, separately among the profiled runs.
    """

    name: str
    variant: str
    run_type: str
    ranks: Whole
    batch_size: Whole
    repeat: Whole
    seed: Whole
    folder: Annotated[str, Meta(pattern=r"^[^\0]*$")]
    command: list[str]
    oversubscribed: bool
    status: str = PENDING
    reason: str | None = None
    seconds: float | None = None
    started_utc: str | None = None
    profiled: bool = False

    @property
    def configuration(self) -> str:
        """Name shared by the runs of one cell and length."""
        return self.name + (" profiled" if self.profiled else "")

    @property
    def gpt2_arguments(self) -> list[str]:
        return work_arguments(self.command)

    @property
    def threads_per_rank(self) -> int:
        """CPU threads of a rank, from OMP_NUM_THREADS in the command."""
        return int(next(word for word in self.command if word.startswith("OMP_NUM_THREADS=")).partition("=")[2])


def work_arguments(command: Sequence[str]) -> list[str]:
    """Return the flags of gpt2.py in a command, without the folder."""
    program = next((index for index, word in enumerate(command) if Path(word).name == "gpt2.py"), None)
    if program is None:
        raise InputError(f"no call of gpt2.py: {shlex.join(command)[:200]!r}")
    arguments = list(command[program + 1 :])
    if "--checkpoint_path" in arguments:
        place = arguments.index("--checkpoint_path")
        del arguments[place : place + 2]
    return arguments


def plan(request: Request) -> list[Cell]:
    """Return every run of the sweep in order: round 1 with each cell once, then round 2, and so on.

    The k-th profiled runs end round k, so that a drift of the machine affects all alike. Impossible cells come last,
    once each, as "not applicable" with a reason.
    """
    asked = [
        (variant, ranks, batch_size)
        for batch_size, ranks, variant in itertools.product(request.batch_sizes, request.ranks, request.variants)
    ]
    first = [cell_of(request, *each, repeat=1) for each in asked]
    possible = [each for each, cell in zip(asked, first, strict=True) if cell.status == PENDING]
    rounds = [
        cell_of(request, *possible[index], repeat=number, profiled=profiled)
        for number in range(1, max(request.repeats, request.profile_runs) + 1)
        for profiled, last in ((False, request.repeats), (True, request.profile_runs))
        if number <= last
        for index in order_of_round(len(possible), number)
    ]
    return rounds + [cell for cell in first if cell.status == NOT_APPLICABLE]


def order_of_round(num_cells: int, round_number: int) -> list[int]:
    """Return the order of the cells in a round: a row of Williams' design (Williams 1949, Aust. J. Sci. Res. 2, 149).

    Over any `num_cells` consecutive rounds every cell has every place once. With an even number of cells, each also
    follows each other equally often. So neither drift nor the run before favours a cell.
    """
    zigzag = [(index + 1) // 2 if index % 2 else -(index // 2) for index in range(num_cells)]
    return [(place + round_number - 1) % num_cells for place in zigzag]


def why_not_applicable(variant: Variant, ranks: int, machine: Machine) -> str | None:
    """Return why a cell makes no sense on this machine; None if it can be tried."""
    drives_all = STRATEGIES[variant.run_type].devices == "all"
    if drives_all and (machine.kind == "cpu" or ranks == 1):
        return f"{variant.run_type} splits a batch over the CUDA devices of one process and needs two" + (
            ", but there is no CUDA device" if machine.kind == "cpu" else ""
        )
    if variant.is_one_process and not drives_all and ranks > 1:
        return f"{variant.run_type} is one process"
    if ranks == 1 and STRATEGIES[variant.run_type].cuts_model:
        return f"{variant.run_type} cuts the model over ranks and needs two"
    if ranks % variant.mesh_ranks:
        return f"its axes need a multiple of {variant.mesh_ranks} ranks"
    if machine.kind == "cuda" and ranks > len(machine.cuda_devices):
        return f"PyTorch sees {len(machine.cuda_devices)} CUDA device{'s' * (len(machine.cuda_devices) > 1)}"
    return None


def oversubscription(cells: Sequence[Cell], machine: Machine) -> str | None:
    """Return what the most crowded cell needs and what the machine has; None if every thread has a core."""
    crowded = [cell for cell in cells if cell.oversubscribed]
    if not crowded:
        return None
    most = max(crowded, key=lambda cell: cell.ranks * cell.threads_per_rank)
    threads = f" of {most.threads_per_rank} threads" if most.threads_per_rank > 1 else ""
    cores = f"{machine.num_cores} core{'s' * (machine.num_cores > 1)}"
    return (
        f"{most.variant} on {most.ranks} rank{'s' * (most.ranks > 1)}{threads} needs more than the {cores} that this "
        "machine lets it use"
    )


def cell_of(
    request: Request, variant: Variant, ranks: int, batch_size: int, repeat: int, profiled: bool = False
) -> Cell:
    """Return one run of the plan; a cell that makes no sense here is "not applicable" with a reason."""
    reason = why_not_applicable(variant, ranks, request.machine)
    name = f"{folder_name(variant.text)}_{ranks}rank{'s' * (ranks > 1)}_batch{batch_size}"
    folder = f"{name}/{'profiled' if profiled else 'run'}_{repeat}"
    seed = request.seed + (repeat - 1 if request.protocol == "time_to_loss" else 0)
    return Cell(
        name=name,
        variant=variant.text,
        run_type=variant.run_type,
        ranks=ranks,
        batch_size=batch_size,
        repeat=repeat,
        seed=seed,
        folder=folder,
        command=_command(request, variant, ranks, batch_size, seed, ["--profile"] if profiled else [], folder),
        oversubscribed=reason is None and request.machine.is_oversubscribed(ranks, variant.threads_per_rank),
        status=PENDING if reason is None else NOT_APPLICABLE,
        reason=reason,
        profiled=profiled,
    )


def _command(
    request: Request, variant: Variant, ranks: int, batch_size: int, seed: int, added: list[str], folder: str
) -> list[str]:
    """Return the command of one run, with relative paths, as it is recorded."""
    machine = request.machine
    is_dp = STRATEGIES[variant.run_type].devices == "all"  # one process that takes every device it sees
    environment = [f"OMP_NUM_THREADS={machine.threads(1 if is_dp else ranks, variant.threads_per_rank)}"]
    environment += [f"CUDA_VISIBLE_DEVICES={','.join(machine.cuda_devices[:ranks])}"] if is_dp else []
    is_launched = ranks > 1 and not is_dp
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if is_launched else []
    global_batch = batch_size * ranks if request.protocol == "weak" else batch_size
    return [
        *("env", *environment, "python", *launcher, request.program),
        *("--run_type", variant.run_type, "--global_batch_size", str(global_batch), "--seed", str(seed)),
        *(*request.shared, *variant.arguments, *added),
        *("--checkpoint_path", str(Path(request.folder) / folder), "--overwrite"),
    ]


def again(cell: Cell, repeat: int, parent: str | None = None, profiled: bool = False) -> Cell:
    """Return another run of a configuration.

    Args:
        parent: folder of the sweep that it belongs to, if another one.
    """
    place = cell.command.index("--checkpoint_path") + 1
    folder = f"{cell.name}/{'profiled' if profiled else 'run'}_{repeat}"
    base = parent if parent is not None else cell.command[place].removesuffix(cell.folder).rstrip("/")
    command = [*cell.command[:place], f"{base}/{folder}", *cell.command[place + 1 :]]
    if profiled:
        command[place - 1 : place - 1] = ["--profile"]
    return dataclasses.replace(
        cell, repeat=repeat, folder=folder, command=command, profiled=profiled,
        status=PENDING, reason=None, seconds=None, started_utc=None,
    )  # fmt: skip


def cells_of_pairs(request: Request, ranks: int, pairs: int) -> list[Cell]:
    """Return both runs of every pair, in order: the first pair of each configuration, then the second, and so on.

    Side a begins the odd pairs and side b the even ones, so a drift favours neither. What cannot run on `ranks`
    runs on one. What cannot run here at all comes last, once each, with a reason.
    """
    first = []
    for variant in request.variants:
        of_variant = ranks if why_not_applicable(variant, ranks, request.machine) is None else 1
        first.append(cell_of(request, variant, of_variant, request.batch_sizes[0], repeat=1))
    possible = [cell for cell in first if cell.status == PENDING]
    planned = [
        again(dataclasses.replace(possible[index], name=f"{possible[index].name}_{side}"), number)
        for number in range(1, pairs + 1)
        for index in order_of_round(len(possible), number)
        for side in (SIDES if number % 2 else reversed(SIDES))
    ]
    return planned + [cell for cell in first if cell.status == NOT_APPLICABLE]


def settings_of(cell: Cell) -> RunSettings:
    """Return the settings with which gpt2.py would run. Raises InputError as it would refuse."""
    ranks = 1 if not STRATEGIES[cell.run_type].is_distributed else cell.ranks
    return check_run(parse_command_line(cell.gpt2_arguments), Launch(0, 0, ranks, ranks)).settings


def compile_alike(cells: Sequence[Cell], machine: Machine) -> str | None:
    """Give every run the same --compile, so that the compiler is not mistaken for a strategy.

    On CUDA --compile auto compiles what tests have shown to compute the same. Where it would compile some cells and not
    others, all run uncompiled. A --compile that was typed stays.

    Returns:
        A sentence if commands were changed, else None.
    """
    if machine.kind == "cpu":
        return None
    blockers: dict[str, str | None] = {}
    possible = [cell for cell in cells if cell.status not in (NOT_APPLICABLE, FAILED)]
    for cell in possible:
        try:
            values = settings_of(cell).by_flag()
        except InputError:
            continue  # check_cells says why
        if values["compile"] is not None:
            return None
        blockers.setdefault(cell.variant, auto_compile_blocker(values))
    first = next((variant for variant, blocker in blockers.items() if blocker is not None), None)
    if first is None or None not in blockers.values():
        return None
    for cell in possible:
        place = cell.command.index("--checkpoint_path")
        cell.command[place:place] = ["--compile", "off"]
    return (
        f"--compile off for every run: {first} is not compiled {blockers[first]}. A compiled run against an uncompiled "
        "one would measure the compiler"
    )


def check_cells(cells: Sequence[Cell], allow_mismatch: bool, protocol: str = "strong") -> dict[str, RunSettings]:
    """Check every cell's flags; mark a cell that gpt2.py would refuse as failed.

    Returns:
        Settings of every cell that can run, by its `configuration`.

    Raises:
        InputError: every cell is refused, one is refused under the profiler alone, no step would be measured, or
            cells of one batch size do unequal work.
    """
    settings: dict[str, RunSettings] = {}
    refused: dict[str, str] = {}
    applicable = [cell for cell in cells if cell.status != NOT_APPLICABLE]
    for cell in applicable:
        key = cell.configuration
        if key not in settings and key not in refused:
            try:
                settings[key] = settings_of(cell)
            except ValueError as error:
                refused[key] = str(error)
        if key in refused:
            cell.status, cell.reason = FAILED, refused[key]
    for cell in applicable:  # else it would come out after all runs were made
        if cell.profiled and cell.configuration in refused and cell.name in settings:
            reason = refused[cell.configuration].replace("--max_train_steps", "--steps")
            raise InputError(f"--profile_runs: {cell.name} cannot be profiled: {reason}, or leave --profile_runs out")
    if not settings:
        reasons = refused.values() or [cell.reason for cell in cells]
        raise InputError(f"no run of this sweep can start: {next(iter(reasons))}")
    shortest = min(settings.values(), key=lambda each: each.last_step)
    if shortest.last_step <= shortest.measuring.timing_warmup_steps:
        raise InputError(
            f"a run of {shortest.last_step} optimizer steps has none to measure, because the first "
            f"{shortest.measuring.timing_warmup_steps} are warm-up (--timing_warmup_steps); give a larger --steps"
        )
    if not allow_mismatch:
        fields = EQUAL_TASK if protocol == "time_to_loss" else EQUAL_WORK
        _check_equal_work([cell for cell in applicable if cell.configuration in settings], settings, fields)
    return settings


def _check_equal_work(cells: Sequence[Cell], settings: dict[str, RunSettings], fields: Sequence[str]) -> None:
    first_of: dict[int, Cell] = {}
    for cell in cells:
        first = first_of.setdefault(cell.batch_size, cell)
        for field in fields:
            ours, theirs = (settings[each.configuration].value(field) for each in (cell, first))
            if ours != theirs:
                raise InputError(
                    f"{cell.name} would do other work than {first.name}: "
                    f"{field} {value_text(ours)} instead of {value_text(theirs)}, so no time of one compares with the "
                    "other's; give it to all of them, or --allow_mismatch"
                )
