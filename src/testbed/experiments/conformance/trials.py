"""The combinations that every pair of releases is tried with, how each is run, and when it agrees. No torch."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from testbed.errors import Failure, one_line
from testbed.experiments.conformance import RANKS, through_program
from testbed.experiments.made_up_tokens import VOCABULARY, write_made_up_tokens
from testbed.io import SOURCE
from testbed.sweep.runner import reason_of_failure

TOLERANCES = {"loss": 5e-6, "norm": 5e-6, "weights": 1e-5}  # float32 sums in another order
ROUNDED = 2.0  # what rounds to bf16 may be this many times as far from fp32 as the single process
SPLITS = (1, 2, 4, 8)  # accumulations of the single process: one run's rounding is a draw, the largest of these counts
SEEDS = (0, 1, 2)  # of initial weights: the others are tried where bf16 differs with the first
REPEATS = 4  # with the same weights, where fp32 differs
LEAST_ROUNDED = 1e-5  # nats, root mean square: what is nearer to fp32 than this was computed in fp32
MAX_NORM = {True: 0.25, False: 1e9}  # the norms of both models lie between 0.4 and 3
TIMEOUT_S, GRACE_S = 180.0, 10.0
STAGES = (0, 1, 2, 3)
PRECISIONS = {"plain": ("fp32", "bf16", "autocast"), "program": ("fp32", "bf16")}
WORKERS = {name: f"testbed.experiments.conformance.{module}" for name, module in
           (("plain", "plain"), ("program", "through_program"))}  # fmt: skip
# what each rank would import, seconds long; a release may lack some
PRELOADED = (
    "deepspeed torch._dynamo torch._inductor.compile_fx deepspeed.ops.adam deepspeed.runtime.zero.stage3 "
    "deepspeed.runtime.zero.muon.muon_optimizer"
).split()
OF_PROGRAM = "gpt2 testbed.train.run testbed.strategies.mesh testbed.strategies.pipeline".split()


@dataclass(frozen=True)
class Trial:
    """One way to train: `through` DeepSpeed alone ("plain") or src/gpt2.py ("program")."""

    through: str
    stage: int
    accumulation: int
    clipping: bool
    precision: str

    @property
    def name(self) -> str:
        clipping = "clipping" if self.clipping else "not clipping"
        return f"{self.through} ZeRO {self.stage}, accumulation {self.accumulation}, {clipping}, {self.precision}"

    def task(self, seed: int) -> dict[str, Any]:
        """Return what its worker reads."""
        work = {"stage": self.stage, "accumulation": self.accumulation, "precision": self.precision}
        return {**work, "max_norm": MAX_NORM[self.clipping], "seed": seed}


def trials() -> list[Trial]:
    """Return every combination."""
    return [
        Trial(through, stage, accumulation, clipping, precision)
        for through, of_it in PRECISIONS.items()
        for stage, precision, accumulation, clipping in itertools.product(STAGES, of_it, (1, 2), (True, False))
    ]


@dataclass(frozen=True)
class Outcome:
    """What one run came to, per step and at its end; `error`: why it failed, without the rest. One that timed out may
    have failed for other work on the machine."""

    losses: Sequence[float] = ()
    norms: Sequence[float] = ()
    weights: Any = None
    error: str | None = None
    timed_out: bool = False


class Server:
    """The process that forks ranks, in the environment of a Python."""

    def __init__(self, python: str, folder: Path):
        self.folder = folder
        self.runs: dict[str, Outcome] = {}
        folder.mkdir(parents=True, exist_ok=True)
        variables = {
            "PYTHONPATH": str(SOURCE),
            "PYTHONSAFEPATH": "1",  # -m would look in the current folder first
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
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

    def alone(self, trial: Trial, seed: int, precision: str, accumulation: int) -> Outcome:
        """Return the single process's run of a trial, of another precision or accumulation; made once."""
        task = {**trial.task(seed), "stage": None, "precision": precision, "accumulation": accumulation}
        key = f"{trial.through} {task}"
        if key not in self.runs:
            self.runs[key] = self.run(trial.through, task, ranks=1)
        return self.runs[key]

    def run(self, through: str, task: dict[str, Any], ranks: int = RANKS) -> Outcome:
        """Carry a task out in ranks of its own."""
        folder = self.folder / through
        folder.mkdir(exist_ok=True)
        for name in ("results.json", "weights.npy"):
            (folder / name).unlink(missing_ok=True)
        (folder / "tasks.json").write_text(json.dumps(task))
        preload = [*PRELOADED, *(OF_PROGRAM if through == "program" else ())]
        request = {"worker": WORKERS[through], "folder": str(folder), "ranks": ranks, "preload": preload}
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps({**request, "timeout_s": TIMEOUT_S, "grace_s": GRACE_S}) + "\n")
            self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise Failure(f"the process that starts ranks died; {self.folder / 'server.log'} says why")
        codes = json.loads(answer)
        if any(code != 0 for code in codes):
            return Outcome(error=why_failed(codes, folder), timed_out=not any(codes))
        if through == "program":
            return Outcome(*through_program.results(folder))
        found = json.loads((folder / "results.json").read_text())
        return Outcome(found["losses"], found["norms"], np.load(folder / "weights.npy"))


def why_failed(codes: Sequence[int | None], folder: Path) -> str:
    """Return the last error of the first rank that failed by itself."""
    failed = [(rank, code) for rank, code in enumerate(codes) if code]
    if not failed:
        return f"it did not end within {TIMEOUT_S:g} s"
    rank, code = failed[0]
    return one_line(reason_of_failure(folder / "run", folder / f"rank_{rank}.err", code), 400)


def judged(trial: Trial, exact: Outcome, rounded: Sequence[Outcome], actual: Outcome) -> dict[str, Any]:
    """Return a trial's line: distances, what is allowed, and whether it agrees.

    Args:
        exact: the single process in fp32.
        rounded: the single process in the trial's precision, split in several ways; in fp32 none.
    """
    line: dict[str, Any] = {**asdict(trial), "agrees": False}
    alone = next((run for run in (exact, *rounded) if run.error), None)
    failed = alone or actual
    if failed.error:
        error = f"the single process: {failed.error}" if alone else failed.error
        return {**line, "error": error, **({"timed_out": True} if failed.timed_out else {})}
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


def distances(expected: Outcome, actual: Outcome, of_steps: Any) -> dict[str, float]:
    """Return how far losses and norms are apart, absolutely, and the weights, relatively."""
    far = {
        name: float(of_steps(np.abs(np.subtract(one, other))))
        for name, one, other in (
            ("loss", expected.losses, actual.losses),
            ("norm", expected.norms, actual.norms),
        )
    }
    far["weights"] = float(np.linalg.norm(actual.weights - expected.weights) / np.linalg.norm(expected.weights))
    return {name: float(f"{value:.3g}") for name, value in far.items()}


def carry_out(python: str, folder: Path, wanted: Sequence[Trial]) -> Iterator[dict[str, Any]]:
    """Yield the line of each trial under the releases of a Python."""
    if any(trial.through == "program" for trial in wanted):
        write_made_up_tokens(folder / "program" / "data", VOCABULARY)
    with Server(python, folder) as server:
        for trial in wanted:
            seeds = SEEDS[:1] * (1 + REPEATS) if trial.precision == "fp32" else SEEDS
            yield confirmed(judged_with(server, trial, seed) for seed in seeds)


def judged_with(server: Server, trial: Trial, seed: int) -> dict[str, Any]:
    """Make a trial's runs with the initial weights of a seed, those of the single process included."""
    exact = server.alone(trial, seed, "fp32", trial.accumulation)
    splits = () if trial.precision == "fp32" else SPLITS
    rounded = [server.alone(trial, seed, trial.precision, split) for split in splits]
    return judged(trial, exact, rounded, server.run(trial.through, trial.task(seed)))


def confirmed(tries: Iterator[dict[str, Any]]) -> dict[str, Any]:
    """Return the first try's line, with how far off the others were.

    What differs by rounding alone is a draw: it differs if every other try does too. In fp32 one try is enough.
    """
    line = next(tries)
    if line["agrees"] or "distances" not in line or "note" in line:
        return line
    others = list(tries)
    agrees = line["precision"] != "fp32" and any(other["agrees"] for other in others)
    late = next((other for other in others if other.get("timed_out")), None)
    if late and not agrees:
        return late
    return {**line, "again": [times_allowed(other) for other in others if "distances" in other], "agrees": agrees}


def times_allowed(line: dict[str, Any]) -> float:
    """Return the largest distance of a line in units of what is allowed."""
    return float(f"{max(line['distances'][name] / line['allowed'][name] for name in line['allowed']):.3g}")
