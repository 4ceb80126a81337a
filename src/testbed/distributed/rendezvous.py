"""Check where the ranks meet, and name the rank that does not come, or dies, while a run starts. No torch.

PyTorch reports a taken port after seconds, from rank 0 alone. gloo listens at the address of the machine's name, which
many systems give the loopback (127.0.1.1): other machines then connect to themselves and wait longer than any timeout.
The store's timeout says how many ranks came, not which. No collective has a short timeout yet, because rank 0 may read
files for minutes while the others wait.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from testbed.distributed.launch import Launch, seconds_since_start, whole_number
from testbed.distributed.watchdog import BEAT_S, is_process_alive, is_process_stopped
from testbed.errors import InputError

LOOK_EVERY_S = 0.2
DEAD_FOR_S = 2.5 * BEAT_S  # most of the time the main thread learns of a death by itself, and knows more about it
FAREWELL_S = 2 * BEAT_S  # for the others to ask the store too, which ends with rank 0
LEAST_PATIENCE_S = 5.0
TORCHRUN_PATIENCE_S = 600.0  # torchrun ends the others when a rank dies, so a slow start is not a danger there


class RankMissing(Exception):
    """A rank did not come. One sentence."""


class Store(Protocol):
    """The part of PyTorch's store that is used here."""

    def set(self, key: str, value: str) -> None: ...
    def check(self, keys: list[str]) -> bool: ...
    def multi_get(self, keys: list[str]) -> Sequence[bytes]: ...


def patience_s(timeout_s: float) -> float:
    """Return how long to wait for a rank to come: --collective_timeout, or as long as loading PyTorch took here."""
    by_launcher = TORCHRUN_PATIENCE_S if "TORCHELASTIC_RUN_ID" in os.environ else LEAST_PATIENCE_S
    return max(timeout_s, seconds_since_start(), by_launcher)


def wait_for_ranks(store: Store, launch: Launch, patience_s: float) -> list[tuple[str, int]]:
    """Wait until every rank has come to the store. Returns `this_process` of each. Raises RankMissing."""
    store.set(f"rank_{launch.rank}", json.dumps(this_process()))
    keys = [f"rank_{rank}" for rank in range(launch.world_size)]
    deadline_s = time.monotonic() + patience_s
    while not store.check(keys):
        if time.monotonic() > deadline_s:
            missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
            if launch.rank == 0:
                time.sleep(FAREWELL_S)
            more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
            raise RankMissing(
                f"rank {missing[0]}{more} has not come: for {patience_s:.0f} s there was no sign of it. It died "
                "before, or was not started; a rank that needs longer to load PyTorch needs a larger "
                "--collective_timeout"
            )
        time.sleep(LOOK_EVERY_S)
    places = [json.loads(each) for each in store.multi_get(keys)]
    return [(place, number) for place, number in places]


def no_answer(trouble: str, patience_s: float) -> RankMissing:
    """Return the error of a rank that found no store."""
    return RankMissing(
        f"rank 0 has not come: nobody answered for {patience_s:.0f} s where the ranks find each other ({trouble}). "
        "It died before it opened the store there, was not started, or cannot be reached from here (address, port, "
        "firewall: MASTER_ADDR, MASTER_PORT); a rank that needs longer to load PyTorch needs a larger "
        "--collective_timeout"
    )


def this_process() -> tuple[str, int]:
    """Return the place where process numbers mean the same, and this process's number."""
    return f"{socket.gethostname()} {_namespace('pid')}", os.getpid()


def _namespace(kind: str) -> str:
    """Return the machine's boot, as virtual machines of one image have one name, and the namespace of this process.

    Not Linux: the machine's name.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink(f'/proc/self/ns/{kind}')}"  # noqa: PTH115 - no path, a name
    except OSError:
        return socket.gethostname()


class StartupWatch:
    """Look at the other ranks' processes on this machine until the ranks train, in a thread.

    A rank that lives is waited for, however slow it is. One of another machine is its launcher's.
    """

    def __init__(
        self,
        launch: Launch,
        processes: Sequence[tuple[str, int]],
        timeout_s: float,
        on_missing: Callable[[str], None],
    ):
        """Args: processes: `this_process` of every rank. timeout_s: how long a rank may be stopped."""
        here = processes[launch.rank][0]
        self._processes = {
            rank: process for rank, (place, process) in enumerate(processes) if rank != launch.rank and place == here
        }
        self._timeout_s, self._on_missing = timeout_s, on_missing
        self._dead_s: dict[int, float] = {}  # rank -> seconds since it was first seen dead, the earliest first
        self._stopped_s: dict[int, float] = {}
        self._closed = threading.Event()

    def begin(self) -> StartupWatch:
        threading.Thread(target=self._run, name="watch-startup", daemon=True).start()
        return self

    def close(self) -> None:
        """End no process from here on."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(BEAT_S / 2):
            missing = self.look(BEAT_S / 2)
            if missing is not None and not self._closed.is_set():
                self._on_missing(missing)
                return

    def look(self, seconds: float) -> str | None:
        """Count `seconds` more. Returns the sentence about a rank that is dead or stopped, or None."""
        self._count(self._dead_s, seconds, lambda process: not is_process_alive(process))
        self._count(self._stopped_s, seconds, is_process_stopped)
        if max(list(self._dead_s.values()), default=0.0) >= DEAD_FOR_S:
            return self.dead_rank()
        for rank, stopped_s in self._stopped_s.items():
            if stopped_s >= self._timeout_s:
                return (
                    f"rank {rank} is stopped (SIGSTOP): for --collective_timeout {self._timeout_s:g} s it gave no sign "
                    "of life while the run started up"
                )
        return None

    def dead_rank(self) -> str | None:
        """Describe the rank that died first. None: none is known to be dead."""
        self._count(self._dead_s, 0.0, lambda process: not is_process_alive(process))
        first = next(iter(self._dead_s), None)
        if first is None:
            return None
        return f"rank {first} is dead: killed from outside while the run started up, unless its own message says why"

    def _count(self, seconds_of: dict[int, float], seconds: float, is_so: Callable[[int], bool]) -> None:
        for rank, process in self._processes.items():
            if not is_so(process):
                seconds_of.pop(rank, None)
            else:
                seconds_of[rank] = seconds_of.get(rank, 0.0) + seconds


INTERFACE = "GLOO_SOCKET_IFNAME"
WAY_OUT = f"set {INTERFACE} to the network interface that the nodes share, such as eth0"


class Unreachable(Exception):
    """Ranks cannot reach each other. One sentence."""


def check_addresses(store: Store, launch: Launch) -> None:
    """Compare the ranks' addresses. All ranks call it once all have come to the store, and get the same answer. Raises
    Unreachable.
    """
    if launch.num_nodes == 1:
        return
    mine = {"network": _namespace("net"), "host": socket.gethostname(), "address": None}
    if not os.environ.get(INTERFACE):
        mine["address"] = gloo_address()
    store.set(f"address_{launch.rank}", json.dumps(mine))
    ranks = [json.loads(each) for each in store.multi_get([f"address_{rank}" for rank in range(launch.world_size)])]
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


class PortTaken(InputError):
    """Another program listens where the ranks are to meet."""


def is_held_here(launch: Launch) -> bool:
    """Return whether this rank opens the port: rank 0, unless torchrun does."""
    by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return launch.is_distributed and launch.rank == 0 and not by_launcher


def check_port(launch: Launch) -> None:
    """Check that the port is free, before PyTorch is loaded and before another rank waits there. Raises PortTaken."""
    address, port = where_ranks_meet()
    if is_held_here(launch) and port is not None:
        listen(address, port).close()


def where_ranks_meet() -> tuple[str, int | None]:
    """Return address and port as the launcher set them. None: what is set is not a port, which PyTorch reports."""
    port = whole_number(os.environ.get("MASTER_PORT", ""))
    return os.environ.get("MASTER_ADDR", ""), port if port is not None and port < 1 << 16 else None


def listen(address: str, port: int) -> socket.socket:
    """Listen at this address if it is one of the loopback, else at all addresses of this machine. Raises PortTaken.

    A name may mean an address of the loopback here and another one on other machines.
    """
    try:
        if is_loopback(address):
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            return socket.create_server((address, port), family=family, backlog=socket.SOMAXCONN)
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except OSError as error:
        raise PortTaken(
            f"MASTER_PORT={port}, where the ranks meet, cannot be listened at ({os.strerror(error.errno or 0)}): "
            f"another run, or what is left of one, has it; start with --master_port {free_port()}, before src/gpt2.py "
            "(torchrun: --master-port)"
        ) from None


def is_loopback(address: str) -> bool:
    """Return whether only this machine can mean it."""
    try:
        return address == "localhost" or ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def free_port() -> int:
    """Return a free port, outside those that the system hands out: gloo of another run takes such ports."""
    while True:
        port = random.randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.socket() as listener:
            listener.bind(("", port))
            return port
