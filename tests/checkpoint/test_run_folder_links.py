"""Start and resume where checkpoints are links or were renamed."""

from __future__ import annotations

import shutil

import pytest
from support.checkpoint_folders import Folder, Weights, move_to_larger_disk, refusal

from testbed.checkpoint import folders, manifest

pytestmark = pytest.mark.usefixtures("one_process")


@pytest.mark.parametrize("by", ["auto", "run", "path", "resolved path"])
@pytest.mark.parametrize("linked", ["checkpoints", "step_000004"])
def test_checkpoints_on_a_larger_disk_are_gone_on_with_and_saved_there(run, tmp_path, linked, by):
    folder = run.checkpoints if linked == "checkpoints" else run.checkpoints / linked
    move_to_larger_disk(folder, tmp_path / "larger")
    newest = run.checkpoints / "step_000004"
    given = {"auto": "auto", "run": run.path, "path": newest, "resolved path": newest.resolve()}[by]
    start = run.begin("--resume", str(given))
    assert start.step == 4 and not start.is_other_run
    metrics = run.train(range(5, 8), {6, 7}, "--keep_last", "2", start=start).metrics
    assert [row["step"] for row in metrics["steps"]] == list(range(1, 8)) and len(metrics["segments"]) == 2
    assert run.names() == ["step_000006", "step_000007"]
    assert all(manifest.why_damaged(run.checkpoints / name) is None for name in run.names())
    if linked == "checkpoints":
        assert sorted(path.name for path in (tmp_path / "larger" / linked).iterdir()) == run.names()
    else:
        assert manifest.why_damaged(tmp_path / "larger" / linked) is None, "of a link goes the link"


def test_a_run_begins_with_a_link_to_an_empty_folder(token_files, tmp_path):
    folder = Folder(token_files, tmp_path / "run")
    folder.path.mkdir()
    (tmp_path / "larger").mkdir()
    folder.checkpoints.symlink_to(tmp_path / "larger")
    for flags in ([], ["--resume"], ["--overwrite"]):
        assert folder.begin(*flags).checkpoint is None and folder.checkpoints.is_symlink()
    folder.train(range(1, 3), {2})
    assert [path.name for path in (tmp_path / "larger").iterdir()] == ["step_000002"]


def test_the_same_command_resumes_its_own_run_beside_linked_checkpoints(run, token_files, tmp_path):
    move_to_larger_disk(run.checkpoints, tmp_path / "larger")
    other = Folder(token_files, tmp_path / "other")
    other.train(range(5, 7), {6}, start=other.begin("--resume", str(run.path)))
    again = other.begin("--resume", str(run.path))
    assert again.step == 6 and not again.is_other_run


@pytest.mark.parametrize("flags", [[], ["--resume"], ["--overwrite"]])
def test_a_link_that_leads_nowhere_is_refused_before_anything_begins_anew(run, tmp_path, flags):
    move_to_larger_disk(run.checkpoints, tmp_path / "larger")
    (tmp_path / "larger").rename(tmp_path / "unmounted")
    words = refusal(run, *flags)
    assert f"is a link to {tmp_path / 'larger' / 'checkpoints'}" in words and "mount or make it" in words


def test_a_renamed_checkpoint_is_no_reason_to_begin_anew_nor_lost(run):
    """Neither set aside nor counted by --keep_last nor deleted: a person says what it is to be called."""
    shutil.rmtree(run.checkpoints / "step_000002")
    renamed = (run.checkpoints / "step_000004").rename(run.checkpoints / "step_000009")
    for flags in (["--resume"], ["--resume", str(renamed)], ["--resume", str(run.path)]):
        words = refusal(run, *flags)
        assert str(renamed) in words and "another step than the 4" in words and "name it step_000004" in words
    renamed.rename(run.checkpoints / "step_000004")
    assert run.begin("--resume").step == 4


def test_a_renamed_checkpoint_is_not_deleted_as_an_old_one(run):
    renamed = (run.checkpoints / "step_000004").rename(run.checkpoints / "step_000001")
    assert str(renamed) in refusal(run, "--resume"), "--keep_last would take it for the oldest"


def test_a_damaged_description_is_damage_and_no_other_name(run):
    path = run.checkpoints / "step_000004" / "checkpoint.json"
    path.write_text(path.read_text().replace('"step": 4', '"step": 5'))
    assert run.begin("--resume").step == 2
    assert run.names() == ["step_000002", "step_000004.damaged"]


def test_a_checkpoint_that_is_renamed_while_the_run_trains_keeps_its_files(token_files, tmp_path):
    folder = Folder(token_files, tmp_path / "run")
    checkpoints = folder.checkpoints

    class Renaming(Weights):
        def save_checkpoint(self, directory, in_background=False):
            if (checkpoints / "step_000002").exists():
                (checkpoints / "step_000002").rename(checkpoints / "step_000005")
            return super().save_checkpoint(directory, in_background)

    folder.train(range(1, 5), {2, 3, 4}, "--keep_last", "1", strategy=Renaming())
    assert folder.names() == ["step_000004", "step_000005"], "it is not counted as a newer one either"
    (checkpoints / "step_000005").rename(checkpoints / "step_000006")
    folder.train(range(5, 7), {6}, "--keep_last", "1")
    assert folder.names() == ["step_000006", "step_000006.abandoned"]
    assert folders.read_description(checkpoints / "step_000006.abandoned").step == 2


def test_going_back_twice_keeps_both_later_checkpoints(run):
    for _ in range(2):
        run.train(range(3, 5), {4}, start=run.begin("--resume", str(run.checkpoints / "step_000002")))
    assert run.names() == ["step_000002", "step_000004", "step_000004.abandoned", "step_000004.abandoned.2"]
