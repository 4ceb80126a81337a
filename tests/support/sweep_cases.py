"""Requests, cells and finished runs of a sweep."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from support.metrics_examples import example_metrics, save
from support.programs import REPOSITORY
from testbed.sweep.plan import Cell, plan
from testbed.sweep.request import Machine, Request, parse_variants, shared_arguments
from testbed.sweep.state import Sweep

SCRIPT = REPOSITORY / "scripts" / "run_scaling_benchmarks.py"


NOTHING_GIVEN = dict.fromkeys(("steps", "seq_length", "epochs", "dataset_mode", "deepspeed_config"))


SIX_STEPS = {**NOTHING_GIVEN, "steps": 6}


def request(variants: str = "baseline,ddp", **changes) -> Request:
    machine = changes.pop("machine", Machine(num_cores=2))
    protocol = changes.pop("protocol", "strong")
    fields = {
        "protocol": protocol,
        "variants": parse_variants(variants),
        "ranks": (1, 2),
        "batch_sizes": (8,),
        "repeats": 3,
        "seed": 42,
        "shared": shared_arguments(protocol, machine.kind, SIX_STEPS, changes.pop("passed_on", [])),
        "machine": machine,
        "folder": "sweep",
        "program": "src/gpt2.py",
    }
    return Request(**{**fields, **changes})


def as_sweep(asked: Request, commit: str = "c" * 40) -> Sweep:
    return Sweep(asked.protocol, "python scripts/run_scaling_benchmarks.py", commit, plan(asked), asked.target_val_loss)


def write_sweep_json(folder: Path, rows: list[dict], **more) -> None:
    """The sweep.json of runs that no sweep made. Each row says what its cell needs; the rest stands for anything."""
    anything = {"name": "x", "run_type": "ddp", "batch_size": 8, "repeat": 1, "seed": 1, "command": [],
                "oversubscribed": False, "status": "complete"}  # fmt: skip
    cells = [{**anything, "variant": row.get("run_type", "ddp"), **row} for row in rows]
    plan = {"schema": 1, "protocol": "strong", "command_line": "", "git_commit": "c" * 40, "cells": cells, **more}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sweep.json").write_text(json.dumps(plan), encoding="utf-8")


def finish(cell: Cell, out_dir: Path, tokens_per_s: float | None = None, **changes) -> None:
    """What a finished run of the cell leaves."""
    if tokens_per_s is not None:
        of_a_second = example_metrics(step_time_s=1.0)["summary"]["mean_tokens_per_sec_global"]
        changes["step_time_s"] = of_a_second / tokens_per_s
    from_another_folder = shlex.join(["../src/gpt2.py", *cell.gpt2_arguments, "--checkpoint_path", "elsewhere"])
    metrics = {"command_line": from_another_folder, "hardware": {"num_devices": cell.ranks}}
    metrics |= {"git_commit": "c" * 40, "run_id": cell.folder, **changes}
    save(out_dir / cell.folder, example_metrics(world_size=cell.ranks, **metrics))
