"""compare_runs.py: verdicts, refusals and warnings on files as training writes them, through the program's own main."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from support.metrics_examples import SHA_OTHER, example_metrics, save, v1_metrics, v20_metrics
from support.programs import run_here

from testbed.analysis.charts.training import comparison_table
from testbed.analysis.comparison.two_arms import compare_arms
from testbed.analysis.runs.arms import Arm
from testbed.analysis.runs.load import load_run


def compare(*words: object) -> tuple[int, str]:
    """Return the exit code and all that was said, on one line."""
    done = run_here("scripts/compare_runs.py", *words)
    return done.returncode, " ".join((done.stdout + done.stderr).split())


def run_file(folder: Path, step_time_s: float = 0.2, *, minute: int = 0, **overrides) -> Path:
    """A short run of its own: own run_id, beginning at 12 o'clock and `minute`."""
    own = {"run_id": f"run-{folder}", "timestamp_utc": f"2026-01-01T{12 + minute // 60}:{minute % 60:02}:00Z"}
    return save(folder, example_metrics(num_steps=6, warmup_steps=1, step_time_s=step_time_s, **{**own, **overrides}))


def arm(folder: Path, speed: float = 1.0, repeats: int = 5, noise: float = 0.002, seed: int = 0, **overrides) -> Path:
    """`repeats` runs under `folder`, whose median throughput is exactly `speed` times that of speed 1.

    Two arms are interleaved: each takes every other minute.
    """
    deviations = np.linspace(-noise, noise, repeats)
    parity = int(sum(map(ord, folder.name)) % 2)
    for number, deviation in enumerate(np.random.default_rng(seed).permutation(deviations)):
        run_file(folder / f"run_{number + 1}", 0.2 / speed * (1 + deviation), minute=2 * number + parity, **overrides)
    return folder


def test_a_verdict_stands_on_the_ratio_of_medians(tmp_path):
    code, said = compare(arm(tmp_path / "a", speed=1.25), "--against", arm(tmp_path / "b"))
    assert code == 0
    assert "Verdict: A is 1.25x as fast as B (95 % interval 1.2" in said
    assert "n = 5 and 5" in said
    assert "Warning" not in said
    said = compare(tmp_path / "b", "--against", tmp_path / "a")[1]
    assert "Verdict: A is slower: 0.80x as fast as B (95 % interval" in said


def test_no_difference_comes_with_what_would_have_been_detected(tmp_path):
    code, said = compare(arm(tmp_path / "a", 1.002, noise=0.02), "--against", arm(tmp_path / "b", noise=0.02))
    assert code == 0
    assert "No detectable difference between A and B (ratio 1.002" in said
    assert re.search(r"5 runs of each would detect a difference of \d\.\d % in 80 % of cases", said)
    assert re.search(r"the observed difference of 0\.2 % takes more than 1,000 runs of each", said)


def test_no_difference_is_not_called_equal_unless_that_is_shown(tmp_path):
    noisy = arm(tmp_path / "noisy", noise=0.03), "--against", arm(tmp_path / "other", noise=0.03)
    said = compare(*noisy)[1]
    assert "No detectable difference" in said
    assert "Equal: Not shown that the throughputs of A and B are equal within 2 %: the interval leaves 0.980" in said
    assert re.search(r"If they are equal, \d+ runs of each show it in 80 % of cases\.", said)
    assert "are equal within 50 %: the interval is in 0.67 to 1.50." in compare(*noisy, "--equivalent", "50%")[1]
    close = arm(tmp_path / "close", 1.01), "--against", arm(tmp_path / "quiet")
    said = compare(*close, "--json", tmp_path / "out.json")[1]
    assert "A is 1.010x as fast as B" in said  # sure, and of no account
    assert "The throughputs of A and B are equal within 2 %: the interval is in 0.980 to 1.020." in said
    assert json.loads((tmp_path / "out.json").read_text())["equivalence"] == {"margin": 0.02, "verdict": "equal"}
    assert "A and B differ by more than 0.2 %." in compare(*close, "--equivalent", "0.2")[1]
    for typed in ("0", "-1", "100%", "much"):
        code, said = compare(*close, f"--equivalent={typed}")
        assert code == 2 and "--equivalent" in said


def test_four_runs_make_no_claim_and_no_failure(tmp_path):
    code, said = compare(arm(tmp_path / "a", 2.0, repeats=4), "--against", arm(tmp_path / "b"))
    assert code == 0
    assert "Not enough repeats for a claim about A against B (ratio 2.00, n = 4 and 5; a claim takes 5 each)" in said
    assert "Not shown that the throughputs of A and B are equal within 2 %: a claim takes 5 runs each." in said


def test_files_and_folders_at_any_depth_name_the_same_runs(tmp_path):
    arm(tmp_path / "sweep" / "a", 1.25)
    arm(tmp_path / "b")
    files = sorted((tmp_path / "sweep").rglob("training_metrics.json"))
    expected = compare(tmp_path / "sweep" / "a", "--against", tmp_path / "b")
    assert compare(*files, "--against", tmp_path / "b") == expected
    assert compare(tmp_path / "sweep", *files, "--against", *(tmp_path / "b").iterdir()) == expected  # none twice
    assert compare(*reversed(files), "--against", tmp_path / "b") == expected


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 7}, "seed 7 against 1337"),
        ({"dataset_sha256": {"train": SHA_OTHER}}, "train data sha256 cccccccc against aaaaaaaa"),
    ],
)
def test_unequal_work_is_refused_with_the_field_and_its_values(tmp_path, change, named):
    sides = arm(tmp_path / "a", 2.0, training_config=change), "--against", arm(tmp_path / "b")
    code, said = compare(*sides, "--json", tmp_path / "out.json")
    assert code == 2
    assert named in said
    assert "faster" not in said
    assert not (tmp_path / "out.json").exists()
    code, said = compare(*sides, "--allow-mismatch", "--json", tmp_path / "out.json")
    assert code == 0
    assert f"Verdict: NOT EQUAL WORK: {named}" in said
    assert "Equal: NOT EQUAL WORK. The throughputs of A and B differ" in said
    record = json.loads((tmp_path / "out.json").read_text())
    assert not record["is_equal_work"]
    assert record["sentences"][0].startswith("NOT EQUAL WORK")
    assert record["mismatches"][0]["field"].replace("_", " ") in named


def test_work_that_a_file_does_not_record_counts_as_unknown(tmp_path):
    old = [save(tmp_path / f"old{number}" / "optimized", v20_metrics()) for number in range(2)]
    code, said = compare(old[0], "--against", arm(tmp_path / "b"))
    assert code == 2
    assert re.search(r"not recorded on both sides: [^:]*weight decay", said)
    code, said = compare(old[0], "--against", old[1], "--allow-mismatch")
    assert code == 0
    assert "NOT EQUAL WORK: not recorded on both sides: " in said
    v1 = save(tmp_path / "v1", v1_metrics())
    assert "PER RANK" in compare(v1, "--against", tmp_path / "b", "--allow-mismatch")[1]


def test_a_faster_arm_that_learns_worse_is_not_called_better(tmp_path):
    worse = example_metrics(num_steps=6)["evaluations"]
    for row in worse:
        row["val_loss"] += 0.02
    code, said = compare(arm(tmp_path / "a", 1.25, evaluations=worse), "--against", arm(tmp_path / "b"))
    assert code == 0
    assert "A is faster than B but learns worse, so it is not faster: final validation loss" in said
    assert "Final validation loss differs by 0.0200, more than 0.0040 (what seeds explain in published" in said
    assert "A is worse" in said
    assert "B learns worse, final validation loss" in compare(tmp_path / "b", "--against", tmp_path / "a")[1]
    said = compare(arm(tmp_path / "c", 0.8, evaluations=worse), "--against", tmp_path / "b")[1]
    assert "A is slower: 0.80x as fast as B" in said
    assert "; A learns worse, final validation loss" in said


def test_seeds_that_vary_give_the_spread_that_losses_are_held_against(tmp_path):
    """Of runs whose seed both sides have; the others are not counted."""
    for side, added, seeds in (("a", 0.01, range(6)), ("b", 0.0, range(5))):
        for seed in seeds:
            rows = example_metrics(num_steps=6)["evaluations"]
            for row in rows:
                row["val_loss"] += 0.02 * seed + added
            config = {"seed": seed}
            run_file(tmp_path / side / f"{seed}", 0.2 + seed / 1e4, evaluations=rows, training_config=config)
    code, said = compare(tmp_path / "a", "--against", tmp_path / "b")
    assert code == 0  # the same seeds on both sides are equal work
    assert "differs by 0.0100, not more than 0.0800 (the seed-to-seed spread of B)" in said
    assert "learns worse" not in said
    assert "no run of B has its seed 5" in said and "n = 5 and 5" in said


def test_instrumented_and_unfinished_runs_are_named_and_not_counted(tmp_path):
    arm(tmp_path / "a", 1.25)
    profiling = {"profile": True, "profile_steps": 3}
    run_file(tmp_path / "a" / "profiled", 9.0, instrumented=True, settings=profiling)
    run_file(tmp_path / "a" / "stopped", 9.0, status="failed", completion=None, failure={"reason": "x", "step": 6})
    (tmp_path / "a" / "broken").mkdir()
    (tmp_path / "a" / "broken" / "training_metrics.json").write_text("{")
    code, said = compare(tmp_path / "a", "--against", arm(tmp_path / "b"))
    assert code == 0
    assert "A is 1.25x as fast as B" in said
    assert "profiled/training_metrics.json: it is instrumented" in said
    assert "stopped/training_metrics.json: its status is failed" in said
    assert "broken/training_metrics.json" in said


def test_code_machine_and_order_that_differ_are_warnings(tmp_path):
    arm(tmp_path / "a", git_commit="1" * 40, git_dirty=True, host={"hostname": "node1"}, env={"torch_version": "2.12"})
    for number in range(5):
        run_file(tmp_path / "b" / f"{number}", 0.2 + number / 1e4, minute=60 + number)
    code, said = compare(tmp_path / "a", "--against", tmp_path / "b")
    assert code == 0
    for text in (
        "commits differ: 111111111111 against 000000000000",
        "uncommitted changes",
        "machine differs: node1 against node0",
        "torch version differs: 2.12 against 2.13.0",
        "not interleaved: the runs of A were made before those of B",
        "a verdict supposes a quiet machine",
    ):
        assert text in said, text


def test_settings_that_differ_are_shown(tmp_path):
    a = arm(tmp_path / "a", settings={"run_type": "ddp", "bucket_cap_mb": 50}, world_size=1)
    said = compare(a, "--against", arm(tmp_path / "b", settings={"run_type": "ddp", "bucket_cap_mb": 25}))[1]
    assert "They differ in: ranks 1 / 2, bucket_cap_mb 50 / 25" in said
    assert "repeats of one configuration" in compare(tmp_path / "b", "--against", arm(
        tmp_path / "c", settings={"run_type": "ddp", "bucket_cap_mb": 25}))[1]  # fmt: skip


def test_devices_and_deepspeed_options_that_are_no_settings_make_another_configuration(tmp_path):
    one_process = {"settings": {"run_type": "dp"}, "training_config": {"run_type": "dp"}, "world_size": 1}
    for devices in (2, 4):
        arm(tmp_path / "dp" / f"{devices}", speed=devices / 2, hardware={"num_devices": devices}, **one_process)
    said = compare(tmp_path / "dp" / "2", "--against", tmp_path / "dp" / "4")[1]
    assert "They differ in: devices 2 / 4" in said
    assert "A holds 2 configurations" in compare(tmp_path / "dp", "--against", arm(tmp_path / "b"))[1]
    selected = {"fp16_enabled": False, "wall_clock_breakdown": False, "zero_stage": 1}
    for name, sha256 in (("one", "1" * 64), ("two", "2" * 64)):
        config = {"path": None, "sha256": sha256, "file_sha256": None, "selected": selected, "effective": {}}
        arm(tmp_path / "json" / name, speed=1.1 if name == "one" else 1.0, deepspeed_config=config)
    said = compare(tmp_path / "json" / "one", "--against", tmp_path / "json" / "two")[1]
    assert "They differ in: DeepSpeed configuration 11111111 / 22222222" in said
    code, said = compare(tmp_path / "json", "--against", tmp_path / "b")
    assert code == 2
    assert "A holds 2 configurations" in said
    assert "DeepSpeed configuration 22222222: " in said


def test_an_unstable_arm_does_not_excuse_its_own_worse_loss(tmp_path):
    for side, losses in (("a", [8.1, 8.1, 8.1, 8.1, 10.6]), ("b", [7.6, 7.6, 7.6, 7.6, 7.7])):
        for number, loss in enumerate(losses):
            rows = example_metrics(num_steps=6)["evaluations"]
            rows[-1]["val_loss"] = loss
            run_file(tmp_path / side / f"{number}", 0.2 + number / 1e4, evaluations=rows)
    said = compare(tmp_path / "a", "--against", tmp_path / "b")[1]
    assert "differs by 0.5000, more than 0.1000 (the run-to-run spread of B); A is worse" in said
    assert "(the run-to-run spread of A); B is worse" in compare(tmp_path / "b", "--against", tmp_path / "a")[1]
    arms = [Arm("ddp", tuple(load_run(path) for path in sorted((tmp_path / side).iterdir()))) for side in "ab"]
    assert compare_arms(*arms, ("ddp", "ddp")).worse_side == "a"
    assert compare_arms(*reversed(arms), ("ddp", "ddp")).worse_side == "b"


def test_files_of_equal_step_times_under_other_run_ids_are_one_run(tmp_path):
    times = np.random.default_rng(1).uniform(0.2, 0.3, 20)
    for side in "ab":
        for number in range(5):
            metrics = example_metrics(run_id=f"{side}{number}")
            for row, seconds in zip(metrics["steps"], times * (1 if side == "a" else 1 + number / 100), strict=True):
                row["step_time_s"] = float(seconds)
            save(tmp_path / side / str(number), metrics)
    code, said = compare(tmp_path / "b", "--against", tmp_path / "a")
    assert code == 2 and "the same step times" in said and "a copy is not a repeat" in said


def test_the_json_file_holds_every_value_and_where_it_is_from(tmp_path):
    compare(arm(tmp_path / "a", 1.25), "--against", arm(tmp_path / "b"), "--json", tmp_path / "out.json")
    record = json.loads((tmp_path / "out.json").read_text())
    assert record["verdict"] == "faster"
    assert record["ratio"]["ratio"] == pytest.approx(1.25)
    assert record["ratio"]["low"] < 1.25 < record["ratio"]["high"]
    assert len(record["a"]["runs"]) == len(record["quantities"][0]["b"]) == 5
    assert record["a"]["runs"][0]["git_commit"] == "0" * 40
    assert record["repeats_to_detect"]["5%"] == 5
    p95 = next(row for row in record["quantities"] if row["name"] == "step time, p95")
    assert p95["ratio"]["ratio"] == pytest.approx(0.8)


def test_what_is_typed_wrong_is_one_sentence_and_exit_code_2(tmp_path):
    good, other = arm(tmp_path / "a"), arm(tmp_path / "b")
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.json").write_text("no json")
    run_file(tmp_path / "profiled" / "1", instrumented=True, settings={"profile": True})
    save(tmp_path / "copy", json.loads((good / "run_1" / "training_metrics.json").read_text()))
    arm(tmp_path / "mixed" / "one", settings={"run_type": "ddp"})
    arm(tmp_path / "mixed" / "two", settings={"run_type": "fsdp"})
    for arguments, sentence in (
        ((tmp_path / "none", "--against", other), "does not exist"),
        ((tmp_path / "empty", "--against", other), "no training_metrics.json under"),
        ((tmp_path / "text.json", "--against", other), "is not JSON"),
        ((good, "--against", good), "stands on both sides"),
        ((good, tmp_path / "copy", "--against", other), "is a copy of"),
        ((tmp_path / "mixed", "--against", other), "A holds 2 configurations"),
        ((tmp_path / "profiled", "--against", other), "A has no run that counts: it is instrumented"),
        ((good, "--against", other, "--json", tmp_path), "must be a file in a folder that exists"),
    ):
        code, said = compare(*arguments)
        assert code == 2, arguments
        assert sentence in said
        assert said.startswith("compare_runs.py: error: ")


def test_a_compiled_strategy_against_an_uncompiled_one_has_no_speed_up(tmp_path):
    """The ratio would be the compiler's. Runs of one strategy may differ in it, as then it is what is compared."""
    for name, run_type, compiled in (("a", "ddp", True), ("b", "allreduce", False), ("c", "ddp", False)):
        run_file(tmp_path / name, training_config={"run_type": run_type, "compile": compiled})
    code, said = compare(tmp_path / "a", "--against", tmp_path / "b")
    assert code == 2 and "compile, of unlike run types" in said
    assert "NOT EQUAL WORK" in compare(tmp_path / "a", "--against", tmp_path / "b", "--allow-mismatch")[1]
    code, said = compare(tmp_path / "a", "--against", tmp_path / "c")
    assert code == 0 and "NOT EQUAL" not in said


def test_a_difference_that_four_decimals_do_not_show_is_said_to_be_small(tmp_path):
    """Not as -0.0000."""
    steps = example_metrics(num_steps=6)["steps"]
    steps[-1]["loss"] -= 1e-6
    _, said = compare(run_file(tmp_path / "b", steps=steps), "--against", run_file(tmp_path / "a"))
    assert "Final training loss differs by less than 0.0001" in said and "-0.0000" not in said


def test_a_file_that_contradicts_itself_is_refused_with_both_figures(tmp_path):
    """A summary three times its own rows was 2.99x; recomputing one section alone made no difference."""
    other = run_file(tmp_path / "b")
    faster = run_file(tmp_path / "a", summary={"mean_tokens_per_sec_global": 9000.0})
    code, said = compare(faster, "--against", other)
    assert code == 2 and re.search(r"A: \S+ contradicts itself: its summary says [\d,.]+ tokens/s, its steps", said)
    twice = [{"activation_checkpointing": value} for value in ("none", "block")]
    recomputing = run_file(tmp_path / "c", training_config=twice[0], settings=twice[1])
    code, said = compare(recomputing, "--against", other)
    assert code == 2 and "its training_config has activation_checkpointing none, its settings block" in said


def test_a_side_that_met_a_busy_machine_is_named_with_the_cores_that_it_used(tmp_path):
    """A steady neighbour made a run five times slower, and they differed "in nothing"."""
    for name, percent in (("a", 196.0), ("b", 97.0)):
        sampled = {"interval_s": 1.0, "per_rank": [{"rank": 0, "num_samples": 9, "cpu_percent_mean": percent,
                   "rss_bytes_mean": 1e9, "rss_bytes_max": 10**9, "gpu_percent_mean": None,
                   "gpu_memory_used_bytes_max": None}]}  # fmt: skip
        metrics = example_metrics(num_steps=40, world_size=1, run_id=name, step_time_s=0.2 if name == "a" else 0.9)
        metrics["hardware"]["cpu_threads_per_rank"] = 2
        metrics["timing"]["step_time_p95_above_median"] = 0.01
        save(tmp_path / name, metrics | {"utilization": sampled})
    _, said = compare(tmp_path / "a", "--against", tmp_path / "b")
    assert "1 of 1 runs of B met a busy machine" in said and "it used 1.0 of its 2 cores" in said
    assert "runs of A met" not in said
    table = comparison_table([load_run(tmp_path / name / "training_metrics.json") for name in "ab"])
    assert "[2]: it used 1.0 of its 2 cores" in " ".join(table.split())


def test_where_both_losses_differ_the_validation_loss_says_who_learns_worse(tmp_path):
    """An arm that fits its training data better and generalises worse has learnt worse."""
    sides = []
    for name, train, validation in (("a", -0.5, 0.5), ("b", 0.0, 0.0)):
        metrics = example_metrics(num_steps=6)
        for row in metrics["steps"]:
            row["loss"] += train
        for row in metrics["evaluations"]:
            row["val_loss"] += validation
        folder = arm(tmp_path / name, evaluations=metrics["evaluations"])
        for path in folder.rglob("training_metrics.json"):
            content = json.loads(path.read_text())
            for row, changed in zip(content["steps"], metrics["steps"], strict=True):
                row["loss"] = changed["loss"]
            save(path.parent, content)
        sides.append(Arm(name, tuple(load_run(path) for path in sorted(folder.iterdir()))))
    assert [loss.is_unequal for loss in compare_arms(*sides).losses] == [True, True]
    assert compare_arms(*sides).worse_side == "a"
    assert compare_arms(*reversed(sides)).worse_side == "b"
