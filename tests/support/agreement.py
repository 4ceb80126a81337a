"""Run strategies and the single process, and list their disagreements."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest

from support.programs import TINY_RUN, data_flags
from support.ranks import Ranks
from testbed.planner.calibration import facts_here
from testbed.sweep.request import facts_of_machine

WORKER = Path(__file__).parent / "agreement_worker.py"
PAIRS = "PAIRS"  # among the flags of a case: it trains on pairs, of which only the references are learned
STEPS = 6
TOLERANCE = 5e-6  # float32 sums in another order
WEIGHT_TOLERANCE = 1e-5  # relative, of the weights as one vector


def clipping_limit(variant_flags: list[str] | str) -> float:
    """Two or three of the six norms lie below it, the others above. AdamW hides a scale that all gradients have, and
    shows one that some have."""
    return 1.4 if PAIRS in variant_flags else 0.65


def case_flags(token_files, pair_files, variant_flags: list[str]) -> list[str]:
    """Accumulation on every rank: 16 = 2 x 8 on one rank, 2 x 4 x 2 on two, 2 x 2 x 4 on four."""
    batch = "--global_batch_size 16 --micro_batch_size_per_gpu 2"
    recipe = f"--max_train_steps {STEPS} --learning_rate 0.01 --warmup_steps 2"
    return [
        *TINY_RUN,
        *data_flags(pair_files if PAIRS in variant_flags else token_files),
        *f"{batch} {recipe} --max_grad_norm {clipping_limit(variant_flags)}".split(),
        *(flag for flag in variant_flags if flag != PAIRS),
    ]


def run_cases(ranks: Ranks, folder: Path, cases: list[tuple[list[str], str | None]], number: int) -> list[dict]:
    """Train every case (flags, bug) on this number of ranks, in one process group."""
    return ranks.run("support.agreement_worker", folder, cases, number)


def distances(expected: dict, actual: dict) -> dict[str, float]:
    """Largest difference of the losses, the norms and the validation loss; of the weights the relative one."""
    found = {
        name: float(np.max(np.abs(np.subtract(expected[name], actual[name]))))
        for name in ("losses", "grad_norms", "val_loss")
    }
    reference = np.array(expected["weights"])
    difference = np.linalg.norm(np.array(actual["weights"]) - reference)
    return {**found, "weights": float(difference / np.linalg.norm(reference))}


def rounding(exact: dict, rounded: dict) -> dict[str, float]:
    """Root mean squares of what rounding does to the losses, that of validation among them, and to the norms; of the
    weights the relative difference."""
    losses = [[*run["losses"], run["val_loss"]] for run in (exact, rounded)]
    norms = [run["grad_norms"] for run in (exact, rounded)]
    found = {name: float(np.sqrt(np.mean(np.subtract(*two) ** 2))) for name, two in
             (("losses", losses), ("grad_norms", norms))}  # fmt: skip
    return {**found, "weights": distances(exact, rounded)["weights"]}


def write_down(variable: str, line: dict, config: pytest.Config | None = None) -> None:
    """Add a line to the file that an environment variable names, for a page of docs/results; nothing without it."""
    if path := os.environ.get(variable):
        lines = [line]
        if not Path(path).exists():  # the first line says what made the others
            words = getattr(config, "workerinput", {}).get("mainargv", sys.argv)  # a worker of -n 2 has no words itself
            command = shlex.join(["python", "-m", "pytest", *words[1:]])
            lines.insert(0, {"command": command, **facts_of_machine(), **facts_here()})
        with Path(path).open("a", encoding="utf-8") as file:
            file.writelines(f"{json.dumps(each)}\n" for each in lines)


def disagreements(expected: dict, actual: dict) -> list[str]:
    """List what differs from the single process, with the size of each difference."""
    found = [
        f"{name} differ by {difference:.1e}"
        for name, difference in distances(expected, actual).items()
        if not difference <= (WEIGHT_TOLERANCE if name == "weights" else TOLERANCE)
    ]
    return found + [f"{name} are not the same" for name in ("windows", "val_tokens") if expected[name] != actual[name]]
