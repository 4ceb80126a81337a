#!/usr/bin/env python3
"""Write summary.json into the folder of scripts/benchmark_gpu.sh, which calls this at its end.

    python scripts/summarise_benchmark.py checkpoint/benchmark_gpu --device cuda --seconds 480 --deadline_s 520

Exit code: 0, 1 a step failed or no longer fitted, two runs do not agree, or a run's file cannot be read, 2 there is
nothing to summarise.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))  # this checkout's code, installed or not

from testbed.analysis.runs.arms import rank_count
from testbed.analysis.runs.load import Run, find_runs, load_run
from testbed.config.flag_parser import FlagParser
from testbed.config.flag_types import not_negative
from testbed.errors import Failure, InputError, say
from testbed.io import holding_together, read_json, write_text
from testbed.metrics.file import read_metrics
from testbed.model.flops import mfu
from testbed.program import program

NOT_PASSED = ("failed", "late", "interrupted")
FIELDS = ("name", "status", "seconds", "exit_code", "reason", "command")


@program
def main() -> int:
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR", help="what benchmark_gpu.sh wrote to")
    parser.add_argument("--device", choices=["cuda", "cpu"], required=True, help="what was measured")
    parser.add_argument("--seconds", type=not_negative, required=True, help="how long all of it took")
    parser.add_argument(
        "--deadline_s", type=not_negative, required=True, metavar="SECONDS", help="how long it might have taken"
    )
    arguments = parser.parse_args()
    if not (arguments.folder / "steps.tsv").exists():
        raise InputError(f"{arguments.folder} holds no steps.tsv of a benchmark")
    found = {"device": arguments.device, "seconds": arguments.seconds, "deadline_s": arguments.deadline_s}
    try:
        found |= summary(arguments.folder)
    except ValueError as error:  # the folder is right, a file in it is damaged
        raise Failure(str(error)) from None
    write_text(arguments.folder / "summary.json", json.dumps(found, indent=2) + "\n")
    print_summary(found)
    say(f"{len(found['failed'])} did not pass, {arguments.seconds} s; {arguments.folder / 'summary.json'}")
    for name in found["failed"]:
        say(f"did not pass: {name}")
    return 1 if found["failed"] else 0


def summary(folder: Path) -> dict[str, Any]:
    """Return all that the folder tells.

    `failed`: what did not pass, by name: steps that failed, were interrupted or no longer fitted before the deadline,
    and checks that do not hold. A check of runs that are not there holds or fails nothing (its step says why), and what
    was left out because it cannot be had here is no failure.
    """
    with holding_together(folder / "steps.tsv"):
        steps: list[dict[str, Any]] = [dict(zip(FIELDS, row, strict=True)) for row in _rows(folder / "steps.tsv")]
        for step in steps:
            step["seconds"] = int(step["seconds"])
            step["exit_code"] = None if step["exit_code"] == "-" else int(step["exit_code"])
            step["reason"] = step["reason"] or None
    runs = {path.parent.name: load_run(path) for path in find_runs(folder / "runs")}
    with holding_together(folder / "checks.tsv"):
        asked = [(reference, name, float(most)) for reference, name, most in _rows(folder / "checks.tsv")]
        if not all(0 <= most < math.inf for *_, most in asked):
            raise InputError("a tolerance is no number")
    checks = [agreement(runs, *each) for each in asked]
    rates = matrix_rates(folder / "matrix_rate.json")
    failed = [step["name"] for step in steps if step["status"] in NOT_PASSED]
    failed += [f"{check['run']} against {check['reference']}" for check in checks if check["holds"] is False]
    return {
        "steps": steps,
        "matrix_rate": rates,
        "runs": {name: facts(run, rates) for name, run in runs.items()},
        "agreement": checks,
        "time_to_loss": time_to_loss(runs.get("time_to_loss_adamw"), runs.get("time_to_loss_muon")),
        "failed": failed,
    }


def matrix_rates(path: Path) -> dict[str, Any]:
    """{precision: {"flops_per_s", "source"}} of a large matrix product here; empty where none was measured."""
    if not path.exists():
        return {}
    rates = read_json(path)
    with holding_together(path):
        for rate in rates.values():
            if not 0 < rate["flops_per_s"] < math.inf:
                raise InputError(f"flops_per_s is {rate['flops_per_s']}")
    return rates


def facts(run: Run, rates: dict[str, Any]) -> dict[str, Any]:
    """Return what a reader of the summary asks of a run; its own file has the rest.

    Two shares of the device: `mfu` of the peak that `mfu_peak_source` names (on a GPU that is known, the data sheet's),
    and `mfu_of_matrix_rate` of what a large matrix product in the same precision reached here.
    """
    metrics = read_metrics(run.path)
    config, speed = metrics["training_config"], metrics["flops"]
    rate = rates.get(config["precision"])
    ranks = rank_count(run)
    assert ranks is not None  # files of this version record it
    return {
        "status": run.status,
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


def agreement(runs: dict[str, Run], reference: str, name: str, most: float) -> dict[str, Any]:
    """Check that no step's loss differs by more than `most` nats; None where a run is missing or broke off."""
    check: dict[str, Any] = {"reference": reference, "run": name, "tolerance": most}
    check |= {"largest_difference": None, "holds": None}
    found = (runs.get(reference), runs.get(name))
    pair = [run for run in found if run is not None and run.status == "complete"]
    if len(pair) == 2:
        ours, theirs = (run.train_losses for run in pair)
        is_equal_length = len(ours) == len(theirs) > 0
        check["largest_difference"] = float(np.max(np.abs(ours - theirs))) if is_equal_length else None
        check["holds"] = is_equal_length and check["largest_difference"] <= most
    return check


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


def _rows(path: Path) -> list[list[str]]:
    return [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def print_summary(found: dict) -> None:
    for precision, rate in found["matrix_rate"].items():
        say(f"matrix product, {precision}: {rate['flops_per_s'] / 1e12:,.2f} TFLOP/s")
    for name, run in found["runs"].items():
        if run["tokens_per_s"]:
            shares = [f"{run[key]:.1%}" if run[key] else "n/a" for key in ("mfu", "mfu_of_matrix_rate")]
            say(f"{name:28s} {run['tokens_per_s']:>12,.0f} tokens/s  MFU {shares[0]}, of the matrix rate {shares[1]}")
    for check in found["agreement"]:
        words = {True: "agrees", False: "DOES NOT AGREE", None: "not compared"}[check["holds"]]
        largest = (
            "" if check["largest_difference"] is None else f", largest difference {check['largest_difference']:.1e}"
        )
        say(f"{check['run']} with {check['reference']}: {words}{largest}")


if __name__ == "__main__":
    sys.exit(main())
