"""Score the planner on rows with measured times: each is predicted from a fit that did not see its group. No torch.

A group is left out of everything at once: the factors, constant MFU, and the width of the interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from testbed.errors import InputError
from testbed.io import write_json
from testbed.memory_model.devices import GIB
from testbed.memory_model.memory import fits, memory_of
from testbed.planner.fit import Fit, conformal_quantile
from testbed.planner.rows import Row, read_rows
from testbed.planner.step_time import PARTS, Constants, measured, published_constants, step_time

LEAST_ROWS, LEAST_SUB_BLOCKS = 3, 2  # of a block whose median counts
# what is left out together -> its title, and what rows have in common there
SCHEMES: dict[str, tuple[str, Callable[[Row], Hashable]]] = {
    "block": ("(a) without its block", lambda row: row.form.block),
    "sub_block": ("(b) without its sub_block", lambda row: (row.form.block, row.form.sub_block)),
    "device": ("without its kind of device", lambda row: row.machine.device.name),
    "program": ("(c) without its program", lambda row: row.job.stack),
}
FOR_WIDTH = ("block", "sub_block", "program")
# what a row states of memory -> attribute of MemoryEstimate
MEMORY = {"peak_allocated_gib": "allocated", "peak_reserved_gib": "reserved", "steady_allocated_gib": "steady"}
COLUMNS = (
    ("rows", "rows"),
    ("median", "median"),
    ("90th percentile", "p90"),
    ("constant MFU: median", "control_median"),
    ("90th percentile", "control_p90"),
    ("covered", "covered"),
)


@dataclass(frozen=True)
class HeldOut:
    """A row's time as predicted without its group: logarithms of predicted over measured."""

    row: Row
    residual: float
    deviation: float  # as the fit expects it
    control: float  # of constant MFU

    @property
    def score(self) -> float:
        """Return the error of the prediction in deviations."""
        return abs(self.residual) / self.deviation


def held_out(rows: Sequence[Row], group_of: Callable[[Row], Hashable]) -> list[HeldOut]:
    """Predict each row that has a time from all rows of other groups."""
    timed = [row for row in rows if row.step_time_s is not None]
    seen = {row.id: measured(row) for row in timed}
    found = {}
    for group in dict.fromkeys(map(group_of, timed)):
        others = [row for row in timed if group_of(row) != group and row.is_fitted]
        fit = Fit([seen[row.id] for row in others], PARTS)
        for row in timed:
            if group_of(row) == group:
                _, log_time, deviation = fit.predict(seen[row.id].nominal)
                truth = seen[row.id].log_time
                found[row.id] = HeldOut(row, log_time - truth, deviation, constant_mfu(row, others) - truth)
    return [found[row.id] for row in timed]


def constant_mfu(row: Row, others: Sequence[Row]) -> float:
    """Return the logarithm of a row's time at the median MFU of the rows most like it.

    Like it: the same kind of device, precision and checkpointing; where there is none, without checkpointing, then of
    the architecture in place of the kind, then any row.
    """
    for place, key in enumerate(_likeness(row)):
        alike = [one for one in others if _likeness(one)[place] == key]
        if alike:
            mfus = [_log_ideal(one) - math.log(one.step_time_s or math.nan) for one in alike]
            return _log_ideal(row) - float(np.median(mfus))
    return _log_ideal(row) + math.log(2)  # half of the peak


def _likeness(row: Row) -> list[Hashable]:
    """Return what rows may have in common, the most first."""
    device, precision, recompute = row.machine.device, row.job.precision, row.job.recompute
    kinds = (device.name, device.architecture)
    narrow = [key for kind in kinds for key in ((kind, precision, recompute), (kind, precision))]
    return [*narrow, *kinds, None]


def _log_ideal(row: Row) -> float:
    return math.log(row.model_flops_per_device / row.machine.device.peak_of(row.job.precision))


def width_of(found: Sequence[HeldOut], without: str | None = None) -> float:
    """Return the interval's width in deviations: conformal, from the scores of held-out rows.

    The scores are residuals over the fit's own deviation, so an interval widens by itself where a device or a program
    was not seen (Lei et al. 2018, arXiv:1604.04173, section 5.2). Rows of one block resemble each other, so a block
    counts as the root of its number of rows (between all rows alike and all blocks alike: Dunn, Wasserman and Ramdas
    2022, arXiv:1809.07441, distribution-free prediction sets for groups).
    """
    used = [one for one in found if one.row.is_scored and one.row.form.block != without]
    blocks = [one.row.form.block for one in used]
    return conformal_quantile([one.score for one in used], [blocks.count(block) ** -0.5 for block in blocks])


def score_file(path: Path) -> tuple[str, dict[str, Any]]:
    """Return the score of a file of rows, as Markdown and as numbers. InputError where it is another kind of file."""
    found = read_rows(path, "--score")
    rows = [row for _, row in found if isinstance(row, Row)]
    rejected = {id: row for id, row in found if isinstance(row, str)}
    if len({row.form.block for row in rows if row.step_time_s}) < 2:
        reasons = "".join(f"; {id}: {reason}" for id, reason in list(rejected.items())[:3])
        raise InputError(f"--score {path}: rows of at least two blocks with a measured time are needed{reasons}")
    result = score(rows)
    result["rejected"] = rejected
    lines = [page_of(result), *(f"Rejected: {id}: {reason}" for id, reason in rejected.items())]
    return "\n".join(lines), result


def score(rows: Sequence[Row]) -> dict[str, Any]:
    """Return errors by what was left out, the interval's width, and the verdicts on memory."""
    found = {scheme: held_out(rows, group_of) for scheme, (_, group_of) in SCHEMES.items()}
    pool = [one for scheme in FOR_WIDTH for one in found[scheme]]
    widths = {block: width_of(pool, block) for block in {row.form.block for row in rows}}
    schemes = {scheme: _scheme(of_scheme, widths) for scheme, of_scheme in found.items()}
    return {"width": round(width_of(pool), 4), "schemes": schemes, "memory": _memory(rows)}


def _scheme(found: Sequence[HeldOut], widths: Mapping[str, float]) -> dict[str, Any]:
    scored = [one for one in found if one.row.is_scored]
    names = sorted({one.row.form.block for one in scored})
    blocks = {name: _errors([one for one in scored if one.row.form.block == name], widths) for name in names}
    counted = [
        each for each in blocks.values() if each["rows"] >= LEAST_ROWS and each["sub_blocks"] >= LEAST_SUB_BLOCKS
    ]
    return {
        "all": _errors(scored, widths),
        "median_of_block_medians": _percent([each["median"] for each in counted], 0.5),
        "control_median_of_block_medians": _percent([each["control_median"] for each in counted], 0.5),
        "weak_or_flagged": _errors([one for one in found if not one.row.is_scored], widths),
        "blocks": blocks,
    }


def _errors(found: Sequence[HeldOut], widths: Mapping[str, float]) -> dict[str, Any]:
    """Return errors in percent of the measured time. `widths`: of the 90 % interval, from other blocks' rows."""
    errors = [100 * abs(math.expm1(one.residual)) for one in found]
    control = [100 * abs(math.expm1(one.control)) for one in found]
    inside = [100.0 * (one.score <= widths[one.row.form.block]) for one in found]
    return {
        "rows": len(found),
        "sub_blocks": len({one.row.form.sub_block for one in found}),
        "median": _percent(errors, 0.5),
        "p90": _percent(errors, 0.9),
        "control_median": _percent(control, 0.5),
        "control_p90": _percent(control, 0.9),
        "covered": round(float(np.mean(inside)), 1) if found else None,
    }


def _percent(values: Sequence[float], quantile: float) -> float | None:
    return round(float(np.quantile(values, quantile)), 1) if values else None


def _memory(rows: Sequence[Row]) -> dict[str, Any]:
    """Return which rows are said not to fit, which is wrong, as all ran, and the errors of what was measured."""
    wrong, errors = [], []
    for row in rows:
        estimate, stated = memory_of(row.job), row.form.measured
        if not fits(estimate, row.machine.device):
            wrong.append(row.id)
        for key, kind in MEMORY.items():
            if stated_gib := getattr(stated, key, None):
                errors.append(100 * abs(getattr(estimate, kind) / GIB / stated_gib - 1))
    return {
        "rows": len(rows),
        "said_not_to_fit": wrong,
        "measured": len(errors),
        "median": _percent(errors, 0.5),
        "p90": _percent(errors, 0.9),
    }


def page_of(result: dict[str, Any]) -> str:
    """Return the tables and the sentences that follow from them, as Markdown."""
    schemes = result["schemes"]
    lines = list(_table("each row is predicted", ((SCHEMES[name][0], entry["all"]) for name, entry in schemes.items())))
    weak = ((SCHEMES[name][0], schemes[name]["weak_or_flagged"]) for name in FOR_WIDTH)
    lines += ["", "Weak and flagged rows, which are counted in no other line:", ""]
    lines += _table("each row is predicted", weak)
    blocks = schemes["block"]["blocks"]
    lines += ["", f"Blocks of {LEAST_ROWS} rows or more, {SCHEMES['block'][0]}:", ""]
    lines += _table("block", ((block, errors) for block, errors in blocks.items() if errors["rows"] >= LEAST_ROWS))
    return "\n".join([*lines, "", *_sentences(result)])


def _table(first: str, entries: Any) -> Iterator[str]:
    yield f"| {first} | {' | '.join(title for title, _ in COLUMNS)} |"
    yield f"|---|{'---:|' * len(COLUMNS)}"
    for name, errors in entries:
        cells = [errors[field] for _, field in COLUMNS]
        yield f"| {name.replace('|', ', ')} | {' | '.join('' if cell is None else f'{cell:g}' for cell in cells)} |"


def _sentences(result: dict[str, Any]) -> Iterator[str]:
    for name in FOR_WIDTH:
        entry, title = result["schemes"][name], SCHEMES[name][0]
        if entry["median_of_block_medians"] is not None:
            medians = f"{entry['median_of_block_medians']:g} %, constant MFU"
            medians += f" {entry['control_median_of_block_medians']:g} %"
            yield f"Median of the block medians, {title}: {medians}.\n"
        wins = sum(errors["control_median"] < errors["median"] for errors in entry["blocks"].values())
        yield f"Constant MFU is better {title} in {wins} of {len(entry['blocks'])} blocks, by their medians.\n"
    memory = result["memory"]
    yield f"Memory: of {memory['rows']} rows, which all ran, {len(memory['said_not_to_fit'])} are said not to fit."
    if memory["measured"]:
        yield (
            f"\n{memory['measured']} measured figures of memory: median error {memory['median']} %, 90th percentile "
            f"{memory['p90']} %."
        )


def predict_file(path: Path, out: Path) -> dict[str, Any]:
    """Predict every row of a file and write the predictions by id. InputError where it is not a file of rows."""
    constants = published_constants()
    predictions = {
        id: {"rejected": row} if isinstance(row, str) else _prediction(row, constants)
        for id, row in read_rows(path, "--predict")
    }
    write_json(out, predictions, f"--out {out}")
    return predictions


def _prediction(row: Row, constants: Constants) -> dict[str, Any]:
    time, estimate = step_time(row.job, row.machine, constants), memory_of(row.job)
    found = {
        "step_time_s": time.seconds,
        "low": time.low,
        "high": time.high,
        "peak_allocated_gib": estimate.allocated / GIB,
        "peak_reserved_gib": estimate.reserved / GIB,
    }
    if not time.seconds > 0 or not all(map(math.isfinite, found.values())):
        return {"rejected": "nothing can be computed from its sizes: they give no time or memory that is a number"}
    return {**found, "fits": bool(fits(estimate, row.machine.device))}
