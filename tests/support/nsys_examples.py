"""Tables of a small trace of two ranks as nsys prints them: text of any locale and CSV, from the same events.

Written from the formats' descriptions and by other means than the reader (statistics instead of numpy, no shared
code), so that agreement means something. Times are in units of UNIT nanoseconds, an odd number, so that sums have
digits to lose.
"""

from __future__ import annotations

import csv
import io
import statistics

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


# name -> durations in units in one step of one rank. A step takes 100, of which 4 lie in no range inside it.
RANGES = {
    ":train/step": [100],
    ":train/dataload": [10],
    ":train/forward": [30],
    ":train/backward": [48],
    "NCCL:ncclAllReduce": [3, 1, 1],
    ":train/optimizer_step": [8],
    ":hook": [35],
    ":val/batch": [30],
}
KERNELS = {GEMM: [30, 23, 12, 14], NCCL: [20, 7, 4], ADAM: [5, 5]}
WAITS = {"poll": [5_626_505, 8], "pthread_cond_wait": [40_000], "sem_wait": [21]}  # a total has five groups of digits
COPIES = {  # duration in units, bytes
    "[CUDA memcpy Host-to-Device]": [(3, 4_194_304), (8, 1_894_999_999)],
    "[CUDA memcpy Device-to-Host]": [(2, 1_895_000)],
    "[CUDA memset]": [(1, 24_000)],
}


def values() -> dict[str, dict[tuple[str, str | None], list[int]]]:
    """Of each report the nanoseconds (or bytes) of single events under (name, style)."""

    def of_all(units: dict[str, list[int]], times: int = 1, style: str | None = None) -> dict:
        return {(name, style): [unit * UNIT for unit in found] * times for name, found in units.items()}

    steps = RANKS * STEPS
    num_kernels = steps * sum(map(len, KERNELS.values()))
    return {
        "nvtx_sum": of_all(RANGES, steps, "PushPop"),
        "osrt_sum": of_all(WAITS),
        "cuda_api_sum": {
            **of_all({"cudaLaunchKernel": [1]}, num_kernels),
            ("cudaEventRecordWithFlags_v11010", None): [777],
        },
        "cuda_gpu_kern_sum": of_all(KERNELS, steps),
        "cuda_gpu_mem_time_sum": of_all({name: [units for units, _ in found] for name, found in COPIES.items()}),
        "cuda_gpu_mem_size_sum": {(name, None): [size for _, size in found] for name, found in COPIES.items()},
    }


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
