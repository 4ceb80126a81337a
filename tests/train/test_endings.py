"""How a run ends: asked to, without another rank, without memory; and what a failure says."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.endings import COMPLETE, ENDLESS, FAILED, PREEMPTED, ending_of, flags_of, ranks, started, wait_for
from support.metrics_examples import example_metrics
from support.programs import python_command, write_token_files

from testbed.analysis.runs.verify import verify
from testbed.checkpoint.folders import CheckpointFailed
from testbed.distributed import watchdog
from testbed.distributed.signals import RunStopped, stop_of
from testbed.metrics.file import check_metrics, read_metrics, write_metrics
from testbed.run_folder import marks
from testbed.train import console, reasons
from testbed.train import ending as run_ending
from testbed.train.reasons import TrainingDiverged


@pytest.mark.launches
@pytest.mark.slow
def test_a_stop_in_validation_loses_nothing(files, tmp_path):
    """SIGTERM in the validation after step 4, and again while the resumed start writes its last files: weights, rows
    and validations are those of the run that nobody disturbed."""
    work = ["--dropout", "0.1", "--global_batch_size", "16", "--max_train_steps", "6", "--eval_every", "4"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    with started(whole, [[*python_command(), *flags_of(files, whole, *work)]]) as run:
        assert run.codes() == [0], run.text
    command = [*python_command(), *flags_of(files, parts, *work)]
    with started(parts, [command]) as run:
        run.wait_until(lambda: run.is_at(4, "validation"))
        run.processes[0].send_signal(signal.SIGTERM)
        assert run.codes(60) == [143], run.text
        mark = run.mark(PREEMPTED)
    assert (
        "reason=terminated (SIGTERM) step=4" in mark and f"checkpoint={parts / 'checkpoints' / 'step_000004'}" in mark
    )
    metrics = read_metrics(parts / "training_metrics.json")
    assert metrics["status"] == "preempted" and metrics["failure"] is None and len(metrics["steps"]) == 4
    assert metrics["evaluations"] == [] and metrics["segments"][-1]["ended"] == "preempted"
    assert not list(parts.glob(".rank*.progress")), "after a good end no rank's place is of interest"
    with started(parts, [[*command, "--resume", "auto"]]) as run:
        run.wait_until(lambda: run.is_at(0, "finish"))
        run.processes[0].send_signal(signal.SIGTERM)
        assert run.codes() == [0], run.text
        run.mark(COMPLETE)
    first, again = (read_metrics(path / "training_metrics.json") for path in (whole, parts))
    for rows, columns in (("steps", ("step", "loss", "grad_norm")), ("evaluations", ("step", "val_loss"))):
        assert [[row[name] for name in columns] for row in again[rows]] == [
            [row[name] for name in columns] for row in first[rows]
        ]
    assert (whole / "model.safetensors").read_bytes() == (parts / "model.safetensors").read_bytes()


@pytest.mark.launches
@pytest.mark.slow
def test_ranks_stop_after_the_same_step_when_one_alone_is_asked(files, tmp_path):
    folder = tmp_path / "run"
    with ranks(folder, flags_of(files, folder, *ENDLESS, "--run_type", "ddp")) as run:
        run.wait_until(lambda: run.is_at(20))
        os.kill(run.process_of(1), signal.SIGUSR1)
        assert run.codes(60) == [143, 143], run.text
        mark = run.mark(PREEMPTED)
    metrics = read_metrics(folder / "training_metrics.json")
    last = metrics["steps"][-1]["step"]
    assert f"reason=asked to make room (SIGUSR1) step={last} " in mark
    saved = folder / "checkpoints" / f"step_{last:06d}"
    assert {path.name for path in saved.glob("random_state_rank*")} == {
        "random_state_rank0.pt",
        "random_state_rank1.pt",
    }


@pytest.mark.launches
@pytest.mark.slow
def test_a_signal_again_within_two_seconds_is_the_same_and_later_ends_at_once(files, tmp_path):
    """Rank 1 is stopped, so rank 0 cannot finish its step: only the third signal, or the grace of 60 s, ends it."""
    folder = tmp_path / "run"
    flags = flags_of(files, folder, *ENDLESS, "--run_type", "allreduce", "--grace_seconds", "60")
    with ranks(folder, flags) as run:
        run.wait_until(lambda: run.is_at(5))
        os.kill(run.process_of(1), signal.SIGSTOP)
        time.sleep(0.5)
        first_s = time.monotonic()
        while run.processes[0].poll() is None and time.monotonic() < first_s + 50:  # the grace is 60
            run.processes[0].send_signal(signal.SIGTERM)
            time.sleep(0.5)
        assert run.processes[0].wait(1) == 143, run.text
        assert time.monotonic() - first_s >= 2, "within two seconds it is the same signal"
        mark = run.mark(FAILED)
        assert "terminated (SIGTERM), and a second time" in mark and "rank 1 is stopped (SIGSTOP): it is in" in mark
    assert read_metrics(folder / "training_metrics.json")["status"] == "failed"


def test_a_stop_that_cannot_save_is_a_failure_with_the_signals_exit_code(files):
    ending = ending_of(files)
    ending.signals = SimpleNamespace(agreed=0, number=signal.SIGTERM, as_exception=lambda: stop_of(signal.SIGTERM))
    reason, code = ending.reason_and_code(CheckpointFailed("the checkpoint of step 3 could not be written"))
    assert code == 143
    assert reason == "terminated (SIGTERM), and nothing could be saved: the checkpoint of step 3 could not be written"


@pytest.mark.launches
@pytest.mark.slow
def test_a_closed_terminal_costs_no_mark(files, tmp_path):
    """Also after Ctrl-C with `2>&1 | tee`: the reader is gone before the run is."""
    folder = tmp_path / "run"
    reader, writer = os.pipe()
    command = [*python_command(), *flags_of(files, folder, *ENDLESS)]
    process = subprocess.Popen(command, stdout=writer, stderr=writer)
    os.close(writer)
    try:
        wait_for(lambda: (place := watchdog.read_place(folder, 0)) is not None and place.step >= 2, 150)
        os.close(reader)
        process.send_signal(signal.SIGHUP)
        assert process.wait(150) == 143
    finally:
        process.kill()
        process.wait()
    assert [path.name for path in folder.glob("RUN_*.txt")] == [PREEMPTED]
    assert read_metrics(folder / "training_metrics.json")["status"] == "preempted"


@pytest.mark.launches
def test_a_stop_while_pytorch_loads_leaves_nothing(files, tmp_path):
    folder = tmp_path / "run"
    with started(folder, [[sys.executable, "-u", *python_command()[1:], *flags_of(files, folder, *ENDLESS)]]) as run:
        run.wait_until(lambda: "loading PyTorch" in run.text)
        run.processes[0].send_signal(signal.SIGUSR1)
        assert run.codes(60) == [143]
    assert not folder.exists() and "Traceback" not in run.text


@pytest.mark.launches
def test_a_token_file_that_is_cut_off_ends_the_run_with_a_sentence(tmp_path):
    """Mapped into memory it ended it by SIGBUS: no mark, no sentence, status `running`."""
    folder, files = tmp_path / "run", write_token_files(tmp_path)
    flags = [*flags_of(files, folder, *ENDLESS), "--num_workers", "2"]
    with started(folder, [[*python_command(), *flags]]) as run:
        run.wait_until(lambda: run.is_at(3))
        os.truncate(files[0], 4096)
        assert run.codes(60) == [1], run.text
        mark = run.mark(FAILED)
    assert f"{files[0]} is no longer the file that was opened" in mark and "Traceback" not in run.text
    assert read_metrics(folder / "training_metrics.json")["status"] == "failed"


def test_a_folder_without_room_is_no_reason_to_end(tmp_path):
    (tmp_path / "file").write_text("")
    file = watchdog.ProgressFile(tmp_path / "file" / "folder", 0)
    file.enter("forward", 1)
    file.beat()
    file.remove()


def exhaust_python():
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (8 * 2**30, limits[1]))
    try:
        bytearray(2**40)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.parametrize("exhaust", [lambda: torch.empty(2**58), lambda: np.ones(2**45), exhaust_python])
def test_memory_that_ran_out_gets_advice_on_the_micro_batch(files, exhaust):
    """Real errors of the libraries, whose words change with their versions."""
    with pytest.raises((RuntimeError, MemoryError)) as raised:
        exhaust()
    reason = ending_of(files).reason_and_code(raised.value)[0]
    assert reason.startswith("out of memory with --micro_batch_size_per_gpu 2; give a smaller one, or auto")


def test_what_is_no_lack_of_memory_gets_no_such_advice(files, capsys):
    ending = ending_of(files)

    def reason_of(error: Exception) -> str | None:
        return reasons.reason_of(error, ending.settings, ending.ranks)

    assert reason_of(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None
    assert "out of memory" in reason_of(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert "another rank is gone" in reason_of(RuntimeError("[gloo/transport] Connection closed by peer"))


def test_a_run_has_one_end(tmp_path):
    saved = tmp_path / "checkpoints" / "step_000003"
    marks.mark_failed(tmp_path, 1, "first")
    assert "reason=first" in marks.mark_failed(tmp_path, 0, "second")
    with pytest.raises(marks.RunAlreadyFailed):
        marks.mark_preempted(tmp_path, "terminated (SIGTERM)", 3, saved)
    assert not (tmp_path / PREEMPTED).exists() and marks.closing_mark(tmp_path) is None
    (tmp_path / FAILED).unlink()
    marks.mark_preempted(tmp_path, "terminated (SIGTERM)", 3, saved)
    assert marks.closing_mark(tmp_path) == PREEMPTED


def test_a_preempted_run_is_not_finished_for_whoever_reads_it(tmp_path):
    metrics = example_metrics(status="preempted", completion=None)
    check_metrics(metrics)
    with pytest.raises(ValueError, match="failure"):
        check_metrics(metrics | {"failure": {"reason": "it did not fail", "step": 3}})
    write_metrics(tmp_path / "training_metrics.json", metrics)
    marks.mark_preempted(tmp_path, "terminated (SIGTERM)", 3, tmp_path)
    (tmp_path / "launcher_metadata.json").write_text('{"world_size": 2}')
    assert [verdict.status for verdict in verify(tmp_path)] == ["incomplete"]
    (tmp_path / COMPLETE).write_text("x")
    assert [verdict.status for verdict in verify(tmp_path)] == ["contradicting_marks"]


@pytest.mark.parametrize("code", [0, None, 3])
def test_an_exit_of_a_library_ends_the_run_as_failed(files, code, monkeypatch):
    """exit() called from inside training is a failure of the run, whatever its code."""
    ending, marked = ending_of(files), []
    ending.signals = SimpleNamespace(agreed=0, number=0, defer=lambda: None)
    monkeypatch.setattr(ending, "mark_failed", lambda reason, **_: marked.append(reason))
    monkeypatch.setattr(ending, "_leave", lambda code: code)
    with ending:
        raise SystemExit(code)
    assert ending.exit_code == 1
    assert marked == [f"RuntimeError: something called exit({code!r}) before the run's end"]


@pytest.mark.parametrize(
    ("error", "code"),
    [(None, 0), (TrainingDiverged("the loss of step 3 is nan"), 1), (RunStopped("terminated (SIGTERM)", 143), 143)],
)
def test_trackers_get_the_exit_code_of_the_run(files, error, code, monkeypatch):
    ending, told = ending_of(files), []
    ending.signals = SimpleNamespace(agreed=0, number=0, defer=lambda: None)
    ending.trackers = SimpleNamespace(close=told.append, may_hold_up_exit=False)
    monkeypatch.setattr(ending, "mark_failed", lambda reason, **_: None)
    monkeypatch.setattr(run_ending, "ignore_signals_until_exit", lambda: None)
    with ending:
        if error is not None:
            raise error
    assert told == [ending.exit_code] == [code]


@pytest.mark.launches
def test_a_lock_of_a_killed_build_is_told_from_one_that_is_held(tmp_path, monkeypatch):
    """As PyTorch makes it: created and kept open by the process that builds."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "cpu_adam").mkdir()
    lock = tmp_path / "cpu_adam" / "lock"
    code = (
        f"import os, time; os.open({str(lock)!r}, os.O_CREAT | os.O_EXCL); print('held', flush=True); time.sleep(600)"
    )
    builder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert builder.stdout.readline() == b"held\n"
    assert console.abandoned_locks() == []
    builder.kill()
    builder.wait()
    assert console.abandoned_locks() == [lock]
    assert [str(lock) in line for line in console.warnings_of_locks("optimized")] == [True]
    assert console.warnings_of_locks("ddp") == []


def test_a_rank_that_fails_after_the_run_was_stopped_takes_the_mark_of_the_stop_away(tmp_path):
    marks.mark_preempted(tmp_path, "terminated (SIGTERM)", 3, tmp_path / "checkpoints" / "step_000003")
    marks.mark_failed(tmp_path, 1, "late")
    assert [path.name for path in tmp_path.glob("RUN_*.txt")] == [FAILED]
