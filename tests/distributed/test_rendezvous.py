"""While a run starts, a rank that died or never came is named, and a rank that lives is waited for."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import psutil
import pytest
from support.endings import FAILED, flags_of, started, wait_for
from support.programs import PROGRAM, python_command

from testbed.distributed import process_group, rendezvous
from testbed.distributed.launch import Launch
from testbed.distributed.rendezvous import RankMissing, StartupWatch, free_port, this_process, wait_for_ranks

pytestmark = pytest.mark.skipif(not Path("/proc").is_dir(), reason="process states as Linux has them")


class Store(dict):
    """PyTorch's store, as far as it is used here."""

    set = dict.__setitem__

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)


def test_a_rank_that_never_comes_is_named_by_every_rank(monkeypatch):
    monkeypatch.setattr(rendezvous.time, "sleep", lambda seconds: None)
    store = Store(rank_3="here")
    for rank in (0, 3):
        with pytest.raises(RankMissing, match=r"^rank 1 \(and 1 more\) has not come: .* larger --collective_timeout$"):
            wait_for_ranks(store, Launch(rank, rank, 4, 4), patience_s=-1.0)


def test_a_rank_that_comes_late_is_waited_for(monkeypatch):
    store = Store(rank_0="here")
    monkeypatch.setattr(rendezvous.time, "sleep", lambda seconds: store.set("rank_1", "here"))
    wait_for_ranks(store, Launch(0, 0, 2, 2), patience_s=60)


def test_a_store_that_nobody_answers_for_is_named(monkeypatch):
    for name, value in Launch(1, 1, 2, 2).as_variables("127.0.0.1", free_port()).items():
        monkeypatch.setenv(name, value)
    now_s = [0.0]
    monkeypatch.setattr(process_group.time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(process_group.time, "sleep", lambda seconds: now_s.__setitem__(0, now_s[0] + seconds))
    with pytest.raises(RankMissing, match=r"rank 0 has not come: nobody answered .* MASTER_ADDR"):
        process_group._store_of_this_start(Launch(1, 1, 2, 2), patience_s=10)
    assert 10 <= now_s[0] < 11, "PyTorch's own wait would begin a second time"
    monkeypatch.setattr(process_group, "_why_no_store", iter(["refused", "refused", None]).__next__)
    process_group.wait_for_store(patience_s=10)


@pytest.mark.parametrize(("by_torchrun", "timeout_s", "expected"), [(False, 4, 27.0), (False, 40, 40), (True, 40, 600)])
def test_ranks_may_take_as_long_to_come_as_this_one_took_to_load(monkeypatch, by_torchrun, timeout_s, expected):
    monkeypatch.setattr(rendezvous, "seconds_since_start", lambda: 27.0)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if by_torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert rendezvous.patience_s(timeout_s) == expected


def watch_of(rank: int, *processes: int, elsewhere: bool = False) -> StartupWatch:
    place, _ = this_process()
    places = [("another machine" if elsewhere and other != rank else place, process)
              for other, process in enumerate(processes)]  # fmt: skip
    return StartupWatch(Launch(rank, rank, len(processes), len(processes)), places, 10, print)


@pytest.mark.launches
def test_a_dead_rank_is_named_after_seconds_and_a_stopped_one_after_the_timeout(other):
    watch = watch_of(0, os.getpid(), other.pid)
    assert [watch.look(1.0) for _ in range(100)] == [None] * 100, "slow, but it lives"
    os.kill(other.pid, signal.SIGSTOP)
    wait_for(lambda: psutil.Process(other.pid).status() == psutil.STATUS_STOPPED)
    assert [watch.look(1.0) for _ in range(9)] == [None] * 9
    assert watch.look(1.0).startswith("rank 1 is stopped (SIGSTOP): for --collective_timeout 10 s")
    assert watch.dead_rank() is None
    other.kill()  # its exit code is not asked for: a zombie is dead too
    wait_for(lambda: psutil.Process(other.pid).status() == psutil.STATUS_ZOMBIE)
    assert [watch.look(1.0), watch.look(1.0)] == [None, None], "the main thread may know more, and is first"
    assert watch.look(1.0).startswith("rank 1 is dead: killed from outside")
    assert watch_of(0, os.getpid(), other.pid, elsewhere=True).dead_rank() is None


@pytest.mark.launches
def test_of_several_dead_ranks_the_first_to_die_is_named(other, monkeypatch):
    dead = {other.pid}
    monkeypatch.setattr(rendezvous, "is_process_alive", lambda process: process not in dead)
    watch = watch_of(2, 1, other.pid, os.getpid())
    watch.look(1.0)
    dead.add(1)  # rank 0 ends because of it
    assert watch.look(1.0) is None and watch.look(1.0).startswith("rank 1 is dead")


# --- the program

# Rank STANDS waits for SECONDS before what PLACE names, as rank 0 does that reads large files, and says so.
STANDING = """
import os, time
from testbed.train import run
owner, name = {"data": (run, "check_data"), "model": (run, "build")}[os.environ["PLACE"]]
then = getattr(owner, name)
def wait(*words, **named):
    if os.environ["RANK"] == os.environ["STANDS"]:
        print("here", flush=True)
        time.sleep(float(os.environ["SECONDS"]))
    return then(*words, **named)
setattr(owner, name, wait)
"""


def ranks_of(token_files, folder: Path, timeout_s: float, world_size: int, variables: dict[str, str]):
    """Ranks without a launcher: no one ends the others."""
    flags = [*flags_of(token_files, folder), "--run_type", "ddp", "--max_val_steps", "0", "--sample_tokens", "0"]
    flags += ["--collective_timeout", str(timeout_s), "--max_train_steps", "1", "--timing_warmup_steps", "0"]
    flags += ["--global_batch_size", str(4 * world_size)]
    places, port = [Launch(rank, rank, world_size, world_size) for rank in range(world_size)], free_port()
    environments = [place.as_variables("127.0.0.1", port) | variables for place in places]
    return started(folder, [[*python_command(), *flags]] * world_size, environments)


def standing(token_files, folder: Path, timeout_s: float, place: str, rank: int, seconds: float, world_size: int = 2):
    """Ranks of which one stands still for a while and lives."""
    told = {"BEFORE": STANDING, "PLACE": place, "STANDS": str(rank), "SECONDS": str(seconds)}
    return ranks_of(token_files, folder, timeout_s, world_size, told)


@pytest.mark.launches
@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_killed_while_pytorch_loads_is_named_within_the_timeout(token_files, tmp_path, killed):
    """In processes that import it themselves."""
    folder = tmp_path / "run"
    with ranks_of(token_files, folder, 4, 2, {"PYTHONPATH": str(PROGRAM.parent)}) as run:
        time.sleep(0.5)
        run.processes[killed].kill()
        assert run.processes[1 - killed].wait(120) == 1, run.text
    assert f"rank {1 - killed} failed: rank {killed} has not come: " in run.text and "Traceback" not in run.text
    assert not folder.exists(), "it was not the run's yet"


@pytest.mark.launches
@pytest.mark.slow
def test_of_three_ranks_the_one_killed_at_startup_is_named_by_both_others(token_files, tmp_path):
    """While rank 0 reads files, long before the timeout of 120 s or the ten minutes that the living are given."""
    with standing(token_files, tmp_path / "run", 120, "data", rank=0, seconds=600, world_size=3) as run:
        run.wait_until(lambda: "here" in run.text)
        run.processes[1].kill()
        assert [run.processes[rank].wait(60) for rank in (0, 2)] == [1, 1], run.text
        for rank in (0, 2):
            assert re.search(rf"^rank {rank} failed: rank 1 is dead", run.text, re.MULTILINE), run.text


@pytest.mark.launches
@pytest.mark.slow
def test_a_rank_killed_while_the_model_is_built_is_in_the_runs_mark(token_files, tmp_path):
    with standing(token_files, tmp_path / "run", 120, "model", rank=1, seconds=600) as run:
        run.wait_until(lambda: "here" in run.text)
        run.processes[1].kill()
        assert run.processes[0].wait(60) == 1, run.text
        assert "Traceback" not in run.text
        assert "[Rank 0] RUN_FAILED reason=rank 1 is dead" in run.mark(FAILED)


@pytest.mark.launches
@pytest.mark.slow
def test_a_slow_rank_that_lives_is_waited_for_beyond_the_timeout(token_files, tmp_path):
    with standing(token_files, tmp_path / "run", 4, "data", rank=0, seconds=7) as run:
        assert run.codes(60) == [0, 0], run.text
        assert "imed out" not in run.text
        run.mark("RUN_COMPLETE.txt")
