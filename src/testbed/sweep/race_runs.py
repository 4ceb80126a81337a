"""Make the runs of a race with src/gpt2.py, within its budget, and measure its winner again. No torch.

A race is a sweep whose runs are not known before: DIR/sweep.json grows with it. The measurement of the winner against
the runner-up is a sweep of its own, in DIR/fresh/.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from testbed.errors import InputError, say
from testbed.sweep.plan import COMPLETE, FAILED, PENDING, Cell, again
from testbed.sweep.race import Difference, Evidence, Measured, RunStopped, TimeIsUp
from testbed.sweep.runner import Runner, in_words, seconds_left
from testbed.sweep.state import Sweep, metrics_of, read_sweep, take_over

if TYPE_CHECKING:
    from testbed.config.settings import RunSettings
    from testbed.sweep.request import Machine

LEAST_PAIRS, MOST_PAIRS = 3, 10  # runs of winner and runner-up in it; the budget keeps room for the least
ENOUGH_ROUNDS = 1000  # with so many, anything may still be told
FRESH_ERROR = 0.05  # both sides of the interval of the fresh ratio together


@dataclass
class Budget:
    """Wall seconds that all runs together may take, with those of earlier calls."""

    seconds: float
    sweeps: list[Sweep] = dataclasses.field(default_factory=list)

    @property
    def spent(self) -> float:
        runs = [each.seconds or 0.0 for sweep in self.sweeps for each in sweep.cells]
        return sum(runs) + sum(row["seconds"] for sweep in self.sweeps for row in sweep.warmup_runs)

    @property
    def left(self) -> float:
        return self.seconds - self.spent


def check_budget(
    seconds: float, out_dir: Path, first: Cell, settings: dict[str, RunSettings], machine: Machine
) -> None:
    """Check that a budget has room for the first run of a race that has made none.

    Raises:
        InputError: it has not.
    """
    expected_s = seconds_left([first], settings, machine)
    if expected_s > seconds and read_sweep(out_dir) is None:
        raise InputError(
            f"--budget {in_words(seconds)} is too short for a single run, which takes about {in_words(expected_s)} (a "
            "guess from FLOPs), and the race needs several of each configuration; give more, such as --budget 15m, or "
            "fewer --steps"
        )


@dataclass
class Starts:
    """Makes the runs of a race, or of its second measurement: a `Track`.

    Attributes:
        first: first run of each configuration, by its name.
        reserve: seconds that the budget must keep when a run of a configuration, by name and number, begins.
    """

    runner: Runner
    first: Mapping[str, Cell]
    budget: Budget
    reserve: Callable[[str, int], float] = lambda name, number: 0.0

    def run(self, name: str, number: int) -> float | str:
        """Return the tokens/s of a run, made now or found finished, or why it failed. Raises as `Track` says."""
        cell = self.cell(name, number)
        if cell.status != COMPLETE:
            self.make(cell, self.reserve(name, number))
        return str(cell.reason) if cell.status == FAILED else self._speed(cell)

    def rounds_left(self, names: Sequence[str], done: int) -> int:
        """Return how many more rounds of these configurations fit into the budget, or are there already."""
        made = [cell.repeat for cell in self.runner.sweep.cells if cell.status == COMPLETE and not cell.profiled]
        if max(made, default=0) > done:  # a race that is resumed
            return ENOUGH_ROUNDS
        round_s = sum(self.expected_s(self.first[name]) for name in names)
        free_s = self.budget.left - self.reserve(names[0], done + 1)
        return max(0, int(free_s / round_s)) if round_s else 0

    def cell(self, name: str, number: int, profiled: bool = False) -> Cell:
        """Return the cell of a run, which is in the plan from then on."""
        wanted = again(self.first[name], number, profiled=profiled)
        found = next((cell for cell in self.runner.sweep.cells if cell.folder == wanted.folder), None)
        if found is None:
            self.runner.sweep.cells.append(wanted)
        return found or wanted

    def make(self, cell: Cell, reserve_s: float = 0.0) -> None:
        """Make a run.

        Raises:
            TimeIsUp: it would take more than the budget has beside the reserve.
            RunStopped: a signal came.
        """
        if self.runner.stop.signal_number is not None:
            raise RunStopped
        if self.expected_s(cell) + reserve_s > self.budget.left:
            if cell.repeat > 1 or cell.profiled:
                self.runner.sweep.cells.remove(cell)  # it is not in the plan
            raise TimeIsUp
        self.runner.make(cell)
        if cell.status == PENDING:
            raise RunStopped
        say(f"{cell.folder}: {self.runner.outcome(cell)}; {in_words(max(0.0, self.budget.left))} left", flush=True)

    def expected_s(self, cell: Cell) -> float:
        """Return the seconds that a run will take, by those that are finished."""
        finished = [each for sweep in self.budget.sweeps for each in sweep.cells if each.status == COMPLETE]
        runner = self.runner
        wanted = dataclasses.replace(cell, status=PENDING, profiled=False)
        return seconds_left([*finished, wanted], runner.settings, runner.machine)

    def _speed(self, cell: Cell) -> float | str:
        metrics = metrics_of(cell, self.runner.out_dir)
        speed = None if metrics is None else metrics["summary"]["mean_tokens_per_sec_global"]
        return "it measured no step" if speed is None else float(speed)


@dataclass(frozen=True)
class Fresh:
    """Winner against runner-up in runs that chose neither. `ratio`: log of the winner's speed over the runner-up's."""

    winner: str
    runner_up: str
    pairs: int
    ratio: Difference | None  # None: fewer than two pairs were made
    equivalent: float

    def fastest_first(self) -> Fresh:
        """Return the same with the pair in the other order if the runner-up is shown to be faster."""
        if self.ratio is None or self.ratio.high >= 0:
            return self
        turned = Difference(-self.ratio.estimate, -self.ratio.high, -self.ratio.low)
        return dataclasses.replace(self, winner=self.runner_up, runner_up=self.winner, ratio=turned)

    def as_json(self) -> dict[str, Any]:
        """Return the pair and its ratio as choice.json has it."""
        ratio = None if self.ratio is None else self.ratio.as_ratio()
        return {"winner": self.winner, "runner_up": self.runner_up, "runs_of_each": self.pairs, "ratio": ratio}

    @property
    def is_decided(self) -> bool:
        """Return whether one is shown to be faster, or both to be equivalent."""
        if self.ratio is None:
            return False
        return self.ratio.low > 0 or self.ratio.high < 0 or self.ratio.is_within(self.equivalent)


def measure_afresh(starts: Starts, winner: str, runner_up: str, equivalent: float, most: int = MOST_PAIRS) -> Fresh:
    """Run winner and runner-up in turn until the difference is decided or the budget is spent.

    Then each runs once more under the profiler, if the budget has room for it. Raises RunStopped after a signal.
    """

    def pair_of(number: int) -> tuple[str, str]:
        return (winner, runner_up) if number % 2 else (runner_up, winner)

    runs: list[Measured] = []
    # a run is begun if its pair has room too
    starts.reserve = lambda name, number: 0.0 if name == pair_of(number)[1] else starts.expected_s(starts.first[name])
    fresh = Fresh(winner, runner_up, 0, None, equivalent)
    try:
        for number in range(1, most + 1):
            speeds = {name: starts.run(name, number) for name in pair_of(number)}
            if failed := [speed for speed in speeds.values() if isinstance(speed, str)]:
                say(f"measuring again: a run failed: {failed[0]}")
                return fresh
            runs += [Measured(name, number, float(speed)) for name, speed in speeds.items()]
            ratio = Evidence(runs, FRESH_ERROR / 2).difference(winner, runner_up) if number > 1 else None
            fresh = Fresh(winner, runner_up, number, ratio, equivalent)
            if number >= LEAST_PAIRS and fresh.is_decided:
                break
        for name in (winner, runner_up):
            cell = starts.cell(name, 1, profiled=True)
            if cell.status != COMPLETE:
                starts.make(cell)
    except TimeIsUp:
        pass
    return fresh


def opened(sweep: Sweep, first: Mapping[str, Cell], out_dir: Path, allow_mismatch: bool) -> str:
    """Add the runs of an earlier call to the plan, mark those that are finished, and return a summary.

    Raises:
        InputError: the folder holds another race or sweep.
    """
    earlier = read_sweep(out_dir)
    planned = {cell.folder for cell in sweep.cells}
    for old in earlier.cells if earlier is not None else ():
        if old.folder in planned:
            continue
        if old.name not in first:
            raise InputError(
                f"--out_dir {out_dir} holds a race with {old.name}, which this call does not ask for; give another "
                "--out_dir, or ask for the same again"
            )
        sweep.cells.append(again(first[old.name], old.repeat, profiled=old.profiled))
    return take_over(sweep, out_dir, allow_mismatch)


def moved(cells: Sequence[Cell], folder: str) -> dict[str, Cell]:
    """Return the first runs of configurations as those of another folder's sweep, by name."""
    return {cell.name: again(cell, 1, parent=folder) for cell in cells}
