"""Runs of several strategies on the same work in one table: their losses, and how far each lies from the first."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from testbed.analysis.runs.comparability import differing_work
from testbed.analysis.runs.load import Run
from testbed.errors import InputError

TOLERANCE = 5e-6  # of the tests, for loss and gradient norm in fp32: float32 sums in another order


def differences_of(runs: Sequence[Run], name: str = "train_losses") -> list[np.ndarray]:
    """Return |value - value of the first run| of each optimizer step, for every run but the first.

    Args:
        name: "train_losses" or "grad_norms".

    Raises:
        InputError: the runs did not do equal work, so that a difference would mean nothing.
    """
    for run in runs[1:]:
        if differences := differing_work((runs[0], run)):
            fields = ", ".join(difference.field for difference in differences)
            raise InputError(f"{run.path} and {runs[0].path} did not do equal work: {fields}")
    first, *others = (getattr(run, name) for run in runs)
    return [np.abs(values - first) for values in others]


def agreement_table(runs: Sequence[Run]) -> str:
    """Return a line per run in Markdown: losses, peak memory of the largest rank, and how far its steps lie from the
    first run's."""
    losses, norms = differences_of(runs), differences_of(runs, "grad_norms")
    cells = [("(the reference)", "", ""), *map(_largest_and_first, losses, norms)]
    lines = [
        "| run | loss of the last step | largest difference of the loss | of the gradient norm | first step over "
        f"{TOLERANCE:g} | validation loss | peak memory, largest rank |",
        "|---|---|---|---|---|---|---|",
    ]
    for run, differences in zip(runs, cells, strict=True):
        memory = f"{run.peak_memory_bytes / 2**20:,.0f} MiB" if run.peak_memory_bytes else "n/a"
        row = (run.full_label, f"{run.final_train_loss:.5f}", *differences, f"{run.final_validation_loss:.5f}", memory)
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def _largest_and_first(losses: np.ndarray, norms: np.ndarray) -> tuple[str, str, str]:
    over = np.flatnonzero(np.maximum(losses, norms) > TOLERANCE)
    return f"{losses.max():.1e}", f"{norms.max():.1e}", str(over[0] + 1) if len(over) else f"none of {len(losses)}"
