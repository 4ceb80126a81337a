"""What the next start of a run takes over, counts as lost and counts as measured: made-up runs, real files."""

from __future__ import annotations

import json
from concurrent.futures import Future

import pytest
from support.checkpoint_folders import Folder, Weights
from support.metrics_examples import example_metrics

from testbed.checkpoint.folders import read_description
from testbed.checkpoint.writer import LAST_WAIT_S, CheckpointWriter
from testbed.distributed import watchdog
from testbed.io import write_text
from testbed.metrics import segments
from testbed.metrics.file import check_metrics, read_metrics
from testbed.run_folder import marks


@pytest.fixture
def run(token_files, tmp_path) -> Folder:
    """Killed after step 5, with a checkpoint of step 4."""
    folder = Folder(token_files, tmp_path / "run")
    folder.train(range(1, 6), {4})
    return folder


def stand_in(folder: Folder, phase: str, step: int) -> None:
    """What a rank 0 that was killed leaves of its progress."""
    watchdog.ProgressFile(folder.path, 0).enter(phase, step)


@pytest.mark.parametrize(
    ("phase", "step", "lost"),
    [
        ("backward", 9, 4),  # steps 5 to 8; the file's rows end with 5
        ("exchange", 9, 5),  # updated, and its row not yet written
        ("validation", 9, 5),
        ("ended", 9, 1),  # by its own will, which it wrote down
        ("start", 0, 1),  # killed before its first step: the rows know more
        ("barrier", 5, 1),
    ],
)
def test_lost_steps_are_those_that_were_done_not_those_that_were_written(run, phase, step, lost):
    stand_in(run, phase, step)
    segment = run.train(range(5, 7), set(), start=run.begin("--resume")).metrics["segments"][1]
    assert segment["lost_steps"] == lost


def test_steps_of_a_start_that_saved_nothing_are_lost_as_they_were_done(token_files, tmp_path):
    folder = Folder(token_files, tmp_path / "run")
    folder.train(range(1, 4), set())
    stand_in(folder, "forward", 7)
    assert folder.train(range(1, 3), set(), start=folder.begin("--resume")).metrics["segments"][1]["lost_steps"] == 6


def test_lost_time_counts_in_a_time_to_a_loss(run):
    """Killed a while after the save: the next start's clock goes on from the kill, not from the save."""
    saved = read_description(run.checkpoints / "step_000004")
    metrics = read_metrics(run.path / "training_metrics.json")
    metrics["summary"]["total_wall_time_sec"] += 100.0
    write_text(run.path / "training_metrics.json", json.dumps(metrics))
    recorder = run.train(range(5, 6), set(), start=run.begin("--resume"))
    lost_s = recorder.starts.current["lost_s"]
    assert 100 <= lost_s < 150
    assert recorder.starts.elapsed_before_s == pytest.approx(saved.elapsed_s + lost_s)


def test_validation_after_the_save_is_kept_and_not_lost(run):
    """Its row stays in the file, so its time was not lost; one before the save, or of a later step, changes nothing."""
    saved = read_description(run.checkpoints / "step_000004")
    earlier = example_metrics(num_steps=5)
    row = earlier["evaluations"][0] | {"step": 4, "wall_time_s": 30.0}
    for elapsed_s, step, kept in ((saved.elapsed_s + 30, 4, 30.0), (saved.elapsed_s - 1, 4, 0.0), (1e9, 5, 0.0)):
        earlier["evaluations"] = [row | {"elapsed_s": elapsed_s, "step": step}]
        assert segments.kept_validation_s(earlier, 4, saved.elapsed_s) == kept


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        (None, "git_commit", "1" * 40),
        (None, "git_dirty", True),
        ("env", "torch_version", "2.12.0"),
        ("host", "hostname", "node1"),
        ("hardware", "cpu_name", "Another CPU"),
        ("hardware", "cpu_threads_per_rank", 9),
        (None, None, None),
    ],
)
def test_rows_of_another_place_stay_but_are_not_measured(run, monkeypatch, section, name, value):
    """Step times of two machines, or of two versions of the code, make no one median."""
    recorder_of = Folder.recorder

    def elsewhere(self, *arguments):
        recorder = recorder_of(self, *arguments)
        (recorder.metrics if section is None else recorder.metrics[section])[name] = value
        recorder.starts.current |= segments.measured_where(recorder.metrics)
        return recorder

    if name is not None:
        monkeypatch.setattr(Folder, "recorder", elsewhere)
    metrics = run.train(range(5, 8), set(), start=run.begin("--resume")).metrics
    check_metrics(metrics)
    measured = [row["step"] for row in metrics["steps"] if not row["is_warmup"]]
    assert measured == ([2, 3, 4, 6, 7] if name is None else [6, 7])
    assert (metrics["segments"][0] != metrics["segments"][1]) and len(metrics["steps"]) == 7
    changed = {key for key in segments.MEASURED_WHERE if metrics["segments"][0][key] != metrics["segments"][1][key]}
    assert len(changed) == (name is not None)


def test_peaks_of_memory_are_those_of_all_starts_on_the_same_ranks(run):
    start = run.begin("--resume")
    start.metrics["memory"] = {"per_rank": [{"rank": 0, "rss": 900, "allocated": None}]}
    start.metrics["epochs"] = [{"epoch_idx": 1, "max_cuda_mem_allocated_bytes_rank0": 700}]
    recorder = run.recorder(run.settings())
    recorder.restore(start.metrics, 4, 5, 1.0, 1.0)
    recorder.add_memory(9, [{"rss": 300, "allocated": 5}])
    assert recorder.metrics["memory"]["per_rank"] == [{"rank": 0, "rss": 900, "allocated": 5}]
    if recorder._epoch_of(9) != 1:
        assert recorder._epoch(1)["max_cuda_mem_allocated_bytes_rank0"] == 700


def test_a_repeated_command_continues_from_another_runs_checkpoint(run, token_files, tmp_path):
    """torchrun --max-restarts and a queue do. Ended before its first checkpoint, it begins with the other one again."""
    other = Folder(token_files, tmp_path / "other")
    command = "--resume", str(run.path)
    other.train(range(5, 6), set(), start=other.begin(*command))
    stand_in(other, "forward", 6)
    again = other.begin(*command)
    assert again.is_other_run and again.step == 4 and again.steps_done == 5
    lost = other.train(range(5, 7), {6}, start=again).metrics["segments"]
    assert len(lost) == 1 and lost[0]["lost_steps"] == 1 and lost[0]["lost_s"] is None
    goes_on = other.begin(*command)
    assert goes_on.step == 6 and not goes_on.is_other_run
    elsewhere = Folder(token_files, tmp_path / "third")
    elsewhere.train(range(1, 3), {2})
    with pytest.raises(ValueError, match="already holds one"):
        other.begin("--resume", str(elsewhere.path))


def test_a_run_is_preempted_or_failed_never_both(tmp_path, monkeypatch):
    """Two ranks write their marks at the same moment: the failure stands, whichever came first."""
    write = marks.write_text

    def fails_meanwhile(path, text):
        write(path, text)
        marks.mark_failed(tmp_path, 1, "killed")

    monkeypatch.setattr(marks, "write_text", fails_meanwhile)
    with pytest.raises(marks.RunAlreadyFailed):
        marks.mark_preempted(tmp_path, "terminated (SIGTERM)", 3, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["RUN_FAILED.txt"]


def test_a_save_in_the_background_gets_a_moment_to_end(run, monkeypatch):
    waited = []
    monkeypatch.setattr("testbed.checkpoint.writer.wait", lambda *arguments: waited.append(arguments))
    writer = CheckpointWriter(Weights(), run.settings("--async_mode", "async"), None, None)
    writer.let_finish()  # nothing is being written
    assert waited == []
    writer._pending = run.path, 6, {}, Future()
    writer.let_finish()
    assert waited == [([writer._pending[3]], LAST_WAIT_S)]
