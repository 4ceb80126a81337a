"""The combinations that every pair of releases is tried with, how each is run, and when it agrees.

`python -m testbed.experiments.conformance.trials NAME...`, in the environment of a pair, carries out those with these
names, and prints a line of JSON for each. It needs numpy, PyTorch and DeepSpeed alone; PyTorch is imported to run.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from testbed.distributed.rendezvous import free_port
from testbed.errors import one_line
from testbed.experiments.conformance import RANKS, Trial

TOLERANCES = {"loss": 5e-6, "norm": 5e-6, "weights": 1e-5}  # float32 sums in another order
ROUNDED = 2.0  # what rounds to bf16 may be this many times as far from fp32 as the single process
SPLITS = (1, 2, 4, 8)  # accumulations of the single process: one run's rounding is a draw, the largest of these counts
SEEDS = (0, 1, 2)  # of initial weights: the others are tried where a run differs with the first
LEAST_ROUNDED = 1e-5  # nats, root mean square: what is nearer to fp32 than this was computed in fp32
TIMEOUT_S = 180.0
STAGES, PRECISIONS = (0, 1, 2, 3), ("fp32", "bf16", "autocast")
# what each rank would import, seconds long; a release may lack some
PRELOADED = (
    "deepspeed torch._dynamo torch._inductor.compile_fx deepspeed.ops.adam deepspeed.runtime.zero.stage3 "
    "deepspeed.runtime.zero.muon.muon_optimizer"
).split()


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


@functools.cache
def run_alone(trial: Trial, seed: int) -> Outcome:
    return run(trial, seed, ranks=1)


def run(trial: Trial, seed: int, ranks: int = RANKS) -> Outcome:
    """Train in ranks that are forked from this process, which has imported what takes seconds."""
    from torch import multiprocessing

    late_s, is_late = time.monotonic() + TIMEOUT_S, False
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "outcome.json"
        arguments = trial, seed, ranks, free_port(), file
        forked: Any = multiprocessing.start_processes(
            be_rank, arguments, ranks, join=False, daemon=True, start_method="fork"
        )
        try:
            while not forked.join(timeout=1.0):
                if is_late := time.monotonic() > late_s:
                    for process in forked.processes:
                        process.kill()
            return Outcome(**json.loads(file.read_text()))
        except (multiprocessing.ProcessRaisedException, multiprocessing.ProcessExitedException) as error:
            late = f"it did not end within {TIMEOUT_S:g} s; if other work ran, remove its line and call again"
            return Outcome(error=late if is_late else one_line(str(error).strip().splitlines()[-1], 400))


def be_rank(rank: int, trial: Trial, seed: int, ranks: int, port: int, file: Path) -> None:
    from testbed.experiments.conformance import plain

    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ.update({name: str(number) for name, number in place.items()}, MASTER_ADDR="127.0.0.1")
    losses, norms, weights = (plain.alone if trial.stage is None else plain.with_deepspeed)(trial, seed)
    if rank == 0:
        file.write_text(json.dumps({"losses": losses, "norms": norms, "weights": weights}))


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


def carried_out(trial: Trial) -> dict[str, Any]:
    """Return the line of a trial under the releases that are installed here."""
    return confirmed(judged_with(trial, seed) for seed in SEEDS)


def judged_with(trial: Trial, seed: int) -> dict[str, Any]:
    """Make a trial's runs with the initial weights of a seed, those of the single process included."""
    splits = () if trial.precision == "fp32" else SPLITS
    alone = replace(trial, stage=None)
    rounded = [run_alone(replace(alone, accumulation=split), seed) for split in splits]
    exact = run_alone(replace(alone, precision="fp32"), seed)
    return judged(trial, exact, rounded, run(trial, seed))


def confirmed(tries: Iterator[dict[str, Any]]) -> dict[str, Any]:
    """Return the first line, with how far off the runs from other weights were, in units of what is allowed.

    What differs by rounding to bf16 is a draw: it differs if every other run does too. In fp32 one is enough.
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


def main(names: Sequence[str]) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is not an answer
    for module in PRELOADED:
        with contextlib.suppress(Exception):  # a rank that needs it fails with it, and says why
            importlib.import_module(module)
    for trial in trials():
        if trial.name in names:
            print(json.dumps(carried_out(trial)), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
