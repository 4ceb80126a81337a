"""A small trace of two ranks as nsys writes it: text of any locale and CSV, from the same events.

Written from the formats' descriptions and by other means than the reader (statistics instead of numpy, no shared
code), so that agreement means something. Times are in units of UNIT nanoseconds, an odd number, so that sums have
digits to lose.
"""

from __future__ import annotations

import csv
import io
import statistics
from collections import defaultdict

UNIT = 1_000_003
RANKS, STEPS = 2, 3
# group separator, decimal mark, digits in the groups before the last
LOCALES = {
    "indian": (",", ".", 2),
    "us": (",", ".", 3),
    "german": (".", ",", 3),
    "swiss": ("'", ".", 3),
    "swiss_typographic": ("\u2019", ".", 3),
    "french_space": (" ", ",", 3),
    "french_no_break": ("\u00a0", ",", 3),
    "french_narrow": ("\u202f", ",", 3),
    "ungrouped": ("", ".", 3),
    "ungrouped_comma": ("", ",", 3),
}
GEMM = "void  gemm<float,  128, 1.5>(int, long)"  # two spaces, commas, a dot and digits
ADAM = (  # longer than what the text shows of a name
    "void at::native::multi_tensor_apply_kernel<at::native::TensorListMetadata<4>, "
    "FusedAdamMathFunctor<float, 4, false>>()"
)
NCCL = "ncclDevKernel_AllReduce_Sum_f16_TREE_LL(ncclDevKernelArgsStorage<(unsigned long)4096>)"
TIME_COLUMNS = ["Avg (ns)", "Med (ns)", "Min (ns)", "Max (ns)", "StdDev (ns)"]
# report -> title, name of the count, columns behind the statistics
REPORTS = {
    "nvtx_sum": ("NVTX Range Summary", "Instances", ["Style", "Range"]),
    "osrt_sum": ("OS Runtime Summary", "Num Calls", ["Name"]),
    "cuda_api_sum": ("CUDA API Summary", "Num Calls", ["Name"]),
    "cuda_gpu_kern_sum": ("CUDA GPU Kernel Summary", "Instances", ["Name"]),
    "cuda_gpu_mem_time_sum": ("CUDA GPU MemOps Summary (by Time)", "Count", ["Operation"]),
    "cuda_gpu_mem_size_sum": ("CUDA GPU MemOps Summary (by Size)", "Count", ["Operation"]),
}


def bases() -> list[tuple[int, int]]:
    """(rank, begin of the step in units) of every step."""
    return [(rank, 1000 * step + 10 * rank) for rank in range(RANKS) for step in range(1, STEPS + 1)]


def ranges() -> list[tuple[int, str, str, str, int, int]]:
    """(rank, thread, domain, name, begin, end) in units. A step takes 100, of which 4 lie in no range inside it."""
    found = []
    for rank, b in bases():
        found += [
            (rank, "main", "", "train/step", b, b + 100),
            (rank, "main", "", "train/dataload", b, b + 10),
            (rank, "main", "", "train/forward", b + 10, b + 40),
            (rank, "main", "", "train/backward", b + 40, b + 88),
            (rank, "main", "NCCL", "ncclAllReduce", b + 60, b + 63),
            (rank, "main", "NCCL", "ncclAllReduce", b + 70, b + 71),
            (rank, "main", "", "train/optimizer_step", b + 90, b + 98),
            (rank, "autograd", "", "hook", b + 45, b + 80),
            (rank, "main", "", "val/batch", b + 200, b + 230),
            (rank, "main", "NCCL", "ncclAllReduce", b + 220, b + 221),
        ]
    return found


def kernels() -> list[tuple[int, str, int, int, int]]:
    """(rank, name, launched, begin, end) in units. Of a step: computation 63, NCCL 27, of which 15 exposed."""
    found = []
    for rank, b in bases():
        found += [
            (rank, GEMM, b + 11, b + 20, b + 50),
            (rank, GEMM, b + 41, b + 52, b + 75),
            (rank, GEMM, b + 42, b + 60, b + 72),  # beside the one before
            (rank, NCCL, b + 60, b + 65, b + 85),
            (rank, NCCL, b + 70, b + 85, b + 92),
            (rank, ADAM, b + 90, b + 90, b + 95),
            (rank, ADAM, b + 97, b + 105, b + 110),  # launched in the step, runs after its end
            (rank, GEMM, b + 205, b + 206, b + 220),  # validation
            (rank, NCCL, b + 221, b + 221, b + 225),
        ]
    return found


def copies() -> list[tuple[str, int, int]]:
    """(operation, duration in units, bytes)."""
    return [
        ("Host-to-Device", 3, 4_194_304),
        ("Host-to-Device", 8, 1_894_999_999),
        ("Device-to-Host", 2, 1_895_000),
        ("memset", 1, 24_000),
    ]


def waits() -> list[tuple[str, int]]:
    """(function, duration in units): long ones, so that a total has five groups of digits."""
    return [("poll", 5_626_505), ("poll", 8), ("pthread_cond_wait", 40_000), ("sem_wait", 21)]


def values() -> dict[str, dict[tuple[str, str | None], list[int]]]:
    """Of each report the nanoseconds (or bytes) of single events under (name, style)."""
    found = {report: defaultdict(list) for report in REPORTS}
    for _, _, domain, name, begin, end in ranges():
        found["nvtx_sum"][f"{domain}:{name}", "PushPop"].append((end - begin) * UNIT)
    for name, duration in waits():
        found["osrt_sum"][name, None].append(duration * UNIT)
    for _ in kernels():
        found["cuda_api_sum"]["cudaLaunchKernel", None].append(UNIT)
    found["cuda_api_sum"]["cudaEventRecordWithFlags_v11010", None].append(777)
    for _, name, _, begin, end in kernels():
        found["cuda_gpu_kern_sum"][name, None].append((end - begin) * UNIT)
    for name, duration, size in copies():
        name = "[CUDA memset]" if name == "memset" else f"[CUDA memcpy {name}]"
        found["cuda_gpu_mem_time_sum"][name, None].append(duration * UNIT)
        found["cuda_gpu_mem_size_sum"][name, None].append(size)
    return found


def grouped(number: int, locale: str) -> str:
    separator, _, size = LOCALES[locale]
    digits = str(number)
    head, groups = digits[:-3], [digits[-3:]]
    while head:
        groups.insert(0, head[-size:])
        head = head[:-size]
    return separator.join(groups)


def written(number: float, decimals: int, locale: str) -> str:
    if decimals == 0:
        return grouped(round(number), locale)
    whole, fraction = f"{number:.{decimals}f}".split(".")
    return grouped(int(whole), locale) + LOCALES[locale][1] + fraction


def table(report: str, locale: str = "ungrouped", cut_names: bool = True) -> list[list[str]]:
    """Header and rows of a report as cells, the largest total first."""
    _, count, named = REPORTS[report]
    is_size = report == "cuda_gpu_mem_size_sum"
    if is_size:
        rows = [["Total (MB)", count, *(column.replace("ns", "MB") for column in TIME_COLUMNS), *named]]
    else:
        rows = [["Time (%)", "Total Time (ns)", count, *TIME_COLUMNS, *named]]
    by_name = values()[report]
    everything = sum(map(sum, by_name.values()))
    for (name, style), mine in sorted(by_name.items(), key=lambda item: -sum(item[1])):
        total = sum(mine)
        stddev = statistics.stdev(mine) if len(mine) > 1 else 0.0
        numbers = [statistics.mean(mine), statistics.median(mine), min(mine), max(mine), stddev]
        if is_size:
            cells = [written(total / 1e6, 3, locale), written(len(mine), 0, locale)]
            cells += [written(number / 1e6, 3, locale) for number in numbers]
        else:
            cells = [written(100 * total / everything, 1, locale)]
            cells += [written(total, 0, locale), written(len(mine), 0, locale)]
            cells += [written(number, d, locale) for number, d in zip(numbers, (1, 1, 0, 0, 1), strict=True)]
        name = name[:99] + "\u2026" if cut_names and len(name) > 100 else name
        rows.append([*cells, *([style] if style else []), name])
    return rows


def text_table(rows: list[list[str]]) -> str:
    """Cells as nsys lays them out: two spaces between columns, numbers to the right, names to the left, padded."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [" " + "  ".join(cell.center(width) for cell, width in zip(rows[0], widths, strict=True))]
    lines.append(" " + "  ".join("-" * width for width in widths))
    for row in rows[1:]:
        aligned = [
            cell.ljust(width) if header in ("Style", "Range", "Name", "Operation") else cell.rjust(width)
            for cell, width, header in zip(row, widths, rows[0], strict=True)
        ]
        lines.append(" " + "  ".join(aligned))
    return "\n".join(lines) + "\n"


def processing(report: str, trace: str = "nsys_17_node0") -> str:
    return f"Processing [/data/profiles/{trace}.sqlite] with [/opt/nsys/reports/{report}.py]... \n"


def stats_text(locale: str = "us", trace: str = "nsys_17_node0", reports: tuple[str, ...] = tuple(REPORTS)) -> str:
    parts = [f"Generating SQLite file /data/profiles/{trace}.sqlite from /data/profiles/{trace}.nsys-rep\n"]
    for report in reports:
        heading = f"\n ** {REPORTS[report][0]} ({report}):\n\n"
        parts.append(processing(report, trace) + heading + text_table(table(report, locale)) + "\n")
    return "".join(parts)


def stats_csv(trace: str = "nsys_17_node0", reports: tuple[str, ...] = tuple(REPORTS)) -> str:
    output = io.StringIO()
    for report in reports:
        output.write(processing(report, trace))
        csv.writer(output, lineterminator="\n").writerows(table(report, cut_names=False))
        output.write("\n")
    return output.getvalue()
