"""Check the marks and files of a run whose folder changes under it."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from support.checkpoint_folders import Folder, contents, move_to_larger_disk, refusal
from support.endings import COMPLETE, ENDLESS, FAILED, ending_of, flags_of, ranks, started
from support.programs import python_command
from torch.distributed.checkpoint.api import CheckpointException

from testbed import run_folder
from testbed.checkpoint import folder_owner, folders, manifest, weights
from testbed.metrics import recorder as recorder_module
from testbed.metrics.file import check_metrics, read_metrics, write_metrics
from testbed.model.gpt2 import GPT2
from testbed.run_folder import marks, run_lock
from testbed.train import ending

pytestmark = pytest.mark.usefixtures("one_process")


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_weights_may_be_read_by_whom_the_umask_lets(run, umask):
    settings = run.settings()
    before = os.umask(umask)
    try:
        weights.write_weights(run.path, GPT2(settings.shape).state_dict(), settings.shape, 0.0, 299, "bpe:300", "{}")
    finally:
        os.umask(before)
    modes = {name: (run.path / name).stat().st_mode & 0o777 for name in (*run_folder.WEIGHTS, "tokenizer.json")}
    assert set(modes.values()) == {0o666 & ~umask}, modes


@pytest.mark.parametrize("error", [SafetensorError("I/O error: No space left on device (os error 28)"), None])
def test_a_disk_that_is_full_when_the_best_weights_are_kept_is_one_sentence(run, monkeypatch, capsys, error):
    """With the last good checkpoint; what was there before is whole. `error` None: in the second file."""
    settings, best = run.settings(), run.path / "best"
    weights.write_weights(best, GPT2(settings.shape).state_dict(), settings.shape, 0.0, 299, "bpe:300")
    before = contents(run.path)

    def full(*arguments, **_):
        raise error or OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(*((weights, "save_file", full) if error else (Path, "write_text", full)))
    with pytest.raises(OSError) as caught:
        weights.write_weights(best, GPT2(settings.shape).state_dict(), settings.shape, 0.0, 299, "bpe:300")
    monkeypatch.undo()
    changed = {path.name for path, content in contents(run.path).items() if before.get(path) != content}
    assert changed <= {"model.safetensors"} and set(contents(run.path)) == set(before)
    ending = ending_of(run.token_files)
    ending.ranks.directory = run.path
    ending.mark_failed(ending.reason_and_code(caught.value)[0])
    mark = (run.path / "RUN_FAILED.txt").read_text()
    assert f"{best / ('model.safetensors' if error else 'config.json')} could not be written (No space left" in mark
    assert f"last checkpoint: {run.checkpoints / 'step_000004'}" in mark and "go on with --resume" in mark
    assert "Traceback" not in capsys.readouterr().err


def test_a_mark_is_one_line_whatever_the_path(tmp_path):
    folder = tmp_path / "a\nb\x1b[31m"
    folder.mkdir()
    line = marks.mark_complete(folder, 2, 10.0, 1.0)
    assert "\n" not in line and "\x1b" not in line and r"a\nb\x1b[31m world_size=2 tokens_per_sec=10.00" in line
    marks.mark_preempted(folder, "terminated (SIGTERM)", 3, folder / "checkpoints" / "step_000003")
    marks.mark_failed(folder, 0, f"full; last checkpoint: {folder}")
    for path in folder.glob("RUN_*.txt"):
        assert path.read_text().count("\n") == 1 and path.read_text().endswith("\n"), path


def test_marking_a_folder_that_is_a_file_now_is_a_sentence(tmp_path):
    (tmp_path / "run").write_text("a file")
    words = marks.mark_failed(tmp_path / "run", 0, "the folder has gone")
    assert words == "the folder has gone (and RUN_FAILED.txt could not be written: Not a directory)"


def test_weights_make_no_folder_anew(run):
    settings = run.settings()
    shutil.rmtree(run.path)
    for folder in (run.path / "best", run.path / "checkpoints" / "x"):
        with pytest.raises(FileNotFoundError):
            weights.write_weights(folder, GPT2(settings.shape).state_dict(), settings.shape, 0.0, 299, "bpe:300")
    assert not run.path.exists()


def test_a_rank_says_in_rank_0s_stead_how_the_run_ended(run, tmp_path):
    """Only where rank 0 is dead, which its lock tells: else it says it itself, and knows more."""
    path = run.path / "training_metrics.json"
    before = path.read_bytes()
    (run.path / ".lock").touch()
    holder = os.open(run.path / ".lock", os.O_RDWR)
    run_lock.fcntl.flock(holder, run_lock.fcntl.LOCK_EX)
    ending.finalize_metrics_for_dead_rank0(run.path, "rank 0 is dead")
    assert path.read_bytes() == before
    os.close(holder)
    ending.finalize_metrics_for_dead_rank0(run.path, "rank 0 is dead")
    metrics = read_metrics(path)
    check_metrics(metrics)
    assert metrics["status"] == "failed" and metrics["failure"] == {"reason": "rank 0 is dead", "step": 5}
    assert metrics["segments"][-1]["ended"] == "failed"
    closed = metrics | {"failure": {"reason": "what rank 0 wrote", "step": 5}}
    write_metrics(path, closed)
    ending.finalize_metrics_for_dead_rank0(run.path, "rank 0 is dead")
    assert read_metrics(path) == closed
    assert run.begin("--resume").step == 4, "and the lock is free"


@pytest.mark.launches
@pytest.mark.slow
def test_a_run_whose_folder_is_renamed_ends_there_and_the_next_one_in_its_place_is_its_own(token_files, tmp_path):
    folder, moved = tmp_path / "run", tmp_path / "renamed"
    with started(
        folder, [[*python_command(), *flags_of(token_files, folder, *ENDLESS, "--save_every", "10")]]
    ) as first:
        first.wait_until(lambda: (folder / "checkpoints" / "step_000010").exists())
        folder.rename(moved)
        second_flags = flags_of(token_files, folder, "--global_batch_size", "16", "--max_train_steps", "3")
        with started(folder, [[*python_command(), *second_flags]]) as second:
            assert first.codes(60) == [1], first.text
            assert second.codes() == [0], second.text
            second.mark(COMPLETE)
    assert f"was renamed to {moved} while the run wrote into it" in first.text and "Traceback" not in first.text
    assert [path.name for path in moved.glob("RUN_*.txt")] == [FAILED] and "was renamed" in (moved / FAILED).read_text()
    metrics = read_metrics(moved / "training_metrics.json")
    assert metrics["status"] == "failed" and len(metrics["steps"]) >= 10
    saved = folders.step_folders(moved / "checkpoints")
    assert saved and all(manifest.why_damaged(path) is None for path in saved)
    assert len(read_metrics(folder / "training_metrics.json")["steps"]) == 3


@pytest.mark.launches
@pytest.mark.slow
def test_rank_0_killed_is_a_failure_in_the_metrics_too(token_files, tmp_path):
    folder = tmp_path / "run"
    with ranks(folder, flags_of(token_files, folder, *ENDLESS, "--run_type", "ddp", "--save_every", "5")) as run:
        run.wait_until(lambda: run.is_at(12))
        os.kill(run.process_of(0), signal.SIGKILL)
        assert run.codes(100) == [-signal.SIGKILL, 1], run.text
        mark = run.mark(FAILED)
    assert "[Rank 1] RUN_FAILED reason=rank 0 is dead, its last sign was from" in mark
    assert "rank 1 waited in" in mark and "last checkpoint: " in mark and "step_0000" in mark
    metrics = read_metrics(folder / "training_metrics.json")
    assert metrics["status"] == "failed" and metrics["failure"]["reason"].startswith("rank 0 is dead")
    assert metrics["segments"][-1]["ended"] == "failed"


def test_what_stands_as_the_mark_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "RUN_FAILED.txt")

    words = marks.mark_failed(tmp_path, 0, "the disk failed")

    assert words.startswith("the disk failed (and what stands as RUN_FAILED.txt cannot be read: it is a FIFO")
    assert not folder_owner.is_run(tmp_path)


@pytest.mark.parametrize("name", ["best", "tensorboard", "profiler_logs"])
def test_a_link_among_the_folders_of_a_run_is_not_written_through(run, tmp_path, name):
    victim = tmp_path / "victim"
    victim.mkdir()
    (run.path / name).symlink_to(victim)

    assert f"{name} is a link to {victim}" in refusal(run, "--resume")


def test_a_folder_that_has_the_name_of_a_file_of_ours_is_not_deleted(run):
    (run.path / "RUN_FAILED.txt").mkdir()
    (run.path / "RUN_FAILED.txt" / "thesis.txt").write_text("mine")

    assert "RUN_FAILED.txt is a folder" in refusal(run, "--resume")
    assert (run.path / "RUN_FAILED.txt" / "thesis.txt").exists()


def test_two_runs_whose_checkpoints_are_one_folder_are_kept_apart(run, token_files, tmp_path):
    move_to_larger_disk(run.checkpoints, tmp_path / "larger")
    before = contents(tmp_path / "larger")
    other = Folder(token_files, tmp_path / "other")
    other.path.mkdir()
    other.checkpoints.symlink_to(run.checkpoints.resolve())

    assert "where the checkpoints of another run lie" in refusal(other, "--resume")
    assert contents(tmp_path / "larger") == before
    run_lock.release(other.path)
    run_lock.lock_linked(run.checkpoints)
    try:
        assert "where another run writes" in refusal(other, "--resume")
    finally:
        run_lock.release(run.path)


def test_what_no_run_wrote_among_the_checkpoints_is_neither_deleted_nor_moved_away_for_good(run):
    """Names like ours, but nothing in them that a checkpoint has."""
    names = {"step_1", "step_000003", "step_000006", "step_backup.damaged", "step_000001.damaged"}
    for name in names:
        (run.checkpoints / name).mkdir()
        (run.checkpoints / name / "thesis.txt").write_text(name)
    (run.checkpoints / "step_000001").write_text("a file")

    run.train(range(5, 9), {5, 6, 7, 8}, "--keep_last", "1", start=run.begin("--resume", "--keep_last", "1"))

    assert {path.read_text() for path in run.checkpoints.rglob("thesis.txt")} == names
    assert [path.name for path in folders.step_folders(run.checkpoints) if folders.is_own(path)] == ["step_000008"]
    assert (run.checkpoints / "step_000001").read_text() == "a file"


@pytest.mark.parametrize(
    ("name", "value"),
    [("step", -5), ("step", 0), ("elapsed_s", math.nan), ("useful_wall_s", -1e300), ("world_size", 0)],
)
def test_figures_that_no_checkpoint_has_are_damage(run, name, value):
    folder = folders.step_folders(run.checkpoints)[-1]
    content = json.loads((folder / "checkpoint.json").read_text())
    (folder / "checkpoint.json").write_text(json.dumps({**content, name: value}))

    with pytest.raises(ValueError, match=f"{name} is .*, which no checkpoint says"):
        folders.read_description(folder)


def test_no_state_is_written_into_a_folder_that_has_vanished(tmp_path):
    from testbed.strategies import state_files

    with pytest.raises(CheckpointException):
        state_files.save({"model": {"weight": torch.ones(2)}}, tmp_path / "gone" / ".step_000006.tmp", None)
    assert not (tmp_path / "gone").exists()


def test_names_out_of_a_manifest_obey_no_terminal(run):
    folder = folders.step_folders(run.checkpoints)[-1]
    entry = {"bytes": 1, "sha256": ""}
    (folder / "manifest.json").write_text(json.dumps({"files": {"\x1b[31mred\n[Rank 0] RUN_COMPLETE": entry}}))

    assert manifest.why_damaged(folder).isprintable()


def test_a_folder_renamed_while_its_metrics_are_being_written_gets_them_itself(run, tmp_path, monkeypatch):
    """Between the look at the path and the last byte lies the check of a file of many steps."""
    recorder = run.train(range(1, 3), set())
    run_lock.hold(run.path)
    plain = recorder_module.write_metrics

    def renamed_meanwhile(path: Path, metrics: dict) -> None:
        run.path.rename(tmp_path / "renamed")
        run.path.mkdir()
        plain(path, metrics)

    monkeypatch.setattr(recorder_module, "write_metrics", renamed_meanwhile)
    try:
        recorder.write("running")
    finally:
        run_lock.release(run.path)
    assert not any(run.path.iterdir())
    assert [row["step"] for row in read_metrics(tmp_path / "renamed" / "training_metrics.json")["steps"]] == [1, 2]
