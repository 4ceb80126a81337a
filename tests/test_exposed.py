"""The cross-check of exposed communication: on made-up runs whose answer is known."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from conftest import REPOSITORY
from metrics_examples import example_metrics, save

from testbed.analysis.exposed import exposed_communication, exposed_table
from testbed.analysis.runs import find_runs, load_run

COMPUTE_S, EXPOSED_S, SLOW_DOWN_S = 0.500, 0.030, 0.020
SCRIPT = REPOSITORY / "scripts" / "exposed_communication.py"


def attribution(steps: list[int], late_s: list[float], exposed_s: float) -> dict:
    """Two ranks; the second computes 10 ms less and waits for the first as long."""
    ranks = []
    for rank, early_s in enumerate((0.0, 0.010)):
        of_rank = []
        for step, late in zip(steps, late_s, strict=True):
            is_synchronised = step % 2 == 1
            computing_s = COMPUTE_S + late + (SLOW_DOWN_S if is_synchronised else 0.0) - early_s
            rows = {"forward_s": 0.02, "backward_s": computing_s - 0.03, "optimizer_s": 0.01, "data_wait_s": 0.0}
            rows |= {"exposed_communication_s": exposed_s + early_s if is_synchronised else 0.0, "idle_s": 0.0}
            rows |= {"step_time_s": sum(rows.values()), "communication_s": exposed_s, "compute_s": computing_s}
            of_rank.append({"step": step, **rows, "num_collectives": int(is_synchronised), "collective_bytes": 4})
        ranks.append({"rank": rank, "steps": of_rank})
    found = {"source": "a test", "timeline": "host", "per_rank": ranks, "collectives": []}
    return {**found, "bound": None, "pipeline": None}


def save_runs(
    folder, repeats: int = 5, traced_exposed_s: float = EXPOSED_S, noise_s: float = 0.001, **settings
) -> None:
    """Runs that drift: each next one is slower by as much as a step exposes."""
    random = np.random.default_rng(1)
    for repeat in range(repeats):
        for profile in (False, True):
            flags = {"run_type": "ddp", "skip_gradient_sync": "alternate", "profile": profile, **settings}
            metrics = example_metrics(instrumented=True, settings=flags, training_config={"run_type": "ddp"})
            measured = [row for row in metrics["steps"] if not row["is_warmup"]]
            late_s = list(repeat * EXPOSED_S + random.normal(0, noise_s, len(measured)))
            for row, late in zip(measured, late_s, strict=True):
                extra_s = EXPOSED_S + SLOW_DOWN_S if row["step"] % 2 == 1 else 0.0
                row["step_time_s"] = COMPUTE_S + late + extra_s
            if profile:
                metrics["attribution"] = attribution([row["step"] for row in measured], late_s, traced_exposed_s)
            save(folder / f"{profile}_{repeat}", metrics)


def table_of(folder):
    return exposed_communication([load_run(path) for path in find_runs(folder)])


def test_trace_and_counterfactual_add_up(tmp_path):
    save_runs(tmp_path)
    (row,) = table_of(tmp_path)
    assert (row.run_type, row.ranks) == ("ddp", 2)
    assert row.traced.median == pytest.approx(EXPOSED_S), "of the rank that waits least, not for the slower one"
    assert row.slow_down.median == pytest.approx(SLOW_DOWN_S, abs=0.002)
    assert row.counterfactual.median == pytest.approx(EXPOSED_S + SLOW_DOWN_S, abs=0.003)
    assert row.counterfactual.high - row.counterfactual.low < 0.005, "runs that drift apart do not widen it"
    assert row.verdict == "agree"
    assert "| agree |" in exposed_table([row])


def test_a_trace_that_misses_half_of_it_does_not_agree(tmp_path):
    save_runs(tmp_path, traced_exposed_s=EXPOSED_S / 2)
    assert table_of(tmp_path)[0].verdict == "do not agree"
    said = subprocess.run([sys.executable, str(SCRIPT), "--dir", str(tmp_path)], capture_output=True, text=True)
    assert said.returncode == 1 and "do not agree" in said.stdout


def test_steps_that_scatter_more_than_they_expose_cannot_tell(tmp_path):
    """Agreement that a trace without any exposed communication would reach as well is none."""
    save_runs(tmp_path, noise_s=0.1)
    assert table_of(tmp_path)[0].verdict.startswith("cannot tell")


def test_configurations_are_not_mixed_and_a_trace_that_could_not_be_read_is_left_out(tmp_path):
    save_runs(tmp_path / "a")
    save_runs(tmp_path / "b", bucket_cap_mb=5.0)
    first, second = table_of(tmp_path)
    assert first.step.num_runs == second.step.num_runs == 5
    for path in find_runs(tmp_path / "b"):
        metrics = json.loads(path.read_text())
        if "attribution" in metrics:
            save(path.parent, {**metrics, "attribution": None})
    assert len(table_of(tmp_path)) == 1


def test_few_repeats_make_no_claim(tmp_path):
    save_runs(tmp_path, repeats=3)
    assert table_of(tmp_path)[0].verdict == "not enough repeats"
    said = subprocess.run([sys.executable, str(SCRIPT), "--dir", str(tmp_path)], capture_output=True, text=True)
    assert said.returncode == 0 and "not enough repeats" in said.stdout


def test_without_alternating_runs_there_is_one_sentence(tmp_path):
    save(tmp_path / "run", example_metrics())
    said = subprocess.run([sys.executable, str(SCRIPT), "--dir", str(tmp_path)], capture_output=True, text=True)
    assert said.returncode == 2 and "--skip_gradient_sync alternate" in said.stderr and "Traceback" not in said.stderr
