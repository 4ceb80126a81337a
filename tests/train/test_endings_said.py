"""Check what a failure says, and that a run has one end."""

from __future__ import annotations

import ast
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from support.endings import COMPLETE, FAILED, PREEMPTED, ending_of
from support.metrics_examples import example_metrics
from support.programs import REPOSITORY, TINY_RUN, data_flags

from testbed.analysis.runs.verify import verify
from testbed.config.flags import parse_command_line
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


def exhaust_torch():
    torch.empty(2**58)


def exhaust_numpy():

    np.ones(2**45)


def exhaust_python():
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (8 * 2**30, limits[1]))
    try:
        bytearray(2**40)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.parametrize("exhaust", [exhaust_torch, exhaust_numpy, exhaust_python])
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


WALL_CLOCKS = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today", "date.today"}


# where a moment is written down for people; nothing is computed from it
TIMESTAMPS = {
    ("src/testbed/io.py", "now_utc"),
    ("src/testbed/metrics/facts.py", "facts_of_run"),
    ("src/testbed/distributed/launch.py", "tell_torchrun"),
    ("src/testbed/data/corpus.py", "write_corpus"),
    ("src/testbed/analysis/profiles/summary.py", "summarize"),
}


def test_nothing_measured_reads_a_clock_that_can_be_set_back():
    """Durations come from the monotonic clocks. Held by reading every program: a clock cannot be set in a test."""
    found = set()
    for path in sorted(
        {*REPOSITORY.glob("*.py"), *REPOSITORY.glob("src/**/*.py"), *REPOSITORY.glob("scripts/**/*.py")}
    ):
        name = str(path.relative_to(REPOSITORY))
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for function in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.Module)]:
            inner = [node for child in ast.iter_child_nodes(function) for node in _outside_functions(child)]
            if any(isinstance(node, ast.Attribute) and ast.unparse(node) in WALL_CLOCKS for node in inner):
                found.add((name, getattr(function, "name", "<module>")))
    assert found <= TIMESTAMPS, f"{found - TIMESTAMPS}: use time.perf_counter or time.monotonic"


def _outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    if not isinstance(node, ast.FunctionDef):
        yield node
        for child in ast.iter_child_nodes(node):
            yield from _outside_functions(child)


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


@pytest.mark.parametrize("flag", ["--grace_seconds", "--collective_timeout"])
def test_a_time_to_wait_is_positive(files, flag):
    with pytest.raises(ValueError, match=flag):
        parse_command_line([*TINY_RUN, *data_flags(files), flag, "0"])


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
    assert console.abandoned_locks(console.cache_folder()) == []
    builder.kill()
    builder.wait()
    assert console.abandoned_locks(console.cache_folder()) == [lock]
    assert [str(lock) in line for line in console.warnings_of_locks("optimized")] == [True]
    assert console.warnings_of_locks("ddp") == []
