"""Write profile_summary.json: what a run's profile says per rank and optimizer step, from Nsight or torch.profiler.

The fields of the first block have the names and forms that earlier tools read; the rest is per rank and optimizer step,
because totals of profiles of different lengths compare the lengths. docs/profiling.md describes the file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypedDict

from msgspec import Meta

from testbed.analysis.document import terminal
from testbed.analysis.document.model import Block, Cell, Document, Section, Table, plain
from testbed.analysis.document.words import Number, counted
from testbed.analysis.profiles.nsight import REPORTS, Row, Stats, StatsTable, read_stats
from testbed.analysis.profiles.trace_operators import OperatorTrace, read_operators
from testbed.analysis.runs.load import attribution_of
from testbed.errors import InputError
from testbed.io import now_utc, write_text
from testbed.metrics.file import metrics_version, read_metrics
from testbed.run_folder import LAUNCHER, METRICS
from testbed.typed_json import check, check_finite, read_checked

SUMMARY_FILE = "profile_summary.json"
PROFILES = "profiles"
PER_STEP = "per_rank_and_step"
STEP = ":train/step"
# The ranges of which the nesting is known: child -> the nearest of these that is there.
_PARENTS = (
    (r":train/(forward|backward)", (":train/schedule", STEP)),
    (r":train/(dataload|loss|synchronise|optimizer_step|schedule)", (STEP,)),
    (r":DeepSpeedEngine\.forward", (":train/forward", STEP)),
    (r":DeepSpeedEngine\.backward", (":train/backward", STEP)),
    (r":DeepSpeedEngine\.step", (":train/optimizer_step", STEP)),
    (r":DeepSpeedEngine\.allreduce_gradients", (":DeepSpeedEngine.backward", ":train/backward", STEP)),
)
_TRAINING_RANGE = re.compile(r":(train/|DeepSpeedEngine\.)")
_COLLECTIVE = re.compile(r"nccl(AllReduce|AllGather|ReduceScatter|Reduce|Broadcast|Bcast|Send|Recv|AllToAll|AlltoAll)$")
_WAITS = re.compile(r"poll|epoll_wait|select|.*cond_(timed)?wait|sem_(timed|clock)?wait|.*nanosleep|futex|fgets|read")
# OS runtime is left out: its time is that of idle threads.
COMPARED = {
    "operators": "Operators (own time)",
    "nvtx_sum": "NVTX ranges (inclusive, nested ones too)",
    "cuda_gpu_kern_sum": "GPU kernels",
    "cuda_api_sum": "CUDA API",
    "cuda_gpu_mem_time_sum": "GPU copies",
}
_NAME_WIDTH = 58
SHOWN = 5  # rows of a table
_PARTS_OF_A_STEP = ("data_wait", "forward", "backward", "optimizer", "exposed_communication", "idle")
# field of the summary -> where training_metrics.json has it. The first nine have the names that earlier tools read
_FIELDS = {
    "gpu": ("hardware", "gpu_name"),
    "cuda": ("env", "cuda_version"),
    "torch": ("env", "torch_version"),
    "deepspeed": ("env", "deepspeed_version"),
    "seq_length": ("training_config", "seq_len"),
    "micro_batch_size_per_gpu": ("training_config", "micro_batch_size_per_gpu"),
    "grad_accum_steps": ("training_config", "grad_accum_steps"),
    "tokens_per_sec": ("summary", "mean_tokens_per_sec_global"),
    "total_wall_time_sec": ("summary", "total_wall_time_sec"),
    "run_type": ("training_config", "run_type"),
    "precision": ("training_config", "precision"),
    "model_size": ("training_config", "model_size"),
    "global_batch_size": ("training_config", "global_batch_size"),
    "cpu": ("hardware", "cpu_name"),
    "instance_type": ("hardware", "instance_type"),
    "deepspeed_config_sha256": ("deepspeed_config", "sha256"),
}


class Launcher(TypedDict, total=False):
    """What is read of launcher_metadata.json, which other launchers than ours write too."""

    world_size: Annotated[int, Meta(ge=1)] | None
    nccl_env: dict[str, Any] | None
    slurm: dict[str, Any] | None


@dataclass(frozen=True)
class Inputs:
    """Evidence that was found in a run's folder and read."""

    stats: tuple[Stats, ...]
    operators: tuple[OperatorTrace, ...]
    reports: list[str]  # names of Nsight's own files
    metrics: dict[str, Any]  # empty without the file, as is `launcher`
    launcher: dict[str, Any]

    def recorded(self, section: str, name: str) -> Any:
        """Return a field of the metrics file; None where it has none."""
        return (self.metrics.get(section) or {}).get(name)

    @property
    def world_size(self) -> int | None:
        return self.launcher.get("world_size") or self.recorded("hardware", "world_size")

    @property
    def hosts(self) -> list[str]:
        """Return the machines that the launcher lists, or the one of the metrics file."""
        told = (self.launcher.get("slurm") or {}).get("hosts") or self.launcher.get("hosts")
        if isinstance(told, str):
            return [host for host in told.splitlines() if host.strip()]
        hostname = self.recorded("host", "hostname")
        return [hostname] if hostname and self.recorded("hardware", "num_nodes") == 1 else []

    @property
    def num_optimizer_steps(self) -> int | None:
        """Return the steps of the run. Those that fp16 skipped took part in communication, so they count."""
        if not self.metrics or metrics_version(self.metrics) == "1":
            return None
        if metrics_version(self.metrics) == "2.2":
            return len(self.metrics["steps"]) or None
        counts = [epoch.get("optimizer_steps") for epoch in self.metrics["epochs"]]
        return sum(counts) or None if None not in counts else None

    @property
    def attributed_steps(self) -> list[dict]:
        """Return the attributed steps of all ranks, one row each; empty where no step was."""
        found = attribution_of(self.metrics) or {"per_rank": []}
        return [row for rank in found["per_rank"] for row in rank["steps"]]


@dataclass(frozen=True)
class Coverage:
    """Amount of training that the profile covers. Totals are divided by it. None is unknown, with the reason."""

    num_steps: int | None
    steps_source: str
    num_ranks: int | None
    ranks_source: str

    @property
    def rank_steps(self) -> int | None:
        return self.num_steps * self.num_ranks if self.num_steps and self.num_ranks else None


def write_summary(run_dir: Path, num_steps: int | None = None, num_ranks: int | None = None) -> tuple[Path, dict]:
    """Summarise the profile in `run_dir` into profiles/profile_summary.json; returns the file and its content.

    Args:
        num_steps: optimizer steps that the profile covers, where neither it nor the run's metrics file tells.
        num_ranks: ranks that it covers, likewise.

    Raises:
        FileNotFoundError: there is no profile in `run_dir`.
        InputError: a file of it does not read; the sentence names file and line. Nothing is written.
    """
    run_dir = Path(run_dir)
    summary = summarize(run_dir, num_steps, num_ranks)
    path = run_dir / PROFILES / SUMMARY_FILE
    path.parent.mkdir(exist_ok=True)
    write_text(path, json.dumps(summary, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    return path, summary


def summarize(run_dir: Path, num_steps: int | None = None, num_ranks: int | None = None) -> dict[str, Any]:
    """Return the content of profile_summary.json, see `write_summary`."""
    inputs = read_inputs(run_dir)
    warnings: list[str] = []
    tables = merged_tables(inputs)
    coverage = _coverage(inputs, tables, num_steps, num_ranks)
    rows_of = {name: list(tables[name].rows) if name in tables else [] for name in REPORTS}
    per_file = {stats.path.name: _top_rows(stats.tables) for stats in inputs.stats}
    slurm = inputs.launcher.get("slurm") or {}
    outermost_ns = _outermost_ns(rows_of["nvtx_sum"])
    summary = {
        "generated_at_utc": now_utc(),
        "run_dir": str(run_dir),
        "slurm_job_id": slurm.get("job_id") or inputs.recorded("scheduler", "job_id"),
        "hosts": inputs.hosts or None,
        "world_size": inputs.world_size,
        "run_id": inputs.metrics.get("run_id"),
        "git_commit": inputs.metrics.get("git_commit") or inputs.launcher.get("git_commit"),
        "command_line": inputs.metrics.get("command_line"),
        **{name: inputs.recorded(section, field) for name, (section, field) in _FIELDS.items()},
        "nsys_report": inputs.reports[0] if len(inputs.reports) == 1 else inputs.reports,
        "inputs": [*per_file, *(trace.path.name for trace in inputs.operators)],
        **_top_rows(tables),
        "likely_bottleneck": _bottleneck(rows_of["nvtx_sum"], outermost_ns),
        "per_file": per_file,
        "instrumented": True,
        "sources": sorted({stats.kind for stats in inputs.stats} | {"torch.profiler" for _ in inputs.operators}),
        "num_optimizer_steps": coverage.num_steps,
        "num_optimizer_steps_source": coverage.steps_source,
        "ranks_in_profile": coverage.num_ranks,
        "ranks_in_profile_source": coverage.ranks_source,
        "phases": _phases(inputs, rows_of["nvtx_sum"], coverage, warnings),
        "nccl": _nccl(rows_of["nvtx_sum"], rows_of["cuda_gpu_kern_sum"], coverage),
        "tables": {report: _table(table, inputs, coverage) for report, table in tables.items()},
        "warnings": warnings,
    }
    warnings += _warnings(inputs, coverage, rows_of)
    return summary


def read_inputs(run_dir: Path) -> Inputs:
    """Read every file of a profile in `run_dir` and its folder profiles/, and what the run's own files say.

    Raises as `write_summary` does.
    """
    reports = [f"*{report}.csv" for report in REPORTS]
    stats_files = _files(run_dir, "nsys_stats*.txt", "nsys*.csv", *reports)
    traces = sorted(run_dir.glob("profiler_logs/rank*.pt.trace.json*"))
    if not stats_files and not traces:
        raise FileNotFoundError(
            f"{run_dir} holds no profile: no {PROFILES}/nsys_stats*.txt, {PROFILES}/nsys*.csv and no "
            "profiler_logs/rank*.pt.trace.json; nsys stats makes a text of a report or an SQLite file"
        )
    return Inputs(
        stats=tuple(map(read_stats, stats_files)),
        operators=tuple(map(read_operators, traces)),
        reports=[path.name for path in _files(run_dir, "nsys_*.nsys-rep", "nsys_*.qdrep")],
        metrics=read_metrics(run_dir / METRICS) if (run_dir / METRICS).exists() else {},
        launcher=read_checked(run_dir / LAUNCHER, _check_launcher) if (run_dir / LAUNCHER).exists() else {},
    )


def _check_launcher(content: Any) -> None:
    check(content, Launcher, may_hold_more=True)
    check_finite(content)  # the summary repeats parts of it


def _files(run_dir: Path, *patterns: str) -> list[Path]:
    found = {path for folder in (run_dir / PROFILES, run_dir) for pattern in patterns for path in folder.glob(pattern)}
    return sorted(found)


def merged_tables(inputs: Inputs) -> dict[str, StatsTable]:
    """Add up the tables of all traces, each trace once, however many files were made from it.

    Where a trace is there as text and CSV, text comes first: it is what people look at.
    """
    by_trace: dict[tuple[str, str], tuple[Stats, StatsTable]] = {}
    for stats in sorted(inputs.stats, key=lambda stats: stats.kind != "text"):
        for report, table in stats.tables.items():
            first, known = by_trace.setdefault((report, stats.trace), (stats, table))
            if sum(row.count for row in known.rows) != sum(row.count for row in table.rows):
                raise InputError(f"{first.path} and {stats.path} are made from one trace, but their {report} differs")
    found: dict[str, list[StatsTable]] = {}
    for (report, _), (_, table) in by_trace.items():
        found.setdefault(report, []).append(table)
    for trace in inputs.operators:
        for report, table in trace.tables.items():
            if report == "operators" or not inputs.stats:
                found.setdefault(report, []).append(table)
    order = ["operators", *REPORTS]
    return {report: _added_up(found[report]) for report in order if report in found}


def _added_up(tables: Sequence[StatsTable]) -> StatsTable:
    """Add up rows of the same name. What cannot be known of the whole (median, deviation) is None."""
    if len(tables) == 1:
        return tables[0]
    by_name: dict[tuple[str, str | None], list[Row]] = {}
    for table in tables:
        for row in table.rows:
            by_name.setdefault((row.name, row.style), []).append(row)
    everything = sum(table.total for table in tables)
    rows = []
    for (name, style), mine in by_name.items():
        total, count = sum(row.total for row in mine), sum(row.count for row in mine)
        percent = None if mine[0].time_percent is None else 100 * total / everything if everything else 0.0
        low, high = min(row.min for row in mine), max(row.max for row in mine)
        rows.append(Row(name, total, count, total / count, None, low, high, None, percent, style))
    return StatsTable(tables[0].report, tuple(sorted(rows, key=lambda row: -row.total)))


def _top_rows(tables: dict[str, StatsTable]) -> dict[str, list[dict]]:
    found = {}
    for kind in ("nvtx", "osrt"):
        rows = tables[f"{kind}_sum"].rows if f"{kind}_sum" in tables else ()
        best = sorted(rows, key=lambda row: -(row.time_percent or 0.0))[:5]
        found[f"{kind}_top5"] = [{"kind": kind, **_legacy_row(row), "raw": row.raw} for row in best]
    return found


def _legacy_row(row: Row) -> dict:
    return {"name": row.name, "time_percent": row.time_percent, "total_time": f"{row.total} ns"}


def _bottleneck(rows: Sequence[Row], outermost_ns: float) -> dict:
    """Return the earlier tools' flag, by nsys's share, and the share that nested ranges do not dilute."""
    found: dict[str, Any] = {"allreduce_gradients_over_20pct": False}
    candidates = [row for row in rows if "allreduce_gradients" in row.name.lower()]
    candidates = sorted(candidates, key=lambda row: -(row.time_percent or 0.0))
    if candidates and (candidates[0].time_percent or 0.0) > 20.0:
        found = {"allreduce_gradients_over_20pct": True, "matched": _legacy_row(candidates[0])}
    if candidates and outermost_ns:
        found["allreduce_gradients_percent_of_outermost_ranges"] = 100 * candidates[0].total / outermost_ns
    return found


def _outermost_ns(rows: Sequence[Row]) -> float:
    """Return the time of the training ranges that lie in no other: what a share of training can be taken of."""
    names = {row.name for row in rows}
    outermost = [row for row in rows if _TRAINING_RANGE.match(row.name) and _parent(row.name, names) is None]
    return sum(row.total for row in outermost)


def _parent(name: str, names: set[str]) -> str | None:
    """Return the range around `name`, as far as the names alone tell."""
    parents = next((parents for pattern, parents in _PARENTS if re.fullmatch(pattern, name)), ())
    return next((parent for parent in parents if parent in names), None)


def _coverage(inputs: Inputs, tables: dict[str, StatsTable], num_steps: int | None, num_ranks: int | None) -> Coverage:
    given, recorded = "given on the command line", inputs.num_optimizer_steps
    if not inputs.stats:
        counts = {trace.num_steps for trace in inputs.operators}
        steps = num_steps or (counts.pop() if len(counts) == 1 else None)
        of_steps = given if num_steps else "steps in the traces of torch.profiler"
        of_ranks = given if num_ranks else "one trace of torch.profiler per rank"
        return Coverage(steps, of_steps, num_ranks or len(inputs.operators), of_ranks)
    nvtx = tables["nvtx_sum"].rows if "nvtx_sum" in tables else ()
    num_ranges = next((row.count for row in nvtx if row.name == STEP), 0)
    ranks, of_ranks = _ranks_in_traces(inputs)
    if num_ranks:
        ranks, of_ranks = num_ranks, given
    if num_steps:
        return Coverage(num_steps, given, ranks, of_ranks)
    if num_ranges and ranks and num_ranges % ranks == 0:
        return Coverage(num_ranges // ranks, f"{num_ranges} {STEP} ranges over {ranks} ranks", ranks, of_ranks)
    unknown = f"unknown: no {STEP} ranges and no {METRICS}; give --optimizer_steps"
    return Coverage(recorded, METRICS if recorded else unknown, ranks, of_ranks)


def _ranks_in_traces(inputs: Inputs) -> tuple[int | None, str]:
    """Return the ranks in Nsight's traces, and how that is known: a trace is of one rank, or of one machine."""
    num_traces, world_size = len({stats.trace for stats in inputs.stats}), inputs.world_size
    if world_size and world_size in (1, num_traces):
        return world_size, "world size"
    num_nodes = int(inputs.recorded("hardware", "num_nodes") or inputs.recorded("scheduler", "nnodes") or 0)
    num_nodes = num_nodes or len(inputs.hosts)
    if world_size and num_nodes and world_size % num_nodes == 0:
        per_node = world_size // num_nodes
        source = f"{num_traces} x {per_node}: one trace for each of {num_nodes} machine(s)"
        return min(world_size, per_node * num_traces), source
    return None, "unknown: world size or number of machines is not recorded; give --ranks_in_profile"


def _table(table: StatsTable, inputs: Inputs, coverage: Coverage) -> dict:
    unit = "mb" if table.report == "cuda_gpu_mem_size_sum" else "ns"
    names = {row.name for row in table.rows}
    divisor = coverage.rank_steps
    if table.report == "operators":
        divisor = sum(trace.num_steps for trace in inputs.operators)
    rows = []
    for row in table.rows:
        found: dict[str, Any] = {"name": row.name} | ({"style": row.style} if row.style else {})
        found |= {"time_percent": row.time_percent} if unit == "ns" else {}
        found |= {f"total_{unit}": row.total, "count": row.count}
        found |= {f"{name}_{unit}": getattr(row, name) for name in ("avg", "med", "min", "max", "stddev")}
        found[PER_STEP] = {f"total_{unit}": row.total / divisor, "count": row.count / divisor} if divisor else None
        if table.report == "nvtx_sum":
            found["nested_in"] = _parent(row.name, names)
        rows.append(found)
    return {f"total_{unit}": table.total, "rows": rows}


def _phases(inputs: Inputs, rows: Sequence[Row], coverage: Coverage, warnings: list[str]) -> dict[str, Any] | None:
    """Return the exclusive parts of a step on one rank, which add up to it; None where the profile does not tell."""
    totals, divisor = {row.name: row.total for row in rows}, coverage.rank_steps
    if STEP in totals:
        source = "totals of the trainer's ranges; train/step is what lies in none of the others"
        trainer = {name for name in totals if name.startswith(":train/")}
        parts = {name: totals[name] for name in trainer}
        for name in trainer:
            if parent := _parent(name, trainer):
                parts[parent] -= totals[name]
        if negative := [name for name, value in parts.items() if value < 0]:
            warnings.append(f"{', '.join(negative)}: the ranges inside take longer, so they lie partly outside.")
            return None
    elif not inputs.stats and (attributed := inputs.attributed_steps):
        source, divisor = f"attribution in {METRICS}", len(attributed)
        parts = {name: 1e9 * sum(row[f"{name}_s"] for row in attributed) for name in _PARTS_OF_A_STEP}
    else:
        return None
    whole = sum(parts.values())
    ordered = sorted(parts.items(), key=lambda item: -item[1])
    return {
        "source": source,
        "step_ns": whole / divisor if divisor else None,
        "parts": [
            {"name": name, "percent_of_step": 100 * value / whole, "ns": value / divisor if divisor else None}
            for name, value in ordered
            if whole
        ],
    }


def _nccl(ranges: Sequence[Row], kernels: Sequence[Row], coverage: Coverage) -> dict[str, Any]:
    """Count collectives by their NVTX ranges and by their kernels, whose names are cut before the arguments."""
    divisor = coverage.rank_steps
    nccl = [row for row in kernels if "nccl" in row.name.lower()]  # ncclDevKernel_... since 2.19, ncclKernel_... before
    found = [("nvtx", row.name, row) for row in ranges if _COLLECTIVE.search(row.name)]
    found += [("kernel", row.name.partition("(")[0], row) for row in nccl]
    kernel_ns = sum(row.total for row in kernels)
    return {
        "percent_of_kernel_time": 100 * sum(row.total for row in nccl) / kernel_ns if kernel_ns else None,
        "instances": [
            {"kind": kind, "name": name, "count": row.count, PER_STEP: row.count / divisor if divisor else None}
            for kind, name, row in found
        ],
    }


def _warnings(inputs: Inputs, coverage: Coverage, rows_of: dict[str, list[Row]]) -> list[str]:
    """Return what a reader must know before believing a figure."""
    found = ["Made under a profiler: counts and shares hold, times are longer than those of the run without it."]
    if coverage.rank_steps is None:
        why = coverage.steps_source if coverage.num_steps is None else coverage.ranks_source
        found.append(f"Nothing is given per rank and step: {why}.")
    elif inputs.stats:
        found.append(
            "Per rank and step is the whole trace over its optimizer steps: what happens once (start, broadcast of the "
            "weights) or in validation is in it."
        )
    names = {row.name for row in rows_of["nvtx_sum"]}
    waits = rows_of["osrt_sum"][0].name if rows_of["osrt_sum"] else ""
    facts = {
        "NVTX ranges lie inside one another: their percentages count time twice and must not be added.": any(
            _parent(name, names) for name in names
        ),
        f"OS runtime time ({waits} first) adds up the sleep of all threads, idle helpers included: it says nothing of "
        "training.": _WAITS.fullmatch(waits),
        "Kernel times are sums: kernels that run at the same time count twice.": rows_of["cuda_gpu_kern_sum"],
        f"There is no {METRICS}: what was trained is not known.": not inputs.metrics,
        "wall_clock_breakdown was on: DeepSpeed waited for the device after every part of a step.": (
            inputs.recorded("deepspeed_config", "selected") or {}
        ).get("wall_clock_breakdown"),
        "NCCL_DEBUG was on: NCCL wrote a log while it was measured.": (
            str((inputs.launcher.get("nccl_env") or {}).get("NCCL_DEBUG")).upper() in ("INFO", "TRACE")
        ),
    }
    found += [text for text, holds in facts.items() if holds]
    for stats in inputs.stats:
        if stats.not_read:
            found.append(f"{stats.path.name}: not read, because not known here: {', '.join(stats.not_read)}.")
    recorded, covered = inputs.num_optimizer_steps, coverage.num_steps
    if recorded and covered and recorded != covered:
        found.append(f"The profile covers {covered} of the run's {counted(recorded, 'optimizer step')}.")
    if inputs.world_size and coverage.num_ranks and coverage.num_ranks < inputs.world_size:
        found.append(f"The profile covers {coverage.num_ranks} of {inputs.world_size} ranks.")
    return found


def summary_text(summary: dict[str, Any]) -> str:
    """Return the summary in short: what a step consists of, collectives, the first rows of each table, warnings."""
    ranks, steps = summary["ranks_in_profile"], summary["num_optimizer_steps"]
    about = (
        f"{summary['run_type'] or 'run'} on {_counted(summary['world_size'], 'rank')}, "
        f"from {', '.join(summary['sources'])}; "
        f"the profile covers {_counted(ranks, 'rank')} x {_counted(steps, 'optimizer step')}"
    )
    blocks: list[Block] = [about]
    if phases := summary["phases"]:
        rows = [
            [part["name"], milliseconds(part["ns"]), Number(part["percent_of_step"], ".1f", unit=" %")]
            for part in phases["parts"]
        ]
        title = f"An optimizer step on one rank, exclusive ({phases['source']})"
        blocks.append(table_of_names(["", "ms", "of the step"], rows, title))
    if collectives := summary["nccl"]["instances"]:
        rows = [
            [f"{row['kind']}  {row['name']}", occurrences(row["count"]), occurrences(row[PER_STEP])]
            for row in collectives
        ]
        percent = summary["nccl"]["percent_of_kernel_time"]
        note = "" if percent is None else f"NCCL is {percent:.1f} % of the sum of kernel times"
        blocks.append(table_of_names(["", "instances", "per rank and step"], rows, "Collectives", note))
    for report, title in COMPARED.items():
        if table := summary["tables"].get(report):
            is_known = all(row[PER_STEP] for row in table["rows"])
            shown = [(row["name"], row[PER_STEP] if is_known else row) for row in table["rows"][:SHOWN]]
            rows = [[name, milliseconds(values["total_ns"]), occurrences(values["count"])] for name, values in shown]
            title = f"{title}, {'per rank and step' if is_known else 'whole profile'}"
            blocks.append(table_of_names(["", "ms", "count"], rows, title))
    share = summary["likely_bottleneck"].get("allreduce_gradients_percent_of_outermost_ranges")
    if share is not None:
        blocks.append(
            f"allreduce_gradients takes {share:.1f} % of the outermost training ranges that are marked here; a profile "
            "that marks other ranges has another whole"
        )
    return terminal.text(
        Document(sections=[Section(blocks=blocks)], notes=[[f"Note: {text}" for text in summary["warnings"]]])
    )


def _counted(number: int | None, noun: str) -> str:
    return counted(number, noun) if number else f"? {noun}s"


def table_of_names(header: Sequence[str], rows: Iterable[Sequence[Cell]], title: str, note: str = "") -> Table:
    """Make a table of names and numbers. Long names are cut."""
    return Table(header, [[_cut(plain(name)), *rest] for name, *rest in rows], title, (0,), note)


def _cut(name: str) -> str:
    return name if len(name) <= _NAME_WIDTH else name[: _NAME_WIDTH - 1] + "…"


def milliseconds(nanoseconds: float | None, form: str = ",.3f") -> Number:
    return Number(None if nanoseconds is None else nanoseconds / 1e6, form)


def occurrences(value: float | None) -> Number:
    """Write a count, or a mean of counts with two decimals."""
    return Number(value, ",d" if isinstance(value, int) else ",.2f")
