"""Sum a benchmark up: what ran, how fast, and whether runs that should agree do. No torch."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testbed.analysis.runs.arms import rank_count
from testbed.analysis.runs.load import Run, find_runs, load_run
from testbed.analysis.runs.search import files_of_runs
from testbed.errors import Failure, InputError, say
from testbed.experiments.gpu_benchmark.record import DONE, LEFT_OUT, PENDING, STEPS_FILE
from testbed.experiments.peers.results_file import PEERS_FILE
from testbed.experiments.peers.table import peers_table
from testbed.io import holding_together, read_json, write_text
from testbed.metrics.file import read_metrics
from testbed.model.flops import mfu
from testbed.run_folder import PROFILER_LOGS, TOKENIZER

SUMMARY, RESULTS, TRACES = "summary.json", "results.tar.gz", "traces.tar.gz"


@dataclass(frozen=True)
class Curve:
    """Loss and unclipped gradient norm by step; a norm is None where fp16 skipped the update."""

    losses: dict[int, float]
    norms: dict[int, float | None]


def summarise(folder: Path) -> dict[str, Any]:
    """Write summary.json and return it.

    `failed`: steps that were tried and did not pass, and runs that do not agree. What was left out because the machine
    lacks it, and parts that were not begun, are no failure.

    Raises:
        InputError: there is no benchmark in the folder.
        Failure: a file in it is damaged.
    """
    content = STEPS_FILE.read(folder / STEPS_FILE.name)
    try:
        found = summary(folder, content)
    except ValueError as error:  # the folder is right, a file in it is damaged
        raise Failure(str(error)) from None
    write_text(folder / SUMMARY, json.dumps(found, indent=1, allow_nan=False) + "\n")
    return found


def summary(folder: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    rows = content["steps"]
    done = [row["name"] for row in rows if row["status"] == DONE]
    metrics = {path.parent.name: path for path in find_runs(folder / "runs") if path.parent.name in done}
    runs = {name: load_run(path) for name, path in metrics.items()}
    curves = {name: curve_of(read_metrics(path)["steps"]) for name, path in metrics.items()}
    checks = [
        {"run": row["name"], **row["check"], **compare(curves, row["check"]["reference"], row["name"], row["check"])}
        for row in rows
        if row["check"] is not None and row["status"] != LEFT_OUT
    ]
    rates = matrix_rates(folder / "matrix_rate.json")
    peers = sorted(folder.glob(f"peers_*/{PEERS_FILE.name}"))
    tried = [row["name"] for row in rows if row["status"] not in (DONE, LEFT_OUT, PENDING)]
    return {
        "device": content["device"],
        "machine": content["machine"],
        "commits": sorted({str(run.git_commit) for run in runs.values()}),
        "seconds": sum(row["seconds"] or 0 for row in rows if row["status"] == DONE),
        "steps": rows,
        "matrix_rate": rates,
        "runs": {name: facts(run, rates) for name, run in runs.items()},
        "agreement": checks,
        "peers": {path.parent.name: peers_table(PEERS_FILE.read(path)) for path in peers},
        "time_to_loss": time_to_loss(runs.get("time_to_loss_adamw"), runs.get("time_to_loss_muon")),
        "pending_parts": sorted({row["part"] for row in rows if row["status"] not in (DONE, LEFT_OUT)}),
        "failed": tried + [f"{one['run']} against {one['reference']}" for one in checks if one["holds"] is False],
    }


def curve_of(rows: Iterable[Mapping[str, Any]]) -> Curve:
    """Return the curve of the rows of a training_metrics.json."""
    rows = list(rows)
    return Curve({row["step"]: row["loss"] for row in rows}, {row["step"]: row["grad_norm"] for row in rows})


def compare(curves: Mapping[str, Curve], reference: str, name: str, most: Mapping[str, float]) -> dict[str, Any]:
    """Compare loss and norm of every step that both runs have; a resumed run has the later ones.

    A skipped update makes the steps after it other work, so the comparison ends with its loss.

    Args:
        most: "loss" in nats, "norm" relative to the reference.

    Returns:
        `holds`: None where one of the runs is missing.
    """
    found: dict[str, Any] = {"compared_steps": 0, "largest_loss_difference": None, "largest_norm_difference": None}
    theirs, ours = curves.get(reference), curves.get(name)
    if theirs is None or ours is None:
        return {**found, "holds": None}
    losses, norms = [], []
    for step in sorted(theirs.losses.keys() & ours.losses.keys()):
        losses.append(abs(ours.losses[step] - theirs.losses[step]))
        one, other = ours.norms[step], theirs.norms[step]
        if one is None or other is None:
            break
        norms.append(abs(one - other) / other if other else abs(one))
    if not losses:
        return {**found, "holds": False}
    largest = max(losses), max(norms, default=0.0)
    return {
        "compared_steps": len(losses),
        "largest_loss_difference": largest[0],
        "largest_norm_difference": largest[1],
        "holds": largest[0] <= most["loss"] and largest[1] <= most["norm"],
    }


def matrix_rates(path: Path) -> dict[str, Any]:
    """Return {precision: {"flops_per_s", "source"}} of a large matrix product here; empty where none was measured."""
    if not path.exists():
        return {}
    rates = read_json(path)
    with holding_together(path):
        for rate in rates.values():
            if not 0 < rate["flops_per_s"] < math.inf:
                raise InputError(f"flops_per_s is {rate['flops_per_s']}")
        return {
            name: {"flops_per_s": rate["flops_per_s"], "source": str(rate["source"])} for name, rate in rates.items()
        }


def facts(run: Run, rates: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a reader of the summary asks of a run; its own file has the rest.

    Two shares of the device: `mfu` of the peak that `mfu_peak_source` names (on a GPU that is known, the data sheet's),
    and `mfu_of_matrix_rate` of what a large matrix product in the same precision reached here.
    """
    config, speed = run.section("training_config"), run.section("flops")
    rate = rates.get(config["precision"])
    ranks = rank_count(run)
    assert ranks is not None  # files of this version record it
    return {
        "status": run.status,
        "ranks": ranks,
        "tokens_per_s": run.tokens_per_s,
        "step_time_median_s": run.step_time_median_s,
        "mfu": run.mfu,
        "mfu_peak_source": speed["peak_source"],
        "mfu_of_matrix_rate": mfu(run.tokens_per_s, speed["per_token_palm"], rate and rate["flops_per_s"], ranks),
        "peak_memory_bytes": run.peak_memory_bytes,
        "final_train_loss": run.final_train_loss,
        "final_validation_loss": run.final_validation_loss,
        "first_step_s": float(run.all_step_times_s[0]) if len(run.all_step_times_s) else None,
        **{name: config.get(name) for name in ("precision", "compile", "matmul", "attention", "optimizer")},
        "micro_batch_size_per_gpu": config["micro_batch_size_per_gpu"],
    }


def time_to_loss(adamw: Run | None, muon: Run | None) -> dict[str, Any] | None:
    """Return when Muon's validation loss first is as low as AdamW's last one; None where a run has no validation."""
    if adamw is None or muon is None or not adamw.validation_losses or not muon.validation_losses:
        return None
    last = adamw.validation_losses[-1]
    reached = next((point for point in muon.validation_losses if point.loss <= last.loss), None)
    return {
        "loss": last.loss,
        "adamw_step": last.step,
        "adamw_train_time_s": last.train_time_s,
        "muon_step": reached.step if reached else None,
        "muon_train_time_s": reached.train_time_s if reached else None,
        "muon_final_loss": muon.validation_losses[-1].loss,
    }


def print_summary(found: Mapping[str, Any]) -> None:
    """Print rates, speeds and comparisons, and what did not pass or is still to be run."""
    for precision, rate in found["matrix_rate"].items():
        say(f"matrix product, {precision}: {rate['flops_per_s'] / 1e12:,.2f} TFLOP/s")
    for name, run in found["runs"].items():
        if run["tokens_per_s"]:
            shares = [f"{run[key]:.1%}" if run[key] else "n/a" for key in ("mfu", "mfu_of_matrix_rate")]
            ranks = "1 rank" if run["ranks"] == 1 else f"{run['ranks']} ranks"
            speed = f"{run['tokens_per_s']:>12,.0f} tokens/s"
            how = f"attention {run['attention']}{', compiled' if run['compile'] else ''}"
            say(f"{name:28s} {ranks:8s}{speed}  MFU {shares[0]}, of the matrix rate {shares[1]}; {how}")
    for table in found["peers"].values():
        say(f"\n{table}\n")
    for check in found["agreement"]:
        if check["holds"] is None:
            continue
        words = "agrees" if check["holds"] else "DOES NOT AGREE"
        apart = "no step in common"
        if check["compared_steps"]:
            loss, norm = check["largest_loss_difference"], check["largest_norm_difference"]
            apart = f"{check['compared_steps']} steps, losses within {loss:.1e}, norms within {norm:.1e} (relative)"
        say(f"{check['run']} with {check['reference']}, as {check['within']}: {words}; {apart}")
    for step in found["steps"]:
        if step["status"] == LEFT_OUT:
            say(f"left out: {step['name']}: {step['reason']}")
    for name in found["failed"]:
        say(f"did not pass: {name}")
    if found["pending_parts"]:
        say(f"parts that are not done: {', '.join(map(str, found['pending_parts']))}")


def pack(folder: Path) -> list[Path]:
    """Return two archives: what a person reads and what continues the benchmark elsewhere, and the profiler's traces.

    Data, weights, checkpoints, and what was compiled or installed stay out. An archive without files is not made.
    """
    apart = ("data", "compiled", "site")
    files = [path.relative_to(folder) for path in files_of_runs(folder) if path.is_file()]
    files = [path for path in files if path.parts[0] not in apart]
    traces = [path for path in files if PROFILER_LOGS in path.parts]
    kinds = (".json", ".log", ".png", ".txt")
    kept = [path for path in files if path.suffix in kinds and path not in traces and path.name != TOKENIZER]
    return [_archive(folder, name, chosen) for name, chosen in ((RESULTS, kept), (TRACES, traces)) if chosen]


def _archive(folder: Path, name: str, files: Iterable[Path]) -> Path:
    partial = folder / f".{name}.tmp"
    names = "\0".join(map(str, files)).encode()
    command = ["tar", "--null", "-czf", str(partial.absolute()), "-C", str(folder), "-T", "-"]
    done = subprocess.run(command, input=names, capture_output=True, check=False)
    if done.returncode:
        raise Failure(f"{folder / name} cannot be written: {done.stderr.decode(errors='replace').strip()[:200]}")
    partial.replace(folder / name)
    return folder / name
