"""Read the metrics.csv of Lightning's CSVLogger, and hparams.yaml next to it.

Format: lightning/pytorch/loggers/csv_logs.py. A column per metric and `step`, an empty cell where a row has none;
training and validation are in rows of their own. `step` counts from 0. litgpt writes the same with Fabric's logger, and
there `iter` and `step` count micro batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from testbed.audit.readers.curves import Curves, Point, number
from testbed.audit.readers.settings import read_settings
from testbed.audit.readers.text import text_of
from testbed.audit.readers.tracked import reported_of
from testbed.audit.reported import Reported

FORM = "Lightning metrics.csv"


def is_lightning(header: Sequence[str]) -> bool:
    """Return whether the first line of a table is that of a CSVLogger."""
    return "step" in header and bool({"epoch", "iter"} & set(header))


def read_lightning(path: Path, header: Sequence[str], rows: Sequence[Sequence[str]]) -> Reported:
    """Return the run of a table that is one of Lightning."""
    curves: Curves = {}
    last_step = -1
    for row in rows:
        values = {name: value for name, cell in zip(header, row, strict=False) if (value := number(cell)) is not None}
        step = values.pop("step", None)
        if step is None or abs(step) > 1e15:
            continue
        last_step = max(last_step, int(step))
        for name, value in values.items():
            curves.setdefault(name, []).append(Point(int(step), value))
    hparams = path.with_name("hparams.yaml")
    settings = read_settings(text_of(hparams)) if hparams.is_file() else {}
    counts_steps = "iter" not in header
    return reported_of(
        path, FORM, curves, settings, () if counts_steps else ("optimizer steps (it counts micro batches)",),
        optimizer_steps=last_step + 1 if counts_steps and last_step >= 0 else None,
    )  # fmt: skip
