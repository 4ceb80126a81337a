"""compare_runs.py --to_final_loss: seed by seed, on made-up runs whose answer is known."""

from __future__ import annotations

import pytest
from support.programs import run_here
from support.scaling_examples import run_with_losses

from testbed.analysis.runs.load import find_runs, load_run
from testbed.analysis.scaling.time_to_loss import final_loss_table, pairs_of_seeds


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


def test_a_loss_that_the_first_validation_had_passed_is_a_bound(tmp_path):
    for seed in range(5):
        run_with_losses(tmp_path / "b" / str(seed), [6.0, 5.5, 5.0], 0.2, seed=seed)
        run_with_losses(tmp_path / "a" / str(seed), [4.9, 4.8, 4.7], 0.3, seed=seed)
    pairs = pairs_of_seeds(runs_below(tmp_path / "a"), runs_below(tmp_path / "b"))
    assert "| at most 10 | at most 0.333 | at most 0.500 |" in final_loss_table(pairs, "A", "B")


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
