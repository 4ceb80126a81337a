"""Check that gloo gives other machines an address at which they can reach this one. No torch.

gloo listens at the address of the machine's name, and many systems give their own name the loopback (127.0.1.1). Other
machines then connect to themselves: some ranks fail at once, and the rest wait longer than any timeout.
"""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from testbed.distributed.launch import Launch
from testbed.distributed.rendezvous import FAREWELL_S

INTERFACE = "GLOO_SOCKET_IFNAME"
WAY_OUT = f"set {INTERFACE} to the network interface that the nodes share, such as eth0"


class Unreachable(Exception):
    """Ranks cannot reach each other. One sentence."""


class Store(Protocol):
    """The part of PyTorch's store that is used here."""

    def set(self, key: str, value: str) -> None: ...
    def multi_get(self, keys: list[str]) -> Sequence[bytes]: ...


def check_addresses(store: Store, launch: Launch) -> None:
    """Compare the ranks' addresses. All ranks call it once all have come to the store, and get the same answer.

    Raises:
        Unreachable: ranks are on several machines, and one would listen at its loopback.
    """
    if launch.num_nodes == 1:
        return
    mine = {"network": _network(), "host": socket.gethostname(), "address": None}
    if not os.environ.get(INTERFACE):
        mine["address"] = gloo_address()
    store.set(_key(launch.rank), json.dumps(mine))
    ranks = [json.loads(each) for each in store.multi_get([_key(rank) for rank in range(launch.world_size)])]
    if len({rank["network"] for rank in ranks}) == 1:  # nodes of a test on one machine
        return
    for number, rank in enumerate(ranks):
        if rank["address"] is not None and ipaddress.ip_address(rank["address"]).is_loopback:
            if launch.rank == 0:  # with which the store ends
                time.sleep(FAREWELL_S)
            raise Unreachable(
                f"rank {number} on {rank['host']} would tell ranks on other machines to reach it at "
                f"{rank['address']}, its loopback: gloo takes the address that /etc/hosts or the DNS gives the "
                f"machine's name; {WAY_OUT}, or give the name its address"
            )


def gloo_address() -> str:
    """Return the address that gloo listens at: the first of the machine's name that can be bound, else the loopback."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        found = []
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as trial:
                trial.bind(address)
        except OSError:
            continue
        return str(address[0]).partition("%")[0]
    return "127.0.0.1"


def _network() -> str:
    """Return what processes share that reach each other at the loopback: the boot and the network namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"  # noqa: PTH115 - no path, a name
    except OSError:  # not Linux
        return socket.gethostname()


def _key(rank: int) -> str:
    return f"address_{rank}"
