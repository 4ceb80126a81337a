"""Heartbeats before the ranks train: a dead rank is found in time, and a rank that lives is waited for."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from support.endings import FAILED, flags_of, started, wait_for
from support.programs import PROGRAM
from support.settings import stand_in

from testbed.distributed.launch import Launch
from testbed.distributed.rendezvous import ENDED, TRAINS, Heartbeat, StartupHeartbeat, this_machine
from testbed.distributed.store_port import free_port
from testbed.train import ending as run_ending

pytestmark = pytest.mark.skipif(not Path("/proc").is_dir(), reason="process states as Linux has them")


class Store(dict):
    """PyTorch's, as far as it is used; `is_gone`: nobody holds it any more."""

    is_gone = False

    def set(self, key: str, value: str) -> None:
        self._is_there()
        self[key] = value.encode()

    def get(self, key: str) -> bytes:
        self._is_there()
        return self[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def check(self, keys: list[str]) -> bool:
        self._is_there()
        return all(key in self for key in keys)

    def _is_there(self) -> None:
        if self.is_gone:
            raise RuntimeError("Connection reset by peer")

    def says(self, rank: int, process: int, count: object, machine: str | None = None) -> None:
        self.set(f"heartbeat_of_rank_{rank}", str(Heartbeat(machine or this_machine(), process, str(count))))


def meeting_of(rank: int, world_size: int, store: Store, timeout_s: float = 10, nodes: int = 1) -> StartupHeartbeat:
    return StartupHeartbeat(Launch(rank, 0, world_size, world_size // nodes), timeout_s, lambda: store, print)


def look(meeting: StartupHeartbeat, seconds: float = 1.0) -> str | None:
    """One turn of both threads; rank 0 says what it found at its next one."""
    meeting.exchange()
    if (missing := meeting.look(seconds)) is not None:
        meeting.broadcast_failure(missing)
        meeting.exchange()
    return missing


def end(process: subprocess.Popen) -> None:
    process.kill()  # nobody asks for its exit code: a zombie is dead too
    wait_for(lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE)


@pytest.mark.launches
def test_a_rank_that_lives_is_waited_for_and_one_that_died_is_missed_at_once(other):
    store = Store()
    meeting = meeting_of(0, 2, store)
    for count in range(100):
        store.says(1, other.pid, count)
        assert look(meeting) is None, "slow, but it lives"
    assert meeting.dead_ranks() is None
    end(other)
    assert [look(meeting), look(meeting)] == [None, None], "the main thread may know more, and is first"
    assert look(meeting).startswith("rank 1 is dead: killed from outside") and "rank 1" in meeting.dead_ranks()


def test_a_rank_that_never_comes_is_missed_after_the_timeout():
    store = Store()
    meeting = meeting_of(0, 4, store)
    found = [look(meeting) for _ in range(8)]
    assert found[:7] == [None] * 7
    assert found[7].startswith("rank 1 (and 2 more) has not come: for --collective_timeout 10 s there was no sign")


@pytest.mark.launches
def test_what_rank_0_misses_the_others_say_too(other):
    store = Store()
    first, last = meeting_of(0, 3, store), meeting_of(2, 3, store)
    for count in range(7):
        store.says(2, other.pid, count)
        assert look(first) is look(last) is None
    store.says(2, other.pid, "last")
    assert look(first).startswith("rank 1 has not come: ")
    assert look(last).startswith("rank 1 has not come: ")
    again = Store({key: value for key, value in store.items() if key.startswith("missed")})
    again.says(0, other.pid, 1)
    assert look(meeting_of(2, 3, again)) is None, "what a rank 0 said that is no more"


@pytest.mark.launches
def test_a_rank_of_another_machine_and_one_that_stands_still_have_the_timeout(other):
    store = Store()
    meeting = meeting_of(0, 3, store)
    store.says(1, 2**30, 1, "another machine")
    store.says(2, other.pid, 1)
    os.kill(other.pid, signal.SIGSTOP)
    wait_for(lambda: psutil.Process(other.pid).status() == psutil.STATUS_STOPPED)
    for count in range(7):
        store.says(1, 2**30, count, "another machine")
        assert look(meeting) is None
    assert "rank 2 is stopped (SIGSTOP)" in [look(meeting) for _ in range(3)][-1]


def test_a_sign_that_an_earlier_start_left_is_no_death():
    """As over several nodes, where starts have no names of their own in the store."""
    store = Store()
    store.says(1, 2**30, 5)
    meeting = meeting_of(0, 2, store, nodes=2)
    assert [look(meeting) for _ in range(7)] == [None] * 7 and meeting.dead_ranks() is None
    alone = meeting_of(0, 2, store)  # on one node each start has names of its own there
    assert "rank 1 is dead" in [look(alone) for _ in range(3)][-1]


@pytest.mark.launches
def test_a_store_that_goes_with_rank_0_is_no_way_to_hang(other):
    store = Store()
    meeting = meeting_of(1, 2, store)
    store.says(0, other.pid, 1)
    assert look(meeting) is None
    store.is_gone = True
    assert look(meeting) is None, "it may come again"
    end(other)
    assert "rank 0 is dead" in [look(meeting) for _ in range(3)][-1]


def test_a_rank_that_ends_by_its_own_will_says_so():
    store = Store()
    theirs = meeting_of(1, 2, store).begin()
    mine = meeting_of(0, 2, store)
    wait_for(lambda: "heartbeat_of_rank_1" in store)
    assert look(mine) is None
    theirs.close(ENDED)
    assert look(mine) is None
    assert mine.dead_ranks() == "rank 1 has ended itself, its own message says why"


@pytest.mark.launches
def test_last_words_of_an_earlier_start_are_not_believed(other):
    """Over several nodes the store keeps what rank 0 and the others said in the start before."""
    store = Store()
    earlier = meeting_of(0, 3, store)
    assert "rank 1" in [look(earlier) for _ in range(8)][-1]
    store.says(0, os.getpid(), ENDED)  # which is the process that said whom it missed
    meeting = meeting_of(2, 3, store, nodes=3)
    assert look(meeting) is None and meeting.dead_ranks() is None
    for count in range(20):
        store.says(0, other.pid, count)
        assert look(meeting) is None


@pytest.mark.launches
@pytest.mark.parametrize("timeout_s", [0.5, 2, 4])
def test_a_small_timeout_ends_no_rank_that_lives(other, timeout_s):
    """A busy machine may delay every other sign."""
    store = Store()
    meeting = meeting_of(1, 2, store, timeout_s)
    for turn in range(20):
        if turn % 2 == 0:
            store.says(0, other.pid, turn)
        assert look(meeting) is None


@pytest.mark.launches
def test_a_rank_that_trains_already_is_not_missed(other):
    store = Store()
    meeting = meeting_of(0, 2, store)
    for count in (1, TRAINS):
        store.says(1, other.pid, count)
        assert look(meeting) is None
    assert [look(meeting) for _ in range(20)] == [None] * 20


def test_a_store_that_nobody_answers_for_is_named():
    def refused() -> Store:
        raise OSError("10.0.0.1:29500: Connection refused")

    meeting = StartupHeartbeat(Launch(1, 1, 2, 2), 10, refused, print)
    found = [look(meeting) for _ in range(8)][-1]
    assert found.startswith("rank 0 has not come: for --collective_timeout 10 s nobody answered")
    assert "(10.0.0.1:29500: Connection refused)" in found and "MASTER_ADDR" in found


def test_a_store_that_never_answers_does_not_hold_up_the_counting(monkeypatch):
    """As when its holder is stopped: the kernel takes the connection, and no word comes back."""
    monkeypatch.setattr("testbed.distributed.rendezvous.LEAST_PATIENCE_S", 0.5)
    never, said = threading.Event(), queue.Queue()

    def stopped() -> Store:
        never.wait()
        raise OSError("gone")

    StartupHeartbeat(Launch(1, 1, 2, 2), 1, stopped, said.put).begin()
    assert said.get(timeout=10).startswith("rank 0 has not come")
    never.set()


def test_where_a_launcher_ends_the_others_a_first_sign_may_take_longer():
    meeting = StartupHeartbeat(Launch(0, 0, 2, 2), 10, Store, print, start_patience_s=30)
    assert [look(meeting) is None for _ in range(30)] == [True] * 29 + [False]


def test_a_first_sign_may_take_as_long_as_this_rank_needed_to_load(monkeypatch):
    """On a machine so busy that one rank loads PyTorch for half a minute, another one is not ready within 5 s of it."""
    met = []
    monkeypatch.setattr(
        run_ending, "StartupHeartbeat", lambda *words: met.append(words[-1]) or SimpleNamespace(begin=lambda: None)
    )
    monkeypatch.setattr(run_ending, "seconds_since_start", lambda: 27.0)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    ending = object.__new__(run_ending.RunEnding)
    ending.launch, ending.settings = Launch(0, 0, 2, 2), stand_in(collective_timeout=4)
    ending._ranks = SimpleNamespace(heartbeat=None)
    ending.start_heartbeat()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    ending.start_heartbeat()
    assert met == [27.0, run_ending.START_PATIENCE_S]


# --- the program

# Rank STANDS waits for SECONDS before what PLACE names, as rank 0 does that reads large files, and says so.
STANDING = """
import os, sys, time
from testbed.config.check import check_command_line
checked, launch = check_command_line(sys.argv[1:])
import gpt2
from testbed.distributed import process_group
from testbed.train import run, setup
owner, name = {"meeting": (process_group, "start_process_group"), "data": (setup, "check_data"),
               "model": (run, "build")}[os.environ["PLACE"]]
then = getattr(owner, name)
def wait(*words, **named):
    if launch.rank == int(os.environ["STANDS"]):
        print("here", flush=True)
        time.sleep(float(os.environ["SECONDS"]))
    return then(*words, **named)
setattr(owner, name, wait)
sys.exit(gpt2.main(checked, launch))
"""


@contextlib.contextmanager
def standing(token_files, folder: Path, timeout_s: float, place: str, rank: int, seconds: float, world_size: int = 2):
    """Ranks without a launcher, of which one stands still for a while and lives."""
    flags = [*flags_of(token_files, folder), "--run_type", "ddp", "--max_val_steps", "0", "--sample_tokens", "0"]
    flags += ["--collective_timeout", str(timeout_s), "--max_train_steps", "1", "--timing_warmup_steps", "0"]
    flags += ["--global_batch_size", str(4 * world_size)]
    port = free_port()
    told = {"PLACE": place, "STANDS": str(rank), "SECONDS": str(seconds), "PYTHONPATH": str(PROGRAM.parent)}
    places = [Launch(each, each, world_size, world_size) for each in range(world_size)]
    environments = [place.as_variables("127.0.0.1", port) | told for place in places]
    with started(folder, [[sys.executable, "-c", STANDING, *flags]] * world_size, environments) as run:
        yield run


@pytest.mark.launches
@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_killed_while_pytorch_loads_is_missed_within_the_timeout(token_files, tmp_path, killed):
    """No launcher ends the other. It begins to wait when it has loaded PyTorch itself."""
    folder, begins_s = tmp_path / "run", time.monotonic()
    with standing(token_files, folder, 4, "meeting", rank=1 - killed, seconds=0) as run:
        time.sleep(0.5)
        run.processes[killed].kill()
        run.wait_until(lambda: "here" in run.text)
        waits_s = time.monotonic()
        code = run.processes[1 - killed].wait(120)
        seconds, loaded_s = time.monotonic() - waits_s, waits_s - begins_s
    assert code == 1 and 1 < seconds < 10 + loaded_s, (code, seconds, loaded_s, run.text)
    assert f"rank {1 - killed} failed: rank {killed} has not come: for --collective_timeout 4 s" in run.text
    assert f"rank {1 - killed} waited for the others to start" in run.text and "Traceback" not in run.text
    assert not folder.exists(), "it was not the run's yet"


@pytest.mark.launches
@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "killed"), [("meeting", 1), ("data", 0), ("model", 1)], ids=["meeting", "reading data", "building"]
)
def test_a_rank_killed_while_the_run_starts_is_missed_at_once(token_files, tmp_path, place, killed):
    """Just after it said that it lives, while rank 0 reads files, and while the model is built: long before the timeout
    of 120 s, let alone the ten minutes that the living are given."""
    folder = tmp_path / "run"
    with standing(token_files, folder, 120, place, rank=killed, seconds=600) as run:
        run.wait_until(lambda: "here" in run.text)
        time.sleep(3)  # with one core for both the other may come later
        os.kill(run.processes[killed].pid, signal.SIGKILL)
        killed_s = time.monotonic()
        code = run.processes[1 - killed].wait(60)
        seconds = time.monotonic() - killed_s
        assert code == 1 and seconds < 15, (code, seconds, run.text)
        assert re.search(rf"^rank {1 - killed} failed: rank {killed} is dead", run.text, re.MULTILINE), run.text
        assert "Traceback" not in run.text
        if place == "model":
            assert f"[Rank 0] RUN_FAILED reason=rank {killed} is dead" in run.mark(FAILED)


@pytest.mark.launches
@pytest.mark.slow
def test_a_slow_rank_that_lives_is_waited_for_beyond_the_timeout(token_files, tmp_path):
    folder = tmp_path / "run"
    with standing(token_files, folder, 4, "meeting", rank=1, seconds=10) as run:
        assert run.codes(60) == [0, 0], run.text
        assert "imed out" not in run.text
        run.mark("RUN_COMPLETE.txt")


@pytest.mark.launches
@pytest.mark.slow
def test_a_stopped_rank_that_holds_the_store_is_missed_too(token_files, tmp_path):
    """Its kernel takes connections for it, so nothing breaks."""
    with standing(token_files, tmp_path / "run", 6, "data", rank=0, seconds=600) as run:
        run.wait_until(lambda: "here" in run.text)
        time.sleep(3)
        os.kill(run.processes[0].pid, signal.SIGSTOP)
        stopped_s = time.monotonic()
        code = run.processes[1].wait(60)
        seconds = time.monotonic() - stopped_s
        assert code == 1 and seconds < 12, (code, seconds, run.text)
        assert "rank 1 failed: rank 0 is stopped (SIGSTOP): for --collective_timeout 6 s" in run.text


@pytest.mark.launches
@pytest.mark.slow
def test_of_three_ranks_the_dead_one_is_named_by_both_others(token_files, tmp_path):
    """Rank 0 ends a moment before rank 2, which does not take it for the cause."""
    with standing(token_files, tmp_path / "run", 120, "data", rank=0, seconds=600, world_size=3) as run:
        run.wait_until(lambda: "here" in run.text)
        time.sleep(3)
        run.processes[1].kill()
        assert [run.processes[rank].wait(30) for rank in (0, 2)] == [1, 1], run.text
        for rank in (0, 2):
            assert re.search(rf"^rank {rank} failed: rank 1 is dead", run.text, re.MULTILINE), run.text
