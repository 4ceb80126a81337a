"""Hosts as network namespaces, joined by a bridge, with a rate on every link.

Nothing is made outside the namespaces: both ends of a link are born inside them, and the machine's own network stays
as it was. A namespace is known by its identity (device and inode of its file), not by its name: a program that reuses a
name loses neither processes nor the namespace. A lab holds each namespace open, so no other one gets its identity.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from testbed.errors import Failure, InputError

NETNS = Path("/run/netns")  # where `ip netns` keeps its names
MOST_HOSTS = 32
PORT_OF_SWITCH = 254  # the switch's own address on the bridge ends with it
# A lab in small, in namespaces of its own: /run is one of its own too, so the names go with the last process.
TRIAL = """
mount -t tmpfs tmpfs /run
hostname trial
ip netns add s
ip netns add h
ip -n s link add br0 type bridge
ip -n s link add p1 type veth peer name eth0 netns h
ip -n s link set p1 master br0 up
tc -n h qdisc add dev eth0 root tbf rate 100mbit burst 250000b latency 50ms
"""
REFUSED = (
    "this kernel or container does not let root make namespaces with links (a container needs the capabilities "
    "NET_ADMIN and SYS_ADMIN)"
)
NEEDED = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux", "unshare": "util-linux"}
UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
NS_GET_NSTYPE, CLONE_NEWNET = 0xB703, 0x40000000
TERM_WAIT_S, KILL_WAIT_S, POLL_S = 2.0, 10.0, 0.02
TOOL_S = 20.0  # ip and tc take milliseconds


class LabError(Failure):
    """The lab cannot be made, or did not go away. One sentence."""


@dataclass(frozen=True)
class Link:
    """The link between every host and the switch, in both directions. Rate: bit/s, None: no limit."""

    rate_bit_per_s: int | None = None

    @property
    def burst_bytes(self) -> int:
        """Return the size of the token bucket: 20 ms of the rate within bounds. A packet of the kernel's segmentation
        must fit into it (64 KiB), and below 4 ms of the rate the timer cannot keep up."""
        assert self.rate_bit_per_s is not None, "only a rate needs a bucket"
        rate = self.rate_bit_per_s / 8  # bytes per second
        return int(min(max(0.020 * rate, 64 * 1024), max(512 * 1024, 0.004 * rate)))

    def __str__(self) -> str:
        return "unlimited" if self.rate_bit_per_s is None else spelled_rate(self.rate_bit_per_s)


def parse_rate(text: str) -> int | None:
    """Return `100mbit`, `1gbit`, `unlimited` in bit/s as tc spells them. InputError says what is understood."""
    if text == "unlimited":
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(bit|kbit|mbit|gbit)", text.lower())
    bits = 0 if found is None else round(float(found[1]) * UNITS[found[2]])
    if not 10**4 <= bits <= 10**12:
        raise InputError(
            f"rate {text!r} is not unlimited, nor a number from 10kbit to 1000gbit with its unit, such as 100mbit"
        )
    return bits


def spelled_rate(bits_per_s: int) -> str:
    """Return `100 Mbit/s`."""
    unit = next(name for name in reversed(UNITS) if bits_per_s >= UNITS[name])
    return f"{bits_per_s / UNITS[unit]:g} {unit.capitalize()}/s"


def address_of(host: int) -> str:
    """Return the address of host 1, 2, ... on eth0."""
    return f"10.77.0.{host}"


def why_impossible() -> str | None:
    """Return why no lab can be made here, with the kernel's own words; None where one can. It is tried once."""
    if os.geteuid() != 0:
        return "network namespaces are made by root only; run it with sudo, or in a container of your own"
    missing = sorted({NEEDED[name] for name in NEEDED if shutil.which(name) is None})
    if missing:
        return f"{' and '.join(missing)} is missing; apt-get install {' '.join(missing)}"
    words = _refusal("unshare", "--net", "--mount", "--uts", "sh", "-ec", TRIAL)
    return None if words is None else f"{REFUSED}: {words}"


@functools.cache
def _refusal(*words: str) -> str | None:
    """Return what a command said that failed. It runs in namespaces of its own, and what it makes ends with it."""
    try:
        run_tool(*words)
    except LabError as error:
        return str(error).partition(" failed: ")[2] or str(error)
    return None


@dataclass(frozen=True)
class Namespace:
    """A network namespace that this lab made: its name, and the identity by which it is known from then on."""

    name: str
    device: int
    inode: int

    @property
    def path(self) -> Path:
        return NETNS / self.name

    def is_there(self) -> bool:
        """Return whether the name still stands for this very namespace."""
        return _identity(self.path) == (self.device, self.inode)

    def open(self) -> int:
        """Return a file descriptor that holds it. LabError when the name stands for something else by now."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            descriptor = -1
        if descriptor < 0 or _identity(descriptor) != (self.device, self.inode):
            if descriptor >= 0:
                os.close(descriptor)
            raise LabError(f"{self.path} is not the namespace that this lab made; it has been removed meanwhile")
        return descriptor

    def processes(self) -> list[int]:
        """Return the ids of the processes inside."""
        numbers = [int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit()]
        return [number for number in numbers if self.holds(number)]

    def holds(self, process: int) -> bool:
        return _identity(Path(f"/proc/{process}/ns/net")) == (self.device, self.inode)


def _identity(place: Path | int) -> tuple[int, int] | None:
    try:
        found = os.fstat(place) if isinstance(place, int) else place.stat()
    except OSError:  # gone, a zombie, or a name without a namespace
        return None
    return found.st_dev, found.st_ino


def make_namespace(name: str) -> Namespace:
    """LabError: the name is taken, or the kernel does not allow it."""
    run_tool("ip", "netns", "add", name)
    with (NETNS / name).open("rb") as held:
        if fcntl.ioctl(held, NS_GET_NSTYPE) != CLONE_NEWNET:
            raise LabError(f"{NETNS / name} is no network namespace")
        identity = _identity(held.fileno())
        assert identity is not None, "an open file is there"
        namespace = Namespace(name, *identity)
    if namespace.holds(os.getpid()):
        raise LabError(f"{NETNS / name} is the namespace that this program itself is in")
    return namespace


def run_tool(*words: str) -> str:
    """Run ip or tc and return what it said; LabError with its own words when it fails, or does not end."""
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, timeout=TOOL_S
        )
    except subprocess.TimeoutExpired:
        raise LabError(f"{words[0]} failed: {' '.join(words)} did not end within {TOOL_S:g} s") from None
    if done.returncode:
        reason = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise LabError(f"{' '.join(words)} failed: {reason}")
    return done.stdout


def join_by_bridge(switch: Namespace, hosts: Sequence[Namespace], link: Link) -> None:
    """Make a bridge in the namespace of the switch, and a link to each host with the rate on both of its ends."""
    inside = ("ip", "-n", switch.name)
    run_tool(*inside, "link", "set", "lo", "up")
    run_tool(*inside, "link", "add", "br0", "type", "bridge")
    run_tool(*inside, "addr", "add", f"{address_of(PORT_OF_SWITCH)}/24", "dev", "br0")
    run_tool(*inside, "link", "set", "br0", "up")
    for number, host in enumerate(hosts, start=1):
        port = f"p{number}"
        run_tool(*inside, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", host.name)
        run_tool("ip", "-n", host.name, "link", "set", "lo", "up")
        run_tool("ip", "-n", host.name, "addr", "add", f"{address_of(number)}/24", "dev", "eth0")
        run_tool("ip", "-n", host.name, "link", "set", "eth0", "up")
        run_tool(*inside, "link", "set", port, "master", "br0", "up")
        # what a host sends leaves through its own end, what it gets through the switch's
        limit_rate(host, "eth0", link)
        limit_rate(switch, port, link)


def limit_rate(namespace: Namespace, interface: str, link: Link) -> None:
    """Put a token bucket on what leaves through an interface; at most 50 ms of the rate wait in its queue."""
    if link.rate_bit_per_s is not None:
        bucket = ("rate", f"{link.rate_bit_per_s}bit", "burst", f"{link.burst_bytes}b", "latency", "50ms")
        run_tool("tc", "-n", namespace.name, "qdisc", "add", "dev", interface, "root", "tbf", *bucket)


def set_connected(switch: Namespace, host: int, is_connected: bool) -> None:
    """Pull the cable of a host on a bridge out, or put it back."""
    run_tool("ip", "-n", switch.name, "link", "set", f"p{host}", "up" if is_connected else "down")


def tear_down(namespaces: Sequence[Namespace]) -> list[str]:
    """End every process inside, remove the namespaces, and say in words what is left: nothing, if all is well.

    A process is signalled through a descriptor of it, and only if it is in a namespace of this lab at that moment.
    """
    there, left = [], []
    with contextlib.ExitStack() as held:
        for namespace in namespaces:  # one that is gone is known no more: its identity may be another's by now
            with contextlib.suppress(LabError):
                held.callback(os.close, namespace.open())
                there.append(namespace)
        end_processes_in(there)
        for namespace in there:
            if namespace.is_there():
                try:
                    run_tool("ip", "netns", "del", namespace.name)
                except LabError as error:
                    left.append(str(error))
        for namespace in there:
            left += [f"process {number} in {namespace.name}" for number in namespace.processes()]
    return left


def end_processes_in(namespaces: Sequence[Namespace], term_wait_s: float = TERM_WAIT_S) -> None:
    """SIGTERM to all processes inside, and SIGKILL to those that are there after `term_wait_s`; waits for their end."""
    for number, wait_s in ((signal.SIGTERM, term_wait_s), (signal.SIGKILL, KILL_WAIT_S)):
        deadline_s = time.monotonic() + wait_s
        signalled: set[int] = set()
        while inside := [process for namespace in namespaces for process in namespace.processes()]:
            for process in inside:
                if process not in signalled or number == signal.SIGKILL:  # a child of one may have come meanwhile
                    _signal_if_inside(process, namespaces, number)
                    signalled.add(process)
            if time.monotonic() > deadline_s:
                break
            time.sleep(POLL_S)


def _signal_if_inside(process: int, namespaces: Sequence[Namespace], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(process)
        try:
            # the descriptor is of one process for good: another process with its number cannot be hit
            if any(namespace.holds(process) for namespace in namespaces):
                signal.pidfd_send_signal(descriptor, number)
        finally:
            os.close(descriptor)
