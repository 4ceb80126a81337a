"""List what a plan will run, for --dry_run: each command once with the number of its runs, their order, and the time.

No torch.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from pathlib import Path

from testbed.config.settings import RunSettings
from testbed.errors import counted
from testbed.sweep.plan import COMPLETE, FAILED, NOT_APPLICABLE, PENDING, Cell, oversubscription
from testbed.sweep.request import Machine
from testbed.sweep.runner import guess_in_words, in_words, seconds_left
from testbed.sweep.state import Sweep, take_over

OF_ONE_RUN = ("--checkpoint_path", "--seed")  # flags in which runs of one command may differ
SHOWN_ROUNDS = 3


def plan_lines(
    sweep: Sweep, out_dir: Path, settings: dict[str, RunSettings], machine: Machine, allow_mismatch: bool = False
) -> list[str]:
    """Return the lines of a dry run, whose commands can be typed, and mark the finished runs of the sweep.

    Raises:
        InputError: the folder holds another sweep, or runs of other code.
    """
    lines = [f"# {line}" for line in take_over(sweep, out_dir, allow_mismatch).splitlines()]
    cells = sweep.cells
    possible = [cell for cell in cells if cell.status not in (FAILED, NOT_APPLICABLE)]
    numbers = {name: place for place, name in enumerate(dict.fromkeys(each.configuration for each in possible), 1)}
    for alike in _by_command(possible):
        names = dict.fromkeys(cell.configuration for cell in alike)
        of_each = [(name, [cell for cell in alike if cell.configuration == name]) for name in names]
        lines.append("# " + "; ".join(f"[{numbers[name]}] {name}: {_counted(runs)}" for name, runs in of_each))
        waits = next((cell for cell in alike if cell.status == PENDING), None)
        lines.append(shlex.join(waits.command) if waits else f"# {shlex.join(alike[0].command)}")
    for alike in _by_command([cell for cell in cells if cell.status == FAILED]):
        lines += [f"# gpt2.py would refuse: {alike[0].reason}", f"# {shlex.join(alike[0].command)}"]
    lines += [f"# not applicable: {each.name}: {each.reason}" for each in cells if each.status == NOT_APPLICABLE]
    if len(possible) > len(numbers):
        lines.append(f"# runs of one command differ in {_differing(possible)}")
    if len(numbers) > 1:
        lines.append(f"# order: {_order(possible, numbers)}")
    waiting = [cell for cell in cells if cell.status == PENDING]
    if (fact := oversubscription(waiting, machine)) is not None:
        lines.append(f"# oversubscribed: {fact}; without --yes the terminal is asked, or the sweep refused")
    is_measured = any(cell.status == COMPLETE for cell in cells)
    basis = "from the finished runs" if is_measured else guess_in_words(machine)
    left = in_words(seconds_left(cells, settings, machine))
    return [*lines, "", f"# {counted(len(waiting), 'run')} to make, and warm-up: about {left} ({basis})"]


def _by_command(cells: Sequence[Cell]) -> Iterator[list[Cell]]:
    """Yield the cells of each command, in the order of their first runs."""
    found: dict[tuple[str, ...], list[Cell]] = {}
    for cell in cells:
        work = tuple(word for before, word in pairwise(["", *cell.command]) if before not in OF_ONE_RUN)
        found.setdefault(work, []).append(cell)
    yield from found.values()


def _counted(runs: Sequence[Cell]) -> str:
    """Return `5 runs, 2 of them finished`."""
    finished = sum(cell.status == COMPLETE for cell in runs)
    return f"{len(runs)} run{'s' * (len(runs) > 1)}" + (f", {finished} of them finished" if finished else "")


def _order(cells: Sequence[Cell], numbers: dict[str, int]) -> str:
    """Return the numbers of the configurations in the order of their runs, for the first rounds."""
    rounds = [
        " ".join(f"[{numbers[cell.configuration]}]" for cell in of_round)
        for _, of_round in groupby(cells, lambda cell: cell.repeat)
    ]
    goes_on = f", and so on for {len(rounds)} rounds" if len(rounds) > SHOWN_ROUNDS else ""
    return ", then ".join(rounds[:SHOWN_ROUNDS]) + goes_on


def _differing(cells: Sequence[Cell]) -> str:
    seeds = {cell.seed for cell in cells}
    return "--checkpoint_path" + (f" and --seed ({min(seeds)} to {max(seeds)})" if len(seeds) > 1 else "")
