"""The combinations that every pair of releases is tried with, how each is run, and when it agrees. No torch."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from testbed.errors import Failure, one_line
from testbed.experiments.conformance import RANKS
from testbed.io import SOURCE
from testbed.sweep.runner import reason_of_failure

TOLERANCES = {"loss": 5e-6, "norm": 5e-6, "weights": 1e-5}  # float32 sums in another order
ROUNDED = 2.0  # what rounds to bf16 may be this many times as far from fp32 as the single process
SPLITS = (1, 2, 4, 8)  # accumulations of the single process: one run's rounding is a draw, the largest of these counts
SEEDS = (0, 1, 2)  # of initial weights: the others are tried where bf16 differs with the first
REPEATS = 4  # with the same weights, where fp32 differs
LEAST_ROUNDED = 1e-5  # nats, root mean square: what is nearer to fp32 than this was computed in fp32
MAX_NORM = {True: 0.25, False: 1e9}  # the model's norms lie between 0.4 and 3
TIMEOUT_S, GRACE_S = 180.0, 10.0
STAGES, PRECISIONS = (0, 1, 2, 3), ("fp32", "bf16", "autocast")
WORKER = "testbed.experiments.conformance.plain"
# what each rank would import, seconds long; a release may lack some
PRELOADED = (
    "deepspeed torch._dynamo torch._inductor.compile_fx deepspeed.ops.adam deepspeed.runtime.zero.stage3 "
    "deepspeed.runtime.zero.muon.muon_optimizer"
).split()


@dataclass(frozen=True)
class Trial:
    """One way to train."""

    stage: int
    accumulation: int
    clipping: bool
    precision: str

    @property
    def name(self) -> str:
        clipping = "clipping" if self.clipping else "not clipping"
        return f"ZeRO {self.stage}, accumulation {self.accumulation}, {clipping}, {self.precision}"

    def task(self, seed: int) -> dict[str, Any]:
        """Return what its worker reads."""
        work = {"stage": self.stage, "accumulation": self.accumulation, "precision": self.precision}
        return {**work, "max_norm": MAX_NORM[self.clipping], "seed": seed}


def trials() -> list[Trial]:
    """Return every combination."""
    return [
        Trial(stage, accumulation, clipping, precision)
        for stage, precision, accumulation, clipping in itertools.product(STAGES, PRECISIONS, (1, 2), (True, False))
    ]


@dataclass(frozen=True)
class Outcome:
    """What one run came to, per step and at its end; `error`: why it failed, without the rest."""

    losses: Sequence[float] = ()
    norms: Sequence[float] = ()
    weights: Sequence[float] = ()
    error: str | None = None


class Server:
    """The process that forks ranks, in the environment of a Python."""

    def __init__(self, python: str, folder: Path):
        self.folder = folder
        self.alone: dict[str, Outcome] = {}
        folder.mkdir(parents=True, exist_ok=True)
        variables = {
            "PYTHONPATH": str(SOURCE),
            "PYTHONSAFEPATH": "1",  # -m would look in the current folder first
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            "TORCH_EXTENSIONS_DIR": str(folder / "extensions"),
        }
        with (folder / "server.log").open("a") as log:
            self.process = subprocess.Popen(
                [python, "-m", "testbed.experiments.rank_server"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True,
                env={**os.environ, **variables},
            )  # fmt: skip

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()  # its ranks, if any, end with it
        self.process.communicate()

    def run_alone(self, trial: Trial, seed: int, precision: str, accumulation: int) -> Outcome:
        """Return the single process's run of a trial, of another precision or accumulation; made once."""
        task = {**trial.task(seed), "stage": None, "precision": precision, "accumulation": accumulation}
        key = str(task)
        if key not in self.alone:
            self.alone[key] = self.run(task, ranks=1)
        return self.alone[key]

    def run(self, task: dict[str, Any], ranks: int = RANKS) -> Outcome:
        """Carry a task out in ranks of its own."""
        (self.folder / "tasks.json").write_text(json.dumps(task))
        request = {"worker": WORKER, "folder": str(self.folder), "ranks": ranks, "preload": PRELOADED}
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps({**request, "timeout_s": TIMEOUT_S, "grace_s": GRACE_S}) + "\n")
            self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise Failure(f"the process that starts ranks died; {self.folder / 'server.log'} says why")
        codes = json.loads(answer)
        if any(code != 0 for code in codes):
            return Outcome(error=why_failed(codes, self.folder))
        return Outcome(**json.loads((self.folder / "results.json").read_text()))


def why_failed(codes: Sequence[int | None], folder: Path) -> str:
    """Return the last error of the first rank that failed by itself."""
    failed = [(rank, code) for rank, code in enumerate(codes) if code]
    if not failed:
        return f"it did not end within {TIMEOUT_S:g} s; if other work ran, remove its line and call again"
    rank, code = failed[0]
    return one_line(reason_of_failure(folder / "run", folder / f"rank_{rank}.err", code), 400)


def judged(trial: Trial, exact: Outcome, rounded: Sequence[Outcome], actual: Outcome) -> dict[str, Any]:
    """Return a trial's line: distances, what is allowed, and whether it agrees.

    Args:
        exact: the single process in fp32.
        rounded: the single process in the trial's precision, split in several ways; in fp32 none.
    """
    line: dict[str, Any] = {**asdict(trial), "agrees": False}
    alone = next((run.error for run in (exact, *rounded) if run.error), None)
    if alone or actual.error:
        return {**line, "error": f"the single process: {alone}" if alone else actual.error}
    if trial.precision == "fp32":
        found, allowed = distances(exact, actual, np.max), dict(TOLERANCES)
    else:
        found = distances(exact, actual, root_mean_square)
        own = [distances(exact, run, root_mean_square) for run in rounded]
        allowed = {name: float(f"{ROUNDED * max(each[name] for each in own):.3g}") for name in found}
    is_rounded = trial.precision == "fp32" or found["loss"] > LEAST_ROUNDED
    is_within = all(far <= allowed[name] for name, far in found.items())  # not a number is not
    note = {} if is_rounded else {"note": "computed in fp32"}
    return {**line, "distances": found, "allowed": allowed, **note, "agrees": is_within and is_rounded}


def root_mean_square(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values))))


def distances(expected: Outcome, actual: Outcome, of_steps: Callable[[np.ndarray], float]) -> dict[str, float]:
    """Return how far losses and norms are apart, absolutely, and the weights, relatively."""
    far = {
        "loss": of_steps(np.abs(np.subtract(expected.losses, actual.losses))),
        "norm": of_steps(np.abs(np.subtract(expected.norms, actual.norms))),
        "weights": np.linalg.norm(np.subtract(actual.weights, expected.weights)) / np.linalg.norm(expected.weights),
    }
    return {name: float(f"{value:.3g}") for name, value in far.items()}


def carry_out(python: str, folder: Path, wanted: Sequence[Trial]) -> Iterator[dict[str, Any]]:
    """Yield the line of each trial under the releases of a Python."""
    with Server(python, folder) as server:
        for trial in wanted:
            seeds = SEEDS[:1] * (1 + REPEATS) if trial.precision == "fp32" else SEEDS
            yield confirmed(judged_with(server, trial, seed) for seed in seeds)


def judged_with(server: Server, trial: Trial, seed: int) -> dict[str, Any]:
    """Make a trial's runs with the initial weights of a seed, those of the single process included."""
    exact = server.run_alone(trial, seed, "fp32", trial.accumulation)
    splits = () if trial.precision == "fp32" else SPLITS
    rounded = [server.run_alone(trial, seed, trial.precision, split) for split in splits]
    return judged(trial, exact, rounded, server.run(trial.task(seed)))


def confirmed(tries: Iterator[dict[str, Any]]) -> dict[str, Any]:
    """Return the first try's line, with how far off the others were, in units of what is allowed.

    What differs by rounding alone is a draw: it differs if every other try does too. In fp32 one try is enough.
    """
    line = next(tries)
    if line["agrees"] or "distances" not in line or "note" in line:
        return line
    others = list(tries)
    times = [
        max(far / other["allowed"][name] for name, far in other["distances"].items())
        for other in others
        if "distances" in other
    ]
    agrees = line["precision"] != "fp32" and any(other["agrees"] for other in others)
    return {**line, "again": [float(f"{each:.3g}") for each in times], "agrees": agrees}
