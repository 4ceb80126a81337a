"""A machine whose name is the loopback's ends a run over several machines at once, on every rank."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import textwrap

import pytest
from support.programs import REPOSITORY

from testbed.distributed import rendezvous
from testbed.distributed.launch import Launch
from testbed.distributed.rendezvous import Unreachable, check_addresses, gloo_address
from testbed.experiments.network_lab import why_impossible


class Store(dict):
    """PyTorch's store, as far as it is used here."""

    set = dict.__setitem__

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self[key].encode() for key in keys]


@pytest.fixture
def other_machine(monkeypatch) -> Store:
    """Rank 1, on a machine of its own with a proper address. Rank 0, this one, is named as Debian names machines."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(rendezvous, "_network", lambda: "this one")
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
    monkeypatch.setattr(rendezvous, "_network", lambda: "another")
    plant_address(monkeypatch, "0.0.0.0")  # rank 1, which is named as it should be
    with pytest.raises(Unreachable, match=r"^rank 0 on node1"):
        check_addresses(other_machine, Launch(1, 0, 2, 1))


def test_the_loopback_does_within_a_machine_and_a_named_interface_is_taken(other_machine, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    check_addresses(other_machine, TWO_NODES)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr(rendezvous, "_network", lambda: "another")
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
