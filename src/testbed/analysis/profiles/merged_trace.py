"""Merge the torch.profiler traces of all ranks into one timeline for Perfetto. No torch.

Each trace is read twice, an event at a time: once for its collectives, which align the clocks, and once to be written.
Only the collectives are kept, so memory does not grow with the traces.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from testbed.analysis.profiles.clocks import Clock, align
from testbed.analysis.profiles.event_stream import opened_trace
from testbed.errors import Failure, InputError, counted
from testbed.io import replacing

STEP = "train/step"
PHASES_TRACK = 1  # thread of a rank's process that shows step and phases; no thread of an operating system has it
DEVICES_FROM = 1_000_000  # processes that are a rank's devices: no rank has such a number
# No rank leaves one of these before every rank has entered it: not so a broadcast, which its root leaves at once.
_MEETS = re.compile(r"barrier|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all", re.IGNORECASE)
_TRACE = re.compile(r"rank(\d+)\.pt\.trace\.json(\.gz)?")
Key = tuple[str, str, int, int]  # group, name, step (odd: after it), how many of them came before


@dataclass
class RankTrace:
    """What the first reading of a rank's trace keeps."""

    path: Path
    rank: int
    base_us: float = 0.0  # moment from which the trace counts, seen from rank 0's: absolute, a float would round it
    host: str = ""
    process: int | None = None
    # of each collective: begin, end (microseconds, on the rank's clock), process, thread
    spans: dict[Key, tuple[float, float, Any, Any]] = field(default_factory=dict)
    of_all: set[Key] = field(default_factory=set)
    clock: Clock = field(default_factory=Clock)


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
        InputError: a folder without traces, or a file of another kind. Failure: a trace is damaged, or a disk full.
    """
    paths = traces_of(run)
    with opened_trace(paths[0]) as stream:
        origin_ns = _base_ns(stream.head)
    ranks = [_scan(path, origin_ns) for path in paths]
    _align(ranks)
    try:
        with replacing(out) as temporary:
            pack: Callable = gzip.open if out.suffix == ".gz" else open
            level = {"compresslevel": 1} if out.suffix == ".gz" else {}
            with pack(temporary, "wt", encoding="utf-8", **level) as file:
                num_events, num_flows = _write(ranks, file)
    except OSError as error:
        raise Failure(f"--out {out} cannot be written: {error.strerror or error}") from None
    size = f"{counted(len(ranks), 'rank')}, {num_events:,} events, {counted(num_flows, 'flow')}"
    return f"{out}: {size}\n{_on_clocks(ranks)}"


def _base_ns(head: dict[str, Any]) -> int:
    return int(head.get("baseTimeNanoseconds") or 0)


def _scan(path: Path, origin_ns: int) -> RankTrace:
    """Read a trace for its collectives."""
    with opened_trace(path) as stream:
        world = stream.head.get("distributedInfo") or {}
        trace = RankTrace(path, int(world.get("rank", 0)), (_base_ns(stream.head) - origin_ns) / 1e3)
        trace.host = str(stream.head.get("host_name", ""))
        size = world.get("world_size", 1)
        groups = [group for group in world.get("pg_config") or [] if group.get("pg_size", size) > 1]
        one_group = all(group.get("pg_size") == size for group in groups)
        steps, found = [], []
        for event in stream:
            if event.get("ph") != "X":
                continue
            if event.get("name") == STEP and event.get("cat") == "user_annotation":
                steps.append((_begin(trace, event), _begin(trace, event) + event["dur"]))
                trace.process = event.get("pid")
            elif name := _collective(event):
                found.append(
                    (name, _group(event), event.get("pid"), event.get("tid"), _begin(trace, event), event["dur"])
                )
    if not steps:
        raise InputError(f"{path} holds no {STEP} range: no step of src/gpt2.py was recorded")
    _number(trace, sorted(steps), sorted(found, key=lambda one: one[4]), size, one_group)
    return trace


def _number(trace: RankTrace, steps: list, found: list, size: int, one_group: bool) -> None:
    """Give each collective the key under which other ranks have it."""
    edges = np.array(steps).ravel()
    seen: dict[tuple, int] = defaultdict(int)
    for name, (group, ranks), process, thread, begin, duration in found:
        place = int(np.searchsorted(edges, begin, side="right"))  # odd: inside a step
        kind = (group, name, place)
        key = (*kind, seen[kind])
        seen[kind] += 1
        trace.spans[key] = (begin, begin + duration, process, thread)
        is_inside = place % 2 == 1
        if _MEETS.search(name) and (ranks == size if ranks else one_group or not is_inside):
            trace.of_all.add(key)


def _collective(event: dict[str, Any]) -> str | None:
    """Return the name of the collective that an event is on this rank: gloo's span, or a kernel of NCCL."""
    name, category = str(event.get("name", "")), event.get("cat")
    if category == "user_annotation" and name.startswith("gloo:"):
        return name.removeprefix("gloo:")
    if category == "kernel" and "nccl" in name.lower():
        return str(event.get("args", {}).get("Collective name") or name)
    return None


def _group(event: dict[str, Any]) -> tuple[str, int | None]:
    """Return a group's name with its ranks, and how many they are; gloo's spans do not tell."""
    arguments = event.get("args", {})
    if "Process Group Name" not in arguments:
        return "", None
    return f"{arguments['Process Group Name']} {arguments.get('Process Group Ranks', '')}", arguments.get("Group size")


def _begin(trace: RankTrace, event: dict[str, Any]) -> float:
    return trace.base_us + event["ts"]


def _align(ranks: list[RankTrace]) -> None:
    """Give each rank its clock. Ranks of one machine share one, unless the collectives contradict."""
    first = ranks[0]
    for trace in ranks[1:]:
        shared = [key for key in first.spans if key in first.of_all and key in trace.of_all]
        mine, reference = (np.array([one.spans[key][:2] for key in shared]).reshape(-1, 2) for one in (trace, first))
        trace.clock = align(mine, reference, shares_clock=bool(trace.host) and trace.host == first.host)


def _write(ranks: list[RankTrace], file: TextIO) -> tuple[int, int]:
    """Write everything; return how many events and flows it was."""
    begins_us = (min((span[0] for span in trace.spans.values()), default=trace.base_us) for trace in ranks)
    start_us = min(one - trace.clock.offset for one, trace in zip(begins_us, ranks, strict=True)) // 1e6 * 1e6
    clocks = [
        {
            "rank": trace.rank, "host": trace.host, "offset_us": trace.clock.offset,
            "uncertainty_us": trace.clock.uncertainty, "num_collectives": trace.clock.num_collectives,
        }
        for trace in ranks
    ]  # fmt: skip
    head = {"displayTimeUnit": "ms", "otherData": {"clocks": clocks, "clock_of": f"rank {ranks[0].rank}"}}
    file.write(json.dumps(head)[:-1] + ', "traceEvents": [\n')
    num_events = num_flows = 0
    devices: dict[tuple[int, Any], int] = {}
    for trace in ranks:
        for event in _events(trace, len(ranks), start_us, devices):
            file.write((",\n" if num_events else "") + json.dumps(event, separators=(",", ":")))
            num_events += 1
    for event in _flows(ranks, start_us, devices):
        file.write(",\n" + json.dumps(event, separators=(",", ":")))
        num_events, num_flows = num_events + 1, num_flows + (event["ph"] == "f")
    file.write("\n]}\n")
    return num_events, num_flows


def _events(trace: RankTrace, world: int, start_us: float, devices: dict) -> Iterator[dict[str, Any]]:
    """Yield a rank's events on rank 0's clock, its phases also as a track of their own."""
    yield _names("process_name", trace.rank, name=f"rank {trace.rank} ({trace.host or 'host unknown'})")
    yield _names("process_sort_index", trace.rank, sort_index=trace.rank)
    yield _names("thread_name", trace.rank, PHASES_TRACK, name="step and phases")
    yield _names("thread_sort_index", trace.rank, PHASES_TRACK, sort_index=-1)
    with opened_trace(trace.path) as stream:
        for event in stream:
            if event.get("ph") == "M" and event.get("name") in ("process_name", "process_sort_index", "process_labels"):
                continue
            known = len(devices)
            event["pid"] = process = _process(trace, event.get("pid"), devices)
            if len(devices) > known:
                yield _names("process_name", process, name=f"rank {trace.rank}: device")
                yield _names("process_sort_index", process, sort_index=trace.rank)
            if "ts" in event:
                event["ts"] = round(_begin(trace, event) - trace.clock.offset - start_us, 3)
            if isinstance(event.get("id"), int):  # each rank counts its own flows from 1
                event["id"] = event["id"] * world + trace.rank
            yield event
            if event.get("cat") == "user_annotation" and str(event.get("name")).startswith("train/"):
                yield {**event, "cat": "phase", "pid": trace.rank, "tid": PHASES_TRACK, "args": {}}


def _process(trace: RankTrace, process: Any, devices: dict[tuple[int, Any], int]) -> int:
    if process == trace.process:
        return trace.rank
    return devices.setdefault((trace.rank, process), DEVICES_FROM + len(devices))


def _names(kind: str, process: int, thread: int = 0, **arguments: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "ts": 0, "args": arguments}


def _flows(ranks: list[RankTrace], start_us: float, devices: dict) -> Iterator[dict[str, Any]]:
    """Yield, for each collective of all ranks, an arrow from the rank that came last to the end on each other."""
    number = 0
    for key in ranks[0].spans:
        if any(key not in trace.of_all for trace in ranks) or len(ranks) == 1:
            continue
        spans = [[moment - trace.clock.offset for moment in trace.spans[key][:2]] for trace in ranks]
        last = max(range(len(ranks)), key=lambda index: spans[index][0])
        for index in range(len(ranks)):
            if index == last:
                continue
            number += 1
            begin = spans[last][0] - start_us
            end = max(spans[index][1] - start_us - 0.001, begin)  # inside the other's span, and no arrow goes back
            for place, kind, moment in ((last, "s", begin), (index, "f", end)):
                trace = ranks[place]
                *_, process, thread = trace.spans[key]
                yield {
                    "ph": kind, "cat": "collective", "name": key[1], "id": number, "ts": round(moment, 3),
                    "pid": _process(trace, process, devices), "tid": thread, **({"bp": "e"} if kind == "f" else {}),
                }  # fmt: skip


def _on_clocks(ranks: list[RankTrace]) -> str:
    """Say how well the clocks are aligned."""
    if len(ranks) == 1:
        return "one rank: there are no clocks to align"
    known = [(trace.clock.uncertainty, trace.rank) for trace in ranks[1:] if trace.clock.uncertainty is not None]
    if not known:
        return "the clocks are not aligned: no collective of all ranks is there"
    worst_us, worst = max(known)
    fewest = min(trace.clock.num_collectives for trace in ranks[1:] if trace.clock.uncertainty is not None)
    unknown = [str(trace.rank) for trace in ranks[1:] if trace.clock.uncertainty is None]
    but = f"; those of rank {', '.join(unknown)} are not, as no such collective is there" if unknown else ""
    return (
        f"clocks are aligned to rank {ranks[0].rank}'s by {counted(fewest, 'collective')} of all ranks: each is right "
        f"within {worst_us:,.0f} us (rank {worst}), whatever the network did{but}"
    )
