"""profile_summary.json in a terminal: a page that fits, the rest is in the file."""

from collections.abc import Sequence
from typing import Any

from testbed.analysis.document import terminal
from testbed.analysis.document.model import Table
from testbed.analysis.profiles.summary import PER_STEP

_TITLES = {
    "operators": "Operators (own time)",
    "nvtx_sum": "NVTX ranges (inclusive)",
    "cuda_gpu_kern_sum": "GPU kernels",
    "cuda_api_sum": "CUDA API",
    "cuda_gpu_mem_time_sum": "GPU copies",
}
_NAME_WIDTH = 58


def summary_text(summary: dict[str, Any], num_rows: int = 5) -> str:
    """The summary in short: what a step consists of, collectives, the first rows of each table, warnings."""
    ranks, steps = summary["ranks_in_profile"], summary["num_optimizer_steps"]
    lines = [
        f"{summary['run_type'] or 'run'} on {summary['world_size'] or '?'} ranks, "
        f"from {', '.join(summary['sources'])}; "
        f"the profile covers {ranks or '?'} ranks x {steps or '?'} optimizer steps"
    ]
    if phases := summary["phases"]:
        lines += ["", f"An optimizer step on one rank, exclusive ({phases['source']})"]
        parts = phases["parts"]
        rows = [[part["name"], milliseconds(part["ns"]), f"{part['percent_of_step']:.1f} %"] for part in parts]
        lines += table_lines(["", "ms", "of the step"], rows)
    if device := summary["device_steps"]:
        mean = device["mean"]
        named = (("step", "step_ns"), ("computation", "compute_ns"), ("NCCL", "nccl_ns"),
                 ("NCCL not covered by computation", "exposed_nccl_ns"))  # fmt: skip
        lines += ["", f"On the device, mean of {len(device['rows'])} steps (unions of kernels)"]
        lines += table_lines(["", "ms"], [[name, milliseconds(mean[key])] for name, key in named])
    if collectives := summary["nccl"]["instances"]:
        lines += ["", "Collectives"]
        rows = [[f"{row['kind']}  {row['name']}", f"{row['count']:,}", number(row[PER_STEP])] for row in collectives]
        lines += table_lines(["", "instances", "per rank and step"], rows)
        if (percent := summary["nccl"]["percent_of_kernel_time"]) is not None:
            lines.append(f"  NCCL is {percent:.1f} % of the sum of kernel times")
    for report, title in _TITLES.items():
        if table := summary["tables"].get(report):
            is_known = all(row[PER_STEP] for row in table["rows"])
            lines += ["", f"{title}, {'per rank and step' if is_known else 'whole profile'}"]
            rows = [_row(row, is_known) for row in table["rows"][:num_rows]]
            lines += table_lines(["", "ms", "count"], rows)
    share = summary["likely_bottleneck"].get("allreduce_gradients_percent_of_outermost_ranges")
    if share is not None:
        lines += ["", f"allreduce_gradients takes {share:.1f} % of the outermost training ranges"]
    lines += ["", *(f"Note: {warning}" for warning in summary["warnings"])]
    return "\n".join(lines)


def _row(row: dict, is_known: bool) -> list[str]:
    values = row[PER_STEP] if is_known else row
    return [row["name"], milliseconds(values["total_ns"]), number(values["count"])]


def milliseconds(nanoseconds: float | None) -> str:
    """Nanoseconds as milliseconds with three decimals."""
    return "n/a" if nanoseconds is None else f"{nanoseconds / 1e6:,.3f}"


def number(value: float | None) -> str:
    """A count, or a mean of counts with two decimals."""
    return "n/a" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"


def table_lines(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns in line, the first to the left and the others to the right; long names are cut."""
    cut = [[name if len(name) <= _NAME_WIDTH else name[: _NAME_WIDTH - 1] + "…", *rest] for name, *rest in rows]
    return ["  " + line for line in terminal.table_lines(Table(header, cut, text_columns=(0,)), gap="  ")]
