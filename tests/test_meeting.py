"""Before the ranks train: one that is dead, or never came, is missed in time; one that lives is waited for."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from conftest import PROGRAM
from test_endings import FAILED, flags_of, started, wait_for

from testbed.drill.work import free_port
from testbed.launch import Launch
from testbed.meeting import Meeting, Sign, this_machine

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

    def check(self, keys: list[str]) -> bool:
        self._is_there()
        return all(key in self for key in keys)

    def _is_there(self) -> None:
        if self.is_gone:
            raise RuntimeError("Connection reset by peer")

    def says(self, rank: int, process: int, count: object, machine: str | None = None) -> None:
        self.set(f"sign_of_rank_{rank}", str(Sign(machine or this_machine(), process, str(count))))


def meeting_of(rank: int, world_size: int, store: Store, timeout_s: float = 10) -> Meeting:
    return Meeting(Launch(rank, rank, world_size, world_size), timeout_s, lambda: store, print)


@pytest.fixture
def other():
    """A process that can be stopped and killed in a rank's stead."""
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def end(process: subprocess.Popen) -> None:
    process.kill()  # nobody asks for its exit code: a zombie is dead too
    wait_for(lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE)


def test_a_rank_that_lives_is_waited_for_and_one_that_died_is_missed_at_once(other):
    store = Store()
    meeting = meeting_of(0, 2, store)
    for count in range(100):
        store.says(1, other.pid, count)
        assert meeting.look(1.0) is None, "slow, but it lives"
    assert meeting.who_is_dead() is None
    end(other)
    assert [meeting.look(1.0), meeting.look(1.0)] == [None, None], "the main thread may know more, and is first"
    assert meeting.look(1.0).startswith("rank 1 is dead: killed from outside") and "rank 1" in meeting.who_is_dead()


def test_a_rank_that_never_comes_is_missed_after_the_timeout():
    store = Store()
    meeting = meeting_of(0, 4, store)
    found = [meeting.look(1.0) for _ in range(8)]
    assert found[:7] == [None] * 7
    assert found[7].startswith("rank 1 (and 2 more) has not come: for --collective_timeout 10 s there was no sign")


def test_what_rank_0_misses_the_others_say_too(other, monkeypatch):
    monkeypatch.setattr("testbed.meeting.FAREWELL_S", 0.0)
    store = Store()
    first, last = meeting_of(0, 3, store), meeting_of(2, 3, store)
    for count in range(7):
        store.says(2, other.pid, count)
        assert first.look(1.0) is last.look(1.0) is None
    store.says(2, other.pid, "last")
    assert first.look(1.0).startswith("rank 1 has not come: ")
    assert last.look(1.0).startswith("rank 1 has not come: ")
    again = Store({key: value for key, value in store.items() if key.startswith("missed")})
    again.says(0, other.pid, 1)
    assert meeting_of(2, 3, again).look(1.0) is None, "what a rank 0 said that is no more"


def test_a_rank_of_another_machine_and_one_that_stands_still_have_the_timeout(other):
    store = Store()
    meeting = meeting_of(0, 3, store)
    store.says(1, 2**30, 1, "another machine")
    store.says(2, other.pid, 1)
    os.kill(other.pid, signal.SIGSTOP)
    wait_for(lambda: psutil.Process(other.pid).status() == psutil.STATUS_STOPPED)
    for count in range(7):
        store.says(1, 2**30, count, "another machine")
        assert meeting.look(1.0) is None
    assert "rank 2 is stopped (SIGSTOP)" in [meeting.look(1.0) for _ in range(3)][-1]


def test_a_sign_that_an_earlier_start_left_is_no_death():
    """As over several nodes, where starts have no names of their own in the store."""
    store = Store()
    store.says(1, 2**30, 5)
    meeting = meeting_of(0, 2, store)
    assert [meeting.look(1.0) for _ in range(7)] == [None] * 7 and meeting.who_is_dead() is None


def test_a_store_that_goes_with_rank_0_is_no_way_to_hang(other):
    store = Store()
    meeting = meeting_of(1, 2, store)
    store.says(0, other.pid, 1)
    assert meeting.look(1.0) is None
    store.is_gone = True
    assert meeting.look(1.0) is None, "it may come again"
    end(other)
    assert "rank 0 is dead" in [meeting.look(1.0) for _ in range(3)][-1]


def test_a_rank_that_ends_by_its_own_will_says_so():
    store = Store()
    theirs = meeting_of(1, 2, store).begin()
    mine = meeting_of(0, 2, store)
    wait_for(lambda: "sign_of_rank_1" in store)
    assert mine.look(1.0) is None
    theirs.close(has_ended=True)
    assert mine.look(1.0) is None
    assert mine.who_is_dead() == "rank 1 has ended itself, its own message says why"


# --- the program

# Rank STANDS waits for SECONDS before what PLACE names, as rank 0 does that reads large files, and says so.
STANDING = """
import os, sys, time
from testbed.settings import start
checked, launch = start(sys.argv[1:])
import gpt2
owner, name = {"meeting": (gpt2.distributed, "start_process_group"), "data": (gpt2, "check_data"),
               "model": (gpt2, "build")}[os.environ["PLACE"]]
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
def standing(token_files, folder: Path, timeout_s: float, place: str, rank: int, seconds: float, steps: int = 1):
    """Two ranks without a launcher, of which one stands still for a while and lives."""
    flags = [*flags_of(token_files, folder), "--run_type", "ddp", "--max_val_steps", "0", "--sample_tokens", "0"]
    flags += ["--collective_timeout", str(timeout_s), "--max_train_steps", str(steps), "--timing_warmup_steps", "0"]
    port = free_port()
    told = {"PLACE": place, "STANDS": str(rank), "SECONDS": str(seconds), "PYTHONPATH": str(PROGRAM.parent)}
    environments = [Launch(each, each, 2, 2).as_variables("127.0.0.1", port) | told for each in range(2)]
    with started(folder, [[sys.executable, "-c", STANDING, *flags]] * 2, environments) as run:
        yield run


@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_killed_while_pytorch_loads_is_missed_within_the_timeout(token_files, tmp_path, killed):
    """No launcher ends the other. It begins to wait when it has loaded PyTorch itself."""
    folder = tmp_path / "run"
    with standing(token_files, folder, 4, "meeting", rank=1 - killed, seconds=0) as run:
        time.sleep(0.5)
        run.processes[killed].kill()
        run.wait_until(lambda: "here" in run.text)
        waits_s = time.monotonic()
        code = run.processes[1 - killed].wait(30)
        seconds = time.monotonic() - waits_s
    assert code == 1 and 1 < seconds < 10, (code, seconds, run.text)
    assert f"rank {1 - killed} failed: rank {killed} has not come: for --collective_timeout 4 s" in run.text
    assert f"rank {1 - killed} waited for the others to start" in run.text and "Traceback" not in run.text
    assert not folder.exists(), "it was not the run's yet"


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


def test_a_slow_rank_that_lives_is_waited_for_beyond_the_timeout(token_files, tmp_path):
    folder = tmp_path / "run"
    with standing(token_files, folder, 4, "meeting", rank=1, seconds=10) as run:
        assert run.codes(60) == [0, 0], run.text
        assert "imed out" not in run.text
        run.mark("RUN_COMPLETE.txt")
