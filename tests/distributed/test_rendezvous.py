"""Where the ranks meet: a taken port and a useless address are said, a rank that died or never came is named."""

from __future__ import annotations

import datetime
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from support.endings import FAILED, flags_of, started, wait_for
from support.programs import PROGRAM, REPOSITORY, TINY_RUN, data_flags, python_command, run_program

from testbed.distributed import process_group, rendezvous
from testbed.distributed.launch import Launch, read_launch, threads_per_rank, usable_cores
from testbed.distributed.rendezvous import (
    PortTaken,
    RankMissing,
    StartupWatch,
    Unreachable,
    check_addresses,
    check_port,
    free_port,
    gloo_address,
    listen,
    this_process,
    wait_for_ranks,
)
from testbed.errors import InputError
from testbed.experiments.network_lab import why_impossible


class Store(dict):
    """PyTorch's store, as far as it is used here."""

    set = dict.__setitem__

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self[key].encode() for key in keys]


def test_a_rank_that_never_comes_is_named_by_every_rank(monkeypatch):
    monkeypatch.setattr(rendezvous.time, "sleep", lambda seconds: None)
    store = Store(rank_3="here")
    for rank in (0, 3):
        with pytest.raises(RankMissing, match=r"^rank 1 \(and 1 more\) has not come: .* larger --collective_timeout$"):
            wait_for_ranks(store, Launch(rank, rank, 4, 4), patience_s=-1.0)


def test_a_rank_that_comes_late_is_waited_for(monkeypatch):
    store = Store()
    monkeypatch.setattr(rendezvous.time, "sleep", lambda seconds: store.set("rank_1", '["another machine", 7]'))
    assert wait_for_ranks(store, Launch(0, 0, 2, 2), patience_s=60) == [this_process(), ("another machine", 7)]


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
def test_a_dead_rank_is_named_after_seconds_and_a_stopped_one_after_the_timeout(other_process):
    watch = watch_of(0, os.getpid(), other_process.pid)
    assert [watch.look(1.0) for _ in range(100)] == [None] * 100, "slow, but it lives"
    os.kill(other_process.pid, signal.SIGSTOP)
    wait_for(lambda: psutil.Process(other_process.pid).status() == psutil.STATUS_STOPPED)
    assert [watch.look(1.0) for _ in range(9)] == [None] * 9
    assert watch.look(1.0).startswith("rank 1 is stopped (SIGSTOP): for --collective_timeout 10 s")
    assert watch.dead_rank() is None
    other_process.kill()  # its exit code is not asked for: a zombie is dead too
    wait_for(lambda: psutil.Process(other_process.pid).status() == psutil.STATUS_ZOMBIE)
    assert [watch.look(1.0), watch.look(1.0)] == [None, None], "the main thread may know more, and is first"
    assert watch.look(1.0).startswith("rank 1 is dead: killed from outside")
    assert watch_of(0, os.getpid(), other_process.pid, elsewhere=True).dead_rank() is None


@pytest.mark.launches
def test_of_several_dead_ranks_the_first_to_die_is_named(other_process, monkeypatch):
    dead = {other_process.pid}
    monkeypatch.setattr(rendezvous, "is_process_alive", lambda process: process not in dead)
    watch = watch_of(2, 1, other_process.pid, os.getpid())
    watch.look(1.0)
    dead.add(1)  # rank 0 ends because of it
    assert watch.look(1.0) is None and watch.look(1.0).startswith("rank 1 is dead")


# --- the program

# Rank STANDS waits for SECONDS before what PLACE names, as rank 0 does that reads large files, and says so.
STANDING = """
import os, time
import torch.distributed as dist
from testbed.train import run
places = {"joining": (dist, "init_process_group"), "data": (run, "check_data"), "model": (run, "build")}
owner, name = places[os.environ["PLACE"]]
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
def test_a_rank_killed_before_the_others_are_connected_to_it_is_named(token_files, tmp_path):
    """It has come, and gloo would wait for its connection for ten minutes."""
    with standing(token_files, tmp_path / "run", 120, "joining", rank=1, seconds=600) as run:
        run.wait_until(lambda: "here" in run.text)
        run.processes[1].kill()
        assert run.processes[0].wait(30) == 1, run.text
    assert re.search(r"^rank 0 failed: rank 1 is dead", run.text, re.MULTILINE), run.text


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


TWO = Launch(0, 0, 2, 2)


@pytest.fixture
def taken() -> Iterator[int]:
    """A port at which another program listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def meets_at(monkeypatch):
    """As a launcher sets it; not torchrun, which holds the port itself."""
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)

    def meet(address: str, port: object) -> None:
        monkeypatch.setenv("MASTER_ADDR", address)
        monkeypatch.setenv("MASTER_PORT", str(port))

    return meet


@pytest.mark.parametrize("address", ["127.0.0.1", "the.first.node"])
def test_a_taken_port_is_named_with_a_free_one(taken, meets_at, address):
    meets_at(address, taken)
    with pytest.raises(
        PortTaken, match=rf"MASTER_PORT={taken}, .*Address already in use.* --master_port (\d+), "
    ) as said:
        check_port(TWO)
    free = int(str(said.value).partition("--master_port ")[2].partition(",")[0])
    meets_at(address, free)
    check_port(TWO)
    check_port(TWO)  # it keeps nothing


def test_only_who_opens_the_port_asks_for_it(taken, meets_at, monkeypatch):
    meets_at("127.0.0.1", taken)
    check_port(Launch(1, 1, 2, 2))
    check_port(Launch(0, 0, 1, 1))
    for no_port in ("", "many", "70000", "-1"):  # PyTorch says so
        meets_at("127.0.0.1", no_port)
        check_port(TWO)
    meets_at("127.0.0.1", taken)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    check_port(TWO)


@pytest.mark.launches
def test_the_program_says_so_before_pytorch_is_loaded(taken, token_files, tmp_path):
    """It said after a while that rank 1 was gone."""
    folder = tmp_path / "run"
    flags = [*TINY_RUN, *data_flags(token_files), "--run_type", "ddp", "--checkpoint_path", str(folder)]
    found = run_program([*python_command(), *flags], 60, env={**os.environ, **TWO.as_variables("127.0.0.1", taken)})
    assert found.returncode == 2 and "loading PyTorch" not in found.stdout, found.stdout + found.stderr
    assert found.stderr.startswith(f"gpt2.py: error: MASTER_PORT={taken}, where the ranks meet") and not folder.exists()
    assert found.stderr.count("\n") == 1 and "rank 1" not in found.stderr


def addresses_of(port: int) -> set[str]:
    connections = psutil.Process().net_connections("inet")
    return {each.laddr.ip for each in connections if each.laddr.port == port and each.status == psutil.CONN_LISTEN}


def test_a_store_on_the_loopback_listens_there_alone(meets_at, monkeypatch):
    """And both ranks find each other in it."""
    address = "localhost"
    port = free_port()
    meets_at(address, port)
    monkeypatch.setattr(process_group, "START_TIMEOUT", datetime.timedelta(seconds=30))
    for name in ("RANK", "WORLD_SIZE"):  # PyTorch reads them itself, and here rank 1 alone asks it
        monkeypatch.setenv(name, Launch(1, 1, 2, 2).as_variables(address, port)[name])
    found = {}

    def join(rank: int) -> None:
        found[rank] = process_group._store_of_this_start(Launch(rank, rank, 2, 2), patience_s=30)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    found[0].set("who", "rank 0")
    assert found[1].get("who") == b"rank 0" and isinstance(found[0], torch.distributed.PrefixStore)
    assert addresses_of(port) == {"127.0.0.1"}


def test_another_address_is_listened_for_everywhere():
    """A machine's own name may mean an address of the loopback on that machine alone."""
    port = free_port()
    with listen("the.first.node", port):
        assert addresses_of(port) & {"::", "0.0.0.0"}
        socket.create_connection(("127.0.0.1", port), 5).close()


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"WORLD_SIZE": "\u00b2"}, "WORLD_SIZE='\u00b2' is not a number"),
        ({"WORLD_SIZE": "9" * 5000}, "WORLD_SIZE='999"),
        ({"RANK": "\x1b[2Jone"}, r"RANK='\x1b[2Jone' is not a number"),
        ({"LOCAL_RANK": "2", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK=2 of LOCAL_WORLD_SIZE=2"),
    ],
)
def test_variables_that_no_launcher_sets_are_one_short_sentence(variables, said):
    """LOCAL_RANK alone made this rank one of those that refuse in silence."""
    with pytest.raises(InputError) as caught:
        read_launch(variables)
    message = str(caught.value)
    assert said in message and len(message) < 300 and message.isprintable()


def test_numbers_in_other_digits_are_no_threads_and_no_port(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "\u00b2")
    monkeypatch.setenv("MASTER_PORT", "\u00b2")
    assert threads_per_rank(Launch(0, 0, 1, 1)) == usable_cores()
    assert rendezvous.where_ranks_meet()[1] is None


@pytest.fixture
def other_machine(monkeypatch) -> Store:
    """Rank 1, on a machine of its own with a proper address. Rank 0, this one, is named as Debian names machines."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(rendezvous, "_namespace", lambda kind: "this one")
    monkeypatch.setattr(rendezvous, "FAREWELL_S", 0.0)
    monkeypatch.setattr(socket, "gethostname", lambda: "node1")
    plant_address(monkeypatch, "127.0.1.1")
    return Store(address_1=json.dumps({"network": "another", "host": "node2", "address": "10.0.0.2"}))


def plant_address(monkeypatch, *found: str) -> None:
    answer = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in found]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answer)


TWO_NODES = Launch(0, 0, 2, 1)


def test_every_rank_names_the_one_at_the_loopback(other_machine, monkeypatch):
    with pytest.raises(Unreachable, match=r"^rank 0 on node1 .* at 127.0.1.1, its loopback.*set GLOO_SOCKET_IFNAME"):
        check_addresses(other_machine, TWO_NODES)
    mine = json.loads(other_machine["address_0"])
    assert mine == {"network": "this one", "host": "node1", "address": "127.0.1.1"}
    monkeypatch.setattr(rendezvous, "_namespace", lambda kind: "another")
    plant_address(monkeypatch, "0.0.0.0")  # rank 1, which is named as it should be
    with pytest.raises(Unreachable, match=r"^rank 0 on node1"):
        check_addresses(other_machine, Launch(1, 0, 2, 1))


def test_the_loopback_does_within_a_machine_and_a_named_interface_is_taken(other_machine, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    check_addresses(other_machine, TWO_NODES)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr(rendezvous, "_namespace", lambda kind: "another")
    check_addresses(other_machine, TWO_NODES)
    check_addresses(Store(), Launch(0, 0, 2, 2))  # one node: nothing is asked


def test_gloo_s_address_is_the_first_that_can_be_bound(monkeypatch):
    plant_address(monkeypatch, "203.0.113.7", "127.0.1.1")  # the first is of no interface here
    assert gloo_address() == "127.0.1.1"
    plant_address(monkeypatch, "203.0.113.7")
    assert gloo_address() == "127.0.0.1", "PyTorch falls back to the loopback"

    def unknown(*_, **__):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert gloo_address() == "127.0.0.1"


JOIN = textwrap.dedent(
    """
    import torch
    from testbed.distributed.rendezvous import Unreachable
    from testbed.distributed.launch import read_launch
    from testbed.distributed.process_group import start_process_group
    try:
        start_process_group(torch.device("cpu"), read_launch(), is_needed=True)
    except Unreachable as error:
        print("said:", error)
    """
)


@pytest.mark.launches
@pytest.mark.alone
@pytest.mark.skipif(why_impossible() is not None, reason=f"no lab here: {why_impossible()}")
def test_two_hosts_that_are_named_so_both_end_at_once(tmp_path):
    """In network namespaces, with real gloo. Without the check one of them waits for minutes."""
    (tmp_path / "join.py").write_text(JOIN)
    named_so = (
        f'printf "127.0.0.1 localhost\\n127.0.1.1 $(hostname)\\n" > {tmp_path}/$RANK && mount --bind {tmp_path}/$RANK '
        f"/etc/hosts && unset GLOO_SOCKET_IFNAME && exec {sys.executable} {tmp_path}/join.py"
    )
    lab = [sys.executable, REPOSITORY / "scripts" / "lab" / "network.py", "run", "--hosts", "2"]
    done = subprocess.run([*lab, "--", "sh", "-c", named_so], capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    said = re.findall(r"said: rank (\d) on host(\d) would", done.stdout)
    assert said == [("0", "1")] * 2, done.stdout
