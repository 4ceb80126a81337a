"""Scaling reports: speed-up, efficiency and fits of known throughputs, unequal work named."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import curve_fit
from support.metrics_examples import save
from support.programs import run_here
from support.scaling_examples import arm_of, metrics_of, report_of, rows_of_plan, write_arm
from support.sweep_cases import write_sweep_json

from testbed.analysis.scaling.fit import amdahl_fit, gustafson_fit
from testbed.analysis.scaling.report import write_scaling_report
from testbed.analysis.scaling.tables import scaling_table
from testbed.audit.claims import audit


def strong_sweep(root: Path) -> dict:
    write_arm(root, "baseline", 1, 1000)
    write_arm(root, "ddp", 2, 1800)
    write_arm(root, "ddp", 4, 3000)
    return report_of(root)


def test_speed_up_and_efficiency_are_the_ratio_of_medians(tmp_path):
    report = strong_sweep(tmp_path)
    assert report["status"] == "ok" and report["mismatches"] == []
    for ranks, ratio in ((2, 1.8), (4, 3.0)):
        arm = arm_of(report, "ddp", ranks)
        assert arm["speedup"]["ratio"] == pytest.approx(ratio)
        assert arm["efficiency"]["ratio"] == pytest.approx(ratio / ranks)
        assert arm["speedup"]["low"] < ratio < arm["speedup"]["high"]
        assert arm["efficiency"]["low"] == pytest.approx(arm["speedup"]["low"] / ranks)
        assert arm["verdict"] == "faster" and arm["n"] == 5
        assert arm["reference"] == "baseline on 1 rank"
    assert arm_of(report, "baseline", 1)["speedup"]["ratio"] == 1


def test_a_single_run_has_no_spread_and_makes_no_claim(tmp_path):
    write_arm(tmp_path, "baseline", 1, 1000, n=1)
    write_arm(tmp_path, "ddp", 2, 1800, n=1)
    report = report_of(tmp_path)
    arm = arm_of(report, "ddp", 2)
    assert arm["verdict"] == "not enough repeats"
    assert arm["speedup"]["low"] is arm["tokens_per_s"]["low"] is None
    assert any("fewer than 5 repeats" in warning for warning in report["warnings"])
    fit = report["strategies"][1]["fits"]["amdahl"]
    assert fit["low"] is None and any("no claim" in note for note in fit["notes"])


def test_without_a_baseline_the_strategy_at_one_rank_is_the_reference(tmp_path):
    write_arm(tmp_path, "ddp", 1, 900)
    write_arm(tmp_path, "ddp", 2, 1800)
    write_arm(tmp_path, "fsdp", 2, 1500)
    report = report_of(tmp_path)
    assert arm_of(report, "ddp", 2)["speedup"]["ratio"] == pytest.approx(2.0)
    assert arm_of(report, "ddp", 2)["reference"] == "ddp on 1 rank (the same strategy)"
    alone = arm_of(report, "fsdp", 2)
    assert alone["speedup"] is None and "no run at one rank" in alone["reason"]


def test_one_repeat_with_other_work_is_found_among_its_arm(tmp_path):
    write_arm(tmp_path, "baseline", 1, 1000)
    write_arm(tmp_path, "ddp", 2, 1800, n=4)
    save(tmp_path / "ddp_2" / "run_5", metrics_of("ddp", 2, 1800, training_config={"weight_decay": 0.0}))
    report = report_of(tmp_path)
    assert [(item["field"], item["baseline"], item["mismatch"]) for item in report["mismatches"]] == [
        ("weight_decay", 0.1, 0.0)
    ]


def test_in_weak_scaling_batch_and_tokens_grow_exactly_with_the_ranks(tmp_path):
    write_arm(tmp_path, "baseline", 1, 1000, batch=8)
    write_arm(tmp_path, "ddp", 2, 1900, batch=16)
    write_arm(tmp_path, "ddp", 4, 3600, batch=32)
    report = report_of(tmp_path, "weak")
    assert report["status"] == "ok" and {arm["batch_size"] for arm in report["arms"]} == {8}
    assert arm_of(report, "ddp", 4)["efficiency"]["ratio"] == pytest.approx(0.9)
    fits = next(row["fits"] for row in report["strategies"] if row["strategy"] == "ddp")
    assert list(fits) == ["gustafson"]
    # from 2 - s = 1.9 and 4 - 3 s = 3.6: s is 0.1 and 0.133, and least squares weighs them 1 to 9
    assert fits["gustafson"]["serial_fraction"] == pytest.approx(0.13, abs=0.003)
    assert report_of(tmp_path, "strong")["status"] == "invalid_comparison"


def test_weak_scaling_allows_the_batch_to_grow_and_nothing_else(tmp_path):
    write_arm(tmp_path, "baseline", 1, 1000, batch=8)
    write_arm(tmp_path, "ddp", 2, 1900, batch=12)
    report = report_of(tmp_path, "weak")
    assert {item["field"] for item in report["mismatches"]} == {"global_batch_size", "tokens"}
    for path in tmp_path.glob("ddp_2/*/training_metrics.json"):
        save(path.parent, metrics_of("ddp", 2, 1900, batch=16, training_config={"lr": 1e-3}))
    assert {item["field"] for item in report_of(tmp_path, "weak")["mismatches"]} == {"lr"}


def test_batch_sizes_with_a_reference_of_their_own_are_series_of_their_own(tmp_path):
    for batch, rates in ((8, (1000, 1800)), (16, (1100, 2090))):
        write_arm(tmp_path / str(batch), "baseline", 1, rates[0], batch=batch)
        write_arm(tmp_path / str(batch), "ddp", 2, rates[1], batch=batch)
    report = report_of(tmp_path)
    assert report["status"] == "ok"
    assert arm_of(report, "ddp", 2, batch=8)["speedup"]["ratio"] == pytest.approx(1.8)
    assert arm_of(report, "ddp", 2, batch=16)["speedup"]["ratio"] == pytest.approx(1.9)
    table = scaling_table(report, "001")
    assert "| strategy | batch (global) | GPUs/ranks | training time (s) | speed-up |" in table
    assert "1.80x" in table and "1.90x" in table and "not measured (run with --profile)" in table


def test_variants_of_a_run_type_are_strategies_of_their_own(tmp_path):
    write_arm(tmp_path, "baseline", 1, 1000)
    for size in (25, 50):
        write_arm(tmp_path, "ddp", 2, 1800 + size, name=f"ddp{size}", settings={"bucket_cap_mb": size})
    report = report_of(tmp_path)
    assert {arm["strategy"] for arm in report["arms"]} == {
        "baseline",
        "ddp:bucket_cap_mb=25",
        "ddp:bucket_cap_mb=50",
    }
    table = scaling_table(report, "004")
    assert "A: ddp, bucket_cap_mb 25 " in table and "B: ddp, bucket_cap_mb 50 " in table
    assert scaling_table(report, "004", ["ddp, bucket_cap_mb 25", "ddp:bucket_cap_mb=50"]) == table
    assert "1.014x [" in table  # 1850 / 1825


def test_a_difference_in_loss_is_said_beside_the_speed_up(tmp_path):
    write_arm(tmp_path, "baseline", 1, 1000)
    for number, path in enumerate(write_arm(tmp_path, "ddp", 2, 1800)):
        metrics = json.loads(path.read_text())
        metrics["evaluations"][-1]["val_loss"] += 0.1 + number / 1e4
        path.write_text(json.dumps(metrics))
    report = report_of(tmp_path)
    assert "+0.1002" in arm_of(report, "ddp", 2)["loss_note"]
    assert any("+0.1002" in warning for warning in report["warnings"])
    assert "losses differ" in scaling_table(report)


def test_instrumented_and_broken_runs_never_enter_throughput_but_give_the_attribution(tmp_path):
    strong_sweep(tmp_path)
    step = {
        "step": 7, "step_time_s": 0.2, "data_wait_s": 0.01, "forward_s": 0.05, "backward_s": 0.08, "optimizer_s": 0.02,
        "exposed_communication_s": 0.03, "idle_s": 0.01, "communication_s": 0.07, "compute_s": 0.15,
        "num_collectives": 2, "collective_bytes": 1000,
    }  # fmt: skip
    per_rank = [{"rank": rank, "steps": [step | {"compute_s": 0.15 + 0.01 * rank}]} for rank in range(2)]
    attribution = {"source": "torch.profiler", "timeline": "host", "per_rank": per_rank, "collectives": []}
    attribution |= {"bound": None, "pipeline": None}
    profiled = metrics_of("ddp", 2, 5.0, instrumented=True, settings={"profile": True}, attribution=attribution)
    save(tmp_path / "profiled", profiled)
    save(tmp_path / "died", metrics_of("ddp", 2, 9.0, status="failed", failure={"reason": "x", "step": 3}))
    report = report_of(tmp_path)
    arm = arm_of(report, "ddp", 2)
    assert arm["n"] == 5 and arm["speedup"]["ratio"] == pytest.approx(1.8)
    assert arm["attribution"]["compute_s"] == pytest.approx(0.155)
    assert arm_of(report, "ddp", 4)["attribution"] is None
    assert sorted(item["reason"].split(",")[0].split(" (")[0] for item in report["left_out"]) == [
        "instrumented",
        "not complete",
    ]
    assert "155.0" in scaling_table(report, "001") and "70.0, 30.0 exposed" in scaling_table(report, "001")
    assert "70.0, 30.0 exposed" in scaling_table(report, "003")


def amdahl(ranks: float, share: float) -> float:
    return 1 / (share + (1 - share) / ranks)


@pytest.mark.parametrize("share", [-0.05, 0.0, 0.08, 0.6])
def test_the_fit_finds_the_share_that_made_the_points(share):
    rates = {ranks: [1000 * amdahl(ranks, share)] * 5 for ranks in (1, 2, 4, 8)}
    fit = amdahl_fit(rates)
    assert fit["serial_fraction"] == pytest.approx(share, abs=1e-12)
    assert fit["num_points"] == 20 and fit["rank_counts"] == [1, 2, 4, 8]
    assert fit["limit_of_speedup"] == (pytest.approx(1 / share) if share > 0 else None)
    assert any("faster than linear" in note for note in fit["notes"]) == (share < 0)
    scaled = gustafson_fit({ranks: [1000 * (ranks - share * (ranks - 1))] * 5 for ranks in (1, 2, 4)})
    assert scaled["serial_fraction"] == pytest.approx(share, abs=1e-12)


def test_the_fit_is_scipys_least_squares_over_all_repeats():
    generator = np.random.default_rng(0)
    rates = {n: list(1000 * amdahl(n, 0.1) * generator.normal(1, 0.02, 6)) for n in (1, 2, 4)}
    fit = amdahl_fit(rates)
    ranks = np.repeat([1.0, 2.0, 4.0], 6)
    relative_time = np.median(rates[1]) / np.concatenate(list(rates.values()))
    expected, _ = curve_fit(lambda n, s: s + (1 - s) / n, ranks, relative_time)
    assert fit["serial_fraction"] == pytest.approx(expected[0], rel=1e-6)
    assert fit["low"] < fit["serial_fraction"] < fit["high"]
    for counts, why in (((), "2 rank counts"), ((2,), "2 rank counts"), ((2, 4), "one rank")):
        fit = amdahl_fit({count: rates[count] for count in counts})
        assert fit["serial_fraction"] is None and why in fit["reason"]
    assert any("cannot show whether the law holds" in each for each in amdahl_fit({1: [5.0], 2: [9.0]})["notes"])


def test_the_interval_of_the_fit_holds_the_truth_in_most_repetitions():
    """Nominal 95 %; a percentile bootstrap of 6 repeats is somewhat narrow. 60 repetitions, 3 standard errors: 0.86."""
    generator = np.random.default_rng(1)
    hits = 0
    for _ in range(60):
        fit = amdahl_fit({n: list(amdahl(n, 0.1) * generator.normal(1, 0.02, 6)) for n in (1, 2, 4)})
        hits += fit["low"] <= 0.1 <= fit["high"]
    assert hits >= 52


def test_faster_than_linear_is_said_not_hidden(tmp_path):
    write_arm(tmp_path, "baseline", 1, 1000)
    write_arm(tmp_path, "ddp", 4, 4250)
    _, report = write_scaling_report(tmp_path)
    assert any("is more than linear" in found.message for found in audit([tmp_path]))
    assert arm_of(report, "ddp", 4)["efficiency"]["ratio"] == pytest.approx(1.0625)
    fit = next(row["fits"]["amdahl"] for row in report["strategies"] if row["strategy"] == "ddp")
    assert fit["serial_fraction"] < 0 and fit["limit_of_speedup"] is None
    assert "faster than linear" in scaling_table(report)


def test_the_plan_of_a_sweep_decides_and_the_report_is_written(tmp_path):
    strong_sweep(tmp_path)
    cells = rows_of_plan(tmp_path)
    cells.append(cells[-1] | {"folder": "ddp_4/run_6", "status": "failed", "reason": "out of memory"})
    write_sweep_json(tmp_path, cells)
    save(tmp_path / "stale", metrics_of("ddp", 2, 50.0))  # of an older plan
    path, report = write_scaling_report(tmp_path)
    assert json.loads(path.read_text()) == report
    assert report["status"] == "ok" and report["protocol"]["name"] == "strong"
    assert arm_of(report, "ddp", 2)["n"] == 5
    reasons = {item["path"]: item["reason"] for item in report["left_out"]}
    assert reasons["ddp_4/run_6"] == "the sweep says failed: out of memory"
    assert reasons["stale/training_metrics.json"] == "not in the plan of the sweep"
    assert all(math.isfinite(arm["tokens_per_s"]["median"]) for arm in report["arms"])


def program(*words: object) -> tuple[int, str, str]:
    done = run_here("scripts/more/generate_scaling_table.py", *words)
    return done.returncode, done.stdout, done.stderr


def test_the_program_prints_the_table(tmp_path):
    strong_sweep(tmp_path)
    code, table, said = program("--dir", tmp_path)
    assert code == 0, said
    assert "| ddp | 8 | 2 | 1,800 [" in table and "Amdahl, ddp, batch 8: serial share" in table


def test_a_wrong_command_line_is_one_sentence():
    runs = "docs/results/run_types"
    for arguments in (
        [],
        ["--dir", "docs/images"],
        ["--dir", runs, "--table", "004"],
        ["--dir", runs, "--protocol", "time_to_loss"],
        ["--dir", runs, "--variants", "a", "b"],
    ):
        code, table, said = program(*arguments)
        assert (code, table) == (2, "") and len(said.splitlines()) == 1, (arguments, said)


def test_unequal_work_is_exit_code_1(tmp_path):
    write_arm(tmp_path, "baseline", 1, 1000)
    write_arm(tmp_path, "ddp", 2, 1800, batch=16)
    code, table, _ = program("--dir", tmp_path)
    assert code == 1 and "global_batch_size is 16, the reference's 8" in table
    assert program("--dir", tmp_path, "--allow-mismatch")[0] == 0


def test_two_variants_are_compared_only_where_both_were_run(tmp_path):
    for run_type, ranks, rate in (("baseline", 1, 1000), ("ddp", 1, 950), ("ddp", 2, 1800), ("fsdp", 2, 1500)):
        write_arm(tmp_path, run_type, ranks, rate)
    rows = scaling_table(report_of(tmp_path), "004", ["ddp", "fsdp"]).splitlines()
    assert [row.split(" | ")[:3] for row in rows if row.startswith(("| A", "| B"))] == [
        ["| A: ddp", "8", "2"],
        ["| B: fsdp", "8", "2"],
    ]
