"""Report how throughput grows with ranks: speed-up, efficiency and the laws fitted to them, in scaling_report.json.

One number per run; an arm's number is the median of its repeats. Speed-up is the ratio of throughputs, so it compares
only runs that did equal work: strong scaling at equal global batch, weak scaling at equal batch per rank, time to loss
at equal task and target. What is unequal beyond that gets no speed-up but is named. docs/scaling.md lists the fields.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from testbed.analysis.comparison.confounders import differing_choices
from testbed.analysis.runs.load import Run, find_runs, load_run
from testbed.analysis.runs.one_peak import on_one_peak
from testbed.analysis.runs.sweep_file import PROTOCOLS, SWEEP_FILE, read_sweep
from testbed.analysis.scaling.fit import amdahl_fit, gustafson_fit, no_fit
from testbed.analysis.scaling.rows import arm_row, mean, relative_path, stdev
from testbed.analysis.scaling.strategies import ALLOWED, ScalingArm, rank_count, reference_of, sort_into_arms
from testbed.analysis.statistics import MIN_REPEATS
from testbed.errors import InputError
from testbed.io import not_a_folder, read_json, write_text

REPORT_FILE = "scaling_report.json"
SCHEMA = 2  # 2: names for readers beside the variants of a sweep


def write_scaling_report(out_dir: Path) -> Path:
    """Report on every run below `out_dir` in `out_dir`/scaling_report.json, replaced in one move; return its path."""
    path = Path(out_dir) / REPORT_FILE
    report = report_on_directory(out_dir)
    write_text(path, json.dumps(report, indent=2, allow_nan=False) + "\n")
    return path


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
    folder = _sweep_folder(out_dir)
    sweep = read_sweep(folder)
    planned = sweep.get("protocol")
    if protocol and planned and protocol != planned:
        raise InputError(
            f"--protocol {protocol}, but {folder / SWEEP_FILE} planned {planned}: protocols are never mixed; "
            "leave --protocol out"
        )
    paths = find_runs(out_dir)
    if not paths:
        raise InputError(f"{out_dir} holds no training_metrics.json at any depth; give the folder of a sweep")
    cells = _cells_below(out_dir, folder, sweep)
    runs, left_out = _load(paths, cells)
    return scaling_report(
        runs,
        protocol or planned or "strong",
        target=sweep.get("target_val_loss") if target is None else target,
        cells=cells,
        allow_mismatch=allow_mismatch,
        directory=out_dir,
        left_out=left_out,
    )


def _sweep_folder(out_dir: Path) -> Path:
    """Return the folder whose sweep.json speaks of the runs below `out_dir`; `out_dir` itself where there is none."""
    if (out_dir / SWEEP_FILE).exists():
        return out_dir
    for folder in out_dir.resolve().parents[:2]:  # a plan lies beside its cells, whose folders hold those of runs
        if (folder / SWEEP_FILE).exists() and _cells_below(out_dir, folder, read_sweep(folder)):
            return folder
    below = sorted(path.parent for path in out_dir.rglob(SWEEP_FILE))
    if len(below) > 1:
        told = ", ".join(f"{folder.relative_to(out_dir)} ({read_sweep(folder)['protocol']})" for folder in below)
        raise InputError(f"--dir {out_dir} holds {len(below)} sweeps, which are never pooled: {told}; give one of them")
    return below[0] if below else out_dir


def _cells_below(out_dir: Path, folder: Path, sweep: Mapping[str, Any]) -> dict[Path, dict]:
    """Return the cells of the sweep in `folder` whose runs lie below `out_dir`, by the folder of the run."""
    root, places = out_dir.resolve(), {}
    for cell in sweep.get("cells", []):
        place = (folder / cell["folder"]).resolve()
        if place.is_relative_to(root):
            places[out_dir / place.relative_to(root)] = cell
    return places


def _load(paths: Sequence[Path], cells: Mapping[Path, dict]) -> tuple[list[Run], list[dict]]:
    """Return the runs, and {path, reason} for files that cannot be read and for cells of the plan without a run."""
    runs, left_out = [], []
    for path in paths:
        try:
            runs.append(load_run(path))
        except ValueError as error:
            left_out.append({"path": str(path), "reason": str(error)})
    for folder, cell in cells.items():
        if cell["status"] != "complete":
            said = f": {cell['reason']}" if cell.get("reason") else ""
            left_out.append({"path": str(folder), "reason": f"the sweep says {cell['status']}{said}"})
    return on_one_peak(runs)[0], left_out


def report_on_files(
    files: Mapping[int, Path], protocol: str | None = None, target: float | None = None, allow_mismatch: bool = False
) -> dict[str, Any]:
    """Return `scaling_report` of one file per number of ranks, whatever strategies they are of.

    Raises:
        InputError: a file cannot be read, or is of another number of ranks than said.
    """
    runs = []
    for ranks, path in sorted(files.items()):
        run = load_run(path)
        if (found := rank_count(run)) != ranks:
            recorded = "does not record its number of ranks" if found is None else f"was run on {found}"
            raise InputError(f"--gpu{ranks} {path} {recorded}; give the file of a run on {ranks}")
        runs.append(run)
    # They are one series because the user says so, compared at the first one's batch; folders need not say anything.
    at = runs[0].work.get("global_batch_size")
    cells = {run.path.parent: {"variant": "files given", "compared_at": at} for run in runs}
    return scaling_report(runs, protocol or "strong", target=target, cells=cells, allow_mismatch=allow_mismatch)


def read_report_file(path: Path) -> dict[str, Any]:
    """Return a scaling_report.json that this module wrote; ValueError, one sentence, for any other file."""
    report = read_json(path, f"--report {path}")
    needed = {"protocol", "arms", "strategies", "mismatches", "warnings", "status"}
    if not isinstance(report, dict) or report.get("schema") != SCHEMA or not needed <= set(report):
        raise InputError(f"--report {path} is not a scaling_report.json of this version; use --dir on the sweep")
    return report


def scaling_report(
    runs: Sequence[Run],
    protocol: str,
    *,
    target: float | None = None,
    cells: Mapping[Path, dict] | None = None,
    allow_mismatch: bool = False,
    directory: Path | None = None,
    left_out: Sequence[dict] = (),
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
        left_out: {path, reason} of what did not become one of `runs`.
    """
    if protocol not in PROTOCOLS:
        raise InputError(f"--protocol {protocol} is none of {', '.join(PROTOCOLS)}")
    if protocol == "time_to_loss" and target is None:
        raise InputError("--protocol time_to_loss needs --target_val_loss LOSS, the loss that time is measured to")
    arms, unfit = sort_into_arms(runs, protocol, cells, allow_instrumented=allow_mismatch)
    left_out = [*left_out, *unfit]
    if not arms:
        reasons = Counter(item["reason"] for item in left_out)
        counted = "; ".join(f"{number} x {reason}" for reason, number in reasons.items())
        raise InputError(f"none of the runs can enter a scaling report: {counted}")
    rows = [arm_row(arm, arms, protocol, target, allow_mismatch, directory) for arm in arms]
    strategies = _strategies(rows, protocol)
    found = [
        {**{key: row[key] for key in ("name", "strategy", "batch_size", "ranks")}, **item}
        for row in rows
        for item in row["mismatches"]
    ]
    seeds_shape, reference_run = _first_strategy(arms, rows)
    return {
        "schema": SCHEMA,
        "status": "ok" if not found else "mismatch_allowed" if allow_mismatch else "invalid_comparison",
        "protocol": {
            "name": protocol,
            "target_val_loss": target,
            "instance_type": reference_run.record.get("hardware", {}).get("instance_type"),
            "seq_len": reference_run.work.get("seq_len"),
            "dataset_mode": reference_run.record.get("training_config", {}).get("dataset_name"),
            "training_config": reference_run.record.get("training_config", {}),
        },
        **seeds_shape,
        "mismatches": found,
        "strategies": strategies,
        "arms": rows,
        "left_out": [{**item, "path": relative_path(Path(item["path"]), directory)} for item in left_out],
        "warnings": [*_warnings(arms, rows, cells or {}), *_about_instrumented(unfit)],
    }


def _strategies(rows: Sequence[dict], protocol: str) -> list[dict[str, Any]]:
    """Return one entry per strategy and batch size: its ranks and the law of its protocol."""
    series: dict[tuple, list[dict]] = {}
    for row in rows:
        series.setdefault((row["strategy"], row["batch_size"]), []).append(row)
    return [
        {
            "strategy": strategy,
            "strategy_name": _name_over_ranks(members),
            "batch_size": batch_size,
            "batch_size_is": members[0]["batch_size_is"],
            "ranks": sorted(row["ranks"] for row in members),
            "reference": members[0]["reference"],
            "has_enough_repeats": all(row["n"] >= MIN_REPEATS for row in members),
            "fits": _fits(members, rows, protocol),
        }
        for (strategy, batch_size), members in series.items()
    ]


def _name_over_ranks(members: Sequence[dict]) -> str:
    """Return the strategy's name, without how a mesh lies over the ranks, which follows their number."""
    names = list(dict.fromkeys(row["strategy_name"] for row in members))
    return names[0] if len(names) == 1 else re.sub(r" \([^()]* x [^()]*\)", "", names[-1])


def _fits(members: Sequence[dict], rows: Sequence[dict], protocol: str) -> dict[str, dict]:
    fits = {}
    for law, fit, owner in (("amdahl", amdahl_fit, "strong"), ("gustafson", gustafson_fit, "weak")):
        if protocol != owner:
            fits[law] = no_fit(law, f"the law is about {owner} scaling, the protocol is {protocol}")
            continue
        spread = [row for row in members if row["speedup"] and row["ranks"] > 1]
        fair = [row for row in spread if not _is_unequal(row)]
        if not fair:
            reason = next((row["reason"] for row in members if row["reason"]), None)
            few = "unequal work follows no law" if spread else "needs runs at 2 rank counts or more, there is 1"
            fits[law] = no_fit(law, reason or few)
            continue
        wanted = (fair[0]["reference_strategy"], fair[0]["batch_size"], 1)
        at_one = next((row for row in rows if (row["strategy"], row["batch_size"], row["ranks"]) == wanted), None)
        if at_one is None:  # a batch that no file records, allowed
            fits[law] = no_fit(law, "needs runs at one rank with this batch size")
            continue
        fits[law] = fit({row["ranks"]: row["tokens_per_s"]["values"] for row in (at_one, *fair)})
        fits[law]["reference"] = fair[0]["reference"]
    return fits


def _is_unequal(row: dict) -> bool:
    """Return whether work is known to differ; what no file records may be equal."""
    return any(None not in (item["baseline"], item["mismatch"]) for item in row["mismatches"])


def _first_strategy(arms: Sequence[ScalingArm], rows: Sequence[dict]) -> tuple[dict[str, Any], Run]:
    """Return the shape of the older reports, {"1": .., "2": .., "4": ..}, for the first strategy that spreads its work.

    "1" is what its speed-ups are relative to.
    """
    pairs = list(zip(arms, rows, strict=True))
    first = next((arm for arm in arms if arm.ranks > 1), arms[0])
    members = [(a, row) for a, row in pairs if (a.strategy, a.series) == (first.strategy, first.series)]
    reference = reference_of(first, arms)
    if reference is not None:
        members = [pair for pair in pairs if pair[0] is reference] + [pair for pair in members if pair[0].ranks > 1]
    members.sort(key=lambda pair: (pair[0].ranks, pair[0].stray_of is None))  # the last of a number of ranks stays
    shape = {}
    for arm, row in members:
        throughput, epochs = row["tokens_per_s"]["values"], row["epoch_wall_time_s"]["values"]
        shape[str(arm.ranks)] = {
            "metrics_paths": row["metrics_paths"],
            "strategy": arm.strategy,
            "n": row["n"],
            "mean_tokens_per_sec_global": mean(throughput),
            "stdev_tokens_per_sec_global": stdev(throughput),
            "mean_epoch_wall_time_sec": mean(epochs),
            "stdev_epoch_wall_time_sec": stdev(epochs),
            "speedup_vs_1gpu": row["speedup"] and row["speedup"]["ratio"],
            "scaling_efficiency": row["efficiency"] and row["efficiency"]["ratio"],
        }
    about = {"strategy": first.strategy, "batch_size": first.batch_size}
    return {"runs_are_of": about, "runs": shape}, members[0][0].runs[0]


def _about_instrumented(left_out: Sequence[dict]) -> list[str]:
    alone = sum(item["reason"].endswith(ALLOWED) for item in left_out)
    runs = "1 run is" if alone == 1 else f"{alone} runs are"
    return [f"{runs} left out, instrumented and alone in a configuration; {ALLOWED}"] if alone else []


def _warnings(arms: Sequence[ScalingArm], rows: Sequence[dict], cells: Mapping[Path, dict]) -> list[str]:
    found = []
    if crowded := sorted({cell["name"] for cell in cells.values() if cell.get("oversubscribed")}):
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
