"""Where the ranks meet: a taken port is said at once by rank 0, and what is on the loopback is nobody else's."""

from __future__ import annotations

import datetime
import os
import socket
import threading
from collections.abc import Iterator

import psutil
import pytest
import torch
from support.programs import TINY_RUN, data_flags, python_command, run_program

from testbed.distributed import process_group, rendezvous
from testbed.distributed.launch import Launch, read_launch, threads_per_rank, usable_cores
from testbed.distributed.rendezvous import PortTaken, check_port, free_port, listen
from testbed.errors import InputError

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
