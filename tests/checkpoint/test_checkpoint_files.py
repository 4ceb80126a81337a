"""Checkpoints as files: what is whole and what is not, what a start takes, refuses and records, what saving leaves."""

from __future__ import annotations

import hashlib
import json
import os
import time

import pytest
import torch
from support.checkpoint_files_cases import flip_a_bit
from support.checkpoint_folders import STEPS, Folder, Weights, contents, refusal
from support.metrics_examples import SHA_OTHER, SHA_VAL, example_metrics, save, v1_metrics
from support.settings import launch

from testbed.checkpoint import changed_settings, manifest
from testbed.checkpoint.folders import read_description
from testbed.checkpoint.load import load
from testbed.distributed.process_group import seed_of_rank
from testbed.metrics.file import check_metrics, read_metrics, write_metrics

pytestmark = pytest.mark.usefixtures("one_process")


def test_the_manifest_has_every_file_with_its_size_and_hash(run):
    folder = run.checkpoints / "step_000004"
    listed = json.loads((folder / "manifest.json").read_text())["files"]
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    del found["manifest.json"]
    assert set(found) == {"checkpoint.json", "training_metrics.json", "random_state_rank0.pt", "part/weights.pt"}
    assert listed == {
        name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()} for name, content in found.items()
    }
    assert len(read_metrics(folder / "training_metrics.json")["steps"]) == 4


DAMAGE = {
    "cut by one byte": (
        lambda at: (at / "part/weights.pt").write_bytes((at / "part/weights.pt").read_bytes()[:-1]),
        ["part/weights.pt", "bytes"],
    ),
    "a bit flipped": (lambda at: flip_a_bit(at / "random_state_rank0.pt"), ["random_state_rank0.pt", "other bytes"]),
    "a file missing": (lambda at: (at / "part/weights.pt").unlink(), ["weights.pt is missing"]),
    "its description missing": (lambda at: (at / "checkpoint.json").unlink(), ["checkpoint.json is missing"]),
    "the manifest missing": (lambda at: (at / "manifest.json").unlink(), ["manifest.json is missing"]),
    "the manifest half": (lambda at: os.truncate(at / "manifest.json", 50), ["manifest.json", "not JSON"]),
    "the manifest empty": (lambda at: (at / "manifest.json").write_text("{}"), ["manifest.json does not list"]),
    "a manifest that leads out": (
        lambda at: (at / "manifest.json").write_text(
            json.dumps(
                {"files": {"checkpoint.json": {"bytes": 1, "sha256": ""}, "../../x": {"bytes": 1, "sha256": ""}}}
            )
        ),
        ["'../../x'"],
    ),
}


@pytest.mark.parametrize(("damage", "said"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_checkpoint_is_skipped_and_the_reason_said(run, capsys, damage, said):
    damage(run.checkpoints / "step_000004")
    start = run.begin("--resume")
    assert start.step == 2
    words = next(line for line in capsys.readouterr().out.splitlines() if "skipped" in line)
    assert "step_000004" in words and all(part in words for part in said)
    assert run.names() == ["step_000002", "step_000004.damaged"], "no later start may take it for whole"
    explicit = refusal(run, "--resume", str(run.checkpoints / "step_000004.damaged"))
    assert "damaged" in explicit or "no whole checkpoint" in explicit


def test_no_bit_of_any_file_can_flip_unseen(run):
    folder = run.checkpoints / "step_000004"
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        whole = path.read_bytes()
        for place in (0, len(whole) // 2, len(whole) - 3):
            flip_a_bit(path, place)
            assert manifest.why_damaged(folder) is not None, (path, place)
            path.write_bytes(whole)
    assert manifest.why_damaged(folder) is None


def test_when_all_are_damaged_the_run_begins_anew_and_deletes_none(run, capsys):
    for step in (2, 4):
        flip_a_bit(run.checkpoints / f"step_{step:06d}" / "part/weights.pt")
    start = run.begin("--resume")
    assert start.checkpoint is None and start.metrics is not None
    assert "no whole checkpoint, so the run begins with its first step" in capsys.readouterr().out
    assert run.names() == ["step_000002.damaged", "step_000004.damaged"]


@pytest.mark.parametrize("name", ["manifest.json", "part/weights.pt"])
def test_what_cannot_be_read_is_no_reason_to_begin_anew(run, monkeypatch, name):
    """A disk or a network that is away for a moment must not cost a run."""
    open_file = os.open

    def open_or_fail(path, *more, **named):
        if str(path).endswith(name):
            raise OSError(5, "Input/output error", str(path))
        return open_file(path, *more, **named)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", open_or_fail)
        with pytest.raises(ValueError, match="Input/output error"):
            run.begin("--resume")
    assert run.names() == ["step_000002", "step_000004"]


def test_auto_begins_in_an_empty_or_absent_folder_and_says_so(token_files, tmp_path, capsys):
    for number, path in enumerate((tmp_path / "absent", tmp_path)):
        start = Folder(token_files, path).begin("--resume", "auto")
        assert start.checkpoint is None and start.metrics is None
        assert capsys.readouterr().out.count("begins with its first step") == 1, number


def test_a_complete_run_is_left_alone(run):
    metrics = read_metrics(run.path / "training_metrics.json")
    last = metrics["steps"][-1]
    metrics["steps"] += [last | {"step": step} for step in range(6, STEPS + 1)]
    done = {"run_complete_file": "RUN_COMPLETE.txt", "printed_marker": True, "timestamp_utc": "2026-01-01T12:00:00Z"}
    metrics |= {"status": "complete", "completion": done}
    (run.path / "RUN_COMPLETE.txt").write_text("done")
    metrics["settings"] = run.settings().as_recorded()
    write_metrics(run.path / "training_metrics.json", metrics)
    before = contents(run.path)
    assert run.begin("--resume").is_complete
    assert contents(run.path) == before
    for step in (2, 4):
        flip_a_bit(run.checkpoints / f"step_{step:06d}" / "part/weights.pt")
    before = contents(run.path)
    assert run.begin("--resume").is_complete, "it needs none of its checkpoints"
    assert contents(run.path) == before
    for step in (2, 4):
        flip_a_bit(run.checkpoints / f"step_{step:06d}" / "part/weights.pt")
    again = run.begin("--resume", str(run.checkpoints / "step_000002"))
    assert not again.is_complete and again.step == 2, "who names a checkpoint wants to go on from it"


def test_a_finished_run_is_not_trained_over_from_an_earlier_checkpoint(token_files, tmp_path):
    """It has --save_at_end off, or the last checkpoint was deleted."""
    run = Folder(token_files, tmp_path / "run")
    run.train(range(1, STEPS + 1), {4}).write("complete")
    longer = ("--resume", "--max_train_steps", str(STEPS + 4), "--allow-setting-change")
    said = refusal(run, *longer)
    assert f"complete with {STEPS} steps" in said and "checkpoint is of step 4" in said and "--checkpoint_path" in said
    finished = Folder(token_files, tmp_path / "finished")
    finished.train(range(1, STEPS + 1), {4, STEPS}).write("complete")
    assert finished.begin(*longer).step == STEPS


def test_a_run_that_was_stopped_goes_back_to_the_last_whole_checkpoint(token_files, tmp_path):
    run = Folder(token_files, tmp_path / "run")
    run.train(range(1, 7), {4, 6}, "--stop_at_step", "6").write("complete")
    flip_a_bit(run.checkpoints / "step_000006" / "checkpoint.json")
    assert run.begin("--resume").step == 4


def test_nothing_is_lost_where_no_step_was(token_files, tmp_path):
    run = Folder(token_files, tmp_path / "run")
    run.train(range(1, 7), {6}, "--stop_at_step", "6").write("complete")
    time.sleep(0.05)
    recorder = run.train(range(7, 8), set(), start=run.begin("--resume"))
    segment = recorder.metrics["segments"][1]
    assert (segment["lost_steps"], segment["lost_s"]) == (0, 0.0)


def test_a_validation_that_came_after_the_save_is_not_done_again(run):
    """It stays in the run's file, though not in the checkpoint's copy of it."""
    assert not run.begin("--resume").is_validated
    metrics = read_metrics(run.path / "training_metrics.json")
    row = example_metrics(num_steps=4, warmup_steps=1)["evaluations"][-1]
    metrics["evaluations"] = [row | {"step": 2, "val_loss": 5.0}, row | {"step": 4, "val_loss": 6.0}]
    write_metrics(run.path / "training_metrics.json", metrics)
    start = run.begin("--resume")
    assert start.step == 4 and start.is_validated and start.best_val_loss == 5.0


@pytest.mark.parametrize("marks", [[], ["RUN_COMPLETE.txt"]])
def test_what_was_measured_of_weights_goes_when_they_are_trained_on(run, marks):
    for name in ("inference_metrics.json", "config.json", *marks):
        (run.path / name).write_text("{}")
    assert run.begin("--resume", str(run.checkpoints / "step_000002")).step == 2
    left = {path.name for path in run.path.iterdir()}
    assert not left & {"inference_metrics.json", *marks} and "config.json" in left


def test_a_complete_run_without_checkpoints_is_not_taken_for_another(token_files, tmp_path):
    """Nor replaced: its weights would be lost."""
    folder = Folder(token_files, tmp_path / "run")
    recorder = folder.train(range(1, STEPS + 1), set())
    recorder.metrics["settings"] = folder.settings().as_recorded()
    recorder.close(None)
    assert folder.begin("--resume").is_complete
    assert "--seed is 7, was 42" in refusal(folder, "--resume", "--seed", "7")
    assert "--max_train_steps is 20, was 10" in refusal(folder, "--resume", "--max_train_steps", "20")
    assert SHA_OTHER in refusal(folder, "--resume", sha256={"train": SHA_OTHER, "val": SHA_VAL})
    save(folder.path, v1_metrics())
    assert "earlier version" in refusal(folder, "--resume")


def test_settings_that_change_the_work_are_refused_and_each_is_named(run):
    words = refusal(run, "--resume", "--learning_rate", "0.1", "--seed", "7", "--eval_every", "3")
    assert "--learning_rate is 0.1, was 0.0006" in words and "--seed is 7, was 42" in words
    assert "--allow-setting-change" in words and "--eval_every" not in words
    assert "min_learning_rate" not in words, "it follows from what was typed"


def test_a_model_of_another_shape_is_refused_whatever_is_allowed(run):
    words = refusal(run, "--resume", "--num_layers", "3", "--allow-setting-change")
    assert "--num_layers is 3, was 2" in words and "--allow-setting-change to go on" not in words


def test_an_allowed_change_is_recorded_and_the_run_compares_with_none(run):
    start = run.begin("--resume", "--weight_decay", "0.2", "--allow_setting_change")
    assert start.setting_changes == ({"name": "weight_decay", "before": 0.1, "now": 0.2},)
    metrics = run.train(range(5, 7), set(), start=start).metrics
    check_metrics(metrics)
    assert metrics["segments"][1]["setting_changes"] == [{"name": "weight_decay", "before": 0.1, "now": 0.2}]
    assert metrics["training_config"]["math_changes"] == ["from step 5 on --weight_decay is 0.2, was 0.1"]
    third = run.train(
        range(7, 8), set(), start=run.begin("--resume", "--weight_decay", "0.2", "--allow-setting-change")
    )
    words = third.metrics["training_config"]["math_changes"]
    assert words[0] == "from step 5 on --weight_decay is 0.2, was 0.1", "what a start did stays said"


def test_a_bin_file_that_changed_is_refused_and_one_that_moved_is_not(run, tmp_path):
    words = refusal(run, "--resume", sha256={"train": SHA_OTHER, "val": SHA_VAL})
    assert f"--train_data_path is 'SHA-256 {SHA_OTHER}'" in words and "--val_data_path" not in words
    moved = tmp_path / "moved"
    moved.mkdir()
    for path in run.token_files[0].parent.iterdir():
        (moved / path.name).write_bytes(path.read_bytes())
    assert run.begin("--resume", "--train_data_path", str(moved / run.token_files[0].name)).step == 4


def test_other_ranks_and_data_parallel_run_types_may_go_on(run):
    settings = run.settings("--resume", "--run_type", "ddp", world_size=2)
    saved = read_description(run.checkpoints / "step_000004")
    changes = changed_settings.differences(settings, saved)
    assert {"name": "run_type", "before": "baseline", "now": "ddp"} in changes
    assert changed_settings.changes_of_work(changes) == []
    assert not changed_settings.is_same_form(saved, settings, launch(2))
    native = run.settings("--resume", "--run_type", "ddp", "--gradient_compression", "bf16", world_size=2)
    names = {change["name"] for change in changed_settings.changes_of_work(changed_settings.differences(native, saved))}
    assert names == {"gradient_compression", "math_changes"}, "another mathematics is other work"


def test_a_micro_batch_that_was_found_is_found_again_on_other_ranks(run):
    """What fits depends on the ranks; on the same ones it is the one that the run began with."""
    saved = read_description(run.checkpoints / "step_000004")
    auto = ("--resume", "--micro_batch_size_per_gpu", "auto")
    same = changed_settings.settings_to_go_on(run.settings(*auto), saved)
    assert same.batch.micro_batch_size_per_gpu == saved.settings["micro_batch_size_per_gpu"]
    other = run.settings(*auto, "--run_type", "ddp", world_size=2)
    assert changed_settings.settings_to_go_on(other, saved).finds_micro_batch
    names = {change["name"] for change in changed_settings.differences(other, saved)}
    assert "run_type" in names and "micro_batch_size_per_gpu" not in names, "it is not known yet"


def test_the_same_form_is_loaded_bit_for_bit_and_another_by_name(run):
    start = run.begin("--resume")
    same, other = Weights(), Weights()
    torch.manual_seed(1)
    assert load(start.checkpoint, same, run.settings("--resume"), launch())
    assert (same.number.item(), same.loaded) == (4.0, "bit for bit")
    continued = torch.rand(3)
    assert not load(start.checkpoint, other, run.settings("--resume", "--run_type", "ddp", world_size=2), launch(2))
    assert (other.number.item(), other.loaded) == (4.0, "by name")
    assert not torch.equal(torch.rand(3), continued), "two ranks cannot both go on with one rank's numbers"
    seeds = {seed_of_rank(seed, rank, step) for seed in (1, 2) for rank in (0, 1) for step in (0, 4)}
    assert len(seeds) == 8


def test_a_start_that_ends_before_its_checkpoint_is_refused(run):
    words = refusal(run, "--resume", "--stop_at_step", "3")
    assert "is past the last step of this start, 3" in words and "--stop_at_step" in words


def test_a_profile_that_no_longer_fits_is_refused_in_advance(run):
    assert "--profile looks at 5 steps" in refusal(run, "--resume", "--profile", "--timing_warmup_steps", "2")
    assert run.begin("--resume", "--profile", "--timing_warmup_steps", "1").step == 4


def test_going_back_keeps_the_later_checkpoint_under_another_name(run):
    start = run.begin("--resume", str(run.checkpoints / "step_000002"))
    assert start.step == 2 and run.names() == ["step_000002", "step_000004.abandoned"]
    assert run.begin("--resume").step == 2, "auto must not take what this run no longer follows"


def test_another_run_goes_on_from_this_ones_checkpoint(run, token_files, tmp_path):
    other = Folder(token_files, tmp_path / "other")
    start = other.begin("--resume", str(run.path))
    assert start.is_other_run and start.step == 4
    metrics = other.train(range(5, 7), {6}, start=start).metrics
    check_metrics(metrics)
    assert [row["step"] for row in metrics["steps"]] == [5, 6] and len(metrics["segments"]) == 1
    assert metrics["segments"][0]["resumed_from"] == str(run.checkpoints / "step_000004")
    assert metrics["segments"][0]["first_step"] == 5
    assert metrics["training_config"]["math_changes"] == [f"steps 1 to 4 trained in run {metrics['run_id']}"]
    assert run.names() == ["step_000002", "step_000004"]
    assert other.begin("--resume").step == 6, "and goes on from its own"
    third = Folder(token_files, tmp_path / "third")
    third.train(range(1, 3), {2})
    assert "already holds one" in refusal(other, "--resume", str(third.path))


def test_metrics_that_cannot_be_read_are_taken_from_the_checkpoint(run, capsys):
    (run.path / "training_metrics.json").write_text("{")
    start = run.begin("--resume")
    assert len(start.metrics["steps"]) == 4 and start.is_record_cut_off
    assert "the copy in the checkpoint is used" in capsys.readouterr().out
    segment = run.train(range(5, 6), set(), start=start).metrics["segments"][1]
    assert segment["lost_steps"] is None and segment["lost_s"] is None, "unknown is null"


def test_a_checkpoint_whose_metrics_are_of_an_earlier_version_is_refused(run):
    folder = run.checkpoints / "step_000004"
    (folder / "training_metrics.json").write_text(json.dumps(v1_metrics()))
    (folder / "manifest.json").unlink()
    manifest.write_manifest(folder)
    assert "is of version 1, and this program goes on from 2.2" in refusal(run, "--resume")


def test_metrics_that_cannot_be_read_without_a_checkpoint_end_the_start(token_files, tmp_path):
    folder = Folder(token_files, tmp_path / "run")
    folder.path.mkdir()
    (folder.path / "training_metrics.json").write_text("{")
    assert "is not JSON" in refusal(folder, "--resume")
    assert (folder.path / "training_metrics.json").read_text() == "{"
