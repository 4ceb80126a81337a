"""Hold races of simulated runs, and count wrong eliminations: `python tests/support/race_simulation.py [RACES]`.

The field has the speeds of docs/results/run_types, the noise is that of docs/results/sweep: five runs of each
configuration, in rounds. It writes docs/results/race/simulation.json, which update_docs.py puts into a table.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from testbed.sweep.field import Field, prune
from testbed.sweep.prediction import Prediction
from testbed.sweep.race import Race, TimeIsUp

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
ROUNDS_OF_THE_SWEEP = 5
MARGIN = 0.02  # --equivalent: that one within it of the fastest is taken is no error


def _log_speed(file: Path) -> float:
    return math.log(json.loads(file.read_text())["summary"]["mean_tokens_per_sec_global"])


@cache
def field_of_run_types() -> tuple[float, ...]:
    """Logarithms of tokens/s of every run type on two ranks, the fastest first."""
    return tuple(sorted(map(_log_speed, RESULTS.glob("run_types/*/training_metrics.json")), reverse=True))


@cache
def scatter_in_the_sweep() -> tuple[float, ...]:
    """Standard deviation of each configuration's five runs around configuration and round, as a fraction."""
    logs = [
        [_log_speed(file) for file in sorted(cell.glob("run_*/*metrics.json"))] for cell in RESULTS.glob("sweep/*/")
    ]
    table = np.array(logs)
    rest = table - table.mean(1, keepdims=True) - table.mean(0) + table.mean()
    return tuple(np.sqrt((rest**2).sum(1) / (table.shape[1] - 1)).tolist())


def typical_scatter() -> float:
    return float(np.sqrt(np.mean(np.square(scatter_in_the_sweep()))))


def normal(random: np.random.Generator) -> float:
    return float(random.standard_normal())


def heavy(random: np.random.Generator) -> float:
    """Student's t with three degrees of freedom, at a standard deviation of 1."""
    return float(random.standard_t(3)) / math.sqrt(3)


def slow_tail(random: np.random.Generator) -> float:
    """Most runs a little faster than the mean, some much slower."""
    return 1.0 - float(random.exponential())


@dataclass
class SimulatedTrack:
    """Runs of random speed. `step` is the scatter of a random walk from run to run, `of_round` that of whole rounds."""

    speeds: dict[str, float]
    scatter: dict[str, float]
    random: np.random.Generator
    draw: Callable[[np.random.Generator], float] = normal
    step: float = 0.0
    of_round: float = 0.0
    most_rounds: int = ROUNDS_OF_THE_SWEEP
    most_runs: int = 10**9
    num_runs: int = 0
    drift: float = 0.0
    rounds: dict[int, float] = field(default_factory=dict)

    def run(self, name: str, number: int) -> float:
        if number > self.most_rounds or self.num_runs >= self.most_runs:
            raise TimeIsUp
        self.num_runs += 1
        self.drift += self.step * float(self.random.standard_normal())
        shared = self.rounds.setdefault(number, self.of_round * float(self.random.standard_normal()))
        return math.exp(self.speeds[name] + shared + self.drift + self.scatter[name] * self.draw(self.random))

    def rounds_left(self, names: Sequence[str], done: int) -> int:
        return min(self.most_rounds - done, (self.most_runs - self.num_runs) // len(names))


@dataclass(frozen=True)
class Case:
    """A field and its noise."""

    name: str
    speeds: tuple[float, ...]
    scatter: tuple[float, ...]
    draw: Callable[[np.random.Generator], float] = normal
    step: float = 0.0
    of_round: float = 0.0
    most_runs: int = 10**9
    plan_error: float | None = None  # standard deviation of the logarithm of predicted times; None: there is no plan


def cases() -> list[Case]:
    speeds, typical = field_of_run_types(), typical_scatter()
    alike, quiet = (typical,) * len(speeds), (0.02,) * len(speeds)
    half = len(speeds) * ROUNDS_OF_THE_SWEEP // 2
    own = tuple(np.resize(scatter_in_the_sweep(), len(speeds)).tolist())
    close = tuple(np.log([1.0] + [0.97] * (len(speeds) - 1)).tolist())
    return [
        Case("a quiet machine: scatter 2 %", speeds, quiet),
        Case(f"scatter of the sweep: {typical:.1%}", speeds, alike),
        Case("the same, with a plan that is off by 10 %", speeds, alike, plan_error=0.10),
        Case("the same without a plan, stopped at half the sweep's runs", speeds, alike, most_runs=half),
        Case("heavy tails: Student's t, 3 degrees of freedom", speeds, alike, draw=heavy),
        Case("a tail of slow runs: exponential", speeds, alike, draw=slow_tail),
        Case("drift: a random walk of 2 % a run, 5 % a round", speeds, alike, step=0.02, of_round=0.05),
        Case("each with the scatter of its own in the sweep", speeds, own),
        Case("the fastest scatters five times as much", speeds, (5 * 0.03,) + (0.03,) * (len(speeds) - 1)),
        Case("all others 3 % slower, heavy tails", close, alike, draw=heavy),
    ]


def planned(names: list[str], case: Case, random: np.random.Generator) -> list[str]:
    """Return the names that a plan leaves, whose 90 % intervals are as wide as its errors make them."""
    predictions = {}
    for name in names:
        seconds = math.exp(-case.speeds[int(name)] + case.plan_error * float(random.standard_normal()))
        wide = math.exp(1.645 * case.plan_error)
        predictions[name] = Prediction(seconds, seconds / wide, seconds * wide, "simulated")
    field = Field([SimpleNamespace(name=name) for name in names], {}, {})
    return [cell.name for cell in prune(field, predictions).cells]


@dataclass(frozen=True)
class Counted:
    """Of many races: shares that eliminated the fastest, that left it alone, and that took it or its equal; runs."""

    races: int
    wrong: float
    decided: float
    took_it: float
    sweep_took_it: float
    mean_runs: float
    p90_runs: float
    sweep_runs: int


def simulate(case: Case, races: int, seed: int) -> Counted:
    """Hold races with seeds `seed`, `seed + 1`, ..."""
    names = [str(place) for place in range(len(case.speeds))]
    speeds, scatter = dict(zip(names, case.speeds, strict=True)), dict(zip(names, case.scatter, strict=True))
    best = max(speeds, key=lambda name: speeds[name])
    as_good = {name for name in names if speeds[name] >= speeds[best] - math.log1p(MARGIN)}
    rows = []
    for number in range(races):
        random = np.random.default_rng(seed + number)
        shuffled = [names[place] for place in random.permutation(len(names))]
        track = SimulatedTrack(speeds, scatter, random, case.draw, case.step, case.of_round, most_runs=case.most_runs)
        race = Race(shuffled if case.plan_error is None else planned(shuffled, case, random), MARGIN)
        race.hold(track)
        sweep = SimulatedTrack(speeds, scatter, random, case.draw, case.step, case.of_round)
        runs = {name: [] for name in names}
        for turn in range(1, ROUNDS_OF_THE_SWEEP + 1):
            for name in shuffled:
                runs[name].append(sweep.run(name, turn))
        fastest = max(names, key=lambda name: np.median(runs[name]))
        wrong = not as_good & set(race.left)
        rows.append((wrong, race.left == [best], race.first_two()[0] in as_good, fastest in as_good, track.num_runs))
    table = np.array(rows, dtype=float)
    means = table.mean(0)
    return Counted(
        races, *(float(share) for share in means[:4]), float(means[4]), float(np.percentile(table[:, 4], 90)),
        len(names) * ROUNDS_OF_THE_SWEEP,
    )  # fmt: skip


def main(races: int) -> None:
    rows = [{"case": case.name, **vars(simulate(case, races, seed=1_000_000))} for case in cases()]
    for row in rows:
        print(row)
    folder = RESULTS / "race"
    folder.mkdir(exist_ok=True)
    content = {"schema": 1, "command": f"python tests/support/race_simulation.py {races}", "rows": rows}
    (folder / "simulation.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2000)
