"""State what a run's NCCL logs prove about its communication: ranks, transports, channels, algorithms.

Reads the lines of NCCL's INFO log that NCCL 2.18 to 2.27 write. Only what a line says is stated. Most lines do not name
their communicator, so transports, channels and algorithms are counted over all of them. A rank without a log and a
subsystem that was not logged are listed under what is not known.
"""

from __future__ import annotations

import io
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from testbed.analysis.document.words import counted, ranges
from testbed.errors import InputError
from testbed.io import open_regular

SCHEMA_VERSION = 3
LOG_FILES = "nccl_rank_*.log"
MOST_WARNINGS = 20
_LINE = re.compile(r"(?P<host>[^\s:\[\]]+):(?P<process>\d+):\d+ \[-?\d+\] (?:\S+ )?NCCL (?P<level>[A-Z]+) (?P<text>.*)")
_VERSION = re.compile(r"\bNCCL version (\d+\.\d+\S*)")
_NETWORK = re.compile(r"(?:Using network|Assigned NET plugin) (.+?)(?: to comm)?$")
_ENVIRONMENT = re.compile(r"(?!NCCL_DEBUG_FILE|NCCL_TOPO_DUMP_FILE)(NCCL_\w+) set by environment to (.*?)\.?$")
_INIT = re.compile(
    r"comm 0x[0-9a-f]+ rank (?P<rank>\d+) nranks (?P<size>\d+) .*?"
    r"(?:commId (?P<id>0x[0-9a-f]+) )?- Init (?P<event>START|COMPLETE)"
)
_CONNECTION = re.compile(
    r"Channel \d+(?:/(?P<use>\d+))? : \d+\[\w+\] -> \d+\[\w+\] (?:\[(?P<end>send|receive)\] )?"
    r"via (?P<via>.+?)(?: comm 0x\w+.*)?$"
)
_CHANNELS = re.compile(r"\d+ coll channels, .*?\d+ p2p channels")
_CHOICE = re.compile(
    r"(?:(?P<collective>\w+)(?: \[Symmetric\])?: )?(?P<bytes>\d+) Bytes -> "
    r"(?:Algo (?P<algorithm>\w+) proto (?P<protocol>\w+)|Kernel (?P<kernel>\w+))"
)
# as NCCL numbers them in the releases that write numbers
_ALGORITHMS = ("Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT")
_PROTOCOLS = ("LL", "LL128", "Simple")

Process = tuple[str, int]  # host and process id


@dataclass
class Communicator:
    """The processes that began to set a communicator up, and those that say they ended, by rank."""

    begun: dict[int, list[Process]] = field(default_factory=lambda: defaultdict(list))
    complete: set[int] = field(default_factory=set)


@dataclass
class Logs:
    """What the logs of one start say; every line adds to it."""

    processes: set[Process] = field(default_factory=set)
    versions: set[str] = field(default_factory=set)
    networks: set[str] = field(default_factory=set)
    environment: set[str] = field(default_factory=set)
    warnings: list[str] = field(default_factory=list)
    communicators: dict[tuple[str | None, int], Communicator] = field(default_factory=lambda: defaultdict(Communicator))
    channels: Counter[str] = field(default_factory=Counter)
    transports: Counter[tuple[str, str]] = field(default_factory=Counter)  # and what it carries
    # sizes in bytes of the calls by collective, algorithm and protocol
    choices: dict[tuple[str, str], list[int]] = field(default_factory=lambda: defaultdict(list))

    def read(self, line: str) -> None:
        """Add a line. One that is cut off or not NCCL's is passed over."""
        if version := _VERSION.search(line):
            self.versions.add(version[1])
        found = _LINE.search(line)
        if found is None:
            return
        process, text = (found["host"], int(found["process"])), found["text"].strip()
        self.processes.add(process)
        if found["level"] == "WARN":
            self.warnings.append(text)
        if network := _NETWORK.search(text):
            self.networks.add(network[1].strip())
        elif variable := _ENVIRONMENT.search(text):
            self.environment.add(f"{variable[1]}={variable[2]}")
        elif init := _INIT.search(text):
            communicator, rank = self.communicators[init["id"], int(init["size"])], int(init["rank"])
            if init["event"] == "START":
                communicator.begun[rank].append(process)
            else:
                communicator.complete.add(rank)
        elif (connection := _CONNECTION.search(text)) and connection["end"] != "receive":  # both ends tell of it
            # without the number of the network card, so that connections of one kind count together
            transport = re.sub(r"^(NET/.+?)/-?\d+(\(\d+\))?", r"\1", connection["via"].strip())
            self.transports[transport, "point to point" if connection["use"] == "1" else "collectives"] += 1
        elif channels := _CHANNELS.search(text):
            self.channels[channels[0]] += 1
        elif choice := _CHOICE.search(text):
            chosen = f"symmetric {choice['kernel']}"
            if not choice["kernel"]:
                chosen = f"{_name(choice['algorithm'], _ALGORITHMS)} {_name(choice['protocol'], _PROTOCOLS)}"
            self.choices[choice["collective"] or "unnamed collective", chosen].append(int(choice["bytes"]))


def _name(said: str, numbered: tuple[str, ...]) -> str:
    """Return "1", "RING" and "Ring" in one spelling; what is not known stays as it was said."""
    if said.isdigit():
        return numbered[int(said)] if int(said) < len(numbered) else f"number {said}"
    return {name.upper(): name for name in numbered}.get(said.upper().replace("_", ""), said)


def find_logs(place: Path) -> list[Path]:
    """Find the logs of one start: `place` itself, or the nccl_rank_*.log under it.

    Raises:
        FileNotFoundError: there are none.
        InputError: they lie in several folders; each start has its own, and two are never read as one.
    """
    if place.is_file():
        return [place]
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


def summarise(place: Path) -> dict[str, Any]:
    """Return the facts of all processes of one start, as JSON, from the logs that `find_logs` finds.

    Raises:
        OSError: a log cannot be read.
        InputError: no line of any file is NCCL's.
    """
    paths = find_logs(place)
    logs = read_logs(paths)
    if not logs.processes:
        raise InputError(f"{', '.join(map(str, paths[:3]))}: no line of NCCL's, nothing to read")
    return summary_of(logs)


def read_logs(paths: Iterable[Path]) -> Logs:
    """Read the logs of one start. OSError where one cannot be read."""
    logs = Logs()
    for path in paths:
        with io.TextIOWrapper(open_regular(path), encoding="utf-8", errors="replace") as lines:
            for line in lines:
                logs.read(line)
    return logs


def summary_of(logs: Logs) -> dict[str, Any]:
    """Return what `summarise` does of logs that were read."""
    transports = [
        {"transport": transport, "for": use, "connections": count}
        for (transport, use), count in sorted(logs.transports.items())
    ]
    algorithms = [
        {"collective": name, "algorithm": chosen, "calls": len(sizes), "bytes": [min(sizes), max(sizes)]}
        for (name, chosen), sizes in sorted(logs.choices.items())
    ]
    return {
        "schema_version": SCHEMA_VERSION,
        "num_processes": len(logs.processes),
        "hosts": sorted({host for host, _ in logs.processes}),
        "versions": sorted(logs.versions),
        "networks": sorted(logs.networks),
        "environment": sorted(logs.environment),
        "warnings": logs.warnings[:MOST_WARNINGS],
        "communicators": [
            {"comm_id": comm_id, "size": size, "ranks": sorted(one.begun), "unknown": list(_unknown(one, size))}
            for (comm_id, size), one in logs.communicators.items()
        ],
        "channels": dict(logs.channels),
        "transports": transports,
        "algorithms": algorithms,
        "unknown": list(_not_logged(bool(transports), bool(algorithms))),
    }


def _unknown(one: Communicator, size: int) -> Iterator[str]:
    """Yield what the logs leave open about the ranks of a communicator."""
    if missing := sorted(set(range(size)) - one.begun.keys()):
        yield f"ranks {ranges(missing)} of {size}: they left no log"
    if repeated := sorted(rank for rank, processes in one.begun.items() if len(processes) > 1):
        yield f"ranks {ranges(repeated)} are of several processes: these logs are of more than one start"
    if unfinished := sorted(one.begun.keys() - one.complete):
        yield f"ranks {ranges(unfinished)} began to set it up and do not say that they ended"


def _not_logged(has_transports: bool, has_algorithms: bool) -> Iterator[str]:
    if not has_transports:
        yield "transports: no line tells how a channel is connected (NCCL_DEBUG below INFO, or no collective was run)"
    if not has_algorithms:
        yield (
            "algorithms and protocols: no line tells them (NCCL_DEBUG_SUBSYS needs TUNING; NCCL writes them on a "
            "communicator's first rank, and before 2.19 not at all)"
        )


def summary_text(summary: dict[str, Any]) -> str:
    """Return what the logs prove, as lines to print."""
    return "\n".join(_lines(summary))


def _lines(summary: dict[str, Any]) -> Iterator[str]:
    yield f"processes: {summary['num_processes']}, on {', '.join(summary['hosts'])}"
    for name, values in (("NCCL", summary["versions"]), ("network", summary["networks"])):
        yield f"{name}: {'PROCESSES DISAGREE: ' * (len(values) > 1)}{' / '.join(values) or 'not logged'}"
    yield from _listed("set by the environment: ", summary["environment"])
    yield from _listed("NCCL warned: ", summary["warnings"])
    for one in summary["communicators"]:
        yield f"communicator {one['comm_id'] or 'without an id'} of {counted(one['size'], 'rank')}"
        yield from _listed("  not known: ", one["unknown"])
    for channels, count in summary["channels"].items():
        yield f"{channels}: said {count} times"
    for row in summary["transports"]:
        yield f"{row['transport']}: {row['connections']} connections for {row['for']}"
    for row in summary["algorithms"]:
        sizes = " to ".join(f"{size:,}" for size in dict.fromkeys(row["bytes"]))
        yield f"{row['collective']}: {row['algorithm']}, {row['calls']} calls of {sizes} bytes"
    yield from _listed("not known: ", summary["unknown"])


def _listed(start: str, texts: Iterable[str]) -> Iterator[str]:
    return (start + text for text in texts)
