"""The folder that a run writes into: whose files are in it, whether it is still there, and what lies elsewhere."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from support.checkpoint_folders import Folder, Weights, contents, launch, refusal
from support.endings import COMPLETE, ENDLESS, FAILED, ending_of, flags_of, ranks, started
from support.metrics_examples import example_metrics
from support.programs import REPOSITORY, python_command, run_program
from torch.distributed.checkpoint.api import CheckpointException

from testbed import run_files, run_lock
from testbed.checkpoint import folder_owner, folders, manifest, weights
from testbed.checkpoint.writer import CheckpointWriter
from testbed.distributed.launch import Launch
from testbed.experiments.fault_drill.damage import TMPFS, SmallDisk, way_to_fill_a_disk
from testbed.io import write_text
from testbed.metrics import recorder as recorder_module
from testbed.metrics import run_directory
from testbed.metrics.file import check_metrics, read_metrics, write_metrics
from testbed.model.gpt2 import GPT2
from testbed.run_lock import FolderGone
from testbed.train import ending as run_ending
from testbed.train.other_ranks import OtherRanks

pytestmark = pytest.mark.usefixtures("one_process")

# --- whose files these are

MODEL = ("config.json", "model.safetensors", "tokenizer.json", "tensorboard/events", "best/model.safetensors")
STRANGERS = {
    "a model that was downloaded": MODEL,
    "another program's checkpoints": ("checkpoints/epoch_1.pt",),
    "metrics of something else": ("training_metrics.json", "config.json"),
    "marks of something else": ("RUN_COMPLETE.txt", "best/weights"),
    "settings of something else": ("effective_config.json", "launcher_metadata.json", "model.safetensors"),
    "a start that was refused has left its lock": (*MODEL, ".lock"),
}


def fill(folder: Path, names: tuple[str, ...]) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")


@pytest.mark.parametrize("names", STRANGERS.values(), ids=STRANGERS)
def test_what_somebody_else_made_is_refused_and_nothing_recommends_to_destroy_it(token_files, tmp_path, names):
    folder, elsewhere = Folder(token_files, tmp_path / "theirs"), Folder(token_files, tmp_path / "ours")
    fill(folder.path, names)
    elsewhere.train(range(1, 3), {2})
    for flags in ([], ["--resume"], ["--resume", str(elsewhere.path)]):
        words = refusal(folder, *flags)
        assert f"--checkpoint_path {folder.path} holds " in words and "no record" in words and "another folder" in words
        assert any(name.partition("/")[0] in words for name in names)
        assert "--overwrite" not in words and "--resume" not in words
        assert (folder.path / ".lock").exists() == (".lock" in names), "not even a lock is left"


def test_overwrite_replaces_what_somebody_else_made_and_names_it(token_files, tmp_path, capsys):
    folder = Folder(token_files, tmp_path / "theirs")
    fill(folder.path, (*MODEL, "train.log", "evidence/start_1", ".cache.tmp", ".rank_of_mine.progress"))
    folder.begin("--overwrite")
    left = {path.relative_to(folder.path).as_posix() for path in contents(folder.path)}
    assert left == {"train.log", "evidence/start_1", ".cache.tmp", ".rank_of_mine.progress"}
    said = capsys.readouterr().out
    assert f"replaces in {folder.path}: model.safetensors, config.json, tokenizer.json, best, tensorboard\n" in said


@pytest.mark.parametrize("flags", [[], ["--resume"]])
def test_other_files_and_empty_folders_stop_no_start_and_stay(token_files, tmp_path, flags):
    """A scheduler's log, the evidence of a start, a lock, and the folder that is to hold the checkpoints."""
    folder = Folder(token_files, tmp_path / "run")
    fill(folder.path, ("train.log", "evidence/start_1", ".lock", ".theirs.tmp"))
    folder.checkpoints.mkdir()
    before = contents(folder.path)
    assert folder.begin(*flags).checkpoint is None
    assert contents(folder.path) == before and folder.checkpoints.is_dir()
    assert (folder.path / ".lock").read_text() == "{}", "another program's lock file is not written into"


def killed_early(folder: Folder, recorded: str) -> None:
    """What a start leaves that ends before its first metrics, as the program writes it."""
    folder.path.mkdir()
    settings = folder.settings()
    if recorded == "settings":
        write_text(folder.path / run_files.EFFECTIVE_CONFIG, json.dumps(settings.as_config()))
    elif recorded == "launcher":
        run_directory.write_launcher_metadata(folder.path, launch(), "0123abc")
    elif recorded == "failed":
        run_directory.mark_failed(folder.path, 1, "the device has gone")
    (folder.path / "tensorboard").mkdir()
    (folder.path / "tensorboard" / "events").write_text("x")


@pytest.mark.parametrize("recorded", ["settings", "launcher", "failed"])
def test_a_run_that_was_killed_before_its_first_metrics_is_begun_again(token_files, tmp_path, recorded):
    """The Slurm launcher gives --resume auto to every start, so it must not need a person for this."""
    folder = Folder(token_files, tmp_path / "run")
    killed_early(folder, recorded)
    assert "already holds a run" in refusal(folder)
    start = folder.begin("--resume", "auto")
    assert start.checkpoint is None and start.metrics is None
    assert not (folder.path / "tensorboard").exists(), "of steps that are trained again nothing stays"
    assert folder.begin("--resume", "auto").checkpoint is None, "killed once more before it wrote anything"


def test_a_checkpoint_alone_shows_whose_the_folder_is(run):
    """The metrics damaged, or lost with all else but one checkpoint: hours of work are gone on with."""
    (run.path / "training_metrics.json").write_text("{")
    assert run.begin("--resume").step == 4
    (run.path / "training_metrics.json").unlink()
    start = run.begin("--resume")
    assert start.step == 4 and start.is_record_cut_off


def test_a_start_with_overwrite_that_is_killed_halfway_leaves_a_folder_of_ours(run, monkeypatch):
    fill(run.path, MODEL[:3])
    killed_early_files = json.dumps(run.settings().as_config())
    write_text(run.path / run_files.EFFECTIVE_CONFIG, killed_early_files)
    delete, deleted = run_directory._delete, []

    def killed(path: Path) -> None:
        if path.name == run_files.EFFECTIVE_CONFIG:
            raise OSError("killed")
        deleted.append(path.name)
        delete(path)

    with monkeypatch.context() as patched, pytest.raises(Exception, match="killed"):
        patched.setattr(run_directory, "_delete", killed)
        run.begin("--overwrite")
    assert deleted[0] == "checkpoints" and "training_metrics.json" in deleted
    start = run.begin("--resume")
    assert start.checkpoint is None and start.metrics is None, "and nothing of the run that was to be replaced"


def test_no_refusal_about_damage_recommends_to_destroy(run, monkeypatch):
    shutil.rmtree(run.checkpoints)
    run_directory.write_launcher_metadata(run.path, launch(), "0123abc")
    (run.path / "training_metrics.json").write_text("{")
    assert "another --checkpoint_path" in (words := refusal(run, "--resume")) and "--overwrite" not in words


# --- a folder that vanishes


def rename(path: Path) -> Path:
    return path.rename(path.with_name("renamed"))


def rename_and_begin_another(path: Path) -> Path:
    moved = rename(path)
    path.mkdir()
    write_text(path / "training_metrics.json", "another run's")
    return moved


def replace_by_a_file(path: Path) -> Path:
    moved = rename(path)
    path.write_text("a file")
    return moved


def delete(path: Path) -> None:
    shutil.rmtree(path)


VANISHING = {
    "deleted": (delete, "was deleted or unmounted", "there is none now"),
    "renamed": (rename, "was renamed to", "there is none now"),
    "another has its name": (rename_and_begin_another, "was renamed to", "another folder has its name now"),
    "a file has its name": (replace_by_a_file, "was renamed to", "something else has its name now"),
}


class Held(Folder):
    """A run whose folder is held, as it is from its start on."""

    def __init__(self, token_files, path: Path):
        super().__init__(token_files, path)
        run_lock.keep_others_out(path)

    def writer(self, strategy=None, *flags: str) -> CheckpointWriter:
        settings = self.settings(*flags)
        self.recorded = self.recorder(settings)
        self.recorded.begin_training(startup_s=0.0)
        row = example_metrics(num_steps=1, world_size=1)["steps"][0]
        self.recorded.steps.append(row)
        return CheckpointWriter(strategy or Weights(), settings, launch(), self.recorded)


@pytest.fixture
def held(token_files, tmp_path) -> Held:
    folder = Held(token_files, tmp_path / "run")
    yield folder
    run_lock.let_others_in(folder.path)


def everything(folder: Path) -> dict[str, bytes | None]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")
    }


@pytest.mark.parametrize(("vanish", "said", "now"), VANISHING.values(), ids=VANISHING)
def test_nothing_is_written_where_another_folder_is_now(held, tmp_path, vanish, said, now):
    """Neither metrics nor a checkpoint nor a mark nor weights; the sentence says what became of it."""
    writer = held.writer()
    writer.save(1)
    moved = vanish(held.path)
    before = everything(tmp_path)
    for write in (
        lambda: held.recorded.write("running"),
        lambda: held.recorded.close(None),
        lambda: writer.save(2),
        lambda: run_directory.mark_complete(held.path, 1, None, 1.0),
        lambda: run_directory.mark_preempted(held.path, "x", 1, held.path),
        lambda: run_directory.write_launcher_metadata(held.path, launch(), "0123abc"),
    ):
        with pytest.raises(FolderGone) as caught:
            write()
        assert said in str(caught.value) and now in str(caught.value) and "\n" not in str(caught.value)
        assert (moved is None) == (str(tmp_path / "renamed") not in str(caught.value))
        assert everything(tmp_path) == before
    if moved is not None:
        assert manifest.why_damaged(moved / "checkpoints" / "step_000001") is None


@pytest.mark.parametrize("vanish", [delete, rename, rename_and_begin_another])
def test_a_folder_that_vanishes_while_a_checkpoint_is_written_leaves_nothing_in_another(held, tmp_path, vanish):
    class Vanishing(Weights):
        def save_checkpoint(self, directory, in_background=False):
            super().save_checkpoint(directory)
            vanish(held.path)

    writer = held.writer(Vanishing())
    with pytest.raises(FolderGone):
        writer.save(1)
    assert not (held.path / "checkpoints").exists() and held.path.exists() == (vanish is rename_and_begin_another)
    if vanish is not delete:
        assert list((tmp_path / "renamed" / "checkpoints").iterdir()) == [], "half a checkpoint goes, where it is"


def ending_in(held: Held, rank: int = 0) -> run_ending.RunEnding:
    ending = ending_of(held.token_files)
    ending.launch, ending.checkpoints, ending.recorder = Launch(rank, rank, 1, 1), None, held.recorded
    ending._ranks = OtherRanks(ending.launch)
    ending._ranks.directory = held.path
    return ending


@pytest.mark.parametrize(("vanish", "said", "now"), VANISHING.values(), ids=VANISHING)
def test_the_mark_goes_where_the_files_are(held, tmp_path, capsys, vanish, said, now):
    writer = held.writer()
    writer.save(1)
    moved = vanish(held.path)
    before = {name: content for name, content in everything(tmp_path).items() if not name.startswith("renamed")}
    ending = ending_in(held)
    with pytest.raises(FolderGone) as caught:
        held.recorded.write("running")
    assert ending._mark_failed(ending._reason_of(caught.value), 1) == 1
    after = {name: content for name, content in everything(tmp_path).items() if not name.startswith("renamed")}
    assert after == before
    printed = capsys.readouterr().err
    assert printed.count(said) == 1 and "Traceback" not in printed
    if moved is not None:
        assert said in (moved / "RUN_FAILED.txt").read_text()
        assert str(moved / "checkpoints" / "step_000001") in (moved / "RUN_FAILED.txt").read_text()
        metrics = read_metrics(moved / "training_metrics.json")
        assert metrics["status"] == "failed" and said in metrics["failure"]["reason"]


@pytest.mark.launches
@pytest.mark.skipif(way_to_fill_a_disk() != TMPFS, reason="nobody here may mount a disk")
def test_a_disk_that_is_unmounted_under_a_run_is_not_written_beside(token_files, tmp_path):
    path = tmp_path / "run"
    with SmallDisk(path, 4_000_000, TMPFS):
        held = Held(token_files, path)
        writer = held.writer()
        writer.save(1)
    try:
        for write in (lambda: held.recorded.write("running"), lambda: writer.save(2)):
            with pytest.raises(FolderGone, match=r"was deleted or unmounted .* another folder has its name now"):
                write()
        assert list(path.iterdir()) == []
    finally:
        run_lock.let_others_in(path)


def test_a_rank_that_finds_no_file_any_more_says_what_became_of_the_folder(held, capsys):
    held.writer()
    rename(held.path)
    ending = ending_in(held)
    for error in (FileNotFoundError(2, "No such file"), RuntimeError("gloo: Connection closed by peer")):
        assert "was renamed to" in ending._reason_of(error)
    assert ending._reason_of(TypeError("a fault of the program")).startswith("TypeError: a fault"), "that is no reason"


def test_a_folder_that_nobody_holds_has_no_handle(tmp_path, monkeypatch):
    """Whatever is called as a missing number would be."""
    (tmp_path / "None").touch()
    monkeypatch.setattr(run_lock, "_HANDLES", tmp_path)
    assert run_lock.by_handle(tmp_path / "run") == tmp_path / "run"


def test_progress_is_read_in_the_held_folder_and_not_in_one_that_took_its_name(held):
    (held.path / ".rank0.progress").write_text("mine")
    rename_and_begin_another(held.path)
    (held.path / ".rank0.progress").write_text("another run's")
    assert (run_lock.by_handle(held.path) / ".rank0.progress").read_text() == "mine"


@pytest.mark.launches
def test_a_second_run_is_kept_out_though_the_lock_file_is_deleted(held):
    (held.path / ".lock").unlink()
    code = f"from pathlib import Path; from testbed.run_lock import *; keep_others_out(Path({str(held.path)!r}))"
    done = run_program([sys.executable, "-c", code], cwd=REPOSITORY / "src")
    assert done.returncode == 1 and "is being written by another run" in done.stderr


def test_looking_costs_microseconds(held):
    seconds = []
    for _ in range(5):
        start_s = time.perf_counter()
        for _ in range(200):
            run_lock.check_held(held.path)
        seconds.append((time.perf_counter() - start_s) / 200)
    assert min(seconds) < 200e-6


# --- links to a larger disk


def move_to_larger_disk(path: Path, disk: Path) -> None:
    disk.mkdir(exist_ok=True)
    shutil.move(path, disk / path.name)
    path.symlink_to(disk / path.name)


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


def test_the_same_command_goes_on_with_its_own_run_though_the_other_ones_checkpoints_are_a_link(
    run, token_files, tmp_path
):
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


# --- names that say another step


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


# --- what a run leaves


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_weights_may_be_read_by_whom_the_umask_lets(run, umask):
    settings = run.settings()
    before = os.umask(umask)
    try:
        weights.export_weights(run.path, GPT2(settings.shape).state_dict(), settings, 299, "bpe:300", "{}")
    finally:
        os.umask(before)
    modes = {name: (run.path / name).stat().st_mode & 0o777 for name in (*run_files.WEIGHTS, "tokenizer.json")}
    assert set(modes.values()) == {0o666 & ~umask}, modes


@pytest.mark.parametrize("error", [SafetensorError("I/O error: No space left on device (os error 28)"), None])
def test_a_disk_that_is_full_when_the_best_weights_are_kept_is_one_sentence(run, monkeypatch, capsys, error):
    """With the last good checkpoint; what was there before is whole. `error` None: in the second file."""
    settings, best = run.settings(), run.path / "best"
    weights.export_weights(best, GPT2(settings.shape).state_dict(), settings, 299, "bpe:300")
    before = contents(run.path)

    def full(*arguments, **_):
        raise error or OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(*((weights, "save_file", full) if error else (Path, "write_text", full)))
    with pytest.raises(OSError) as caught:
        weights.export_weights(best, GPT2(settings.shape).state_dict(), settings, 299, "bpe:300")
    monkeypatch.undo()
    changed = {path.name for path, content in contents(run.path).items() if before.get(path) != content}
    assert changed <= {"model.safetensors"} and set(contents(run.path)) == set(before)
    ending = ending_of(run.token_files)
    ending._ranks.directory = run.path
    ending._mark_failed(ending._reason_of(caught.value), 1)
    mark = (run.path / "RUN_FAILED.txt").read_text()
    assert f"{best / ('model.safetensors' if error else 'config.json')} could not be written (No space left" in mark
    assert f"last checkpoint: {run.checkpoints / 'step_000004'}" in mark and "go on with --resume" in mark
    assert "Traceback" not in capsys.readouterr().err


def test_a_mark_is_one_line_whatever_the_path(tmp_path):
    folder = tmp_path / "a\nb\x1b[31m"
    folder.mkdir()
    line = run_directory.mark_complete(folder, 2, 10.0, 1.0)
    assert "\n" not in line and "\x1b" not in line and r"a\nb\x1b[31m world_size=2 tokens_per_sec=10.00" in line
    run_directory.mark_preempted(folder, "terminated (SIGTERM)", 3, folder / "checkpoints" / "step_000003")
    run_directory.mark_failed(folder, 0, f"full; last checkpoint: {folder}")
    for path in folder.glob("RUN_*.txt"):
        assert path.read_text().count("\n") == 1 and path.read_text().endswith("\n"), path


def test_marking_a_folder_that_is_a_file_now_is_a_sentence(tmp_path):
    (tmp_path / "run").write_text("a file")
    words = run_directory.mark_failed(tmp_path / "run", 0, "the folder has gone")
    assert words == "the folder has gone (and RUN_FAILED.txt could not be written: Not a directory)"


def test_weights_make_no_folder_anew(run):
    settings = run.settings()
    shutil.rmtree(run.path)
    for folder in (run.path / "best", run.path / "checkpoints" / "x"):
        with pytest.raises(FileNotFoundError):
            weights.export_weights(folder, GPT2(settings.shape).state_dict(), settings, 299, "bpe:300")
    assert not run.path.exists()


def test_a_rank_says_in_rank_0s_stead_how_the_run_ended(run, tmp_path):
    """Only where rank 0 is dead, which its lock tells: else it says it itself, and knows more."""
    path = run.path / "training_metrics.json"
    before = path.read_bytes()
    (run.path / ".lock").touch()
    holder = os.open(run.path / ".lock", os.O_RDWR)
    run_lock.fcntl.flock(holder, run_lock.fcntl.LOCK_EX)
    run_ending.write_in_rank_0s_stead(run.path, "rank 0 is dead")
    assert path.read_bytes() == before
    os.close(holder)
    run_ending.write_in_rank_0s_stead(run.path, "rank 0 is dead")
    metrics = read_metrics(path)
    check_metrics(metrics)
    assert metrics["status"] == "failed" and metrics["failure"] == {"reason": "rank 0 is dead", "step": 5}
    assert metrics["segments"][-1]["ended"] == "failed"
    closed = metrics | {"failure": {"reason": "what rank 0 wrote", "step": 5}}
    write_metrics(path, closed)
    run_ending.write_in_rank_0s_stead(run.path, "rank 0 is dead")
    assert read_metrics(path) == closed
    assert run.begin("--resume").step == 4, "and the lock is free"


# --- the program itself


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
            assert first.codes(30) == [1], first.text
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
def test_a_folder_that_is_deleted_under_two_ranks_is_not_made_again(token_files, tmp_path):
    folder = tmp_path / "run"
    flags = flags_of(token_files, folder, *ENDLESS, "--run_type", "ddp", "--save_every", "10")
    with ranks(folder, flags) as run:
        run.wait_until(lambda: (folder / "checkpoints" / "step_000010").exists())
        processes = [run.process_of(rank) for rank in range(2)]
        for process in processes:  # else it may notice while half of its files are there
            os.kill(process, signal.SIGSTOP)
        shutil.rmtree(folder)
        for process in processes:
            os.kill(process, signal.SIGCONT)
        assert run.codes(30) == [1, 1], run.text
    assert "was deleted or unmounted while the run wrote into it" in run.text and "Traceback" not in run.text
    assert not folder.exists()


@pytest.mark.launches
@pytest.mark.slow
def test_rank_0_killed_is_a_failure_in_the_metrics_too(token_files, tmp_path):
    folder = tmp_path / "run"
    with ranks(folder, flags_of(token_files, folder, *ENDLESS, "--run_type", "ddp", "--save_every", "5")) as run:
        run.wait_until(lambda: run.is_at(12))
        os.kill(run.process_of(0), signal.SIGKILL)
        assert run.codes(30) == [-signal.SIGKILL, 1], run.text
        mark = run.mark(FAILED)
    assert "[Rank 1] RUN_FAILED reason=rank 0 is dead" in mark
    metrics = read_metrics(folder / "training_metrics.json")
    assert metrics["status"] == "failed" and metrics["failure"]["reason"].startswith("rank 0 is dead")
    assert metrics["segments"][-1]["ended"] == "failed"


def test_what_stands_as_the_mark_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "RUN_FAILED.txt")

    words = run_directory.mark_failed(tmp_path, 0, "the disk failed")

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
    run_lock.let_others_in(other.path)
    run_lock.lock_linked(run.checkpoints)
    try:
        assert "where another run writes" in refusal(other, "--resume")
    finally:
        run_lock.let_others_in(run.path)


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
        run_lock.let_others_in(run.path)
    assert not any(run.path.iterdir())
    assert [row["step"] for row in read_metrics(tmp_path / "renamed" / "training_metrics.json")["steps"]] == [1, 2]
