"""Time to loss by hand: the line between two validations, runs that never arrive, and the protocol that compares."""

from __future__ import annotations

import json

import pytest
from support.metrics_examples import save
from support.scaling_examples import arm_of, report_of, run_with_losses

from testbed.analysis.runs.load import load_run
from testbed.analysis.scaling.tables import scaling_table
from testbed.analysis.scaling.time_to_loss import time_to_loss, time_to_loss_of_arm


def test_time_to_loss_is_read_off_the_line_between_two_validations(tmp_path):
    run = load_run(run_with_losses(tmp_path, [6.0, 5.0, 5.4, 4.0]))
    found = time_to_loss(run, 5.25)  # three quarters of the way from step 10 to step 20
    assert found.step == pytest.approx(17.5)
    assert found.train_time_s == pytest.approx(3.5)
    assert found.elapsed_s == pytest.approx(3.0 + 0.75 * 3.0)
    assert found.tokens == pytest.approx(17.5 * 8 * 64)
    assert not found.is_upper_bound
    assert time_to_loss(run, 5.0).step == 20  # reached, not only passed
    assert time_to_loss(run, 3.9) is None
    early = time_to_loss(run, 6.5)
    assert early.is_upper_bound and early.step == 10 and early.train_time_s == pytest.approx(2.0)


def test_a_median_over_censored_runs_is_claimed_only_when_more_than_half_arrived(tmp_path):
    def arm(num_reached: int, n: int = 5) -> dict:
        curves = [[6.0, 5.0 if number < num_reached else 5.9] for number in range(n)]
        runs = [
            load_run(run_with_losses(tmp_path / f"{num_reached}_{n}_{k}", curve, 0.2 + k / 100, seed=k))
            for k, curve in enumerate(curves)
        ]
        return time_to_loss_of_arm(runs, 5.5)

    times = [15 * (0.2 + k / 100) for k in range(5)]
    whole, some, half = arm(5), arm(3), arm(2, n=4)
    assert whole["train_time_s"]["median"] == pytest.approx(times[2])
    assert whole["train_time_s"]["low"] < times[2] < whole["train_time_s"]["high"]
    assert some["train_time_s"]["median"] == pytest.approx(times[2]) and some["num_never_reached"] == 2
    assert some["train_time_s"]["low"] is None
    assert half["train_time_s"]["median"] is None and "no median is claimed" in half["reason"]


def test_the_time_to_loss_protocol_compares_times_whatever_the_batch(tmp_path):
    for seed in range(5):
        run_with_losses(tmp_path / f"a{seed}", [6.0, 5.0], 0.2 + seed / 1e3, run_type="baseline", seed=seed,
                        hardware={"num_devices": 1})  # fmt: skip
        run_with_losses(tmp_path / f"b{seed}", [6.0, 5.5, 5.0], 0.05 + seed / 4e3, seed=seed + 9,
                        training_config={"lr": 1e-3})  # fmt: skip
    report = report_of(tmp_path, "time_to_loss", target=5.25)
    assert report["status"] == "ok"
    arm = arm_of(report, "ddp", 2)
    assert arm["time_to_loss"]["train_time_s"]["median"] == pytest.approx(25 * 0.0505)
    assert arm["speedup"]["ratio"] == pytest.approx(17.5 * 0.202 / (25 * 0.0505), rel=1e-3)
    assert arm["verdict"] == "faster"
    assert "| time to loss 5.25 (s) | tokens to it |" in scaling_table(report)
    assert f"| 1.3 [1.2, 1.3] | {arm['time_to_loss']['tokens']['median']:,.0f}" in scaling_table(report)
    with pytest.raises(ValueError, match="--target_val_loss"):
        report_of(tmp_path, "time_to_loss")
    early = report_of(tmp_path, "time_to_loss", target=6.5)
    assert "the first validation was already at the target" in arm_of(early, "ddp", 2)["reason"]
    never = report_of(tmp_path, "time_to_loss", target=4.0)
    assert arm_of(never, "ddp", 2)["speedup"] is None and "never reached" in arm_of(never, "ddp", 2)["reason"]


def test_a_failed_run_that_validated_nothing_counts_as_one_that_never_arrived(tmp_path):
    def run(name: str, losses: list[float], **more):
        return load_run(run_with_losses(tmp_path / name, losses, **more))

    crashed = run("crashed", [6.0], status="failed", failure={"reason": "killed", "step": 3}, completion=None)
    path = tmp_path / "crashed" / "training_metrics.json"
    save(path.parent, json.loads(path.read_text()) | {"evaluations": []})
    failed = [load_run(path), run("arrived", [6.0, 5.0], status="failed", completion=None,
                                  failure={"reason": "killed", "step": 20}), crashed]  # fmt: skip
    found = time_to_loss_of_arm([run("whole", [6.0, 5.0])], 5.5, failed)
    assert (found["num_reached"], found["num_never_reached"]) == (1, 2)
    assert "2 of 3 runs never reached the target (2 failed)" in found["reason"]
