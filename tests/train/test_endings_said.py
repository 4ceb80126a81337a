"""Check what a failure says, and that a run has one end."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.endings import COMPLETE, FAILED, PREEMPTED, ending_of
from support.metrics_examples import example_metrics

from testbed.analysis.runs.verify import verify
from testbed.distributed import watchdog
from testbed.metrics.file import check_metrics, write_metrics
from testbed.run_folder import marks
from testbed.train import console, reasons

pytestmark = pytest.mark.skipif(not Path("/proc").is_dir(), reason="signals and process states as Linux has them")


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
    ending.checkpoints = None
    monkeypatch.setattr(ending, "mark_failed", lambda reason, **_: marked.append(reason))
    monkeypatch.setattr(ending, "_leave", lambda code: code)
    with ending:
        raise SystemExit(code)
    assert ending.exit_code == 1
    assert marked == [f"RuntimeError: something called exit({code!r}) before the run's end"]


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
