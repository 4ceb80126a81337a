"""Make the hosts of a lab, and remove them with the block of code that asked for them.

A record in STATE names a lab's namespaces as soon as each is made. Where the process that made them is killed, the next
lab removes them, or `network.py down`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from testbed.errors import InputError
from testbed.experiments.network_lab.links import (
    MOST_HOSTS,
    LabError,
    Link,
    Namespace,
    address_of,
    join_by_bridge,
    make_namespace,
    tear_down,
    why_impossible,
)
from testbed.io import holding_together, read_json, write_text

STATE = Path("/run/testbed-lab")
PREFIX = "testbed-"
ENDING_S, POLL_S = 40.0, 0.05


@dataclass(frozen=True)
class Lab:
    """A lab that is up.

    Attributes:
        hosts_file: names the hosts for programs inside, as /etc/hosts does.
        owner: the process that made it, and when that one started.
    """

    name: str
    link: Link
    switch: Namespace
    hosts: tuple[Namespace, ...]
    hosts_file: Path
    owner: int
    owner_started_s: float

    @property
    def namespaces(self) -> tuple[Namespace, ...]:
        return self.switch, *self.hosts

    def as_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), default=str)


def lab_from(content: dict[str, Any]) -> Lab:
    """Return the lab of `Lab.as_json`. LookupError and TypeError for other content."""
    fields = {**content, "hosts_file": Path(content["hosts_file"]), "link": Link(**content["link"])}
    hosts = tuple(Namespace(**host) for host in content["hosts"])
    return Lab(**{**fields, "switch": Namespace(**content["switch"]), "hosts": hosts})


@contextlib.contextmanager
def lab(num_hosts: int, link: Link) -> Iterator[Lab]:
    """Yield hosts for as long as the block runs.

    Raises:
        InputError: such a lab makes no sense.
        LabError: it cannot be made here, or something of it was left at the end.
    """
    if not 1 <= num_hosts <= MOST_HOSTS:
        raise InputError(f"{num_hosts} hosts are not from 1 to {MOST_HOSTS}")
    if (reason := why_impossible()) is not None:
        raise LabError(reason)
    clear_abandoned()
    with contextlib.ExitStack() as held, contextlib.ExitStack() as cleanup:
        yield _make(num_hosts, link, held, cleanup)


def known_labs() -> list[str]:
    """Return the names of the labs on this machine."""
    return sorted(path.stem for path in STATE.glob("*.json"))


def take_down(name: str) -> str:
    """End a lab, or what a killed process left of one. Returns in words how it went.

    Raises:
        InputError: there is no such lab.
        LabError: something of it is left.
    """
    if name not in known_labs():
        raise InputError(f"{name!r} is not a lab on this machine; known: {', '.join(known_labs()) or 'none is up'}")
    found = _read(name)
    if (owner := _living_owner(found)) is not None:
        with contextlib.suppress(psutil.NoSuchProcess):
            owner.send_signal(signal.SIGTERM)
        deadline_s = time.monotonic() + ENDING_S
        while name in known_labs() and _living_owner(found) is not None and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
        if name not in known_labs():
            return "taken down by the process that made it"
    _remove(name, found.namespaces)
    return "taken down; the process that made it had been killed"


def clear_abandoned() -> None:
    """Remove the labs whose owners were killed. The labs of living processes stay."""
    for name in known_labs():
        with contextlib.suppress(LabError, ValueError):  # else it stays, for take_down to say why
            if _living_owner(found := _read(name)) is None:
                _remove(name, found.namespaces)


def _read(name: str) -> Lab:
    path = STATE / f"{name}.json"
    with holding_together(path):
        return lab_from(read_json(path))


def _living_owner(of: Lab) -> psutil.Process | None:
    """Return the owner, unless its number belongs to another process by now."""
    try:
        process = psutil.Process(of.owner)
        is_same = abs(process.create_time() - of.owner_started_s) < 1 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return None
    return process if is_same else None


def _remove(name: str, namespaces: Sequence[Namespace]) -> None:
    """Remove a lab's namespaces and its record. LabError names what is left."""
    if left := tear_down(namespaces):
        raise LabError(f"of lab {name} is left: {'; '.join(left)}")
    for suffix in (".hosts", ".json"):
        (STATE / f"{name}{suffix}").unlink(missing_ok=True)


def _make(num_hosts: int, link: Link, held: contextlib.ExitStack, cleanup: contextlib.ExitStack) -> Lab:
    """Make the namespaces and join them.

    Args:
        held: keeps them open until the end, so that no other namespace gets the identity of one.
        cleanup: removes what was made, whatever fails.
    """
    STATE.mkdir(mode=0o700, exist_ok=True)
    name = f"{PREFIX}{secrets.token_hex(3)}"
    hosts_file, owner = STATE / f"{name}.hosts", psutil.Process()
    namespaces: list[Namespace] = []
    cleanup.callback(_remove, name, namespaces)
    for suffix in ("s", *range(1, num_hosts + 1)):
        namespaces.append(make_namespace(f"{name}-{suffix}"))
        held.callback(os.close, namespaces[-1].open())
        switch, *hosts = namespaces
        made = Lab(name, link, switch, tuple(hosts), hosts_file, owner.pid, owner.create_time())
        write_text(STATE / f"{name}.json", made.as_json())  # each at once: this process may be killed here, too
    names = [f"{address_of(number)} host{number}" for number in range(1, num_hosts + 1)]
    hosts_file.write_text("\n".join(["127.0.0.1 localhost", *names, ""]))
    join_by_bridge(switch, hosts, link)
    return made
