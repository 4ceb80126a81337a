"""State what a run's NCCL logs prove about its communication: transports, channels, algorithms, agreement of ranks.

Only what a line says is stated. A rank without a log, a communicator that was never complete, a subsystem that was not
logged: each is listed under what is not known, and nothing is concluded from it. docs/evidence.md explains the fields.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from testbed.analysis.document.words import counted, ranges
from testbed.analysis.profiles.nccl_lines import Choice, Connection, LogFile, Member, Process, read_log
from testbed.errors import InputError

SCHEMA_VERSION = 1
LOG_FILES = "nccl_rank_*.log"
CHANNELS = {"coll": "collectives", "nvls": "NVLS", "p2p": "point to point", "collnet": "CollNet"}
_NO_TRANSPORT = "transports: no line tells how a channel is connected (NCCL_DEBUG below INFO, or no collective was run)"
_NO_ALGORITHM = (
    "algorithms and protocols: no line tells them (NCCL_DEBUG_SUBSYS needs TUNING; NCCL writes them on the "
    "communicator's first rank, and before 2.19 not at all)"
)
_NAMELESS = "to which communicator these belong: the process has several, and connected them after they were complete"


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
            f"{place} holds the logs of {len(folders)} starts ({', '.join(folders)}), and two starts are no one run; "
            "name the folder of one"
        )
    return found


def summarise(place: Path) -> dict[str, Any]:
    """Return `summary_of` the logs that `find_logs` finds. OSError where one cannot be read."""
    return summary_of([read_log(path) for path in find_logs(place)])


def summary_of(logs: Sequence[LogFile]) -> dict[str, Any]:
    """Return the facts of all processes of one start, as JSON.

    Raises:
        InputError: no line of any file is NCCL's.
    """
    if not any(log.num_lines for log in logs):
        raise InputError(f"{', '.join(str(log.path) for log in logs[:3])}: no line of NCCL's, nothing to read")
    groups: dict[tuple, list[Member]] = {}
    for log in logs:
        for member in log.members:
            is_named = member.rank is not None
            key = (member.comm_id, member.size) if is_named else (str(log.path), member.host, member.process)
            groups.setdefault(key, []).append(member)
    return {
        "schema_version": SCHEMA_VERSION,
        "num_processes": sum(map(_num_processes, logs)),
        "version": _said_by(logs, lambda log: log.versions),
        "network": _said_by(logs, lambda log: log.networks),
        "nvls_multicast": _said_by(logs, lambda log: log.nvls),
        "environment": _environment(logs),
        "warnings": [{"file": log.path.name, "text": text} for log in logs for text in log.warnings[:5]],
        "communicators": [_communicator(members) for members in groups.values()],
    }


def _num_processes(log: LogFile) -> int:
    """Return the processes that a file is of; a file without a line of NCCL's is one that says nothing."""
    return max(1, len(log.processes))


def _said_by(logs: Sequence[LogFile], facts: Callable[[LogFile], set[tuple[str, Process | None]]]) -> dict[str, Any]:
    """Return a fact that each process may state: its value where those that do agree, and how many do.

    A line that names no process is of one of its file's.
    """
    found = sorted({value for log in logs for value, _ in facts(log)})
    said = [min(_num_processes(log), len({process for _, process in facts(log)})) for log in logs]
    return {
        "value": found[0] if len(found) == 1 else None,
        "values": found,
        "processes_that_say": sum(said),
        "processes": sum(map(_num_processes, logs)),
    }


def _environment(logs: Sequence[LogFile]) -> dict[str, list[str]]:
    names = sorted({name for log in logs for name in log.environment})
    return {
        name: sorted({value for log in logs for value in log.environment.get(name, ())})
        for name in names
        if name not in ("NCCL_DEBUG_FILE", "NCCL_TOPO_DUMP_FILE")
    }


def _communicator(members: Sequence[Member]) -> dict[str, Any]:
    first = members[0]
    hosts = {member.rank: member.host for member in members}
    connections = {one for member in members for one in member.connections}
    choices = [choice for member in members for choice in member.choices]
    return {
        "comm_id": first.comm_id,
        "size": first.size,
        "ranks": sorted({member.rank for member in members if member.rank is not None}),
        "hosts": sorted(set(hosts.values())),
        "channels": {
            name: _one_value({member.counts[name] for member in members if name in member.counts}) for name in CHANNELS
        },
        "rings": _one_value({member.num_rings for member in members if member.num_rings is not None}),
        "trees": _one_value({len(member.trees) for member in members if member.trees}),
        "nvls_tree_ranks": sorted(
            member.rank for member in members if member.has_nvls_tree and member.rank is not None
        ),
        "transports": _transports(connections, hosts),
        "algorithms": _algorithms(choices) if choices else None,
        "disagreements": _disagreements(members),
        "unknown": list(_unknown(members, bool(connections), bool(choices))),
    }


def _unknown(members: Sequence[Member], has_connections: bool, has_choices: bool) -> Iterator[str]:
    """Yield what the logs of one communicator leave open."""
    size = members[0].size
    ranks = Counter(member.rank for member in members if member.rank is not None)
    if not ranks:
        yield _NAMELESS
    if missing := sorted(set(range(size or 0)) - ranks.keys()):
        yield f"ranks {ranges(missing)} of {size}: they left no log"
    if repeated := sorted(rank for rank, count in ranks.items() if count > 1):
        yield f"ranks {ranges(repeated)} are in several files: these logs are of more than one start"
    if unfinished := sorted(member.rank for member in members if member.rank is not None and not member.is_complete):
        yield f"ranks {ranges(unfinished)} began to set it up and do not say that they ended"
    if not has_connections and size != 1:
        yield _NO_TRANSPORT
    if not has_choices:
        yield _NO_ALGORITHM


def _one_value(values: set[int]) -> int | None:
    return values.pop() if len(values) == 1 else None


def _disagreements(members: Sequence[Member]) -> list[str]:
    """Return in what the ranks of one communicator contradict each other: they should not."""
    found = []
    said = {f"channels for {words}": {member.rank: member.counts.get(name) for member in members}
            for name, words in CHANNELS.items()}  # fmt: skip
    said["trees"] = {member.rank: len(member.trees) or None for member in members}
    for what, of_ranks in said.items():
        known = {rank: number for rank, number in of_ranks.items() if number is not None}
        if len(set(known.values())) > 1:
            found.append(f"{what}: " + ", ".join(f"rank {rank} {number}" for rank, number in known.items()))
    sizes = {member.size for member in members}
    if len(sizes) > 1:
        found.append(f"ranks in the communicator: {ranges(sorted(size or 0 for size in sizes))}")
    return found


def _transports(connections: set[Connection], hosts: dict[int | None, str]) -> list[dict[str, Any]]:
    """Count the connections of each kind within a host and between hosts. Both ends of one count once."""
    counts: Counter = Counter()
    for one in connections:
        ends = [hosts.get(one.sender), hosts.get(one.receiver)]
        where = "unknown" if None in ends else "within a host" if ends[0] == ends[1] else "between hosts"
        counts[one.transport, where, one.is_point_to_point] += 1
    return [
        {"transport": transport, "where": where, "for": "point to point" if is_p2p else "collectives", "connections": n}
        for (transport, where, is_p2p), n in sorted(counts.items())
    ]


def _algorithms(choices: Sequence[Choice]) -> list[dict[str, Any]]:
    """Return how often each algorithm was taken in the calls that were logged, and for which sizes."""
    sizes: dict[tuple[str, str, str | None], list[int]] = {}
    for choice in choices:
        key = (choice.collective or "unnamed collective", choice.algorithm, choice.protocol)
        sizes.setdefault(key, []).append(choice.num_bytes)
    return [
        {
            "collective": collective, "algorithm": algorithm, "protocol": protocol,
            "calls": len(found), "smallest_bytes": min(found), "largest_bytes": max(found),
        }
        for (collective, algorithm, protocol), found in sorted(sizes.items(), key=lambda item: tuple(map(str, item[0])))
    ]  # fmt: skip


def summary_text(summary: dict[str, Any]) -> str:
    """Return what the logs prove, as lines to print."""
    lines = [
        f"NCCL {_fact(summary['version'])}",
        f"network: {_fact(summary['network'])}",
        f"NVLS multicast: {_fact(summary['nvls_multicast'])}",
    ]
    for name, values in summary["environment"].items():
        lines.append(f"set by the environment: {name}={' / '.join(values)}")
    for warning in summary["warnings"]:
        lines.append(f"NCCL warned ({warning['file']}): {warning['text']}")
    for communicator in summary["communicators"]:
        lines += ["", *_communicator_lines(communicator)]
    if not summary["communicators"]:
        lines += ["", "no communicator is in these logs"]
    return "\n".join(lines)


def _communicator_lines(one: dict[str, Any]) -> list[str]:
    size = counted(one["size"], "rank") if one["size"] else "ranks that are not named"
    lines = [f"communicator {one['comm_id'] or 'without an id'} of {size} on {', '.join(one['hosts'])}"]
    channels = [f"{words} {one['channels'][name]}" for name, words in CHANNELS.items() if one["channels"][name]]
    if channels:
        lines.append(f"  channels: {', '.join(channels)}")
    if one["rings"] or one["trees"]:
        parts = [f"{one[kind]} {kind}" for kind in ("rings", "trees") if one[kind]]
        lines.append(f"  patterns: {', '.join(parts)}" + (", an NVLS tree" if one["nvls_tree_ranks"] else ""))
    for row in one["transports"]:
        where = "ends not both known" if row["where"] == "unknown" else row["where"]
        lines.append(f"  {row['transport']}: {row['connections']} connections for {row['for']}, {where}")
    for row in one["algorithms"] or []:
        sizes = sorted({row["smallest_bytes"], row["largest_bytes"]})
        protocol = f" {row['protocol']}" if row["protocol"] else ""
        lines.append(
            f"  {row['collective']}: {row['algorithm']}{protocol}, {row['calls']} calls of "
            f"{' to '.join(f'{size:,}' for size in sizes)} bytes"
        )
    lines += [f"  RANKS DISAGREE: {text}" for text in one["disagreements"]]
    return lines + [f"  not known: {text}" for text in one["unknown"]]


def _fact(fact: dict[str, Any]) -> str:
    counted = f"said by {fact['processes_that_say']} of {fact['processes']} process{'es' * (fact['processes'] != 1)}"
    if not fact["values"]:
        return "not logged"
    if fact["value"] is None:
        return f"PROCESSES DISAGREE: {' / '.join(fact['values'])} ({counted})"
    return f"{fact['value']} ({counted})"
