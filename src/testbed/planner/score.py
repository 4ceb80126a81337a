"""Score the planner on published runs: errors, coverage, verdicts on memory, next to constant MFU. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from testbed.errors import InputError
from testbed.io import read_json
from testbed.memory_model.devices import GIB
from testbed.memory_model.memory import fits, memory_of
from testbed.planner.hold_out import FOR_WIDTH, LEFT_OUT, UNKNOWN, HeldOut, held_out, width_of, with_widths
from testbed.planner.published import ImpossibleRow, Row, as_unknown, rows_of

LEAST_ROWS, LEAST_SUB_BLOCKS = 3, 2  # of a block whose median counts
TITLES = {
    "block": "(a) without its block",
    "sub_block": "(b) without its sub_block",
    "GPU kind": "without its GPU kind",
    UNKNOWN: "without its GPU kind and data sheet",
    "source": "without its source",
    "precision": "without its precision",
    "model size": "without its model width",
}


def score_file(path: Path) -> tuple[str, dict[str, Any]]:
    """Return the score of a file of rows, as text and as numbers. InputError where it is no such file."""
    content = read_json(path, f"--score {path}")
    if not isinstance(content, dict) or not isinstance(content.get("rows"), list):
        raise InputError(f'--score {path}: a file of published runs has its rows in a list under "rows"')
    found = list(rows_of(content["rows"]))
    rows = [one for one in found if isinstance(one, Row)]
    if len({row.block for row in rows if row.step_time_s}) < 2:
        raise InputError(f"--score {path}: rows of at least two blocks with a measured time are needed")
    result = score(rows)
    result["rejected"] = {one.id: one.reason for one in found if isinstance(one, ImpossibleRow)}
    return text_of(result), result


def score(rows: Sequence[Row]) -> dict[str, Any]:
    """Return errors by what was left out, the interval's width, and the verdicts on memory."""
    by_scheme = {scheme: held_out(rows, group_of) for scheme, group_of in LEFT_OUT.items()}
    by_scheme[UNKNOWN] = held_out(rows, LEFT_OUT["GPU kind"], as_unknown)
    pool = [one for scheme in FOR_WIDTH for one in by_scheme[scheme]]
    unknown = by_scheme[UNKNOWN]
    schemes = {
        scheme: _scheme(with_widths(found, unknown if scheme == UNKNOWN else pool))
        for scheme, found in by_scheme.items()
    }
    return {
        "width": round(width_of(pool), 4),
        "width_of_unknown_device": round(max(width_of(pool), width_of(unknown)), 4),
        "schemes": schemes,
        "memory": _memory(rows),
    }


def _scheme(found: Sequence[HeldOut]) -> dict[str, Any]:
    scored = [one for one in found if one.row.is_scored]
    blocks = {
        block: _errors([one for one in scored if one.row.block == block])
        for block in sorted({one.row.block for one in scored})
    }
    counted = [
        entry for entry in blocks.values() if entry["rows"] >= LEAST_ROWS and entry["sub_blocks"] >= LEAST_SUB_BLOCKS
    ]
    return {
        "all": _errors(scored),
        "median_of_block_medians": _percent([entry["median"] for entry in counted], 0.5),
        "control_median_of_block_medians": _percent([entry["control_median"] for entry in counted], 0.5),
        "weak_or_flagged": _errors([one for one in found if not one.row.is_scored]),
        "blocks": blocks,
    }


def _errors(found: Sequence[HeldOut]) -> dict[str, Any]:
    """Return errors in percent of the measured time."""
    errors = [100 * one.error for one in found]
    control = [100 * one.control_error for one in found]
    return {
        "rows": len(found),
        "sub_blocks": len({one.row.sub_block for one in found}),
        "median": _percent(errors, 0.5),
        "p90": _percent(errors, 0.9),
        "control_median": _percent(control, 0.5),
        "control_p90": _percent(control, 0.9),
        "covered": round(100 * float(np.mean([one.is_covered for one in found])), 1) if found else None,
    }


def _percent(values: Sequence[float | None], quantile: float) -> float | None:
    known = [value for value in values if value is not None]
    return round(float(np.quantile(known, quantile)), 1) if known else None


def _memory(rows: Sequence[Row]) -> dict[str, Any]:
    """Return how often the verdict on memory was wrong, and the error of the peak where one was measured.

    Every published run ran, so none may be predicted not to fit. A false "fits" is a row whose model states alone are
    more than its device has.
    """
    wrong, false_fits, errors = [], [], []
    for row in rows:
        estimate, device = memory_of(row.job), row.machine.device
        is_said_to_fit = fits(estimate, device)
        if not is_said_to_fit:
            wrong.append(row.id)
        elif estimate.states > device.memory_bytes:
            false_fits.append(row.id)
        errors += [100 * abs(estimate.of_kind(kind) / GIB / gib - 1) for kind, gib in row.memory.items()]
    return {
        "rows": len(rows),
        "false_fits": false_fits,
        "said_not_to_fit": wrong,
        "measured": len(errors),
        "median": _percent(errors, 0.5),
        "p90": _percent(errors, 0.9),
    }


def text_of(result: dict[str, Any]) -> str:
    """Return the tables that --score prints."""
    lines = [*_summary(result), ""]
    for scheme in FOR_WIDTH:
        lines += [*_blocks(scheme, result["schemes"][scheme]), ""]
    memory = result["memory"]
    lines += [
        f'Memory of {memory["rows"]} rows, which all ran: {len(memory["false_fits"])} false "fits", '
        f"{len(memory['said_not_to_fit'])} said not to fit.",
        *[f"    said not to fit: {name}" for name in memory["said_not_to_fit"]],
    ]
    if memory["measured"]:
        lines.append(
            f"Error of {memory['measured']} measured memory figures: median {memory['median']} %, "
            f"90th percentile {memory['p90']} %."
        )
    lines += [f"Rejected: {name}: {reason}" for name, reason in result.get("rejected", {}).items()]
    return "\n".join(lines)


def _summary(result: dict[str, Any]) -> list[str]:
    head = f"{'each row predicted':30s} {'rows':>4s} | {'median':>6s} {'p90':>6s} | {'MFU':>6s} {'p90':>6s} | covered"
    lines = ["Error of step time in percent; MFU: of constant MFU; covered: by the 90 % interval.", "", head]
    for scheme, entry in result["schemes"].items():
        lines.append(f"{TITLES[scheme]:30s} {_row(entry['all'])}")
        weak = entry["weak_or_flagged"]
        if scheme in FOR_WIDTH and weak["rows"]:
            lines.append(f"{'    weak or flagged, apart':30s} {_row(weak)}")
    medians = result["schemes"]["sub_block"]
    return [
        *lines,
        "",
        f"Median of the medians of blocks with {LEAST_ROWS} rows and {LEAST_SUB_BLOCKS} sub-blocks or more, (b): "
        f"{medians['median_of_block_medians']} %, constant MFU {medians['control_median_of_block_medians']} %.",
    ]


def _blocks(scheme: str, entry: dict[str, Any]) -> list[str]:
    lines = [f"{TITLES[scheme]:30s} {'rows':>4s} | {'median':>6s} {'p90':>6s} | {'MFU':>6s} {'p90':>6s} | covered"]
    for block, errors in entry["blocks"].items():
        wins = "   constant MFU wins" if errors["control_median"] < errors["median"] else ""
        lines.append(f"{block:30s} {_row(errors)}{wins}")
    return lines


def _row(errors: dict[str, Any]) -> str:
    def shown(name: str) -> str:
        return f"{errors[name]:6.1f}" if errors[name] is not None else f"{'':6s}"

    covered = shown("covered")
    errors_of_both = f"{shown('median')} {shown('p90')} | {shown('control_median')} {shown('control_p90')}"
    return f"{errors['rows']:4d} | {errors_of_both} | {covered}"
