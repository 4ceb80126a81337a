"""Merge the torch.profiler traces of all ranks into one timeline for Perfetto. No torch.

Each trace is read twice: once for its collectives, which align the clocks, and once to be written. Only the collectives
are kept, so memory does not grow with the ranks.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from testbed.analysis.profiles.clocks import Clock, align
from testbed.errors import Failure, InputError, counted, first_line
from testbed.io import read_unpacked, replacing
from testbed.profiling.trace import STEP

Event = dict[str, Any]
PHASES_TRACK = 1  # thread of a rank's process that shows step and phases; no thread of an operating system has it
DEVICES_FROM = 1_000_000  # processes that are a rank's devices: no rank has such a number
# No rank leaves one of these before every rank has entered it: not so a broadcast, which its root leaves at once.
_MEETS = re.compile(r"barrier|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all", re.IGNORECASE)
_TRACE = re.compile(r"rank(\d+)\.pt\.trace\.json(\.gz)?")
Key = tuple[str, str, int, int]  # group, name, step (odd: after it), how many of them came before


@dataclass
class RankTrace:
    """What the first reading of a rank's trace keeps. Moments are in microseconds, on the rank's clock.

    Attributes:
        base_us: moment from which the trace counts, seen from rank 0's: absolute, a float would round it.
        spans: of each collective of all ranks begin, end, process and thread.
    """

    path: Path
    rank: int
    host: str
    base_us: float
    begin_us: float
    process: Any
    world_size: int
    spans: dict[Key, tuple[float, float, Any, Any]]
    clock: Clock = field(default_factory=Clock)
    devices: dict[Any, int] = field(default_factory=dict)

    def process_of(self, process: Any) -> int:
        """Return the number that a process has in the timeline: the rank, or one of its devices'."""
        if process == self.process:
            return self.rank
        return self.devices.setdefault(process, DEVICES_FROM * (self.rank + 1) + len(self.devices))


def traces_of(run: Path) -> list[Path]:
    """Return the traces of a run's folder, or of its profiler_logs, by rank. InputError where there is none."""
    if not run.is_dir():
        raise InputError(f"{run} is not a folder of a run")
    for folder in (run / "profiler_logs", run):
        found = {int(named[1]): path for path in folder.glob("rank*") if (named := _TRACE.fullmatch(path.name))}
        if found:
            return [found[rank] for rank in sorted(found)]
    raise InputError(f"{run} holds no profiler_logs/rank0.pt.trace.json: train with --profile")


def merge(run: Path, out: Path) -> str:
    """Write the merged timeline of a run with --profile, packed by gzip if the name ends with .gz.

    Returns:
        What to say of it: ranks, collectives, and how far apart clocks may still be.

    Raises:
        InputError: a folder without traces, or a file that is none. Failure: the disk is full.
    """
    paths = traces_of(run)
    if out.exists() and any(out.samefile(path) for path in paths):
        raise InputError(f"--out {out} is one of the traces; name another file")
    origin_ns = _base_ns(_content(paths[0]))
    ranks = [_scanned(path, origin_ns) for path in paths]
    numbers = [trace.rank for trace in ranks]
    if twice := [trace.path for trace in ranks if numbers.count(trace.rank) > 1]:
        raise InputError(f"{twice[0]} and {twice[1]} are both of one rank; keep the traces of one run in {run}")
    _align(ranks)
    clocks = [{"rank": trace.rank, "host": trace.host, **asdict(trace.clock)} for trace in ranks]
    head = {"displayTimeUnit": "ms", "otherData": {"clocks": clocks, "clock_of": f"rank {ranks[0].rank}"}}
    num_events = num_flows = 0
    try:
        with replacing(out) as temporary:
            pack: Callable = gzip.open if out.suffix == ".gz" else open
            level = {"compresslevel": 1} if out.suffix == ".gz" else {}
            with pack(temporary, "wt", encoding="utf-8", **level) as file:
                file.write(json.dumps(head)[:-1] + ', "traceEvents": [\n')
                for event in _timeline(ranks):
                    file.write(
                        (",\n" if num_events else "") + json.dumps(event, separators=(",", ":"), allow_nan=False)
                    )
                    num_events += 1
                    num_flows += event["ph"] == "f" and event.get("cat") == "collective"
                file.write("\n]}\n")
    except OSError as error:
        raise Failure(f"--out {out} cannot be written: {error.strerror or error}") from None
    size = f"{counted(len(ranks), 'rank')}, {num_events:,} events, {counted(num_flows, 'flow')}"
    world = max(trace.world_size for trace in ranks)
    lines = [f"{out}: {size}", _on_clocks(ranks)]
    if len(ranks) < world:
        lines.append(f"{len(ranks)} of {world} ranks left a trace: arrows begin at the last of these alone")
    return "\n".join(lines)


def _content(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_unpacked(path), parse_constant=_refuse)
        if not all("ph" in event and "name" in event for event in content["traceEvents"]):
            raise InputError("an event has no name or no kind")
        return content
    except Exception as error:  # zlib, json and what is in a damaged file each have errors of their own
        raise InputError(f"{path} is not a trace of torch.profiler: {first_line(error)}") from None


def _refuse(constant: str) -> float:
    raise InputError(f"it contains {constant}")


def _base_ns(content: dict[str, Any]) -> int:
    base = content.get("baseTimeNanoseconds") or 0
    return base if isinstance(base, int) else 0


def _scanned(path: Path, origin_ns: int) -> RankTrace:
    try:
        return _scan(path, origin_ns)
    except InputError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:  # what a damaged file may hold
        raise InputError(f"{path} is not a trace of torch.profiler: {first_line(error)}") from None


def _scan(path: Path, origin_ns: int) -> RankTrace:
    """Read a trace for its collectives."""
    content = _content(path)
    world, base_us = content.get("distributedInfo") or {}, (_base_ns(content) - origin_ns) / 1e3
    size = world.get("world_size", 1)
    groups = [group for group in world.get("pg_config") or [] if group.get("pg_size", size) > 1]
    has_one_group = all(group.get("pg_size") == size for group in groups)
    events = [event for event in content["traceEvents"] if event.get("ph") == "X"]
    steps = [event for event in events if event["name"] == STEP and event.get("cat") == "user_annotation"]
    if not steps:
        raise InputError(f"{path} holds no {STEP} range: no step of src/gpt2.py was recorded")
    edges = np.array(sorted((step["ts"], step["ts"] + step["dur"]) for step in steps)).ravel()
    spans: dict[Key, tuple[float, float, Any, Any]] = {}
    seen: dict[tuple, int] = defaultdict(int)
    for event in sorted(events, key=lambda event: event["ts"]):
        name = _collective(event)
        if name is None or not _MEETS.search(name):
            continue
        place = int(np.searchsorted(edges, event["ts"], side="right"))  # odd: inside a step
        group, ranks = _group(event)
        if ranks == size if ranks else has_one_group or place % 2 == 0:
            kind, begin_us = (group, name, place), base_us + event["ts"]
            spans[*kind, seen[kind]] = (begin_us, begin_us + event["dur"], event.get("pid"), event.get("tid"))
            seen[kind] += 1
    begin_us = base_us + min(event["ts"] for event in events)
    host = str(content.get("host_name", ""))
    return RankTrace(path, int(world.get("rank", 0)), host, base_us, begin_us, steps[0].get("pid"), int(size), spans)


def _collective(event: Event) -> str | None:
    """Return the name of the collective that an event is on this rank: gloo's span, or a kernel of NCCL."""
    name, category = str(event["name"]), event.get("cat")
    if category == "user_annotation" and name.startswith("gloo:"):
        return name.removeprefix("gloo:")
    if category == "kernel" and "nccl" in name.lower():
        return str(event.get("args", {}).get("Collective name") or name)
    return None


def _group(event: Event) -> tuple[str, int | None]:
    """Return a group's name with its ranks, and how many they are; gloo's spans do not tell."""
    arguments = event.get("args", {})
    if "Process Group Name" not in arguments:
        return "", None
    return f"{arguments['Process Group Name']} {arguments.get('Process Group Ranks', '')}", arguments.get("Group size")


def _align(ranks: list[RankTrace]) -> None:
    """Give each rank its clock. Ranks of one machine share one, unless the collectives contradict."""
    first = ranks[0]
    for trace in ranks[1:]:
        shared = first.spans.keys() & trace.spans.keys()
        mine, reference = (np.array([one.spans[key][:2] for key in shared]).reshape(-1, 2) for one in (trace, first))
        trace.clock = align(mine, reference, shares_clock=bool(trace.host) and trace.host == first.host)


def _timeline(ranks: list[RankTrace]) -> Iterator[Event]:
    """Yield all events on rank 0's clock, from the first one on."""
    start_us = min(trace.begin_us - trace.clock.offset_us for trace in ranks)
    for number, trace in enumerate(ranks):
        yield from _events(trace, number, len(ranks), start_us)
    yield from _flows(ranks, start_us)


def _events(trace: RankTrace, number: int, num_traces: int, start_us: float) -> Iterator[Event]:
    """Yield a rank's events, its phases also as a track of their own."""
    yield _names("process_name", trace.rank, name=f"rank {trace.rank} ({trace.host or 'host unknown'})")
    yield _names("process_sort_index", trace.rank, sort_index=trace.rank)
    yield _names("thread_name", trace.rank, PHASES_TRACK, name="step and phases")
    yield _names("thread_sort_index", trace.rank, PHASES_TRACK, sort_index=-1)
    for event in _content(trace.path)["traceEvents"]:
        if event["ph"] == "M" and event["name"].startswith("process_"):
            continue
        event["pid"] = trace.process_of(event.get("pid"))
        if event["ph"] != "M":
            event["ts"] = round(trace.base_us + event["ts"] - trace.clock.offset_us - start_us, 3)
        if isinstance(event.get("id"), int):  # each rank counts its own flows from 1
            event["id"] = event["id"] * num_traces + number
        yield event
        if event.get("cat") == "user_annotation" and event["name"].startswith("train/"):
            yield {**event, "cat": "phase", "pid": trace.rank, "tid": PHASES_TRACK, "args": {}}
    for process in trace.devices.values():
        yield _names("process_name", process, name=f"rank {trace.rank}: device")
        yield _names("process_sort_index", process, sort_index=trace.rank)


def _names(kind: str, process: int, thread: int = 0, **arguments: Any) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "ts": 0, "args": arguments}


def _flows(ranks: list[RankTrace], start_us: float) -> Iterator[Event]:
    """Yield, for each collective of all ranks, an arrow from the rank that came last to the end on each other."""
    number = 0
    for key in ranks[0].spans:
        if any(key not in trace.spans for trace in ranks):
            continue
        spans = [[moment - trace.clock.offset_us - start_us for moment in trace.spans[key][:2]] for trace in ranks]
        last = max(range(len(ranks)), key=lambda index: spans[index][0])
        for index in range(len(ranks)):
            if index == last:
                continue
            number += 1
            begin = spans[last][0]
            end = max(spans[index][1] - 0.001, begin)  # inside the other's span, and no arrow goes back
            for place, kind, moment in ((last, "s", begin), (index, "f", end)):
                *_, process, thread = ranks[place].spans[key]
                yield {
                    "ph": kind, "cat": "collective", "name": key[1], "id": number, "ts": round(moment, 3),
                    "pid": ranks[place].process_of(process), "tid": thread, **({"bp": "e"} if kind == "f" else {}),
                }  # fmt: skip


def _on_clocks(ranks: list[RankTrace]) -> str:
    """Say how well the clocks are aligned."""
    if len(ranks) == 1:
        return "one rank: there are no clocks to align"
    known = [(trace.clock.uncertainty_us, trace.rank) for trace in ranks[1:] if trace.clock.uncertainty_us is not None]
    if len(known) < len(ranks) - 1:
        unknown = ", ".join(str(trace.rank) for trace in ranks if trace.clock.uncertainty_us is None)
        return f"the clocks of rank {unknown} are not aligned: no collective of all ranks is there"
    if odd := [str(trace.rank) for trace in ranks[1:] if trace.clock.contradicts]:
        return (
            f"the clocks of rank {', '.join(odd)} cannot be aligned: collectives contradict; are all traces of one run?"
        )
    worst_us, worst = max(known)
    fewest = min(trace.clock.num_collectives for trace in ranks[1:])
    return (
        f"clocks are aligned to rank {ranks[0].rank}'s by {counted(fewest, 'collective')} of all ranks: each is right "
        f"within {worst_us:,.0f} us (rank {worst}), whatever the network did"
    )
