"""Which runs a scaling report lets be repeats, which it compares, and which sweep it believes."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from support.metrics_examples import save, v20_metrics
from support.scaling_examples import arm_of, cell, metrics_of, report_of, rows_of_plan, run_with_losses, write_arm
from support.sweep_cases import write_sweep_json

from testbed.analysis.comparison.two_arms import compare_arms
from testbed.analysis.runs.arms import group_into_arms
from testbed.analysis.runs.load import load_run
from testbed.analysis.scaling.report import report_on_directory
from testbed.analysis.scaling.tables import scaling_table


def on_gpus(ranks: int) -> dict:
    """As a sweep runs on 16 cores: its GPUs' processes share them."""
    threads = 16 // ranks
    return {"device_type": "cuda", "gpu_name": "Example GPU", "num_devices": ranks, "cpu_threads_per_rank": threads}


def test_on_gpus_the_threads_that_follow_from_the_ranks_are_no_other_hardware(tmp_path):
    for run_type, ranks in (("baseline", 1), ("ddp", 2), ("ddp", 4)):
        write_arm(tmp_path, run_type, ranks, 1000 * ranks**0.9, hardware=on_gpus(ranks))
    report = report_of(tmp_path)
    assert report["status"] == "ok" and report["mismatches"] == []
    assert arm_of(report, "ddp", 4)["speedup"]["ratio"] == pytest.approx(4**0.9)
    more_threads = on_gpus(2) | {"cpu_threads_per_rank": 6}
    save(tmp_path / "ddp_2" / "run_6", metrics_of("ddp", 2, 1800, hardware=more_threads))
    assert len(group_into_arms([load_run(path) for path in sorted(tmp_path.rglob("ddp_2/*/*.json"))])) == 1
    other_gpu = on_gpus(2) | {"gpu_name": "Another GPU"}
    save(tmp_path / "ddp_2" / "run_6", metrics_of("ddp", 2, 1800, hardware=other_gpu))
    assert [item["field"] for item in report_of(tmp_path)["mismatches"]] == ["hardware.gpu_name"]


def test_without_a_plan_an_arm_has_its_own_batch_and_enters_no_other_batch_sizes_fit(tmp_path):
    write_arm(tmp_path, "baseline", 1, 1000)
    write_arm(tmp_path, "ddp", 2, 1800)
    write_arm(tmp_path, "ddp", 4, 6000, batch=16)
    report = report_of(tmp_path, allow_mismatch=True)
    assert [(arm["ranks"], arm["batch_size"]) for arm in report["arms"]] == [(1, 8), (2, 8), (4, 16)]
    assert arm_of(report, "ddp", 4)["speedup"]["ratio"] == pytest.approx(6)
    table = scaling_table(report)
    assert "| ddp | 16 | 4 |" in table and "(UNEQUAL WORK)" in table
    fits = {row["batch_size"]: row["fits"]["amdahl"] for row in report["strategies"] if row["strategy"] == "ddp"}
    assert fits[8]["rank_counts"] == [1, 2] and fits[8]["serial_fraction"] == pytest.approx(1 / 9, abs=1e-3)
    assert fits[16]["serial_fraction"] is None and "unequal work" in fits[16]["reason"]
    refused = report_of(tmp_path)
    assert refused["status"] == "invalid_comparison" and {row["batch_size"] for row in refused["mismatches"]} == {16}
    assert arm_of(refused, "ddp", 4)["speedup"] is None and arm_of(refused, "ddp", 2)["n"] == 5
    planned = report_of(tmp_path, cells={path.parent: cell(path.parts[-3][:-2]) for path in tmp_path.rglob("*.json")})
    assert planned["status"] == "ok" and "no run at one rank" in arm_of(planned, "ddp", 4)["reason"]


def test_fields_that_no_file_records_are_one_line(tmp_path):
    for ranks, batch in ((1, 16), (2, 32), (4, 64)):
        metrics = v20_metrics(ranks)
        metrics["training_config"]["global_batch_size"] = batch
        save(tmp_path / str(ranks), metrics)
    assert report_of(tmp_path)["status"] == "invalid_comparison"
    lines = scaling_table(report_of(tmp_path)).splitlines()
    assert [line for line in lines if "not recorded" in line] == [line for line in lines if line.startswith("- Not ")]
    assert sum("global_batch_size is" in line for line in lines) == 2
    unknown = next(line for line in lines if line.startswith("- Not "))
    assert "seed" in unknown and "weight_decay" in unknown and "global_batch_size" not in unknown


def test_copies_of_a_run_are_no_repeats_and_are_named(tmp_path):
    write_arm(tmp_path, "baseline", 1, 1000)
    first = write_arm(tmp_path, "ddp", 2, 1800, n=2)[0]
    for number in range(3):
        shutil.copytree(first.parent, tmp_path / "ddp_2" / f"saved_{number}")
    report = report_of(tmp_path, directory=tmp_path)
    assert arm_of(report, "ddp", 2)["n"] == 2 and arm_of(report, "ddp", 2)["verdict"] == "not enough repeats"
    reasons = {item["path"]: item["reason"] for item in report["left_out"]}
    assert reasons.keys() == {f"ddp_2/saved_{number}/training_metrics.json" for number in range(3)}
    assert all(f"a copy of {first}" in reason for reason in reasons.values())
    (arm,) = group_into_arms([load_run(path) for path in sorted((tmp_path / "ddp_2").rglob("*.json"))])
    assert len(arm.runs) == 5 and len(arm.measured_runs) == len(arm.tokens_per_s) == 2
    comparison = compare_arms(arm, arm)
    assert len(comparison.a.runs) == 2
    assert all(reason.startswith("a copy of ") for _, reason in comparison.not_counted)


@pytest.mark.parametrize("is_planned", [False, True])
def test_a_failed_run_that_never_reached_the_target_counts_as_one_that_never_did(tmp_path, is_planned):
    cells = {}
    died = {"status": "failed", "completion": None, "failure": {"reason": "diverged", "step": 20}}
    for strategy, ranks in (("baseline", 1), ("ddp", 2)):
        for seed in range(5):
            is_dead = strategy == "ddp" and seed > 2
            # the fifth had reached the target before it died, and says nothing against its arm
            losses = [6.0, 5.0] if seed != 3 else [6.0, 5.9]
            path = run_with_losses(tmp_path / f"{strategy}{seed}", losses if is_dead else [6.0, 5.0], 0.2 + seed / 1e3,
                                   run_type=strategy, seed=seed, hardware={"num_devices": ranks},
                                   **(died if is_dead else {}))  # fmt: skip
            cells[path.parent] = cell(strategy)
    report = report_of(tmp_path, "time_to_loss", target=5.25, cells=cells if is_planned else None)
    arm = arm_of(report, "ddp", 2)
    reached = arm["time_to_loss"]
    assert (arm["n"], reached["n"], reached["num_reached"], reached["num_never_reached"]) == (3, 4, 3, 1)
    assert reached["train_time_s"]["low"] is None
    assert arm["speedup"] is None and "1 of 4 runs never reached the target (1 failed)" in arm["reason"]


def plan(root: Path, protocol: str) -> None:
    """A sweep of baseline on 1 rank and ddp on 2 with its sweep.json."""
    write_arm(root, "baseline", 1, 1000, batch=8)
    write_arm(root, "ddp", 2, 1900, batch=16 if protocol == "weak" else 8)
    write_sweep_json(root, rows_of_plan(root), protocol=protocol)


def test_a_folder_of_several_sweeps_is_refused_in_one_sentence(tmp_path, monkeypatch):
    plan(tmp_path / "both" / "strong", "strong")
    plan(tmp_path / "both" / "weak", "weak")
    with pytest.raises(ValueError, match=r"holds 2 sweeps, .*: strong \(strong\), weak \(weak\); give one"):
        report_on_directory(tmp_path / "both")
    assert report_on_directory(tmp_path / "both" / "weak")["status"] == "ok"
    shutil.rmtree(tmp_path / "both" / "strong")
    assert report_on_directory(tmp_path / "both")["protocol"]["name"] == "weak"
    monkeypatch.chdir(tmp_path / "both" / "weak" / "ddp_2")
    cell = report_on_directory(Path())
    assert cell["protocol"]["name"] == "weak" and cell["left_out"] == []
    assert [(arm["strategy"], arm["batch_size"], arm["n"]) for arm in cell["arms"]] == [("ddp", 8, 5)]
    with pytest.raises(ValueError, match="planned weak"):
        report_on_directory(tmp_path / "both" / "weak" / "ddp_2", "strong")


def test_the_reference_has_the_settings_that_are_not_the_strategys_own(tmp_path):
    """ddp:compile against baseline:compile; bucket_cap_mb, which no baseline has, is ddp's own."""
    plain = {"compile": False, "bucket_cap_mb": None}
    compiled = plain | {"compile": True}
    write_arm(tmp_path, "baseline", 1, 1000, settings=plain)
    write_arm(tmp_path, "baseline", 1, 1250, name="compiled", settings=compiled)
    write_arm(tmp_path, "ddp", 2, 1800, settings=plain | {"bucket_cap_mb": 25})
    write_arm(tmp_path, "ddp", 2, 2000, name="ddp_compiled", settings=compiled | {"bucket_cap_mb": 25})
    report = report_of(tmp_path)
    assert arm_of(report, "ddp:compile", 2)["reference"] == "baseline, compile on 1 rank"
    assert arm_of(report, "ddp:compile", 2)["speedup"]["ratio"] == pytest.approx(1.6)
    assert arm_of(report, "ddp", 2)["reference"] == "baseline on 1 rank"
    assert arm_of(report, "ddp", 2)["speedup"]["ratio"] == pytest.approx(1.8)
    assert arm_of(report, "ddp:compile", 2)["reference_note"] is None
    assert arm_of(report, "baseline:compile", 1)["speedup"]["ratio"] == pytest.approx(1.25)
    fits = {row["strategy"]: row["fits"]["amdahl"]["serial_fraction"] for row in report["strategies"]}
    assert fits["ddp:compile"] == pytest.approx(0.25, abs=1e-3)  # 1 / 1.6 = s + (1 - s) / 2
    assert "1.60x" in scaling_table(report, "003") and "| 1 | " in scaling_table(report, "001")
    shutil.rmtree(tmp_path / "compiled_1")
    report = report_of(tmp_path)
    alone = arm_of(report, "ddp:compile", 2)
    assert alone["reference"] == "baseline on 1 rank" and alone["speedup"]["ratio"] == pytest.approx(2.0)
    assert alone["reference_note"].startswith("its reference, baseline on 1 rank, differs in compile (True against ")
    assert f"ddp, compile on 2 ranks: {alone['reference_note']}" in report["warnings"]


def deepspeed(options: dict, accumulation: int) -> dict:
    """As training records it: the hash of the whole follows the ranks, since the accumulation is in it."""
    effective = {"gradient_accumulation_steps": accumulation, "zero_optimization": {"stage": 1} | options}
    sha256 = hashlib.sha256(json.dumps(effective).encode()).hexdigest()
    selected = {"fp16_enabled": False, "wall_clock_breakdown": False, "zero_stage": 1}
    config = {"path": "x.json", "sha256": sha256, "file_sha256": "f" * 64, "selected": selected, "effective": effective}
    return {"deepspeed_config": config, "training_config": {"deepspeed_enabled": True, "zero_stage": 1}}


def test_without_a_plan_options_of_a_deepspeed_file_make_another_strategy(tmp_path):
    write_arm(tmp_path, "baseline", 1, 1000)
    for name, options, rate in (("one", {}, 1800), ("two", {"round_robin_gradients": True}, 1500)):
        write_arm(tmp_path, "optimized", 1, rate / 2, name=name, **deepspeed(options, 2))
        write_arm(tmp_path, "optimized", 2, rate, name=name, **deepspeed(options, 1))
    arms = [arm for arm in report_of(tmp_path)["arms"] if arm["strategy"] != "baseline"]
    assert [(arm["ranks"], arm["n"]) for arm in arms] == [(1, 5), (2, 5)] * 2
    assert sorted({arm["tokens_per_s"]["median"] for arm in arms}) == [750, 900, 1500, 1800]
    assert all("DeepSpeed configuration " in arm["name"] for arm in arms)
    assert arms[0]["strategy"] == arms[1]["strategy"] != arms[2]["strategy"]


def test_strategies_stand_in_one_order_whatever_order_a_sweep_ran_in(tmp_path):
    expected = ["baseline", "allreduce", "ddp:bucket_cap_mb=5", "ddp:bucket_cap_mb=25", "fsdp"]
    for first in (0, 2):
        root, cells = tmp_path / str(first), {}
        for variant in expected[first:] + expected[:first]:
            paths = write_arm(root, variant.partition(":")[0], 2 - (variant == "baseline"), 1000,
                              name=variant.replace(":", "_"), n=1)  # fmt: skip
            cells[paths[0].parent] = cell(variant)
        found = [arm["strategy"] for arm in report_of(root, cells=cells)["arms"]]
        assert found == expected
