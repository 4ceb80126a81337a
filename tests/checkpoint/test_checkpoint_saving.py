"""Check the bookkeeping of a resumed run and what saving leaves on the disk."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.checkpoint_files_cases import flip_a_bit
from support.checkpoint_folders import Folder, Weights, refusal
from support.programs import REPOSITORY, TINY_RUN, data_flags, run_program, torchrun_command

from testbed.checkpoint import manifest
from testbed.checkpoint import writer as checkpoint
from testbed.checkpoint.folders import CheckpointFailed, read_description
from testbed.metrics.file import check_metrics, read_metrics

pytestmark = pytest.mark.usefixtures("one_process")


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """The clock of the records: one moment, until a test sets another."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_segments_count_what_was_lost_once(clock, token_files, tmp_path):
    """Killed after step 5 with a checkpoint of 4; then killed after 6 without one; then after 7."""
    run = Folder(token_files, tmp_path / "run")
    first = run.train(range(1, 6), {2, 4})
    clock[0] += 7
    first.write("running")
    second = run.train(range(5, 7), set(), start=run.begin("--resume"))
    clock[0] += 5
    second.write("failed", failure={"reason": "x", "step": 6})
    third = run.train(range(5, 8), {6}, start=run.begin("--resume"))
    clock[0] += 3
    third.write("running")
    segments = third.metrics["segments"]
    assert [(s["first_step"], s["last_step"], s["lost_steps"], s["ended"]) for s in segments] == [
        *((1, 5, 0, None), (5, 6, 1, "failed"), (5, 7, 2, None)),
    ]
    assert [(s["wall_time_s"], s["lost_s"]) for s in segments] == [(7, 0), (5, 7), (3, 5)]
    assert third.metrics["summary"]["total_wall_time_sec"] == 15
    assert [row["step"] for row in third.metrics["steps"]] == list(range(1, 8))
    assert [row["step"] for row in third.metrics["checkpoints"]] == [2, 4, 6]
    assert read_description(run.checkpoints / "step_000006").useful_wall_s == 0


def test_a_run_that_saved_nothing_begins_again_and_counts_all_as_lost(clock, token_files, tmp_path):
    folder = Folder(token_files, tmp_path / "run")
    first = folder.train(range(1, 4), set())
    clock[0] += 7
    first.write("running")
    run_id = first.metrics["run_id"]
    (folder.path / "RUN_FAILED.txt").write_text("x")
    (folder.path / "best").mkdir()
    metrics = folder.train(range(1, 3), set(), start=folder.begin("--resume")).metrics
    assert metrics["run_id"] == run_id and [row["step"] for row in metrics["steps"]] == [1, 2]
    assert metrics["segments"][1]["lost_steps"] == 3 and metrics["segments"][1]["resumed_from"] is None
    assert metrics["segments"][1]["lost_s"] == metrics["segments"][0]["wall_time_s"] == 7
    assert not (folder.path / "RUN_FAILED.txt").exists() and not (folder.path / "best").exists()


def test_rows_of_other_ranks_stay_but_are_not_measured(run):
    """A headline over rows of one and of two ranks would be the speed of neither."""
    start = run.begin("--resume", "--run_type", "ddp", world_size=2)
    metrics = run.train(range(5, 8), set(), "--run_type", "ddp", start=start, world_size=2).metrics
    check_metrics(metrics)
    assert [len(row["per_rank_step_time_s"]) for row in metrics["steps"]] == [1] * 4 + [2] * 3
    assert [row["step"] for row in metrics["steps"] if not row["is_warmup"]] == [6, 7]
    assert metrics["timing"]["num_measured_steps"] == 2
    metrics["steps"][5]["per_rank_step_time_s"] = [0.1]
    with pytest.raises(ValueError, match="steps\\[5\\]"):
        check_metrics(metrics)


def test_the_newest_are_kept_and_what_was_damaged_goes_with_the_next(token_files, tmp_path):
    folder = Folder(token_files, tmp_path / "run")
    folder.train(range(1, 6), {1, 2, 3, 4, 5}, "--keep_last", "3")
    assert folder.names() == ["step_000003", "step_000004", "step_000005"]
    (folder.checkpoints / "step_000004").replace(folder.checkpoints / "step_000004.damaged")
    (folder.checkpoints / ".step_000009.tmp").mkdir()
    folder.train(range(6, 7), {6}, "--keep_last", "1", start=folder.begin("--resume"))
    assert folder.names() == ["step_000006"]


@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), OSError(30, "Read-only file system")])
def test_a_save_that_fails_leaves_the_earlier_ones_and_no_half(run, fault):
    with pytest.raises(CheckpointFailed) as caught:
        run.train(range(1, 9), {7}, strategy=Weights(fault))
    words = str(caught.value)
    assert fault.strerror in words and "step 7" in words and "--resume" in words and "\n" not in words
    assert run.names() == ["step_000002", "step_000004"]
    assert all(manifest.why_damaged(run.checkpoints / name) is None for name in run.names())


def test_a_rank_that_cannot_write_its_random_state_has_met_the_others_before(run, monkeypatch):
    """They wait for it while they write the strategy's files, and would do so in vain."""
    folder, met = run.checkpoints / ".step_000007.tmp" / "part", []

    def full_disk(*_):
        met.append(folder.exists())
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "_random_state", full_disk)
    with pytest.raises(CheckpointFailed, match="No space left"):
        run.train(range(1, 9), {7})
    assert met == [True]


def test_everything_is_on_disk_before_the_folder_has_its_name(run, monkeypatch):
    """Each file and each folder is flushed, then the rename, then the folder that the name is in."""
    events = []
    flush, replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (events.append(str(Path(f"/proc/self/fd/{fd}").readlink())), flush(fd)))
    monkeypatch.setattr(Path, "replace", lambda a, b: (events.append((a.name, Path(b).name)), replace(a, b))[1])
    run.train(range(1, 8), {7})
    renamed = events.index((".step_000007.tmp", "step_000007"))
    folder = run.checkpoints / "step_000007"
    for path in [folder, *folder.rglob("*")]:
        assert str(path).replace("/step_000007", "/.step_000007.tmp") in events[:renamed], path
    assert str(run.checkpoints) in events[renamed:]


def test_what_is_saved_in_the_background_is_recorded_when_it_is_on_disk(token_files, tmp_path):
    folder, strategy = Folder(token_files, tmp_path / "run"), Weights()
    recorder = folder.train(range(1, 3), {2}, "--async_mode", "async", strategy=strategy)
    row = recorder.metrics["checkpoints"][0]
    assert row["is_asynchronous"] and row["total_s"] is None and not (folder.checkpoints / "step_000002").exists()
    check_metrics(recorder.metrics)
    time.sleep(0.2)
    strategy.background.set_result(None)
    deadline = time.monotonic() + 10
    while row["total_s"] is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert manifest.why_damaged(folder.checkpoints / "step_000002") is None
    assert row["total_s"] >= row["blocking_s"] + 0.2, "the loop did not wait for what came after the copy"
    size = sum(path.stat().st_size for path in (folder.checkpoints / "step_000002").rglob("*") if path.is_file())
    assert row["bytes"] == size - (folder.checkpoints / "step_000002" / "manifest.json").stat().st_size


def test_a_save_that_fails_in_the_background_is_not_passed_over(token_files, tmp_path):
    folder, strategy = Folder(token_files, tmp_path / "run"), Weights()
    strategy.background.set_exception(OSError(28, "No space left on device"))
    with pytest.raises(CheckpointFailed, match=r"step 2 .*No space left"):
        folder.train(range(1, 5), {2, 4}, "--async_mode", "async", strategy=strategy)
    assert folder.names() == []


@pytest.mark.launches
def test_two_runs_cannot_write_into_one_folder_and_a_killed_one_locks_nothing(run):
    code = (
        f"from pathlib import Path; from testbed.run_folder.run_lock import acquire; acquire(Path({str(run.path)!r}))"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", f"{code}; print('held', flush=True); import time; time.sleep(60)"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY / "src",
    )
    try:
        assert holder.stdout.readline() == "held\n"
        for flags in (["--resume"], ["--overwrite"]):
            words = refusal(run, *flags)
            assert "another run" in words and f"process {holder.pid}" in words
        assert run.names() == ["step_000002", "step_000004"], "nothing is touched"
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    assert run.begin("--resume").step == 4


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--allow-setting-change"], ["--allow-setting-change", "--resume"]),
        (["--resume", "--eval_only"], ["--eval_only", "--resume"]),
        (["--resume", "nowhere"], ["--resume nowhere", "step_000020"]),
        (["--run_type", "optimized", "--async_mode", "async"], ["--async_mode", "optimized", "fsdp"]),
        (["--keep_last", "0"], ["--keep_last", "0"]),
    ],
)
def test_flags_that_contradict_each_other_are_refused(token_files, tmp_path, flags, said):
    with pytest.raises(ValueError) as caught:
        Folder(token_files, tmp_path / "run").settings(*flags)
    assert all(part in str(caught.value) for part in said)


def flags_of(token_files, directory: Path, *more: str) -> list[str]:
    batch = ["--global_batch_size", "16", "--max_train_steps", "7", "--timing_warmup_steps", "1"]
    return [*TINY_RUN, *data_flags(token_files), *batch, "--checkpoint_path", str(directory), *more]


@pytest.mark.launches
@pytest.mark.slow
def test_the_program_skips_what_is_damaged_and_ends_with_the_same_weights(ranks, token_files, tmp_path):
    """Begun by --resume itself, its last checkpoint damaged, resumed, and started once more when complete."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    more = ["--dropout", "0.1", "--resume", "--optimizer", "muon", "--muon_learning_rate", "0.002"]
    more += ["--lr_schedule", "wsd"]
    flags = flags_of(token_files, parts, *more, "--save_every", "2")
    first = ranks.run_program([*flags, "--stop_at_step", "5"], tmp_path / "first")
    assert first.returncode == 0 and "begins with its first step" in first.stdout, first.stderr
    damaged = parts / "checkpoints" / "step_000005"
    flip_a_bit(next(damaged.glob("*.distcp")))
    second = ranks.run_program(flags, tmp_path / "second")
    assert second.returncode == 0, second.stderr
    assert "step_000005 is skipped: " in second.stdout and "steps 5 to 7" in second.stdout
    assert ranks.run_program(flags_of(token_files, whole, *more), tmp_path / "uninterrupted").returncode == 0
    assert (parts / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    metrics = read_metrics(parts / "training_metrics.json")
    assert [segment["lost_steps"] for segment in metrics["segments"]] == [0, 1]
    assert [segment["ended"] for segment in metrics["segments"]] == ["stopped", "complete"]
    assert metrics["segments"][1]["random_numbers"] == "continued"
    assert [row["step"] for row in metrics["checkpoints"]] == [2, 4, 5, 6, 7]
    assert all(row["blocking_s"] > 0 and row["total_s"] > 0 for row in metrics["checkpoints"])
    held = {path: path.stat().st_mtime_ns for path in parts.iterdir() if path.name != ".lock"}
    third = ranks.run_program(flags, tmp_path / "third")
    assert third.returncode == 0 and "already complete" in third.stdout
    assert held == {path: path.stat().st_mtime_ns for path in held}


@pytest.mark.launches
def test_a_refusal_reaches_all_ranks(ranks, token_files, tmp_path):
    """One sentence, no traceback, no rank left waiting."""
    (tmp_path / "checkpoints" / "step_000002").mkdir(parents=True)  # without a file
    flags = flags_of(token_files, tmp_path / "run", "--run_type", "ddp", "--resume", str(tmp_path))
    done = ranks.run_program(flags, tmp_path / "ranks", 2)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.count(f"gpt2.py: error: --resume {tmp_path} holds no whole checkpoint") == 1


@pytest.mark.launches
@pytest.mark.slow
def test_a_full_disk_ends_the_run_in_one_sentence_with_whole_files(token_files, tmp_path):
    """DeepSpeed's rank 0 alone has something to write: the other must not wait for it until a collective times out.

    A limit on file sizes stands for the disk: metrics fit under it, a checkpoint does not.
    """
    directory = tmp_path / "run"
    recipe = ["--run_type", "optimized", "--zero_stage", "0", "--collective_timeout", "20"]
    flags = flags_of(token_files, directory, "--save_every", "3", "--embedding_size", "128", *recipe)
    done = run_program(["bash", "-c", 'ulimit -f 128 && exec "$@"', "limited", *torchrun_command(2), *flags])
    assert done.returncode == 1, done.stderr
    of_ranks = [line for line in done.stderr.splitlines() if re.match(r"rank \d failed: ", line)]
    said = "checkpoint of step 3 could not be written", "the disk took only a part of a file"
    assert of_ranks and all(part in line for line in of_ranks for part in said)
    assert str(REPOSITORY / "src" / "testbed") not in done.stderr, "no traceback of ours"
    assert list((directory / "checkpoints").iterdir()) == []
    metrics = read_metrics(directory / "training_metrics.json")
    assert metrics["status"] == "failed" and len(metrics["steps"]) == 3
    assert "step 3" in (directory / "RUN_FAILED.txt").read_text()


def test_the_loop_waits_for_the_copy_and_at_the_next_save_for_the_disk(clock, token_files, tmp_path, monkeypatch):
    """5 s for each copy, and 1 s whenever the ranks wait for each other: twice in a save, once for an earlier one."""

    class Slow(Weights):
        def save_checkpoint(self, directory: Path, in_background: bool = False):
            clock[0] += 5
            return super().save_checkpoint(directory, in_background)

    plain, strategy = checkpoint.process_group.wait_for_work, Slow()
    strategy.background.set_result(None)

    def wait_for_work(work) -> None:
        clock[0] += 1
        plain(work)

    monkeypatch.setattr(checkpoint.process_group, "wait_for_work", wait_for_work)
    recorder = Folder(token_files, tmp_path / "run").train(
        range(1, 5), {2, 4}, "--async_mode", "async", strategy=strategy
    )
    assert [row["blocking_s"] for row in recorder.metrics["checkpoints"]] == [8, 7]
