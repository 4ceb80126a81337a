"""How a run ends: asked to, without another rank, without memory. Each test does it to real processes where it can."""

from __future__ import annotations

import ast
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from support.endings import COMPLETE, ENDLESS, FAILED, PREEMPTED, ending_of, flags_of, ranks, started, wait_for
from support.metrics_examples import example_metrics
from support.programs import PROGRAM, REPOSITORY, TINY_RUN, data_flags, python_command, write_token_files

from testbed.analysis.runs.verify import verify
from testbed.config.flags import parse_command_line
from testbed.data.token_file import sidecar_path
from testbed.distributed import process_group, watchdog
from testbed.distributed.launch import Launch
from testbed.distributed.store_port import free_port
from testbed.metrics import run_directory
from testbed.metrics.file import check_metrics, read_metrics, write_metrics
from testbed.strategies import deepspeed_build_locks
from testbed.train import ending as run_ending
from testbed.train import other_ranks

pytestmark = pytest.mark.skipif(not Path("/proc").is_dir(), reason="signals and process states as Linux has them")


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> tuple[Path, Path]:
    """A validation file that takes about a second, so that a signal can meet it."""
    return write_token_files(tmp_path_factory.mktemp("tokens"), val_tokens=100_000)


# --- asked to end


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
        assert run.codes(20) == [143], run.text
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
        assert run.codes(20) == [143, 143], run.text
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
        while run.processes[0].poll() is None and time.monotonic() < first_s + 30:
            run.processes[0].send_signal(signal.SIGTERM)
            time.sleep(0.5)
        assert run.processes[0].wait(1) == 143, run.text
        assert 2 <= time.monotonic() - first_s < 30, "within two seconds it is the same signal"
        mark = run.mark(FAILED)
        assert "terminated (SIGTERM), and a second time" in mark and "rank 1 is stopped (SIGSTOP): it is in" in mark
    assert read_metrics(folder / "training_metrics.json")["status"] == "failed"


@pytest.mark.launches
def test_the_grace_bounds_a_stop_that_does_not_come_to_an_end(files, tmp_path):
    folder = tmp_path / "run"
    flags = flags_of(files, folder, *ENDLESS[:-2], "--eval_every", "2", "--grace_seconds", "0.01")
    with started(folder, [[*python_command(), *flags]]) as run:
        run.wait_until(lambda: run.is_at(2, "validation"))
        run.processes[0].send_signal(signal.SIGTERM)
        assert run.codes(10) == [143], run.text
        mark = run.mark(FAILED)
        assert "had not ended after --grace_seconds 0.01" in mark and "no checkpoint was saved" in mark
    metrics = read_metrics(folder / "training_metrics.json")
    assert metrics["status"] == "failed" and len(metrics["steps"]) == 2, "its rows are kept"
    assert watchdog.read_place(folder, 0).step == 2, "after a bad end the last place stays"


@pytest.mark.launches
def test_a_stop_that_cannot_save_is_a_failure_with_the_signals_exit_code(files, tmp_path):
    folder = tmp_path / "run"
    with started(folder, [[*python_command(), *flags_of(files, folder, *ENDLESS)]]) as run:
        run.wait_until(lambda: run.is_at(1))
        (folder / "checkpoints").write_text("a file where the folder should be")
        run.processes[0].send_signal(signal.SIGTERM)
        assert run.codes(20) == [143], run.text
        mark = run.mark(FAILED)
    assert "terminated (SIGTERM), and nothing could be saved: the checkpoint of step" in mark


@pytest.mark.launches
@pytest.mark.slow
@pytest.mark.parametrize(("sent", "code", "mark"), [(signal.SIGINT, 130, PREEMPTED), (signal.SIGHUP, 143, PREEMPTED)])
def test_that_nobody_reads_any_more_costs_no_mark(files, tmp_path, sent, code, mark):
    """As after Ctrl-C with `2>&1 | tee`, or when a terminal is closed: the reader is gone before the run is."""
    folder = tmp_path / "run"
    reader, writer = os.pipe()
    command = [*python_command(), *flags_of(files, folder, *ENDLESS)]
    process = subprocess.Popen(command, stdout=writer, stderr=writer)
    os.close(writer)
    try:
        wait_for(lambda: (place := watchdog.read_place(folder, 0)) is not None and place.step >= 2, 150)
        os.close(reader)
        process.send_signal(sent)
        assert process.wait(30) == code
    finally:
        process.kill()
        process.wait()
    assert [path.name for path in folder.glob("RUN_*.txt")] == [mark]
    assert read_metrics(folder / "training_metrics.json")["status"] == mark.removesuffix(".txt")[4:].lower()


@pytest.mark.launches
def test_a_stop_while_pytorch_loads_leaves_nothing(files, tmp_path):
    folder = tmp_path / "run"
    with started(folder, [[*python_command(), *flags_of(files, folder, *ENDLESS)]]) as run:
        run.wait_until(lambda: "loading PyTorch" in run.text)
        run.processes[0].send_signal(signal.SIGUSR1)
        assert run.codes(20) == [143]
    assert not folder.exists() and "Traceback" not in run.text


@pytest.mark.launches
def test_a_token_file_that_is_cut_off_ends_the_run_with_a_sentence(tmp_path):
    """Mapped into memory it ended it by SIGBUS: no mark, no sentence, status `running`."""
    folder, files = tmp_path / "run", write_token_files(tmp_path)
    flags = [*flags_of(files, folder, *ENDLESS), "--num_workers", "2"]
    with started(folder, [[*python_command(), *flags]]) as run:
        run.wait_until(lambda: run.is_at(3))
        os.truncate(files[0], 4096)
        assert run.codes(20) == [1], run.text
        mark = run.mark(FAILED)
    assert f"{files[0]} is no longer the file that was opened" in mark and "Traceback" not in run.text
    assert read_metrics(folder / "training_metrics.json")["status"] == "failed"


@pytest.mark.launches
@pytest.mark.slow
def test_a_token_file_that_is_touched_trains_on_and_one_with_other_ids_does_not(tmp_path):
    """On all ranks, of which the first alone read the file before the first step. The old time is put back after."""
    folder, files = tmp_path / "run", write_token_files(tmp_path)
    with ranks(folder, flags_of(files, folder, *ENDLESS, "--run_type", "ddp")) as run:
        run.wait_until(lambda: run.is_at(3))
        files[0].touch()
        touched_at = watchdog.read_place(folder, 0).step
        run.wait_until(lambda: all(run.is_at(touched_at + 3, rank=rank) for rank in range(2)))
        before = files[0].stat()
        with files[0].open("r+b") as file:
            file.write(b"\1\0" * 8)
        os.utime(files[0], ns=(before.st_atime_ns, before.st_mtime_ns))
        assert run.codes(30) == [1, 1], run.text
        mark = run.mark(FAILED)
    assert f"{files[0]} is no longer the file that was opened: it was written to, and its data are others" in mark


# --- without another rank


@pytest.mark.launches
@pytest.mark.slow
def test_a_stopped_rank_is_named_within_the_timeout(files, tmp_path):
    """And the rank that waited goes, though nobody tells it to. The progress file has the place to the step."""
    folder = tmp_path / "run"
    flags = flags_of(files, folder, *ENDLESS, "--run_type", "ddp", "--collective_timeout", "6")
    with ranks(folder, flags) as run:
        run.wait_until(lambda: run.is_at(20))
        os.kill(run.process_of(1), signal.SIGSTOP)
        stopped_s = time.monotonic()
        assert run.processes[0].wait(30) == 1, run.text
        seconds = time.monotonic() - stopped_s
        place, mark = watchdog.read_place(folder, 1), run.mark(FAILED)
    assert 3 < seconds < 20  # the default is 120
    assert f"rank 1 is stopped (SIGSTOP): it is in {place.words} since" in mark
    assert "rank 0 waited in" in mark and "Traceback" not in run.text
    assert abs(place.step - read_metrics(folder / "training_metrics.json")["steps"][-1]["step"]) <= 1


# On SIGUSR2 the main thread stands still in its next forward or backward pass, while the process and its threads run.
STAND_STILL = """
import signal, time
def stand_still(number, frame):
    while frame and frame.f_code.co_name != "train_step":
        frame = frame.f_back
    time.sleep(600) if frame else signal.setitimer(signal.ITIMER_REAL, 0.0005)
for number in (signal.SIGUSR2, signal.SIGALRM):
    signal.signal(number, stand_still)
"""


@pytest.mark.launches
@pytest.mark.slow
def test_a_rank_that_runs_and_does_not_come_is_named_when_the_collective_times_out(files, tmp_path):
    """Its progress file shows signs of life, so the watch leaves it alone."""
    folder, patch = tmp_path / "run", tmp_path / "patch"
    patch.mkdir()
    (patch / "sitecustomize.py").write_text(STAND_STILL)
    flags = flags_of(files, folder, *ENDLESS, "--run_type", "ddp", "--collective_timeout", "6")
    with ranks(folder, flags, PYTHONPATH=f"{patch}:{os.environ.get('PYTHONPATH', '')}") as run:
        run.wait_until(lambda: run.is_at(20))
        os.kill(run.process_of(1), signal.SIGUSR2)
        stopped_s = time.monotonic()
        assert run.processes[0].wait(30) == 1, run.text
        assert 5 < time.monotonic() - stopped_s < 20
        place, mark = watchdog.read_place(folder, 1), run.mark(FAILED)
    assert f"rank 1 is in {place.words} since" in mark and "rank 0 waited in" in mark and "imed out" in mark


@pytest.mark.launches
@pytest.mark.slow
def test_a_dead_rank_is_named_at_once(files, tmp_path):
    folder = tmp_path / "run"
    with ranks(folder, flags_of(files, folder, *ENDLESS, "--run_type", "ddp", "--save_every", "5")) as run:
        run.wait_until(lambda: run.is_at(12))
        os.kill(run.process_of(1), signal.SIGKILL)
        killed_s = time.monotonic()
        assert run.codes(20) == [1, -signal.SIGKILL], run.text
        assert time.monotonic() - killed_s < 20  # not after --collective_timeout
        mark = run.mark(FAILED)
    assert "rank 1 is dead, its last sign was from" in mark and "rank 0 waited in" in mark
    assert "last checkpoint: " in mark and "step_0000" in mark


@pytest.mark.launches
@pytest.mark.slow
def test_a_rank_that_fails_is_named_by_the_one_that_waits(files, tmp_path):
    """Rank 1 alone reads a token that the model does not know; rank 0 checks its own files only."""
    beyond = tmp_path / "beyond.bin"
    shutil.copy(sidecar_path(files[0]), sidecar_path(beyond))
    np.full_like(np.fromfile(files[0], dtype="<u2"), 60_000).tofile(beyond)
    folder = tmp_path / "run"
    flags = flags_of(files, folder, *ENDLESS, "--run_type", "ddp")
    with ranks(folder, flags, of_rank_1=("--train_data_path", str(beyond))) as run:
        assert run.codes() == [1, 1], run.text
        mark = run.mark(FAILED)
    assert "[Rank 1] RUN_FAILED reason=IndexError: " in mark, "the first to fail knows the cause"
    assert "rank 0 failed: rank 1 has ended itself, its own message says why; rank 0 waited in" in run.text


@pytest.mark.launches
@pytest.mark.slow
def test_the_documented_torchrun_starts_again_without_a_rank_and_saves_when_told_to_make_room(files, tmp_path):
    """Rank 1 is killed: all start again from the last checkpoint. Then SIGUSR1 to the launcher, which passes it on."""
    guide = (REPOSITORY / "docs" / "faults.md").read_text(encoding="utf-8")
    documented = (
        re.search(r"^torchrun (.*?)src/gpt2\.py", guide, re.DOTALL | re.MULTILINE)[1].replace("\\\n", "").split()
    )
    assert {"--max-restarts", "--signals-to-handle", "--shutdown-timeout"} < {*documented}
    launcher = [sys.executable, "-m", "torch.distributed.run", *documented, f"--master-port={free_port()}"]
    folder = tmp_path / "run"
    flags = [*ENDLESS, "--run_type", "ddp", "--save_every", "10", "--resume", "auto"]
    with started(folder, [[*launcher, str(PROGRAM), *flags_of(files, folder, *flags)]]) as run:
        run.wait_until(lambda: (folder / "checkpoints" / "step_000010").exists())
        killed = run.process_of(1)
        os.kill(killed, signal.SIGKILL)
        run.wait_until(lambda: run.process_of(1) not in (None, killed) and run.is_at(12))
        named = f"local_rank: 1 (pid: {killed})", "rank 1 is dead"  # by the launcher, if it looks before rank 0 ends
        assert any(words in run.text for words in named), run.text
        run.processes[0].send_signal(signal.SIGUSR1)
        assert run.codes(30) == [1], run.text
        run.mark(PREEMPTED)
    metrics = read_metrics(folder / "training_metrics.json")
    assert [row["step"] for row in metrics["steps"]] == list(range(1, metrics["steps"][-1]["step"] + 1))
    assert [segment["ended"] for segment in metrics["segments"]][1:] == ["preempted"]
    assert metrics["segments"][1]["first_step"] > 10


def test_a_start_again_does_not_find_what_the_ranks_before_left_in_the_store(monkeypatch):
    """torchrun keeps one store through --max-restarts, and in it the addresses of the dead."""
    server = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    here, of_two_nodes = Launch(0, 0, 2, 2), Launch(0, 0, 2, 1)
    for name, value in here.as_variables("127.0.0.1", server.port).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")

    def store(launch: Launch, restarts: int) -> torch.distributed.Store:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
        return process_group._store_of_this_start(launch)

    store(here, 0).set("address", "of the dead")
    assert store(here, 0).check(["address"]) and not store(here, 1).check(["address"])
    store(of_two_nodes, 0).set("address", "of a rank whose node has not lost any")
    assert store(of_two_nodes, 1).check(["address"]), "nodes that count apart must find each other"


# --- who is missing


def place_of(folder: Path, rank: int, phase: str, step: int, process: int | None = None) -> watchdog.ProgressFile:
    file = watchdog.ProgressFile(folder, rank)
    file.enter(phase, step)
    if process is not None:
        watchdog._WHO.pack_into(file._map, watchdog._WHO_AT, process, socket.gethostname().encode())
    return file


@pytest.mark.launches
def test_the_missing_rank_is_the_dead_then_the_stopped_then_the_one_behind(tmp_path, other):
    place_of(tmp_path, 0, "exchange", 12)
    file = place_of(tmp_path, 1, "exchange", 12, other.pid)
    missing = lambda: watchdog.missing_ranks(tmp_path, 2, 0)  # noqa: E731
    assert missing() is None, "both wait at one place"
    assert watchdog.longest_level_rank(tmp_path, 2, 0).startswith(
        "no rank is behind, and rank 1 is in the exchange of the"
    )
    file.enter("data_wait")
    assert re.fullmatch(r"rank 1 is in reading data of step 12 since \d s", missing())
    file.enter("forward", 13)
    assert missing() is None is watchdog.longest_level_rank(tmp_path, 2, 0), "ahead is not missing"
    file.enter("backward", 12)
    os.kill(other.pid, signal.SIGSTOP)
    wait_for(lambda: psutil.Process(other.pid).status() == psutil.STATUS_STOPPED)
    assert re.fullmatch(r"rank 1 is stopped \(SIGSTOP\): it is in backward of step 12 since \d s", missing())
    other.kill()  # and nobody has asked for its exit code: a zombie is dead too
    wait_for(lambda: psutil.Process(other.pid).status() == psutil.STATUS_ZOMBIE)
    assert missing().startswith("rank 1 is dead, its last sign was from backward of step 12")
    file.enter("ended")
    assert missing() == "rank 1 has ended itself, its own message says why"
    watchdog.path_of(tmp_path, 1).write_bytes(b"\xff" * 200)
    assert missing() is None, "what is no progress file says nothing"


def waiting_for_rank_1(files, folder: Path, process: int) -> tuple[run_ending.RunEnding, watchdog.ProgressFile]:
    """Rank 0 of two in the exchange of step 12, and rank 1 in the barrier before it, where it was last seen."""
    ending = ending_of(files)
    ending.launch = Launch(0, 0, 2, 2)
    ending._ranks = other_ranks.OtherRanks(ending.launch)
    ending._ranks.directory = folder
    place_of(folder, 0, "exchange", 12)
    return ending, place_of(folder, 1, "barrier", 12, process)


BROKEN = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1024")


@pytest.mark.launches
def test_a_rank_that_is_killed_is_dead_as_soon_as_the_kernel_shows_it(files, tmp_path, other, monkeypatch):
    """Its connections break before. A table of processes that shows the death at the third look."""
    ending, _ = waiting_for_rank_1(files, tmp_path, other.pid)
    shown = iter([psutil.STATUS_RUNNING, psutil.STATUS_RUNNING, psutil.STATUS_RUNNING, psutil.STATUS_RUNNING])
    monkeypatch.setattr(watchdog, "_status", lambda process: next(shown, psutil.STATUS_ZOMBIE))
    reason = ending._reason_of(BROKEN)
    assert reason.startswith("rank 1 is dead, its last sign was from the barrier before a step of step 12"), reason


@pytest.mark.launches
def test_a_rank_that_lives_is_behind_as_soon_as_it_shows_it(files, tmp_path, other, monkeypatch):
    ending, file = waiting_for_rank_1(files, tmp_path, other.pid)
    looks = []
    monkeypatch.setattr(other_ranks.time, "sleep", lambda seconds: looks.append(seconds) or file.beat())
    reason = ending._reason_of(BROKEN)
    assert re.match(r"rank 1 is in the barrier before a step of step 12 since \d s; rank 0 waited", reason), reason
    assert len(looks) == 1, "and nobody waits longer"


@pytest.mark.launches
@pytest.mark.parametrize(("flags", "lives"), [(0x400040, True), (0x400044, False)])
def test_a_process_that_the_kernel_takes_apart_is_dead(tmp_path, other, monkeypatch, flags, lives):
    """It is listed as running while its memory goes, after its connections have broken. Names may hold brackets."""
    (tmp_path / str(other.pid)).mkdir()
    (tmp_path / str(other.pid) / "stat").write_text(f"{other.pid} (a) R (b)) R 1 2 3 0 -1 {flags} 101 0 0 0\n")
    monkeypatch.setattr(watchdog, "PROCESSES", tmp_path)
    assert watchdog.is_process_alive(other.pid) is lives


@pytest.mark.launches
def test_the_watch_waits_for_the_timeout_and_not_for_a_rank_that_lives(tmp_path, other, monkeypatch):
    monkeypatch.setattr(watchdog.threading, "Thread", lambda **_: type("Idle", (), {"start": lambda self: None})())
    mine, file = place_of(tmp_path, 0, "exchange", 3), place_of(tmp_path, 1, "backward", 3, other.pid)
    watch = watchdog.Watch(tmp_path, 0, 2, timeout_s=10, on_stuck=print)
    for _ in range(30):
        file.beat()
        assert watch.look(1.0) is None, "slow, perhaps, but running: the collective's own timeout decides"
    found = [watch.look(1.0) for _ in range(9)]
    assert found[:7] == [None] * 7 and "rank 1" in found[-1], "it has not run for ten seconds"
    mine.enter("barrier", 4)
    assert watch.look(1.0) is None, "this rank goes on, so it waits for nobody"


def test_where_a_rank_is_costs_microseconds(tmp_path):
    """No system call and no flush: measured as the best of five thousand calls each, on a machine that may be busy."""
    file = watchdog.ProgressFile(tmp_path, 0)
    seconds = []
    for _ in range(5):
        start_s = time.perf_counter()
        for step in range(5000):
            file.enter("forward", step)
        seconds.append((time.perf_counter() - start_s) / 5000)
    assert min(seconds) < 10e-6


def test_a_folder_without_room_is_no_reason_to_end(tmp_path):
    (tmp_path / "file").write_text("")
    file = watchdog.ProgressFile(tmp_path / "file" / "folder", 0)
    file.enter("forward", 1)
    file.beat()
    file.remove()


def exhaust_torch():
    torch.empty(2**58)


def exhaust_numpy():
    import numpy as np

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
    reason = ending_of(files)._reason_of(raised.value)
    assert reason.startswith("out of memory with --micro_batch_size_per_gpu 2; give a smaller one, or auto")


def test_what_is_no_lack_of_memory_gets_no_such_advice(files, capsys):
    ending = ending_of(files)
    assert ending._reason_of(RuntimeError("mat1 and mat2 shapes cannot be multiplied")).startswith("RuntimeError: mat1")
    assert "out of memory" in ending._reason_of(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert "another rank is gone" in ending._reason_of(RuntimeError("[gloo/transport] Connection closed by peer"))


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
    run_directory.mark_failed(tmp_path, 1, "first")
    assert "reason=first" in run_directory.mark_failed(tmp_path, 0, "second")
    with pytest.raises(run_directory.RunAlreadyFailed):
        run_directory.mark_preempted(tmp_path, "terminated (SIGTERM)", 3, saved)
    assert not (tmp_path / PREEMPTED).exists() and run_directory.closing_mark(tmp_path) is None
    (tmp_path / FAILED).unlink()
    run_directory.mark_preempted(tmp_path, "terminated (SIGTERM)", 3, saved)
    assert run_directory.closing_mark(tmp_path) == PREEMPTED


def test_a_preempted_run_is_not_finished_for_whoever_reads_it(tmp_path):
    metrics = example_metrics(status="preempted", completion=None)
    check_metrics(metrics)
    with pytest.raises(ValueError, match="failure"):
        check_metrics(metrics | {"failure": {"reason": "it did not fail", "step": 3}})
    write_metrics(tmp_path / "training_metrics.json", metrics)
    run_directory.mark_preempted(tmp_path, "terminated (SIGTERM)", 3, tmp_path)
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
    assert deepspeed_build_locks.abandoned_locks(deepspeed_build_locks.cache_folder()) == []
    builder.kill()
    builder.wait()
    assert deepspeed_build_locks.abandoned_locks(deepspeed_build_locks.cache_folder()) == [lock]
    assert [str(lock) in line for line in deepspeed_build_locks.warnings_of_locks("optimized")] == [True]
    assert deepspeed_build_locks.warnings_of_locks("ddp") == []
