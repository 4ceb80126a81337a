"""State what a run's NCCL logs prove about its communication: transports, channels, algorithms, agreement of ranks.

Reads the lines of NCCL's INFO log that NCCL 2.18 to 2.27 write. Only what a line says is stated. A rank without a log,
a communicator that was never complete, a subsystem that was not logged: each is listed under what is not known.

Not every line names its communicator: what is said between "Init START" and "Init COMPLETE" on a thread belongs to that
communicator, what is said later to the process's only one, and else to none that can be named.
"""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from testbed.analysis.document.words import counted, ranges
from testbed.errors import InputError
from testbed.io import open_regular

SCHEMA_VERSION = 2
LOG_FILES = "nccl_rank_*.log"
CHANNELS = {"coll": "collectives", "nvls": "NVLS", "p2p": "point to point", "collnet": "CollNet"}
_LINE = re.compile(
    r"(?P<host>[^\s:\[\]]+):(?P<process>\d+):(?P<thread>\d+) \[-?\d+\] (?:\S+ )?NCCL (?P<level>[A-Z]+) (?P<text>.*)"
)
_VERSION = re.compile(r"\bNCCL version (\d+\.\d+\S*)")
_NETWORK = re.compile(r"(?:Using network|Assigned NET plugin) (.+?)(?: to comm)?$")
_ENVIRONMENT = re.compile(r"(NCCL_\w+) set by environment to (.*?)\.?$")
_INIT = re.compile(
    r"comm (?P<handle>0x[0-9a-f]+) rank (?P<rank>\d+) nranks (?P<size>\d+) .*?"
    r"(?:commId (?P<id>0x[0-9a-f]+) )?- Init (?P<event>START|COMPLETE)"
)
_CONNECTION = re.compile(
    r"Channel (?P<channel>\d+)(?:/(?P<use>\d+))? : (?P<sender>\d+)\[\w+\] -> (?P<receiver>\d+)\[\w+\] "
    r"(?:\[(?:send|receive)\] )?via (?P<via>.+?)(?: comm 0x\w+.*)?$"
)
_COUNTS = re.compile(
    r"(?P<coll>\d+) coll channels, (?:(?P<collnet>\d+) collnet channels, )?(?:(?P<nvls>\d+) nvls channels, )?"
    r"(?P<p2p>\d+) p2p channels"
)
_CHOICE = re.compile(
    r"(?:(?P<collective>\w+)(?: \[Symmetric\])?: )?(?P<bytes>\d+) Bytes -> "
    r"(?:Algo (?P<algorithm>\w+) proto (?P<protocol>\w+)|Kernel (?P<kernel>\w+))"
)
# as NCCL numbers them in the releases that write numbers
_ALGORITHMS = ("Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT")
_PROTOCOLS = ("LL", "LL128", "Simple")

Process = tuple[str, int]  # host and process id


class Connection(NamedTuple):
    """A channel from one rank to another, as one of the two set it up. Ranks count within the communicator."""

    channel: int
    sender: int
    receiver: int
    transport: str  # "P2P/CUMEM/read", "SHM/direct/direct", "NET/IB/GDRDMA", ...: without the number of the card
    is_point_to_point: bool  # for sends and receives, not for collectives


@dataclass
class Member:
    """One process's record of one communicator; `rank` is None for one that the lines do not name."""

    process: Process
    rank: int | None = None
    size: int | None = None
    comm_id: str | None = None
    is_complete: bool = False
    channels: dict[str, int] = field(default_factory=dict)
    connections: set[Connection] = field(default_factory=set)
    # sizes in bytes of the calls by collective, algorithm (the kernel where that is all that is said) and protocol
    choices: dict[tuple[str, str, str | None], list[int]] = field(default_factory=dict)


@dataclass
class LogFile:
    """What one file says. A fact stands with the process that states it; None: the line does not name it."""

    path: Path
    processes: set[Process] = field(default_factory=set)
    versions: set[tuple[str, Process | None]] = field(default_factory=set)
    networks: set[tuple[str, Process | None]] = field(default_factory=set)
    environment: set[tuple[str, str]] = field(default_factory=set)
    warnings: list[str] = field(default_factory=list)
    members: list[Member] = field(default_factory=list)

    @property
    def num_processes(self) -> int:
        """Return how many processes wrote the file; one without a line of NCCL's is of a process that says nothing."""
        return max(1, len(self.processes))


def find_logs(place: Path) -> list[Path]:
    """Find the logs of one start: `place` itself, or the nccl_rank_*.log under it.

    Raises:
        FileNotFoundError: there are none.
        InputError: they lie in several folders; each start has its own, and two are never read as one.
    """
    if place.is_file():
        return [place]
    if not place.is_dir():
        raise FileNotFoundError(f"{place} is neither a file nor a folder")
    found = sorted(place.rglob(LOG_FILES))
    if not found:
        raise FileNotFoundError(
            f"{place} holds no {LOG_FILES}: the run was made without NCCL_LOGS=1, or its backend was gloo, which has "
            "no such log"
        )
    folders = sorted({str(path.parent.relative_to(place)) for path in found})
    if len(folders) > 1:
        raise InputError(
            f"{place} holds the logs of {len(folders)} starts ({', '.join(folders)}), and two starts are not one run; "
            "name the folder of one"
        )
    return found


def read_log(path: Path) -> LogFile:
    """Read one file. A line that is cut off or not NCCL's is passed over. OSError where it cannot be read."""
    with io.TextIOWrapper(open_regular(path), encoding="utf-8", errors="replace") as lines:
        return parse_lines(lines, path)


def parse_lines(lines: Iterable[str], path: Path) -> LogFile:
    """Read lines as `read_log` does."""
    log = LogFile(path)
    by_handle: dict[tuple[Process, str], Member] = {}
    begun: dict[tuple[Process, str], Member] = {}  # by process and thread: the communicator that is being set up there
    later: dict[Process, list[str]] = {}
    for line in lines:
        found = _LINE.search(line)
        process = (found["host"], int(found["process"])) if found else None
        if version := _VERSION.search(line):
            log.versions.add((version[1], process))
        if found is None or process is None:
            continue
        thread, text = (process, found["thread"]), found["text"].strip()
        log.processes.add(process)
        if found["level"] == "WARN":
            log.warnings.append(text)
        if network := _NETWORK.search(text):
            log.networks.add((network[1].strip(), process))
        elif variable := _ENVIRONMENT.search(text):
            log.environment.add((variable[1], variable[2]))
        elif init := _INIT.search(text):
            key = (process, init["handle"])
            # an address may be given to another communicator once the first is gone
            if key not in by_handle or (init["event"] == "START" and by_handle[key].is_complete):
                by_handle[key] = Member(process, int(init["rank"]), int(init["size"]), init["id"])
                log.members.append(by_handle[key])
            if init["event"] == "START":
                begun[thread] = by_handle[key]
            else:
                by_handle[key].is_complete = True
                begun.pop(thread, None)
        elif thread in begun:
            _read_member(begun[thread], text)
        else:
            later.setdefault(process, []).append(text)
    for process, texts in later.items():
        own = [member for member in log.members if member.process == process]
        member = own[0] if len(own) == 1 else Member(process)
        for text in texts:
            _read_member(member, text)
        if member not in own and (member.connections or member.choices or member.channels):
            log.members.append(member)
    return log


def _read_member(member: Member, text: str) -> None:
    if found := _CONNECTION.search(text):
        # without the number of the network card, so that connections of one kind count together
        transport = re.sub(r"^(NET/.+?)/-?\d+(\(\d+\))?", r"\1", found["via"].strip())
        channel, sender, receiver = (int(found[name]) for name in ("channel", "sender", "receiver"))
        member.connections.add(Connection(channel, sender, receiver, transport, found["use"] == "1"))
    elif found := _COUNTS.search(text):
        member.channels = {name: int(count) for name, count in found.groupdict().items() if count is not None}
    elif found := _CHOICE.search(text):
        chosen: tuple[str, str | None] = (f"symmetric {found['kernel']}", None)
        if not found["kernel"]:
            chosen = (_name(found["algorithm"], _ALGORITHMS), _name(found["protocol"], _PROTOCOLS))
        key = (found["collective"] or "unnamed collective", *chosen)
        member.choices.setdefault(key, []).append(int(found["bytes"]))


def _name(said: str, numbered: tuple[str, ...]) -> str:
    """Return "1", "RING" and "Ring" in one spelling; what is not known stays as it was said."""
    if said.isdigit():
        return numbered[int(said)] if int(said) < len(numbered) else f"number {said}"
    return {name.upper(): name for name in numbered}.get(said.upper().replace("_", ""), said)


def summarise(place: Path) -> dict[str, Any]:
    """Return `summary_of` the logs that `find_logs` finds. OSError where one cannot be read."""
    return summary_of([read_log(path) for path in find_logs(place)])


def summary_of(logs: Sequence[LogFile]) -> dict[str, Any]:
    """Return the facts of all processes of one start, as JSON.

    Raises:
        InputError: no line of any file is NCCL's.
    """
    if not any(log.processes for log in logs):
        raise InputError(f"{', '.join(str(log.path) for log in logs[:3])}: no line of NCCL's, nothing to read")
    groups: dict[tuple, list[Member]] = {}
    for log in logs:
        for member in log.members:
            key = (str(log.path), member.process) if member.rank is None else (member.comm_id, member.size)
            groups.setdefault(key, []).append(member)
    environment: dict[str, list[str]] = {}
    for name, value in sorted({pair for log in logs for pair in log.environment}):
        if name not in ("NCCL_DEBUG_FILE", "NCCL_TOPO_DUMP_FILE"):
            environment.setdefault(name, []).append(value)
    return {
        "schema_version": SCHEMA_VERSION,
        "num_processes": sum(log.num_processes for log in logs),
        "version": _said_by(logs, "versions"),
        "network": _said_by(logs, "networks"),
        "environment": environment,
        "warnings": [{"file": log.path.name, "text": text} for log in logs for text in log.warnings[:5]],
        "communicators": [_communicator(members) for members in groups.values()],
    }


def _said_by(logs: Sequence[LogFile], name: str) -> dict[str, Any]:
    """Return a fact that each process may state: its value where those that do agree, and how many do."""
    facts: list[set[tuple[str, Process | None]]] = [getattr(log, name) for log in logs]
    values = sorted({value for of_log in facts for value, _ in of_log})
    return {
        "value": values[0] if len(values) == 1 else None,
        "values": values,
        # a line that names no process is one of its file's
        "processes_that_say": sum(
            min(log.num_processes, len({process for _, process in of_log}))
            for log, of_log in zip(logs, facts, strict=True)
        ),
        "processes": sum(log.num_processes for log in logs),
    }


def _communicator(members: Sequence[Member]) -> dict[str, Any]:
    hosts = {member.rank: member.process[0] for member in members}
    channels = {
        name: {member.rank: member.channels[name] for member in members if name in member.channels} for name in CHANNELS
    }
    connections: Counter = Counter()
    for one in {one for member in members for one in member.connections}:  # both ends tell of it
        ends = {hosts.get(one.sender), hosts.get(one.receiver)}
        where = "unknown" if None in ends else "within a host" if len(ends) == 1 else "between hosts"
        connections[one.transport, where, "point to point" if one.is_point_to_point else "collectives"] += 1
    sizes: dict[tuple[str, str, str | None], list[int]] = {}
    for member in members:
        for key, found in member.choices.items():
            sizes.setdefault(key, []).extend(found)
    algorithms = [
        {
            **dict(zip(("collective", "algorithm", "protocol"), key, strict=True)),
            "calls": len(found),
            "smallest_bytes": min(found),
            "largest_bytes": max(found),
        }
        for key, found in sorted(sizes.items(), key=lambda item: tuple(map(str, item[0])))
    ]
    return {
        "comm_id": members[0].comm_id,
        "size": members[0].size,
        "ranks": sorted({member.rank for member in members if member.rank is not None}),
        "hosts": sorted(set(hosts.values())),
        "channels": {
            name: next(iter(counts.values())) if len(set(counts.values())) == 1 else None
            for name, counts in channels.items()
        },
        "transports": [
            {"transport": transport, "where": where, "for": use, "connections": count}
            for (transport, where, use), count in sorted(connections.items())
        ],
        "algorithms": algorithms or None,
        "disagreements": [
            f"channels for {CHANNELS[name]}: " + ", ".join(f"rank {rank} {count}" for rank, count in counts.items())
            for name, counts in channels.items()
            if len(set(counts.values())) > 1
        ],
        "unknown": list(_unknown(members, bool(connections), bool(algorithms))),
    }


def _unknown(members: Sequence[Member], has_connections: bool, has_choices: bool) -> Iterator[str]:
    """Yield what the logs of one communicator leave open."""
    size = members[0].size
    ranks = Counter(member.rank for member in members if member.rank is not None)
    if not ranks:
        yield "to which communicator these belong: the process has several, and connected them after they were complete"
    if missing := sorted(set(range(size or 0)) - ranks.keys()):
        yield f"ranks {ranges(missing)} of {size}: they left no log"
    if repeated := sorted(rank for rank, count in ranks.items() if count > 1):
        yield f"ranks {ranges(repeated)} are in several files: these logs are of more than one start"
    if unfinished := sorted(member.rank for member in members if member.rank is not None and not member.is_complete):
        yield f"ranks {ranges(unfinished)} began to set it up and do not say that they ended"
    if not has_connections and size != 1:
        yield "transports: no line tells how a channel is connected (NCCL_DEBUG below INFO, or no collective was run)"
    if not has_choices:
        yield (
            "algorithms and protocols: no line tells them (NCCL_DEBUG_SUBSYS needs TUNING; NCCL writes them on the "
            "communicator's first rank, and before 2.19 not at all)"
        )


def summary_text(summary: dict[str, Any]) -> str:
    """Return what the logs prove, as lines to print."""
    lines = [f"NCCL {_fact(summary['version'])}", f"network: {_fact(summary['network'])}"]
    for name, values in summary["environment"].items():
        lines.append(f"set by the environment: {name}={' / '.join(values)}")
    for warning in summary["warnings"]:
        lines.append(f"NCCL warned ({warning['file']}): {warning['text']}")
    for communicator in summary["communicators"]:
        lines += ["", *_communicator_lines(communicator)]
    if not summary["communicators"]:
        lines += ["", "no communicator is in these logs"]
    return "\n".join(lines)


def _communicator_lines(one: dict[str, Any]) -> Iterator[str]:
    size = counted(one["size"], "rank") if one["size"] else "ranks that are not named"
    yield f"communicator {one['comm_id'] or 'without an id'} of {size} on {', '.join(one['hosts'])}"
    if channels := [f"{words} {one['channels'][name]}" for name, words in CHANNELS.items() if one["channels"][name]]:
        yield f"  channels: {', '.join(channels)}"
    for row in one["transports"]:
        where = "ends not both known" if row["where"] == "unknown" else row["where"]
        yield f"  {row['transport']}: {row['connections']} connections for {row['for']}, {where}"
    for row in one["algorithms"] or []:
        sizes = " to ".join(f"{size:,}" for size in sorted({row["smallest_bytes"], row["largest_bytes"]}))
        protocol = f" {row['protocol']}" if row["protocol"] else ""
        yield f"  {row['collective']}: {row['algorithm']}{protocol}, {row['calls']} calls of {sizes} bytes"
    for text in one["disagreements"]:
        yield f"  RANKS DISAGREE: {text}"
    for text in one["unknown"]:
        yield f"  not known: {text}"


def _fact(fact: dict[str, Any]) -> str:
    said = f"said by {fact['processes_that_say']} of {fact['processes']} process{'es' * (fact['processes'] != 1)}"
    if not fact["values"]:
        return "not logged"
    if fact["value"] is None:
        return f"PROCESSES DISAGREE: {' / '.join(fact['values'])} ({said})"
    return f"{fact['value']} ({said})"
