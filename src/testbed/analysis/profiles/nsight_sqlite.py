"""Read a trace that Nsight Systems exported to SQLite (`nsys export --type sqlite`): the same tables, and more.

The events are all there, so what a table cannot say can be computed: the time of a range without the ranges inside it,
and of each optimizer step the time in which NCCL's kernels ran and no other kernel did. Tables and columns as in
Nvidia's "SQLite Export Schema Reference" (docs.nvidia.com/nsight-systems); what the tables show is what `nsys stats`
shows of the same file. Times are whole nanoseconds.
"""

from __future__ import annotations

import re
import sqlite3
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from testbed.analysis.profiles.nesting import innermost
from testbed.analysis.profiles.nsight import Row, Stats, StatsTable
from testbed.errors import InputError
from testbed.io import holding_together, open_regular
from testbed.profiling.intervals import intersect, subtract, union

STEP = ":train/step"
# eventType of NVTX_EVENTS: from the library, or imported from text files
_PUSH_POP, _START_END, _DOMAIN_CREATED = (59, 70), (60, 71), 75
_COPIES = {
    1: "Host-to-Device", 2: "Device-to-Host", 3: "Host-to-Array", 4: "Array-to-Host", 5: "Array-to-Array",
    6: "Array-to-Device", 7: "Device-to-Array", 8: "Device-to-Device", 9: "Host-to-Host", 10: "Peer-to-Peer",
}  # fmt: skip
_TABLE_INFO = (sqlite3.SQLITE_PRAGMA, "table_info")
_LONGEST_VALUE = 1 << 20  # bytes; names of kernels have some thousands
_PROCESS = ~0xFFFFFF  # the bits of a globalTid or globalPid that name the process; the lower ones name the thread
_NEEDED = {
    "StringIds": "id value",
    "NVTX_EVENTS": "start end eventType text textId globalTid domainId",
    "CUPTI_ACTIVITY_KIND_KERNEL": "start end deviceId correlationId globalPid demangledName",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start end globalTid correlationId nameId",
    "CUPTI_ACTIVITY_KIND_MEMCPY": "start end copyKind bytes",
    "CUPTI_ACTIVITY_KIND_MEMSET": "start end bytes",
    "OSRT_API": "start end nameId",
}


@dataclass(frozen=True)
class Range:
    """One NVTX range of one thread."""

    name: str
    thread: int
    start: int
    end: int
    is_push_pop: bool

    @property
    def process(self) -> int:
        return self.thread & _PROCESS


@dataclass(frozen=True)
class Kernel:
    """One kernel, and when the host launched it (its start where that is not recorded)."""

    name: str
    process: int
    device: int
    start: int
    end: int
    launched: int


@dataclass(frozen=True)
class DeviceStep:
    """One optimizer step on one device, by the kernels that were launched in it. Nanoseconds; unions, so no kernel
    that runs beside another counts twice."""

    process: int
    device: int
    step: int
    step_ns: int
    compute_ns: int
    nccl_ns: int
    exposed_nccl_ns: int
    nccl_instances: int


@dataclass(frozen=True)
class Export:
    """Content of one export; `exclusive_ns` is of the whole trace, `in_steps` inside train/step on its thread."""

    stats: Stats
    num_ranks: int | None  # processes with train/step ranges
    num_steps: int | None  # of each rank
    exclusive_ns: dict[str, int]
    in_steps: dict[str, int]  # exclusive parts of all steps of all ranks, adding up to them
    device_steps: tuple[DeviceStep, ...]
    num_unclosed: int  # ranges that were open when the trace ended


def read_export(path: Path) -> Export:
    """Read an export. InputError when it is none, or lacks a column of the documented schema."""
    path = Path(path)
    try:
        with open_regular(path):  # SQLite itself would wait for a FIFO
            pass
        # immutable: nothing is looked for beside the file, and nothing written there
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)) as database:
            database.set_authorizer(_may)
            database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_VALUE)
            tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            for name in tables & set(_NEEDED):
                columns = {row[1] for row in database.execute(f"PRAGMA table_info({name})")}
                if missing := set(_NEEDED[name].split()) - columns:
                    raise InputError(
                        f"{path}: table {name} lacks {', '.join(sorted(missing))}; export it with a newer nsys"
                    )
            with holding_together(path):  # a column of SQLite can hold values of any type
                return _read(path, database, tables)
    except (OSError, sqlite3.Error) as error:
        raise InputError(f"{path} is not an SQLite export of Nsight Systems: {error}") from None


def _may(action: int, name: str | None, *_: str | None) -> int:
    """Allow our queries to read rows, and no more: the schema of an unknown file can compute a column with a function,
    and a table can be a program that runs when it is read."""
    is_reading = action in (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ)
    return sqlite3.SQLITE_OK if is_reading or (action, name) == _TABLE_INFO else sqlite3.SQLITE_DENY


def _read(path: Path, database: sqlite3.Connection, tables: set[str]) -> Export:
    if not tables & (set(_NEEDED) - {"StringIds"}):
        raise InputError(f"{path} holds no events of Nsight Systems: no table {', '.join(sorted(set(_NEEDED)))}")
    strings = dict(database.execute("SELECT id, value FROM StringIds")) if "StringIds" in tables else {}

    def select(table: str, columns: str) -> list[tuple]:
        return database.execute(f"SELECT {columns} FROM {table}").fetchall() if table in tables else []

    def text(number: int | None) -> str:
        return strings.get(number, f"[string {number}]")

    runtime = select("CUPTI_ACTIVITY_KIND_RUNTIME", "start, end, globalTid, correlationId, nameId")
    launches = {(thread & _PROCESS, correlation): start for start, _, thread, correlation, _ in runtime}
    kernels = [
        Kernel(text(name), pid & _PROCESS, device, start, end, launches.get((pid & _PROCESS, correlation), start))
        for start, end, device, correlation, pid, name in select(
            "CUPTI_ACTIVITY_KIND_KERNEL", "start, end, deviceId, correlationId, globalPid, demangledName"
        )
    ]
    ranges, num_unclosed = _ranges(
        select("NVTX_EVENTS", "start, end, eventType, text, textId, globalTid, domainId"), strings
    )
    copies = [
        (f"[CUDA memcpy {_COPIES.get(kind, f'kind {kind}')}]", end - start, size)
        for start, end, kind, size in select("CUPTI_ACTIVITY_KIND_MEMCPY", "start, end, copyKind, bytes")
    ]
    copies += [
        ("[CUDA memset]", end - start, size)
        for start, end, size in select("CUPTI_ACTIVITY_KIND_MEMSET", "start, end, bytes")
    ]
    durations: dict[str, list[tuple[tuple[str, str | None], int]]] = {
        "nvtx_sum": [
            ((range_.name, "PushPop" if range_.is_push_pop else "StartEnd"), range_.end - range_.start)
            for range_ in ranges
        ],
        "osrt_sum": [
            ((text(name), None), end - start) for start, end, name in select("OSRT_API", "start, end, nameId")
        ],
        "cuda_api_sum": [((_without_version(text(name)), None), end - start) for start, end, _, _, name in runtime],
        "cuda_gpu_kern_sum": [((kernel.name, None), kernel.end - kernel.start) for kernel in kernels],
        "cuda_gpu_mem_time_sum": [((name, None), duration) for name, duration, _ in copies],
        "cuda_gpu_mem_size_sum": [((name, None), size) for name, _, size in copies],
    }
    found = {report: table_of(report, values) for report, values in durations.items() if values}
    steps = [range_ for range_ in ranges if range_.name == STEP]
    processes = {step.process for step in steps}
    per_rank = {sum(step.process == process for step in steps) for process in processes}
    exclusive, in_steps = _exclusive(ranges, steps)
    return Export(
        stats=Stats(path, "sqlite", path.stem, found),
        num_ranks=len(processes) or None,
        num_steps=per_rank.pop() if len(per_rank) == 1 else None,
        exclusive_ns=exclusive,
        in_steps=in_steps,
        device_steps=tuple(_device_steps(kernels, steps)),
        num_unclosed=num_unclosed,
    )


def _ranges(rows: Sequence[tuple], strings: dict[int, str]) -> tuple[list[Range], int]:
    """Return the ranges under nsys's names, domain:range. One that was never closed ends with the trace."""
    last = max((moment for row in rows for moment in row[:2] if moment is not None), default=0)
    domains = {
        (thread & _PROCESS, domain): text if text is not None else strings.get(text_id, "")
        for _, _, kind, text, text_id, thread, domain in rows
        if kind == _DOMAIN_CREATED
    }
    found, num_unclosed = [], 0
    for start, end, kind, text, text_id, thread, domain in rows:
        if kind not in _PUSH_POP + _START_END:
            continue
        name = strings.get(text_id, "") if text is None else text
        name = f"{domains.get((thread & _PROCESS, domain), '')}:{name}"
        num_unclosed += end is None
        if not (end is None and name == STEP):  # half a step is no step
            found.append(Range(name, thread, start, last if end is None else end, kind in _PUSH_POP))
    return found, num_unclosed


def _without_version(function: str) -> str:
    """Return a name as nsys prints it: without _v7000 of cudaLaunchKernel, with _v11010."""
    return re.sub(r"_v\d{4}$", "", function)


def table_of(report: str, values: Iterable[tuple[tuple[str, str | None], int]]) -> StatsTable:
    """Add up single events, each under (name, style), to the rows that `nsys stats` makes of them.

    The largest first. Nanoseconds stay, bytes become megabytes of 10^6.
    """
    scale = 1e-6 if report == "cuda_gpu_mem_size_sum" else 1
    by_name: dict[tuple[str, str | None], list[int]] = defaultdict(list)
    for named, value in values:
        by_name[named].append(value)
    everything = sum(map(sum, by_name.values()))
    rows = []
    for (name, style), mine in sorted(by_name.items(), key=lambda item: -sum(item[1])):
        array = np.array(mine, dtype=float)
        rows.append(
            Row(
                name=name,
                total=sum(mine) * scale,
                count=len(mine),
                avg=float(array.mean()) * scale,
                med=float(np.median(array)) * scale,
                min=min(mine) * scale,
                max=max(mine) * scale,
                stddev=float(array.std(ddof=1)) * scale if len(mine) > 1 else 0.0,
                time_percent=100 * sum(mine) / everything if scale == 1 and everything else None,
                style=style,
            )
        )
    return StatsTable(report, tuple(rows))


def _exclusive(ranges: Sequence[Range], steps: Sequence[Range]) -> tuple[dict[str, int], dict[str, int]]:
    """Return the time of each range without the ranges inside it: in the whole trace, and in train/step on its thread.

    Start/end ranges do not nest, they may even end on another thread, so they have no exclusive time.
    """
    whole: dict[str, int] = defaultdict(int)
    in_steps: dict[str, int] = defaultdict(int)
    threads: dict[int, list[Range]] = defaultdict(list)
    for range_ in ranges:
        if range_.is_push_pop:
            threads[range_.thread].append(range_)
    for thread, mine in threads.items():
        windows = union((step.start, step.end) for step in steps if step.thread == thread)
        parts = innermost([(range_.start, range_.end) for range_ in mine])
        by_name: dict[str, list] = defaultdict(list)
        for range_, found in zip(mine, parts, strict=True):
            by_name[range_.name] += found
        for name, found in by_name.items():
            whole[name] += sum(end - start for start, end in found)
            if inside := _length_ns(intersect(union(found), windows)):
                in_steps[name] += inside
    return dict(whole), dict(in_steps)


def _device_steps(kernels: Sequence[Kernel], steps: Sequence[Range]) -> Iterable[DeviceStep]:
    """Yield each step of each device. A kernel belongs to the step in which the host launched it, whenever it ran."""
    by_device: dict[tuple[int, int], list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        by_device[kernel.process, kernel.device].append(kernel)
    for (process, device), mine in sorted(by_device.items()):
        own_steps = sorted((step for step in steps if step.process == process), key=lambda step: step.start)
        starts = [step.start for step in own_steps]
        compute: dict[int, list] = defaultdict(list)
        nccl: dict[int, list] = defaultdict(list)
        for kernel in mine:
            number = bisect_right(starts, kernel.launched) - 1
            is_inside = number >= 0 and kernel.launched <= own_steps[number].end
            kind = nccl if is_nccl(kernel.name) else compute
            kind[number if is_inside else -1].append((kernel.start, kernel.end))
        all_compute = union(span for spans in compute.values() for span in spans)
        for number, step in enumerate(own_steps):
            communication = union(nccl[number])
            yield DeviceStep(
                process=process,
                device=device,
                step=number + 1,
                step_ns=step.end - step.start,
                compute_ns=_length_ns(union(compute[number])),
                nccl_ns=_length_ns(communication),
                exposed_nccl_ns=_length_ns(subtract(communication, all_compute)),
                nccl_instances=len(nccl[number]),
            )


def is_nccl(kernel: str) -> bool:
    """Return whether a kernel is NCCL's: ncclDevKernel_... since 2.19, ncclKernel_... before."""
    return "nccl" in kernel.lower()


def _length_ns(intervals: np.ndarray) -> int:
    return round(float((intervals[:, 1] - intervals[:, 0]).sum()))
