"""Read the lines of NCCL's INFO log that say how ranks are connected, as NCCL 2.18 to 2.27 write them.

One process writes one file (NCCL_DEBUG_FILE with %h and %p); what a job printed holds several processes. Not every
line names its communicator: what is said between "Init START" and "Init COMPLETE" on a thread belongs to that
communicator, what is said later to the process's only one, and else to none that can be named.
"""

from __future__ import annotations

import io
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from testbed.io import open_regular

_LINE = re.compile(
    r"(?P<host>[^\s:\[\]]+):(?P<process>\d+):(?P<thread>\d+) \[-?\d+\] (?:\S+ )?NCCL (?P<level>[A-Z]+) (?P<text>.*)"
)
_VERSION = re.compile(r"\bNCCL version (\d+\.\d+\S*)")
_INIT = re.compile(
    r"comm (?P<handle>0x[0-9a-f]+) rank (?P<rank>\d+) nranks (?P<size>\d+) .*?"
    r"(?:commId (?P<id>0x[0-9a-f]+) )?- Init (?P<event>START|COMPLETE)"
)
_CONNECTION = re.compile(
    r"Channel (?P<channel>\d+)(?:/(?P<use>\d+))? : (?P<sender>\d+)\[\w+\] -> (?P<receiver>\d+)\[\w+\] "
    r"(?:\[(?P<side>send|receive)\] )?via (?P<via>.+?)(?: comm 0x\w+.*)?$"
)
_RING = re.compile(r"Channel (\d+)/(\d+) :\s+\d+(?:\s+\d+)*$")
_TREE = re.compile(r"\[(\d+)\] -?\d+(?:/-?\d+)*->-?\d+->-?\d+")
_COUNTS = re.compile(
    r"(?P<coll>\d+) coll channels, (?:(?P<collnet>\d+) collnet channels, )?(?:(?P<nvls>\d+) nvls channels, )?"
    r"(?P<p2p>\d+) p2p channels"
)
_NVLS = re.compile(r"NVLS multicast support is (not )?available")
_NETWORK = re.compile(r"(?:Using network|Assigned NET plugin) (.+?)(?: to comm)?$")
_ENVIRONMENT = re.compile(r"(NCCL_\w+) set by environment to (.*?)\.?$")
_CHOICE = re.compile(
    r"(?:(?P<collective>\w+): )?(?P<bytes>\d+) Bytes -> Algo (?P<algorithm>\w+) proto (?P<protocol>\w+)"
)
_KERNEL = re.compile(r"(?P<collective>\w+) \[Symmetric\]: (?P<bytes>\d+) Bytes -> Kernel (?P<kernel>\w+)")
# as NCCL numbers them in the releases that write numbers
_ALGORITHMS = ("Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT")
_PROTOCOLS = ("LL", "LL128", "Simple")
_NAMES = {name.upper(): name for name in (*_ALGORITHMS, *_PROTOCOLS)}
_NAMES |= {"COLLNET_DIRECT": "CollNetDirect", "COLLNET_CHAIN": "CollNetChain", "NVLS_TREE": "NVLSTree"}


class Connection(NamedTuple):
    """A channel from one rank to another, as one of the two set it up. Ranks count within the communicator."""

    channel: int
    sender: int
    receiver: int
    transport: str  # "P2P/CUMEM/read", "SHM/direct/direct", "NET/IB/GDRDMA", ...: without the number of the card
    is_point_to_point: bool  # for sends and receives, not for collectives


class Choice(NamedTuple):
    """NCCL's choice for one collective call. `algorithm` is the kernel where that is all that is said."""

    collective: str | None
    num_bytes: int
    algorithm: str
    protocol: str | None


@dataclass
class Member:
    """One process's record of one communicator."""

    host: str
    process: int
    rank: int | None = None  # None: of a communicator that the lines do not name
    size: int | None = None
    comm_id: str | None = None
    is_complete: bool = False
    counts: dict[str, int] = field(default_factory=dict)  # channels: coll, collnet, nvls, p2p
    num_rings: int | None = None
    trees: set[int] = field(default_factory=set)
    connections: list[Connection] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    has_nvls_tree: bool = False


Process = tuple[str, str]  # host and process id


@dataclass
class LogFile:
    """All that one file says. Facts stand with the process that states them; None: the line does not name it."""

    path: Path
    processes: set[Process] = field(default_factory=set)
    versions: set[tuple[str, Process | None]] = field(default_factory=set)
    networks: set[tuple[str, Process | None]] = field(default_factory=set)
    nvls: set[tuple[str, Process | None]] = field(default_factory=set)  # whether the hardware has multicast
    environment: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    warnings: list[str] = field(default_factory=list)
    members: list[Member] = field(default_factory=list)
    num_lines: int = 0


def read_log(path: Path) -> LogFile:
    """Read one file. A line that is cut off or not NCCL's is passed over. OSError where it cannot be read."""
    with io.TextIOWrapper(open_regular(path), encoding="utf-8", errors="replace") as lines:
        return parse_lines(lines, path)


def parse_lines(lines: Iterable[str], path: Path) -> LogFile:
    """Read lines as `read_log` does."""
    log = LogFile(path)
    by_handle: dict[tuple[Process, str], Member] = {}
    begun: dict[tuple[Process, str], Member] = {}  # by process and thread: the communicator that is being set up there
    nameless: dict[Process, Member] = {}
    waiting: dict[Process, list[tuple[Member, str]]] = defaultdict(list)
    for line in lines:
        found = _LINE.search(line)
        if version := _VERSION.search(line):
            log.versions.add((version[1], (found["host"], found["process"]) if found else None))
        if not found:
            continue
        log.num_lines += 1
        process, thread, text = (found["host"], found["process"]), found["thread"], found["text"].strip()
        log.processes.add(process)
        if found["level"] == "WARN":
            log.warnings.append(text)
        _read_process(log, process, text)
        if init := _INIT.search(text):
            # an address may be given to another communicator once the first is gone
            key = (process, init["handle"])
            if key not in by_handle or (init["event"] == "START" and by_handle[key].is_complete):
                by_handle[key] = Member(*_place(process), int(init["rank"]), int(init["size"]), init["id"])
                log.members.append(by_handle[key])
            if init["event"] == "START":
                begun[process, thread] = by_handle[key]
            else:
                by_handle[key].is_complete = True
                begun.pop((process, thread), None)
        elif (process, thread) in begun:
            _read_member(begun[process, thread], text)
        else:
            nameless.setdefault(process, Member(*_place(process)))
            waiting[process].append((nameless[process], text))
    for process, said in waiting.items():
        own = [member for member in log.members if (member.host, member.process) == _place(process)]
        for member, text in said:
            _read_member(own[0] if len(own) == 1 else member, text)
        rest = nameless[process]
        if rest.connections or rest.choices or rest.counts:
            log.members.append(rest)
    return log


def _place(process: Process) -> tuple[str, int]:
    return process[0], int(process[1])


def _read_process(log: LogFile, process: Process, text: str) -> None:
    if found := _NETWORK.search(text):
        log.networks.add((found[1].strip(), process))
    elif found := _NVLS.search(text):
        log.nvls.add(("not available" if found[1] else "available", process))
    elif found := _ENVIRONMENT.search(text):
        log.environment[found[1]].add(found[2])


def _read_member(member: Member, text: str) -> None:
    if found := _CONNECTION.search(text):
        member.connections.append(
            Connection(
                int(found["channel"]), int(found["sender"]), int(found["receiver"]), _transport(found["via"]),
                found["use"] == "1",
            )
        )  # fmt: skip
    elif found := _RING.search(text):
        member.num_rings = int(found[2])
    elif text.startswith("Trees "):
        member.trees |= {int(number) for number in _TREE.findall(text)}
    elif found := _COUNTS.search(text):
        member.counts = {name: int(count) for name, count in found.groupdict().items() if count is not None}
    elif text.startswith("Connected NVLS tree"):
        member.has_nvls_tree = True
    elif found := _CHOICE.search(text):
        algorithm, protocol = _name(found["algorithm"], _ALGORITHMS), _name(found["protocol"], _PROTOCOLS)
        member.choices.append(Choice(found["collective"], int(found["bytes"]), algorithm, protocol))
    elif found := _KERNEL.search(text):
        member.choices.append(Choice(found["collective"], int(found["bytes"]), f"symmetric {found['kernel']}", None))


def _transport(via: str) -> str:
    """Leave out the numbers of network cards, so that connections of one kind count together."""
    return re.sub(r"^(NET/.+?)/-?\d+(\(\d+\))?", r"\1", via.strip())


def _name(said: str, numbered: tuple[str, ...]) -> str:
    """Return "1", "RING" and "Ring" in one spelling; what is not known stays as it was said."""
    if said.isdigit():
        return numbered[int(said)] if int(said) < len(numbered) else f"number {said}"
    return _NAMES.get(said.upper(), said)
