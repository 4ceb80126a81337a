"""Report how throughput grows with ranks: speed-up, efficiency and the laws fitted to them, in scaling_report.json.

One number per run; an arm's number is the median of its repeats. Speed-up is the ratio of throughputs, so it compares
only runs that did equal work: strong scaling at equal global batch, weak scaling at equal batch per rank, time to loss
at equal task and target. What is unequal beyond that gets no speed-up but is named. docs/scaling.md lists the fields.
"""

from __future__ import annotations

import json
import re
import statistics as plain_statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from testbed.analysis.comparison.confounders import differing_choices
from testbed.analysis.comparison.two_arms import VALIDATION, losses_of
from testbed.analysis.runs.comparability import INSTRUMENTS, Mismatch, mismatches
from testbed.analysis.runs.load import Run, attribution_of, find_runs, load_run, on_one_peak
from testbed.analysis.scaling.fit import FITS, no_fit
from testbed.analysis.scaling.strategies import (
    ALLOWED,
    ScalingArm,
    reference_note,
    reference_of,
    sort_into_arms,
)
from testbed.analysis.scaling.time_to_loss import finite, interval_of, time_to_loss_of_arm
from testbed.analysis.statistics import MIN_REPEATS, compare
from testbed.errors import InputError
from testbed.io import not_a_folder, write_text
from testbed.sweep.plan import COMPLETE, Cell
from testbed.sweep.request import PROTOCOLS
from testbed.sweep.state import SWEEP_FILE, Sweep, read_sweep

REPORT_FILE = "scaling_report.json"
SCHEMA = 3  # 3: without the shape of earlier reports


def write_scaling_report(out_dir: Path) -> tuple[Path, dict[str, Any]]:
    """Report on every run below `out_dir` in `out_dir`/scaling_report.json, replaced in one move.

    Returns:
        The file and its content.
    """
    path, report = Path(out_dir) / REPORT_FILE, report_on_directory(out_dir)
    write_text(path, json.dumps(report, indent=2, allow_nan=False) + "\n")
    return path, report


def report_on_directory(
    out_dir: Path, protocol: str | None = None, target: float | None = None, allow_mismatch: bool = False
) -> dict[str, Any]:
    """Return `scaling_report` of every run below `out_dir`. Its sweep.json gives protocol, target and cells.

    So does the one above it, where `out_dir` is the folder of a cell, and the only one below it.

    Raises:
        InputError: no runs, several sweeps, an unknown or contradicting protocol, a file that cannot be read; one
            sentence.
    """
    out_dir = Path(out_dir)
    if fault := not_a_folder(out_dir):
        raise InputError(f"{out_dir} {fault}; give the folder of a sweep")
    folder, sweep = _sweep_of(out_dir)
    if sweep and protocol not in (None, sweep.protocol):
        raise InputError(
            f"--protocol {protocol}, but {folder / SWEEP_FILE} planned {sweep.protocol}: protocols are never mixed; "
            "leave --protocol out"
        )
    paths = find_runs(out_dir)
    if not paths:
        raise InputError(f"{out_dir} holds no training_metrics.json at any depth; give the folder of a sweep")
    cells = _cells_below(out_dir, folder, sweep) if sweep else {}
    runs, left_out = [], {}
    for path in paths:
        try:
            runs.append(load_run(path))
        except ValueError as error:
            left_out[path] = str(error)
    for place, cell in cells.items():
        if cell.status != COMPLETE:
            left_out[place] = f"the sweep says {cell.status}" + (f": {cell.reason}" if cell.reason else "")
    return scaling_report(
        on_one_peak(runs)[0],
        protocol or (sweep.protocol if sweep else "strong"),
        target=sweep.target_val_loss if sweep and target is None else target,
        cells=cells,
        allow_mismatch=allow_mismatch,
        directory=out_dir,
        left_out=left_out,
    )


def _sweep_of(out_dir: Path) -> tuple[Path, Sweep | None]:
    """Return the sweep that planned the runs below `out_dir`, with its folder."""
    if sweep := read_sweep(out_dir):
        return out_dir, sweep
    for folder in out_dir.resolve().parents[:2]:  # a plan lies beside its cells, whose folders hold those of runs
        if (sweep := read_sweep(folder)) and _cells_below(out_dir, folder, sweep):
            return folder, sweep
    below = {path.parent: read_sweep(path.parent) for path in sorted(out_dir.rglob(SWEEP_FILE))}
    if len(below) > 1:
        told = ", ".join(f"{folder.relative_to(out_dir)} ({each.protocol})" for folder, each in below.items() if each)
        raise InputError(f"--dir {out_dir} holds {len(below)} sweeps, which are never pooled: {told}; give one of them")
    return next(iter(below.items()), (out_dir, None))


def _cells_below(out_dir: Path, folder: Path, sweep: Sweep) -> dict[Path, Cell]:
    """Return the cells of the sweep in `folder` whose runs lie below `out_dir`, by the folder of the run."""
    root = out_dir.resolve()
    places = {(folder / cell.folder).resolve(): cell for cell in sweep.cells}
    return {out_dir / place.relative_to(root): cell for place, cell in places.items() if place.is_relative_to(root)}


def scaling_report(
    runs: Sequence[Run],
    protocol: str,
    *,
    target: float | None = None,
    cells: Mapping[Path, Cell] | None = None,
    allow_mismatch: bool = False,
    directory: Path | None = None,
    left_out: Mapping[Path, str] | None = None,
) -> dict[str, Any]:
    """Return speed-up and efficiency of every strategy, batch size and number of ranks, as scaling_report.json has it.

    Args:
        runs: as `load_run` gives them.
        protocol: "strong", "weak" or "time_to_loss".
        target: validation loss; needed by time_to_loss, an addition elsewhere.
        cells: folder of a run -> its cell of sweep.json; without it the settings tell strategies apart.
        allow_mismatch: give speed-ups between unequal work too, under the status mismatch_allowed, and count
            instrumented runs of configurations that have no others.
        directory: paths in the report are relative to it.
        left_out: why a path did not become one of `runs`.
    """
    if protocol not in PROTOCOLS:
        raise InputError(f"--protocol {protocol} is none of {', '.join(PROTOCOLS)}")
    if protocol == "time_to_loss" and target is None:
        raise InputError("--protocol time_to_loss needs --target_val_loss LOSS, the loss that time is measured to")
    arms, unfit = sort_into_arms(runs, protocol, cells or {}, allow_instrumented=allow_mismatch)
    not_shown = {**(left_out or {}), **{run.path: reason for run, reason in unfit.items()}}
    if not arms:
        reasons = Counter(not_shown.values())
        counted = "; ".join(f"{number} x {reason}" for reason, number in reasons.items())
        raise InputError(f"none of the runs can enter a scaling report: {counted}")
    rows = [_arm_row(arm, arms, protocol, target, allow_mismatch, directory) for arm in arms]
    found = [
        {**{key: row[key] for key in ("name", "strategy", "batch_size", "ranks")}, **item}
        for row in rows
        for item in row["mismatches"]
    ]
    return {
        "schema": SCHEMA,
        "status": "ok" if not found else "mismatch_allowed" if allow_mismatch else "invalid_comparison",
        "protocol": {"name": protocol, "target_val_loss": target},
        "mismatches": found,
        "strategies": _strategies(rows, protocol),
        "arms": rows,
        "left_out": [{"path": _relative(path, directory), "reason": reason} for path, reason in not_shown.items()],
        "warnings": [*_warnings(arms, rows, cells or {}), *_about_instrumented(unfit.values())],
    }


def _strategies(rows: Sequence[dict], protocol: str) -> list[dict[str, Any]]:
    """Return one entry per strategy and batch size, with the law of its protocol."""
    series: dict[tuple, list[dict]] = {}
    for row in rows:
        series.setdefault((row["strategy"], row["batch_size"]), []).append(row)
    return [
        {
            "strategy": strategy,
            "strategy_name": _name_over_ranks(members),
            "batch_size": batch_size,
            "fits": _fits(members, rows, protocol),
        }
        for (strategy, batch_size), members in series.items()
    ]


def _name_over_ranks(members: Sequence[dict]) -> str:
    """Return the strategy's name, without how a mesh lies over the ranks, which follows their number."""
    names = list(dict.fromkeys(row["strategy_name"] for row in members))
    return names[0] if len(names) == 1 else re.sub(r" \([^()]* x [^()]*\)", "", names[-1])


def _fits(members: Sequence[dict], rows: Sequence[dict], protocol: str) -> dict[str, dict]:
    """Return the law of the protocol, fitted to one strategy at one batch size; time to loss has none."""
    if protocol not in FITS:
        return {}
    law, fit = FITS[protocol]
    spread = [row for row in members if row["speedup"] and row["ranks"] > 1]
    fair = [row for row in spread if not _is_unequal(row)]
    if not fair:
        reason = next((row["reason"] for row in members if row["reason"]), None)
        few = "unequal work follows no law" if spread else "needs runs at 2 rank counts or more, there is 1"
        return {law: no_fit(law, reason or few)}
    wanted = (fair[0]["reference_strategy"], fair[0]["batch_size"], 1)
    at_one = [row for row in rows if (row["strategy"], row["batch_size"], row["ranks"]) == wanted]
    if not at_one:  # a batch that no file records, allowed
        return {law: no_fit(law, "needs runs at one rank with this batch size")}
    return {law: fit({row["ranks"]: row["tokens_per_s"]["values"] for row in (at_one[0], *fair)})}


def _is_unequal(row: dict) -> bool:
    """Return whether work is known to differ; what no file records may be equal."""
    return any(None not in (item["baseline"], item["mismatch"]) for item in row["mismatches"])


def _about_instrumented(reasons: Iterable[str]) -> list[str]:
    alone = sum(reason.endswith(ALLOWED) for reason in reasons)
    runs = "1 run is" if alone == 1 else f"{alone} runs are"
    return [f"{runs} left out, instrumented and alone in a configuration; {ALLOWED}"] if alone else []


def _warnings(arms: Sequence[ScalingArm], rows: Sequence[dict], cells: Mapping[Path, Cell]) -> list[str]:
    found = []
    if crowded := sorted({cell.name for cell in cells.values() if cell.oversubscribed}):
        found.append(f"more threads than cores, so the times say nothing about the strategy: {', '.join(crowded)}")
    if few := sorted({row["n"] for row in rows if row["n"] < MIN_REPEATS}):
        found.append(f"fewer than {MIN_REPEATS} repeats in some arms (n = {', '.join(map(str, few))}): no claim")
    commits = sorted({commit for row in rows for commit in row["git_commits"]})
    if len(commits) > 1:
        found.append(f"the runs are of {len(commits)} commits: {', '.join(commit[:12] for commit in commits)}")
    if any(run.record.get("git_dirty") for arm in arms for run in arm.runs):
        found.append("some runs were made from a working tree with uncommitted changes")
    for strategy in dict.fromkeys(arm.strategy for arm in arms):
        of_strategy = [arm for arm in arms if arm.strategy == strategy]
        for item in differing_choices([run for arm in of_strategy for run in arm.runs]):
            name = of_strategy[0].label
            found.append(f"{name}: {item.what} differs from run to run ({', '.join(item.a)}); set it by hand")
    for row in rows:
        place = row["name"]
        if row["efficiency"] and row["ranks"] > 1 and row["efficiency"]["ratio"] > 1:
            found.append(f"{place} is faster than linear ({row['efficiency']['ratio']:.2f}): look for the cause")
        if row["reference_note"]:
            found.append(f"{place}: {row['reference_note']}")
        if row["loss_note"]:
            found.append(f"{place}: {row['loss_note']}")
    return found


def _arm_row(
    arm: ScalingArm,
    arms: Sequence[ScalingArm],
    protocol: str,
    target: float | None,
    allow_mismatch: bool,
    directory: Path | None,
) -> dict[str, Any]:
    reference = reference_of(arm, arms)
    # Without an arm at one rank there is no speed-up, but unequal work is still to be told: against the first arm.
    compared = reference or next(other for other in arms if other.batch_size == arm.batch_size)
    unequal = mismatches(arm.runs, compared.runs, protocol, on_devices=True)
    found = [entry for item in unequal for entry in _mismatch_entries(item)]
    row: dict[str, Any] = {
        "name": arm.name,
        "strategy": arm.strategy,
        "strategy_name": arm.label,
        "batch_size": arm.batch_size,
        "batch_size_is": "per rank" if protocol == "weak" else "global",
        "ranks": arm.ranks,
        "n": len(arm.runs),
        "metrics_paths": [_relative(run.path, directory) for run in arm.runs],
        "run_ids": [run.run_id for run in arm.runs],
        "git_commits": sorted({str(run.git_commit) for run in arm.runs}),
        "seeds": [run.work.get("seed") for run in arm.runs],
        "global_batch_size": arm.runs[0].work.get("global_batch_size"),
        "tokens_per_s": interval_of([run.tokens_per_s for run in arm.runs]),
        "step_time_s": interval_of([run.step_time_median_s for run in arm.runs]),
        "step_time_p95_s": interval_of([run.step_time_p95_s for run in arm.runs]),
        "training_time_s": interval_of([run.training_time_s for run in arm.runs]),
        "wall_time_s": interval_of([run.record.get("summary", {}).get("total_wall_time_sec") for run in arm.runs]),
        "peak_memory_bytes": interval_of([run.peak_memory_bytes for run in arm.runs]),
        "memory_is": arm.runs[0].memory_meaning,
        "mfu": interval_of([run.mfu for run in arm.runs]),
        "final_train_loss": interval_of([run.final_train_loss for run in arm.runs]),
        "final_val_loss": interval_of([run.final_validation_loss for run in arm.runs]),
        "time_to_loss": None if target is None else time_to_loss_of_arm(arm.runs, target, arm.failed),
        "attribution": _mean_attribution(arm.instrumented),
        "utilization": _mean_utilization(arm),
        "mismatches": found,
    }
    return row | _speed_up(arm, reference, protocol, target, bool(found) and not allow_mismatch)


def _mismatch_entries(item: Mismatch) -> list[dict[str, Any]]:
    """Return one entry for each value of the arm that is not the reference's; the seeds are one value."""
    if item.field == "seed" and not item.is_unknown:
        return [{"field": "seed", "baseline": sorted(item.b), "mismatch": sorted(item.a)}]
    return [
        {"field": item.field, "baseline": item.b[0], "mismatch": value}
        for value in item.a
        if value is None or value != item.b[0] or item.field == INSTRUMENTS
    ]


def _speed_up(
    arm: ScalingArm, reference: ScalingArm | None, protocol: str, target: float | None, refused: bool
) -> dict[str, Any]:
    """Return speed-up and efficiency against the reference with 95 % intervals and verdict, or why there is none."""
    none: dict[str, Any] = dict.fromkeys(("speedup", "efficiency", "verdict", "minimum_detectable_effect"))
    none |= dict.fromkeys(("reference", "reference_strategy", "reference_note", "reason", "loss_note"))
    if reference is None:
        return none | {"reason": "no run at one rank, neither of baseline nor of the same strategy"}
    is_same = reference.strategy == arm.strategy
    none["reference"] = reference.name + (" (the same strategy)" if is_same and reference is not arm else "")
    none["reference_strategy"] = reference.strategy
    none["reference_note"] = reference_note(arm, reference)
    if refused:
        return none | {"reason": "unequal work, see mismatches"}
    if protocol == "time_to_loss":
        numbers, reason = _times_to_loss(arm, reference, target)
        if reason:
            return none | {"reason": reason}
    else:
        numbers = [[rate for run in each.runs if (rate := run.tokens_per_s) is not None] for each in (arm, reference)]
    speed_up = {"ratio": 1.0, "low": None, "high": None}
    if arm is not reference:
        ratio = compare(*numbers)
        speed_up = {name: finite(getattr(ratio, name)) for name in ("ratio", "low", "high")}
        none["verdict"] = ratio.verdict
        none["minimum_detectable_effect"] = finite(ratio.minimum_detectable_effect)
    efficiency = {name: None if value is None else value / arm.ranks for name, value in speed_up.items()}
    return none | {"speedup": speed_up, "efficiency": efficiency, "loss_note": _loss_note(arm, reference, protocol)}


def _times_to_loss(
    arm: ScalingArm, reference: ScalingArm, target: float | None
) -> tuple[list[list[float]], str | None]:
    """Return seconds to the target, the reference's first: less time is a larger ratio. Or why there are none."""
    assert target is not None  # the protocol has one
    found = [time_to_loss_of_arm(each.runs, target, each.failed) for each in (reference, arm)]
    for each, times in zip((reference, arm), found, strict=True):
        if times["num_never_reached"] or len(times["train_time_s"]["values"]) < len(each.runs):
            what = times["reason"] or "a run does not record its training time at the target"
            return [], f"{each.name}: {what}"
        if times["num_upper_bounds"]:
            return [], f"{each.name}: the first validation was already at the target"
    return [times["train_time_s"]["values"] for times in found], None


def _loss_note(arm: ScalingArm, reference: ScalingArm, protocol: str) -> str | None:
    """Return in what the losses are unequal, since a faster run that learns worse is not faster; None: in nothing."""
    if arm is reference or protocol != "strong":  # weak scaling trains on more tokens, time to loss ends at one loss
        return None
    if any(run.final_validation_loss is None for run in (*arm.runs, *reference.runs)):
        return "a run has no validation loss: that both learned equally is not shown"
    found = {each.name: each for each in losses_of((arm.name, reference.name), arm.runs, reference.runs)}
    if VALIDATION not in found:
        return "validation losses are over different data or token counts and do not compare"
    losses = found[VALIDATION]
    size = f"{losses.difference:+.4f}, more than {losses.noise:.4f} ({losses.noise_source})"
    return f"median final validation loss differs by {size}" if losses.is_unequal else None


def _relative(path: Path, directory: Path | None) -> str:
    return str(path.relative_to(directory) if directory and path.is_relative_to(directory) else path)


def _mean_attribution(runs: Sequence[Run]) -> dict[str, Any] | None:
    """Return the mean optimizer step over ranks and profiled steps, in seconds; None: not measured."""
    kept = [found for run in runs if (found := attribution_of(run.record))]
    steps = [step for found in kept for per_rank in found["per_rank"] for step in per_rank["steps"]]
    if not steps:
        return None
    columns = {name: [step[name] for step in steps] for name in steps[0] if name != "step"}
    means = {name: None if None in values else _mean(values) for name, values in columns.items()}
    return means | {"n_steps": len(steps), "source": sorted({found["source"] for found in kept})}


def _mean_utilization(arm: ScalingArm) -> dict[str, Any] | None:
    """Return the mean over ranks and runs of the sampled utilization in percent; None: not sampled."""
    measured = [run.record["utilization"] for run in arm.runs if run.record.get("utilization")]
    sampled = measured or [run.record["utilization"] for run in arm.instrumented if run.record.get("utilization")]
    rows = [row for each in sampled for row in each["per_rank"]]
    names = ("cpu_percent_mean", "gpu_percent_mean")
    return {name: _mean([row[name] for row in rows if row[name] is not None]) for name in names} if rows else None


def _mean(values: Sequence[float]) -> float | None:
    return plain_statistics.fmean(values) if values else None
