"""Carrying a sweep out: a run that fails, hangs or is stopped, a full disk, and a real one."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from support.programs import REPOSITORY, TINY_RUN, data_flags, script
from support.sweep_cases import SCRIPT, as_sweep, finish, request

from testbed.distributed import processes
from testbed.distributed.processes import Stop
from testbed.sweep import state
from testbed.sweep.plan import COMPLETE, FAILED, NOT_APPLICABLE, PENDING, plan
from testbed.sweep.runner import LOCK, Runner, only_sweep_in
from testbed.sweep.state import read_sweep

STAND_IN = """
    import shlex, subprocess, sys, time
    from pathlib import Path
    sys.path.insert(0, {tests!r})
    from support.metrics_examples import example_metrics, save

    def value(flag):
        return sys.argv[sys.argv.index(flag) + 1]

    folder, run_type = Path(value("--checkpoint_path")), value("--run_type")
    if run_type == "allreduce":
        sys.exit("gpt2.py: error: this cannot be")
    if run_type == "fsdp":
        raise RuntimeError("a tensor is not where it was")
    if run_type == "ddp":
        (folder / "RUN_FAILED.txt").write_text("[Rank 0] RUN_FAILED reason=out of memory timestamp_utc=2026Z\\n")
        sys.exit(1)
    if run_type == "optimized":  # like torchrun: a rank in a session of its own; and it does not listen to SIGTERM
        code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
        child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
        (folder / "written").write_text(str(child.pid))
        (folder / "written").rename(folder / "pids")
        time.sleep(600)
    metrics = example_metrics(world_size=1, command_line=shlex.join(sys.argv), hardware={{"num_devices": 1}})
    save(folder, metrics)
    (folder / "model.safetensors").write_text("weights")
"""


@pytest.fixture
def stand_in(tmp_path):
    program = tmp_path / "gpt2.py"
    program.write_text(textwrap.dedent(STAND_IN.format(tests=str(REPOSITORY / "tests"))))
    return program


@contextlib.contextmanager
def a_runner(stand_in: Path, variants: str, **options):
    out_dir = stand_in.parent / "out"
    asked = request(variants, ranks=(1,), repeats=2, folder=str(out_dir), program=str(stand_in))
    sweep = as_sweep(asked)
    with Stop() as stop, only_sweep_in(out_dir) as lock:
        yield Runner(sweep, out_dir, asked.machine, SETTINGS_OF_ANY, stop, lock, **options)


class _Any(dict):
    """The time left is not what these tests are about."""

    def __contains__(self, key):
        return False


SETTINGS_OF_ANY = _Any()


@pytest.fixture(autouse=True)
def no_estimate(request, monkeypatch):
    if "stand_in" in request.fixturenames:
        monkeypatch.setattr("testbed.sweep.runner.seconds_left", lambda *_: 0.0)


def is_alive(pid: int) -> bool:
    """A zombie is not: its parent ended first, and nobody collected it."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.launches
def test_a_failed_run_is_recorded_with_its_reason_and_the_sweep_goes_on(stand_in, capsys):
    with a_runner(stand_in, "baseline,allreduce,ddp,fsdp") as runner:
        runner.run_all(warmup_runs=1)
    written = read_sweep(runner.out_dir)
    outcome = {cell.run_type: (cell.status, cell.reason) for cell in written.cells}
    assert outcome == {
        "baseline": (COMPLETE, None),
        "allreduce": (FAILED, "this cannot be"),
        "ddp": (FAILED, "out of memory"),
        "fsdp": (FAILED, "exit code 1: RuntimeError: a tensor is not where it was"),
    }
    assert len(written.cells) == 8 and all(cell.seconds > 0 and cell.started_utc for cell in written.cells)
    folder = runner.out_dir / "baseline_1rank_batch8" / "run_1"
    assert not (folder / "model.safetensors").exists()  # 500 MB each with GPT-2 124M
    assert (folder / "train.log").read_text().startswith("$ env OMP_NUM_THREADS=1 python ")
    # the warm-up run is on record, and nowhere where a search for runs would find it
    assert [(row["name"], row["status"]) for row in written.warmup_runs] == [("baseline_1rank_batch8", COMPLETE)]
    assert len(list(runner.out_dir.rglob("training_metrics.json"))) == 2
    assert not list(runner.out_dir.glob(".warmup-*"))
    assert "nothing left" in capsys.readouterr().out


@pytest.mark.launches
def test_warming_up_removes_nothing_that_was_there(stand_in):
    with a_runner(stand_in, "baseline") as runner:
        note = runner.out_dir / "warmup" / "notes.txt"
        note.parent.mkdir()
        note.write_text("mine")
        runner.run_all(warmup_runs=1)
    assert note.read_text() == "mine"


@pytest.mark.launches
def test_a_run_that_takes_too_long_is_ended_with_all_its_processes(stand_in, monkeypatch):
    monkeypatch.setattr(processes, "PATIENCE_S", 1.0)
    pids = stand_in.parent / "out" / "optimized_1rank_batch8" / "run_1" / "pids"
    # the clock stands still until the run has started its child
    clock = SimpleNamespace(perf_counter=lambda: 10.0 * pids.exists(), sleep=time.sleep, monotonic=time.monotonic)
    monkeypatch.setattr(processes, "time", clock)
    with a_runner(stand_in, "optimized", timeout_s=5.0) as runner:
        runner.sweep.cells = runner.sweep.cells[:1]
        runner.run_all(warmup_runs=0)
    cell = read_sweep(runner.out_dir).cells[0]
    assert (cell.status, cell.reason) == (FAILED, "it ran longer than --run_timeout_s 5 and was ended")
    assert not is_alive(int((runner.out_dir / cell.folder / "pids").read_text()))


@pytest.mark.launches
@pytest.mark.parametrize("number, exit_code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_run_and_leaves_a_sweep_to_go_on_with(stand_in, monkeypatch, request, number, exit_code):
    monkeypatch.setattr(processes, "PATIENCE_S", 1.0)
    pids = stand_in.parent / "out" / "optimized_1rank_batch8" / "run_1" / "pids"

    def send() -> None:
        while not pids.exists():
            time.sleep(0.05)
        os.kill(os.getpid(), number)

    sender = threading.Thread(target=send)
    # a shell that starts the tests in the background has them ignore Ctrl-C, and a sweep leaves what is ignored alone
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    with a_runner(stand_in, "optimized", timeout_s=60.0) as runner:
        sender.start()
        runner.run_all(warmup_runs=0)
        sender.join()
        assert runner.stop.exit_code == exit_code
    assert not is_alive(int(pids.read_text()))
    written = read_sweep(runner.out_dir)
    assert [(cell.status, cell.reason) for cell in written.cells] == [(PENDING, "interrupted"), (PENDING, None)]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler  # as it was


def test_a_second_sweep_in_the_same_folder_is_refused(tmp_path):
    with (
        only_sweep_in(tmp_path),
        pytest.raises(ValueError, match="in use by another sweep"),
        only_sweep_in(tmp_path),
    ):
        pass
    with only_sweep_in(tmp_path):
        pass


def test_a_lock_that_is_a_link_is_refused_and_its_target_kept(tmp_path):
    (tmp_path / "mine.txt").write_text("kept")
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / LOCK).symlink_to(tmp_path / "mine.txt")
    with pytest.raises(ValueError, match="cannot be written"), only_sweep_in(tmp_path / "sweep"):
        pass
    assert (tmp_path / "mine.txt").read_text() == "kept"


def test_a_full_disk_ends_the_sweep_and_no_run_is_left(stand_in, monkeypatch):
    before = psutil.Process().children()
    with a_runner(stand_in, "baseline") as runner:

        def full(path: Path, text: str) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(state, "write_text", full)
        with pytest.raises(OSError, match="No space left"):
            runner.run_all(warmup_runs=0)
    assert psutil.Process().children() == before


@pytest.mark.launches
@pytest.mark.slow
def test_a_real_sweep_of_two_runs(token_files, tmp_path):
    """A single process and a pipeline of two, on real data: both learn the same, and the report is there."""
    out_dir = tmp_path / "sweep"
    own = ["--run_types", "baseline,pipeline", "--ranks", "1,2", "--batch_sizes", "8", "--repeats", "1", "--steps", "7"]
    own += ["--warmup_runs", "0", "--yes", "--out_dir", str(out_dir), "--", *TINY_RUN, *data_flags(token_files)]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *own], capture_output=True, text=True, timeout=120, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    sweep = json.loads((out_dir / "sweep.json").read_text())
    assert Counter(cell["status"] for cell in sweep["cells"]) == {COMPLETE: 2, NOT_APPLICABLE: 2}
    assert "--out_dir sweep -- " in sweep["command_line"]
    losses = [
        json.loads(path.read_text())["summary"]["final_val_loss"] for path in out_dir.rglob("training_metrics.json")
    ]
    assert len(losses) == 2 and losses[0] == pytest.approx(losses[1], abs=5e-6)  # float32 sums in another order
    assert (out_dir / "scaling_report.json").exists()
    assert "about" in done.stdout and "\n| pipeline" in done.stdout and "its status is ok" in done.stdout
    assert "baseline_2ranks_batch8: not applicable: baseline is one process" in done.stdout


def test_the_end_of_a_sweep_prints_what_keeps_its_report_from_being_ok(tmp_path, capsys):
    cells = [cell for cell in plan(request("ddp", repeats=1)) if cell.status == PENDING]
    for cell in cells:
        cell.status = COMPLETE
        finish(cell, tmp_path, training_config={"precision": "fp32" if cell.ranks == 1 else "bf16"})
    sweep = as_sweep(request("ddp"))
    sweep.cells = cells
    sweep.write(tmp_path)
    script(SCRIPT.name).report(cells, tmp_path)
    said = capsys.readouterr().out
    assert "its status is invalid_comparison" in said
    assert "precision is bf16" in said


@pytest.mark.parametrize("ranks", [(2,), (1, 2)])
def test_a_sweep_without_one_rank_ends_with_the_commands_that_compare_its_strategies(tmp_path, capsys, ranks):
    """Every speed-up is n/a then."""
    sweep = as_sweep(request("allreduce,ddp,fsdp", repeats=1, ranks=ranks))
    for cell in sweep.cells:
        cell.status = COMPLETE
        finish(cell, tmp_path, training_config={"run_type": cell.run_type})
    sweep.write(tmp_path)
    script(SCRIPT.name).report(sweep.cells, tmp_path)
    said = capsys.readouterr().out
    commands = [line for line in said.splitlines() if line.startswith("python scripts/compare_runs.py")]
    first = tmp_path / "allreduce_2ranks_batch8"
    expected = [f"{tmp_path}/{name}_2ranks_batch8 --against {first}" for name in ("ddp", "fsdp")]
    assert commands == ([f"python scripts/compare_runs.py {each}" for each in expected] if ranks == (2,) else [])
    assert ("no speed-up can be given; verdicts between" in said) == (ranks == (2,))
