"""Who makes a lab and who takes it away: one process that outlives whoever asked for it, but not for long.

    python -m testbed.experiments.network_lab.keeper '{"hosts": 2, "seconds": 600, ...}'

The keeper makes the namespaces, says so in a line of JSON, and waits. It takes everything down, in the same way each
time, when its standard input closes (whoever asked for the lab is done, or dead), when the lab's time is over, when the
switch in user space has died, or on SIGTERM; then it says in a second line why, and what is left. A file in STATE
outlives a keeper that was killed, so that `network.py down` can still tell the lab's namespaces from others of the
same name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from testbed.experiments.network_lab.links import (
    MOST_HOSTS,
    LabError,
    Link,
    Namespace,
    address_of,
    join_by_bridge,
    limit_rate,
    make_namespace,
    run_tool,
    tear_down,
    why_impossible,
    why_no_switch,
)
from testbed.experiments.network_lab.relay import MTU
from testbed.io import SOURCE, holding_together, read_json, write_text

STATE = Path("/run/testbed-lab")
PREFIX = "testbed-"
LONGEST_S = 24 * 3600.0
MAKING_S, RELAY_S, ENDING_S, POLL_S = 60.0, 30.0, 40.0, 0.25


@dataclass(frozen=True)
class Lab:
    """A lab that is up. `hosts_file` names the hosts for programs inside, as /etc/hosts does."""

    name: str
    link: Link
    switch: Namespace
    hosts: tuple[Namespace, ...]
    hosts_file: Path
    keeper: int
    keeper_started_s: float

    @property
    def namespaces(self) -> tuple[Namespace, ...]:
        return self.switch, *self.hosts

    def as_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), default=str)


def lab_from(content: dict[str, Any]) -> Lab:
    """The inverse of `Lab.as_json`. LookupError and TypeError for other content."""
    fields = {**content, "hosts_file": Path(content["hosts_file"]), "link": Link(**content["link"])}
    hosts = tuple(Namespace(**host) for host in content["hosts"])
    return Lab(**{**fields, "switch": Namespace(**content["switch"]), "hosts": hosts})


@contextlib.contextmanager
def lab(num_hosts: int, link: Link, seconds: float) -> Iterator[Lab]:
    """Hosts for as long as the block runs, and `seconds` at most.

    Raises:
        ValueError: such a lab makes no sense.
        LabError: it cannot be made here, or something of it was left at the end.
    """
    process, made = _start_keeper(num_hosts, link, seconds, is_attached=True)
    try:
        yield made
    except BaseException:
        with contextlib.suppress(LabError):  # what went wrong inside is the news
            _end_keeper(process, made)
        raise
    _end_keeper(process, made)


def bring_up(num_hosts: int, link: Link, seconds: float) -> Lab:
    """A lab that stays up for `seconds` unless `take_down` is called. Errors as in `lab`."""
    return _start_keeper(num_hosts, link, seconds, is_attached=False)[1]


def known_labs() -> list[str]:
    """Names of the labs on this machine."""
    return sorted(path.stem for path in STATE.glob("*.json"))


def take_down(name: str) -> str:
    """End a lab of `bring_up`, or what a killed keeper left of one; in words how it went.

    Raises:
        ValueError: there is no such lab.
        LabError: something of it is left.
    """
    if name not in known_labs():
        known = ", ".join(known_labs()) or "none is up"
        raise ValueError(f"{name!r} is not a lab on this machine; known: {known}")
    path = STATE / f"{name}.json"
    with holding_together(path):
        found = lab_from(read_json(path))
    keeper = _living_keeper(found)
    if keeper is not None:
        with contextlib.suppress(psutil.NoSuchProcess):
            keeper.send_signal(signal.SIGTERM)
            keeper.wait(ENDING_S)
        if not path.exists():
            return "taken down by its keeper"
    _clear(found)
    return "taken down; its keeper had been killed"


def clear_abandoned() -> None:
    """Take down what killed keepers left; a lab whose keeper lives is left alone, whoever it belongs to."""
    for name in known_labs():
        with contextlib.suppress(LabError, ValueError):  # else it stays, for take_down to say why
            path = STATE / f"{name}.json"
            with holding_together(path):
                found = lab_from(read_json(path))
            if _living_keeper(found) is None:
                _clear(found)


def _living_keeper(of: Lab) -> psutil.Process | None:
    """The keeper, unless its number belongs to another process by now."""
    try:
        process = psutil.Process(of.keeper)
        is_same = abs(process.create_time() - of.keeper_started_s) < 1 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return None
    return process if is_same else None


def _clear(of: Lab) -> None:
    """Take down without the keeper. LabError names what is left."""
    left = tear_down(of.namespaces)
    if left:
        raise LabError(f"of lab {of.name} is left: {'; '.join(left)}")
    _forget(of.name)


def _forget(name: str) -> None:
    for suffix in (".hosts", ".json"):
        (STATE / f"{name}{suffix}").unlink(missing_ok=True)


def _start_keeper(num_hosts: int, link: Link, seconds: float, is_attached: bool) -> tuple[subprocess.Popen, Lab]:
    if not 1 <= num_hosts <= MOST_HOSTS:
        raise ValueError(f"{num_hosts} hosts are not from 1 to {MOST_HOSTS}")
    if not 0 < seconds <= LONGEST_S:
        raise ValueError(f"a lab's time of {seconds:g} s is not above 0 and at most {LONGEST_S:g}")
    if link.delay_s is not None and not 0 <= link.delay_s <= 10:
        raise ValueError(f"a delay of {1000 * link.delay_s:g} ms is not from 0 to 10000")
    if (reason := why_impossible() if link.delay_s is None else why_no_switch()) is not None:
        raise LabError(reason)
    clear_abandoned()
    asked = {"hosts": num_hosts, "link": dataclasses.asdict(link), "seconds": seconds, "is_attached": is_attached}
    process = subprocess.Popen(
        [sys.executable, "-m", "testbed.experiments.network_lab.keeper", json.dumps(asked)],
        stdin=subprocess.PIPE if is_attached else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        # a lab that stays up must not hold on to the pipe of whoever reads what `up` says
        stderr=None if is_attached else subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        start_new_session=True,  # Ctrl-C is for whoever uses the lab, who then closes it
    )
    try:
        answer = _line_of(process, MAKING_S)
    except BaseException:
        process.terminate()
        raise
    if "error" in answer:
        process.wait()
        raise LabError(answer["error"])
    if not is_attached:
        assert process.stdout is not None
        process.stdout.close()
    return process, lab_from(answer)


def _line_of(process: subprocess.Popen, wait_s: float) -> dict[str, Any]:
    """The next thing that a keeper says; it may have been killed."""
    assert process.stdout is not None
    is_there = select.select([process.stdout], [], [], wait_s)[0]
    line = process.stdout.readline() if is_there else b""
    if not line:
        raise LabError("the keeper of the lab ended without a word" if is_there else f"no lab within {wait_s:g} s")
    return json.loads(line)


def _end_keeper(process: subprocess.Popen, made: Lab) -> None:
    """Close the lab. LabError: its time was over, its switch had died, or something is left."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    try:
        answer = _line_of(process, ENDING_S)
        process.wait(ENDING_S)
    except (LabError, subprocess.TimeoutExpired):
        process.kill()
        process.wait()
        _clear(made)
        return
    if answer["left"]:
        raise LabError(f"of lab {made.name} is left: {'; '.join(answer['left'])}")
    if answer["why"] is not None:
        raise LabError(answer["why"])


class Keeper:
    """The process itself."""

    def __init__(self, asked: dict[str, Any]):
        self.link = Link(**asked["link"])
        self.num_hosts, self.is_attached = asked["hosts"], asked["is_attached"]
        self.seconds = asked["seconds"]
        self.deadline_s = time.monotonic() + self.seconds
        self.name = f"{PREFIX}{secrets.token_hex(3)}"
        self.namespaces: list[Namespace] = []
        self.held: list[int] = []  # what keeps their identities from being given to others
        self.relay: subprocess.Popen | None = None
        self.is_asked_to_end = False

    def live(self) -> int:
        """From the first namespace to the last. Returns the exit code."""
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, self._note)
        why, error = None, None
        try:
            self._say(self._make().as_json())
            why = self._wait()
        except LabError as failure:
            error = str(failure)
        finally:
            left = tear_down(self.namespaces)
            if self.relay is not None:
                self.relay.wait()
            if not left:
                _forget(self.name)
        self._say(json.dumps({"error": error} if error is not None else {"why": why, "left": left}))
        return 1 if left or error else 0

    def _note(self, number: int, frame: object) -> None:
        self.is_asked_to_end = True

    @staticmethod
    def _say(line: str) -> None:
        with contextlib.suppress(OSError):  # nobody listens to a lab that stays up, or any more
            os.write(sys.stdout.fileno(), f"{line}\n".encode())

    def _make(self) -> Lab:
        STATE.mkdir(mode=0o700, exist_ok=True)
        hosts_file = STATE / f"{self.name}.hosts"
        started_s = psutil.Process().create_time()
        for suffix in ("s", *range(1, self.num_hosts + 1)):
            self.namespaces.append(make_namespace(f"{self.name}-{suffix}"))
            self.held.append(self.namespaces[-1].open())
            switch, *hosts = self.namespaces
            made = Lab(self.name, self.link, switch, tuple(hosts), hosts_file, os.getpid(), started_s)
            write_text(STATE / f"{self.name}.json", made.as_json())  # each at once: a keeper may be killed here, too
        names = [f"{address_of(number)} host{number}" for number in range(1, self.num_hosts + 1)]
        hosts_file.write_text("\n".join(["127.0.0.1 localhost", *names, ""]))
        if self.link.delay_s is None:
            join_by_bridge(switch, hosts, self.link)
        else:
            self._join_by_relay(switch, hosts)
        return made

    def _join_by_relay(self, switch: Namespace, hosts: list[Namespace]) -> None:
        """Start the switch in user space, inside the namespace that stands for it, and set its devices up."""
        descriptors = [namespace.open() for namespace in (switch, *hosts)]
        asked = {"hosts": descriptors[1:], "delay_s": self.link.delay_s, "bytes_per_s": self.link.bytes_per_s}
        inside = ["nsenter", f"--net=/proc/self/fd/{descriptors[0]}"]
        self.relay = subprocess.Popen(
            [*inside, sys.executable, "-m", "testbed.experiments.network_lab.relay", json.dumps(asked)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            pass_fds=descriptors,
        )
        for descriptor in descriptors:
            os.close(descriptor)
        said = self.relay.stdout
        assert said is not None
        if not select.select([said], [], [], RELAY_S)[0] or not said.readline():
            raise LabError(f"the switch in user space has not started within {RELAY_S:g} s, or ended at once")
        for number, host in enumerate(hosts, start=1):
            run_tool("ip", "-n", host.name, "link", "set", "lo", "up")
            run_tool("ip", "-n", host.name, "addr", "add", f"{address_of(number)}/24", "dev", "eth0")
            run_tool("ip", "-n", host.name, "link", "set", "eth0", "mtu", str(MTU), "txqueuelen", "1000", "up")
            limit_rate(host, "eth0", self.link)

    def _wait(self) -> str | None:
        """Until the lab is to end; why, where nobody asked for it."""
        watched = [sys.stdin] if self.is_attached else []
        while not self.is_asked_to_end:
            if time.monotonic() > self.deadline_s:
                return f"the lab's time of {self.seconds:g} s was over"
            if self.relay is not None and self.relay.poll() is not None:
                return f"the switch in user space ended with code {self.relay.returncode}"
            if select.select(watched, [], [], POLL_S)[0] and not os.read(sys.stdin.fileno(), 1):
                break
        return None


if __name__ == "__main__":
    sys.exit(Keeper(json.loads(sys.argv[1])).live())
