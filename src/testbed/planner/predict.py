"""Predict rows in the form of the published runs that state no measured values. No torch."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from testbed.errors import InputError
from testbed.io import read_json, write_json
from testbed.memory_model.devices import GIB
from testbed.memory_model.memory import fits, memory_of
from testbed.planner.constants import SCORE_FILE, Constants, constants_of_rows
from testbed.planner.published import ImpossibleRow, Row, own_rows, rows_of
from testbed.planner.step_time import step_time

ABSURD = "nothing can be computed from its sizes: they give no time or memory that is a number"


def predict_file(path: Path, out: Path) -> dict[str, Any]:
    """Predict every row of a file and write the predictions by id. InputError where it is no file of rows.

    `rows` and `reference_rows` are both predicted. A reference row that states a measured time, and is not one of the
    project's own, is fitted on too: it tells of the same program and machine what the published runs do not.
    """
    content = read_json(path, f"--predict {path}")
    if not isinstance(content, dict) or not isinstance(content.get("rows"), list):
        raise InputError(f'--predict {path}: a file of rows has them in a list under "rows"')
    references = content.get("reference_rows")
    found = list(rows_of(references)) if isinstance(references, list) else []
    predictions = predict([*found, *rows_of(content["rows"])], [one for one in found if isinstance(one, Row)])
    write_json(out, predictions, f"--out {out}")
    return predictions


def predict(found: list[Row | ImpossibleRow], references: list[Row]) -> dict[str, dict[str, Any]]:
    """Return the prediction of each row, or the reason to reject it, by id; of rows with one id the last."""
    own = own_rows()
    known = {row.id for row in own}
    widths = json.loads(SCORE_FILE.read_text(encoding="utf-8"))
    constants = constants_of_rows([*own, *(row for row in references if row.id not in known)], widths["width"])
    of_unknown = replace(constants, width=widths["width_of_unknown_device"])
    return {
        one.id: _rejected(one.reason)
        if isinstance(one, ImpossibleRow)
        else _tried(one, constants if one.device_is_known else of_unknown)
        for one in found
    }


def _tried(row: Row, constants: Constants) -> dict[str, Any]:
    """Predict a row; arithmetic on absurd sizes may fail, which must not end the file."""
    try:
        return _prediction(row, constants)
    except (ValueError, ArithmeticError, MemoryError, RecursionError, IndexError, KeyError, TypeError) as error:
        return _rejected(f"nothing can be computed from its sizes: {error}")


def _rejected(reason: str) -> dict[str, Any]:
    return {"rejected": reason}


def _prediction(row: Row, constants: Constants) -> dict[str, Any]:
    time = step_time(row.job, row.machine, constants)
    if not time.seconds > 0:
        return _rejected(ABSURD)
    estimate = memory_of(row.job)
    found = {
        "step_time_s": time.seconds,
        "low": time.low,
        "high": time.high,
        "peak_memory_gib": estimate.of_kind(row.memory_kind) / GIB,
        "steady_memory_gib": estimate.steady / GIB,
        "fits": bool(fits(estimate, row.machine.device)),
    }
    return found if all(math.isfinite(number) for number in found.values()) else _rejected(ABSURD)
