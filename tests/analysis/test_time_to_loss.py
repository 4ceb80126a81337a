"""Time to loss by hand: the line between two validations, runs that never arrive, the protocol, and seed by seed."""

from __future__ import annotations

import dataclasses

import pytest
from support.programs import run_here
from support.scaling_examples import arm_of, report_of, run_with_losses

from testbed.analysis.runs.load import find_runs, load_run
from testbed.analysis.scaling.tables import scaling_table
from testbed.analysis.scaling.time_to_loss import final_loss_table, pairs_of_seeds, time_to_loss, time_to_loss_of_arm


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
    assert whole["num_seeds"] == 5
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
    never = report_of(tmp_path, "time_to_loss", target=4.0)
    assert arm_of(never, "ddp", 2)["speedup"] is None and "never reached" in arm_of(never, "ddp", 2)["reason"]


# --- compare_runs.py --to_final_loss


def runs_below(folder) -> list:
    return [load_run(path) for path in find_runs(folder)]


def write_arms(folder) -> None:
    """Validations every 10 steps. Each reference ends at 5.0 + seed / 100 after 30 steps of 0.2 s; the other is there
    half-way between its validations at 10 and 20, in steps of 0.3 s."""
    for seed in range(5):
        last = 5.0 + seed / 100
        run_with_losses(folder / "b" / str(seed), [6.0, 5.5, last], 0.2, seed=seed)
        run_with_losses(folder / "a" / str(seed), [last + 0.2, last - 0.2, last - 0.4], 0.3, seed=seed)


def test_each_seed_has_a_target_of_its_own(tmp_path):
    write_arms(tmp_path)
    pairs = pairs_of_seeds(runs_below(tmp_path / "a"), runs_below(tmp_path / "b"))
    assert [pair.seed for pair in pairs] == [0, 1, 2, 3, 4]
    for pair in pairs:
        assert pair.ended.loss == pytest.approx(5.0 + pair.seed / 100) and pair.ended.step == 30
        assert pair.share_of_steps == pytest.approx(0.5)
        assert pair.share_of_time == pytest.approx(0.75)
    early = [
        dataclasses.replace(pair, reached=dataclasses.replace(pair.reached, is_upper_bound=True)) for pair in pairs
    ]
    assert "| at most 15 | at most 0.500 | at most 0.750 |" in final_loss_table(early, "A", "B")
    text = final_loss_table(pairs, "Muon", "AdamW")
    assert "| 3 | 5.0300 | 30 | 15 | 0.500 | 0.750 |" in text
    assert "Median over 5 seeds: 0.500 [0.500, 0.500] of the tokens, 0.750 [0.750, 0.750] of the time." in text


def test_a_run_that_never_gets_there_makes_no_median_and_exit_code_1(tmp_path):
    write_arms(tmp_path)
    run_with_losses(tmp_path / "a" / "5", [6.0, 5.9, 5.8], 0.3, seed=5)
    run_with_losses(tmp_path / "b" / "5", [6.0, 5.5, 5.0], 0.2, seed=5)
    done = run_here("scripts/compare_runs.py", tmp_path / "a", "--against", tmp_path / "b", "--to_final_loss")
    assert done.returncode == 1 and "never" in done.stdout and "Median" not in done.stdout


def test_a_run_that_did_not_end_is_no_reference(tmp_path):
    write_arms(tmp_path)
    failed = {"status": "failed", "failure": {"reason": "killed", "step": 30}, "completion": None}
    run_with_losses(tmp_path / "b" / "0", [6.0, 5.5, 5.0], 0.2, seed=0, **failed)
    done = run_here("scripts/compare_runs.py", tmp_path / "a", "--against", tmp_path / "b", "--to_final_loss")
    assert done.returncode == 2 and "is not complete" in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seed": 99}, "other seeds"),
        ({"seed": 1}, "a seed stands twice"),
        ({"seed": 4, "training_config": {"global_batch_size": 64}}, "differ in global_batch_size"),
    ],
)
def test_what_makes_no_pair_is_refused(tmp_path, change, words):
    write_arms(tmp_path)
    run_with_losses(tmp_path / "a" / "4", [5.2, 4.9, 4.8], 0.3, **change)
    with pytest.raises(ValueError, match=words):
        pairs_of_seeds(runs_below(tmp_path / "a"), runs_below(tmp_path / "b"))
