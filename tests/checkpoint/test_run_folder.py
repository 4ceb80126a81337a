"""The folder that a run writes into: whose files are in it, whether it is still there, and what lies elsewhere."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.checkpoint_folders import Folder, Weights, contents, refusal
from support.endings import ending_of
from support.metrics_examples import example_metrics
from support.programs import REPOSITORY, run_program
from support.settings import launch

from testbed import run_folder
from testbed.checkpoint import manifest
from testbed.checkpoint.writer import CheckpointWriter
from testbed.distributed.launch import Launch
from testbed.io import write_text
from testbed.metrics.environment import write_launcher_metadata
from testbed.metrics.file import read_metrics
from testbed.run_folder import marks, reuse, run_lock
from testbed.run_folder.run_lock import FolderGone
from testbed.train import ending as run_ending
from testbed.train.other_ranks import OtherRanks

pytestmark = pytest.mark.usefixtures("one_process")


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
        write_text(folder.path / run_folder.EFFECTIVE_CONFIG, json.dumps(settings.as_config()))
    elif recorded == "launcher":
        write_launcher_metadata(folder.path, launch(), "0123abc")
    elif recorded == "failed":
        marks.mark_failed(folder.path, 1, "the device has gone")
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
    write_text(run.path / run_folder.EFFECTIVE_CONFIG, killed_early_files)
    delete, deleted = reuse._delete, []

    def killed(path: Path) -> None:
        if path.name == run_folder.EFFECTIVE_CONFIG:
            raise OSError("killed")
        deleted.append(path.name)
        delete(path)

    with monkeypatch.context() as patched, pytest.raises(Exception, match="killed"):
        patched.setattr(reuse, "_delete", killed)
        run.begin("--overwrite")
    assert deleted[0] == "checkpoints" and "training_metrics.json" in deleted
    start = run.begin("--resume")
    assert start.checkpoint is None and start.metrics is None, "and nothing of the run that was to be replaced"


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
        run_lock.acquire(path)

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
    run_lock.release(folder.path)


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
        lambda: marks.mark_complete(held.path, 1, None, 1.0),
        lambda: marks.mark_preempted(held.path, "x", 1, held.path),
        lambda: write_launcher_metadata(held.path, launch(), "0123abc"),
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
    ending.ranks = OtherRanks(ending.launch, 60, ending.end_from_thread)
    ending.ranks.directory = held.path
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
    reason, code = ending.reason_and_code(caught.value)
    ending.mark_failed(reason)
    assert code == 1
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
def test_a_disk_that_is_unmounted_under_a_run_is_not_written_beside(token_files, tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "test", str(path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("nobody here may mount a disk")
    try:
        held = Held(token_files, path)
        writer = held.writer()
        writer.save(1)
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)
    try:
        for write in (lambda: held.recorded.write("running"), lambda: writer.save(2)):
            with pytest.raises(FolderGone, match=r"was deleted or unmounted .* another folder has its name now"):
                write()
        assert list(path.iterdir()) == []
    finally:
        run_lock.release(path)


def test_a_rank_that_finds_no_file_any_more_says_what_became_of_the_folder(held, capsys):
    held.writer()
    rename(held.path)
    ending = ending_in(held)
    for error in (FileNotFoundError(2, "No such file"), RuntimeError("gloo: Connection closed by peer")):
        assert "was renamed to" in ending.reason_and_code(error)[0]
    reason, _ = ending.reason_and_code(TypeError("a fault of the program"))
    assert reason.startswith("TypeError: a fault"), "that is no reason"


def test_progress_is_read_in_the_held_folder_and_not_in_one_that_took_its_name(held):
    (held.path / ".rank0.progress").write_text("mine")
    rename_and_begin_another(held.path)
    (held.path / ".rank0.progress").write_text("another run's")
    assert (run_lock.by_handle(held.path) / ".rank0.progress").read_text() == "mine"


@pytest.mark.launches
def test_a_second_run_is_kept_out_though_the_lock_file_is_deleted(held):
    (held.path / ".lock").unlink()
    code = (
        f"from pathlib import Path; from testbed.run_folder.run_lock import acquire; acquire(Path({str(held.path)!r}))"
    )
    done = run_program([sys.executable, "-c", code], cwd=REPOSITORY / "src")
    assert done.returncode == 1 and "is being written by another run" in done.stderr
