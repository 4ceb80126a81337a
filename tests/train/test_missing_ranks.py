"""Name the rank that died, stopped or lags behind."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from support.endings import ENDLESS, FAILED, PREEMPTED, ending_of, flags_of, ranks, started, wait_for
from support.programs import PROGRAM, REPOSITORY
from support.settings import typed

from testbed.config.check import has_version
from testbed.data.token_file import sidecar_path
from testbed.distributed import process_group, watchdog
from testbed.distributed.launch import Launch
from testbed.distributed.rendezvous import free_port
from testbed.metrics.file import read_metrics
from testbed.train import ending as run_ending
from testbed.train import other_ranks
from testbed.train import run as setup

pytestmark = pytest.mark.skipif(not Path("/proc").is_dir(), reason="signals and process states as Linux has them")


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
        assert run.processes[0].wait(100) == 1, run.text  # the default is 120
        assert time.monotonic() - stopped_s > 3
        place, mark = watchdog.read_place(folder, 1), run.mark(FAILED)
    assert f"rank 1 is stopped (SIGSTOP): it is in {place.words} since" in mark
    assert "rank 0 waited in" in mark and "Traceback" not in run.text
    assert re.search(r" inside gloo:(barrier|\w+ \([\dx]+ \w+\)), collective \d+ of process group 0 default_pg", mark)
    assert abs(place.step - read_metrics(folder / "training_metrics.json")["steps"][-1]["step"]) <= 1


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
@pytest.mark.skipif(not has_version("torch", (2, 12)), reason="torchrun has --shutdown-timeout since PyTorch 2.12")
def test_the_documented_torchrun_restarts_without_a_rank_and_saves_on_sigusr1(files, tmp_path):
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
        assert run.codes(60) == [1], run.text
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
        return process_group._store_of_this_start(launch, patience_s=30)

    store(here, 0).set("address", "of the dead")
    assert store(here, 0).check(["address"]) and not store(here, 1).check(["address"])
    store(of_two_nodes, 0).set("address", "of a rank whose node has not lost any")
    assert store(of_two_nodes, 1).check(["address"]), "nodes that count apart must find each other"


def place_of(folder: Path, rank: int, phase: str, step: int, process: int | None = None) -> watchdog.ProgressFile:
    file = watchdog.ProgressFile(folder, rank)
    file.enter(phase, step)
    if process is not None:
        watchdog._WHO.pack_into(file._map, watchdog._WHO_AT, process, socket.gethostname().encode())
    return file


@pytest.mark.launches
def test_the_missing_rank_is_the_dead_then_the_stopped_then_the_one_behind(tmp_path, other_process):
    place_of(tmp_path, 0, "exchange", 12)
    file = place_of(tmp_path, 1, "exchange", 12, other_process.pid)
    missing = lambda: watchdog.missing_ranks(tmp_path, 2, 0)  # noqa: E731
    assert missing() is None, "both wait at one place"
    assert watchdog.longest_waiting_at_same_place(tmp_path, 2, 0).startswith(
        "no rank is behind, and rank 1 is in the exchange of the"
    )
    file.enter("data_wait")
    assert re.fullmatch(r"rank 1 is in reading data of step 12 since \d s", missing())
    file.enter("forward", 13)
    assert missing() is None is watchdog.longest_waiting_at_same_place(tmp_path, 2, 0), "ahead is not missing"
    file.enter("backward", 12)
    os.kill(other_process.pid, signal.SIGSTOP)
    wait_for(lambda: psutil.Process(other_process.pid).status() == psutil.STATUS_STOPPED)
    assert re.fullmatch(r"rank 1 is stopped \(SIGSTOP\): it is in backward of step 12 since \d s", missing())
    other_process.kill()  # and nobody has asked for its exit code: a zombie is dead too
    wait_for(lambda: psutil.Process(other_process.pid).status() == psutil.STATUS_ZOMBIE)
    assert missing().startswith("rank 1 is dead, its last sign was from backward of step 12")
    file.enter("ended")
    assert missing() == "rank 1 has ended itself, its own message says why"
    watchdog.path_of(tmp_path, 1).write_bytes(b"\xff" * 200)
    assert missing() is None, "another file says nothing of progress"


def waiting_for_rank_1(files, folder: Path, process: int) -> tuple[run_ending.RunEnding, watchdog.ProgressFile]:
    """Rank 0 of two in the exchange of step 12, and rank 1 in the barrier before it, where it was last seen."""
    ending = ending_of(files)
    ending.launch = Launch(0, 0, 2, 2)
    ending.ranks = other_ranks.OtherRanks(ending.launch, 60, ending.end_from_thread)
    ending.ranks.directory = folder
    place_of(folder, 0, "exchange", 12)
    return ending, place_of(folder, 1, "barrier", 12, process)


BROKEN = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1024")


@pytest.mark.launches
def test_a_rank_that_is_killed_is_dead_as_soon_as_the_kernel_shows_it(files, tmp_path, other_process, monkeypatch):
    """Its connections break before. A table of processes that shows the death at the third look."""
    ending, _ = waiting_for_rank_1(files, tmp_path, other_process.pid)
    shown = iter([psutil.STATUS_RUNNING, psutil.STATUS_RUNNING, psutil.STATUS_RUNNING, psutil.STATUS_RUNNING])
    monkeypatch.setattr(watchdog, "_status", lambda process: next(shown, psutil.STATUS_ZOMBIE))
    reason = ending.reason_and_code(BROKEN)[0]
    assert reason.startswith("rank 1 is dead, its last sign was from the barrier before a step of step 12"), reason


@pytest.mark.launches
def test_a_rank_that_lives_is_behind_as_soon_as_it_shows_it(files, tmp_path, other_process, monkeypatch):
    ending, file = waiting_for_rank_1(files, tmp_path, other_process.pid)
    looks = []
    monkeypatch.setattr(other_ranks.time, "sleep", lambda seconds: looks.append(seconds) or file.beat())
    reason = ending.reason_and_code(BROKEN)[0]
    assert re.match(r"rank 1 is in the barrier before a step of step 12 since \d s; rank 0 waited", reason), reason
    assert len(looks) == 1, "and nobody waits longer"


@pytest.mark.launches
@pytest.mark.parametrize(("flags", "lives"), [(0x400040, True), (0x400044, False)])
def test_a_process_that_the_kernel_takes_apart_is_dead(tmp_path, other_process, monkeypatch, flags, lives):
    """It is listed as running while its memory goes, after its connections have broken. Names may hold brackets."""
    (tmp_path / str(other_process.pid)).mkdir()
    (tmp_path / str(other_process.pid) / "stat").write_text(
        f"{other_process.pid} (a) R (b)) R 1 2 3 0 -1 {flags} 101 0 0 0\n"
    )
    monkeypatch.setattr(watchdog, "PROCESSES", tmp_path)
    assert watchdog.is_process_alive(other_process.pid) is lives


@pytest.fixture
def without_threads(monkeypatch) -> None:
    monkeypatch.setattr(watchdog.threading, "Thread", lambda **_: SimpleNamespace(start=lambda: None))


@pytest.mark.launches
def test_the_watch_waits_for_the_timeout_and_not_for_a_rank_that_lives(tmp_path, other_process, without_threads):
    mine, file = place_of(tmp_path, 0, "exchange", 3), place_of(tmp_path, 1, "backward", 3, other_process.pid)
    watch = watchdog.Watch(tmp_path, 0, 2, timeout_s=10, on_stuck=print)
    for _ in range(30):
        file.beat()
        assert watch.look(1.0) is None, "slow, perhaps, but running: the collective's own timeout decides"
    found = [watch.look(1.0) for _ in range(9)]
    assert found[:5] == [None] * 5 and "rank 1" in found[-1], "it has not run for ten seconds"
    mine.enter("barrier", 4)
    assert watch.look(1.0) is None, "this rank goes on, so it waits for nobody"


@pytest.fixture
def states(without_threads, monkeypatch) -> dict[int, str]:
    """The table of processes."""
    table: dict[int, str] = {}
    monkeypatch.setattr(watchdog, "_status", lambda process: table.get(process, psutil.STATUS_SLEEPING))
    return table


def looks_of(folder: Path, rank: int, files: list[watchdog.ProgressFile], still: set[int], said: list[str]):
    """A function that looks some seconds long, while the ranks that do not stand still show that they live."""
    watch = watchdog.Watch(folder, rank, len(files), timeout_s=120, on_stuck=print, on_stopped=said.append)

    def look(seconds: int) -> list[str]:
        said.clear()
        for _ in range(seconds):
            for other in set(range(len(files))) - still:
                files[other].beat()
            assert watch.look(1.0) is None
        return [*said]

    return look


@pytest.mark.parametrize(
    ("state", "words"),
    [(psutil.STATUS_STOPPED, "is stopped (state T: SIGSTOP"), (psutil.STATUS_TRACING_STOP, "a debugger (state t)")],
)
def test_a_stopped_rank_is_said_to_be_so_once_after_a_few_seconds(tmp_path, states, state, words):
    files = [place_of(tmp_path, rank, "forward", 3, 4_000_000 + rank) for rank in range(3)]
    still: set[int] = set()
    look = looks_of(tmp_path, 0, files, still, [])
    assert look(30) == [], "a long step, in which every rank runs"
    states[4_000_001] = state
    still.add(1)
    assert look(4) == []
    (line,) = look(60)
    assert line.startswith("rank 1 does not move: its process 4000001 ") and words in line
    assert "in forward of step 3 since" in line and "rank 0 waits for it in forward of step 3" in line
    assert line.endswith("and gives up in about 111 s (--collective_timeout 120)")
    states.clear()
    still.clear()
    assert look(10) == []
    states[4_000_001] = state
    still.add(1)
    assert len(look(20)) == 1, "another stop is another line"
    files[0].enter("backward")
    assert look(1) == []


def test_the_lowest_rank_that_runs_says_who_is_stopped(tmp_path, states):
    files = [place_of(tmp_path, rank, "forward", 3, 4_000_000 + rank) for rank in range(4)]
    states |= {4_000_000: psutil.STATUS_STOPPED, 4_000_002: psutil.STATUS_STOPPED}
    said = {rank: looks_of(tmp_path, rank, files, {0, 2}, [])(20) for rank in (1, 3)}
    assert [line[:20] for line in said[1]] == ["rank 0 does not move", "rank 2 does not move"] and said[3] == []


def test_a_silent_rank_whose_process_is_not_stopped_is_not_accused(tmp_path, states):
    """It may compile or hold Python's lock; on another machine nothing is known of its process."""
    files = [place_of(tmp_path, rank, "validation", 3, 4_000_000 + rank) for rank in range(3)]
    watchdog._WHO.pack_into(files[2]._map, watchdog._WHO_AT, 4_000_002, b"elsewhere")
    states[4_000_002] = psutil.STATUS_STOPPED
    assert looks_of(tmp_path, 0, files, {1, 2}, [])(60) == []


@pytest.mark.launches
@pytest.mark.slow
def test_the_ranks_that_wait_for_a_stopped_one_say_so_and_go_on_with_it(files, tmp_path):
    folder = tmp_path / "run"
    flags = flags_of(files, folder, *ENDLESS, "--run_type", "tensor", "--collective_timeout", "60")
    with ranks(folder, flags) as run:
        run.wait_until(lambda: run.is_at(20))
        stopped = run.process_of(1)
        os.kill(stopped, signal.SIGSTOP)
        run.wait_until(lambda: "does not move" in run.text, 20)
        assert f"rank 1 does not move: its process {stopped} is stopped (state T" in run.text
        assert "(--collective_timeout 60)" in run.text
        step = watchdog.read_place(folder, 1).step
        os.kill(stopped, signal.SIGCONT)
        run.wait_until(lambda: run.is_at(step + 20), 20)
        assert run.text.count("does not move") == 1


@pytest.mark.launches
def test_a_gpu_that_hangs_is_found_by_the_rank_itself(tmp_path, other_process, without_threads):
    """All ranks live and stand at one place, as they do when a collective hangs. NCCL would leave no mark."""
    mine, file = place_of(tmp_path, 0, "forward", 1), place_of(tmp_path, 1, "device", 1, other_process.pid)
    watches = [watchdog.Watch(tmp_path, 0, 2, timeout_s=10, on_stuck=print, is_cuda=is_cuda) for is_cuda in (0, 1)]

    def looks(number: int) -> list[list[str | None]]:
        found = []
        for _ in range(number):
            file.beat()
            found.append([watch.look(1.0) for watch in watches])
        return found

    assert looks(30) == [[None, None]] * 30, "the first step compiles"
    for phase, may_last in (("validation", True), ("data_wait", True), ("checkpoint", True), ("device", False)):
        mine.enter(phase, 2)
        file.enter(phase, 2)
        found = looks(30)
        assert [on_cpu for on_cpu, _ in found] == [None] * 30, "a collective of gloo times out by itself"
        if may_last:
            assert [on_gpu for _, on_gpu in found] == [None] * 30, phase
        else:
            assert found[5][1] is None and found[6][1].startswith("rank 0 makes no progress and no rank is behind it")
    file.enter("data_wait", 2)
    assert looks(1)[0][1].startswith("rank 1 is in reading data of step 2"), "the rank that keeps the others waiting"


def test_a_run_on_a_gpu_watches_its_own_device(files, tmp_path, monkeypatch):
    """From the choice of the device to the thread that watches."""
    gpu = torch.device("cuda", 0)
    checked = typed([*flags_of(files, tmp_path, "--run_type", "ddp")], 2)
    monkeypatch.setattr(setup, "choose_device", lambda settings, launch: gpu)
    monkeypatch.setattr(setup, "check_memory", lambda *_: None)
    monkeypatch.setattr(setup.process_group, "start_process_group", lambda *_, **__: "nccl")
    monkeypatch.setattr(setup.resume, "begin", lambda *_: SimpleNamespace(
        is_complete=False, checkpoint=None, sha256={"train": "", "val": ""}))  # fmt: skip
    watches = []
    monkeypatch.setattr(other_ranks.run_lock, "hold", lambda directory: None)
    monkeypatch.setattr(other_ranks.watchdog, "begin", lambda directory, rank: None)
    monkeypatch.setattr(other_ranks.watchdog, "Watch", lambda *_, is_cuda, **__: watches.append(is_cuda))
    monkeypatch.setattr(other_ranks.run_lock, "by_handle", lambda directory: directory)
    ending, _ = waiting_for_rank_1(files, tmp_path, 0)
    ending.signals, ending.ranks.watch_startup = SimpleNamespace(interrupt=lambda: None), lambda: None
    checked, device, _, _ = setup.join_ranks(checked, Launch(0, 0, 2, 2), ending)
    setup.agree_on_start(checked, Launch(0, 0, 2, 2), ending, device)
    assert watches == [True]
