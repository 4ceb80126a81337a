"""Readers of what other programs leave behind: timing logs, rank JSON, wandb logs and exports, scaling reports.

Each is known by its content, reads what is there, and says in `Reported.unread` what it looked for and did not find.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from testbed.analysis.audit.reported import PIPELINE_JSON, RANK_JSON, Reported
from testbed.io import read_json, read_text

NUMBER = r"(-?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)"
# The names of a timing breakdown -> the parts of an epoch that they call so.
TIMING_PARTS = {
    "total": rf"(?i)total epoch time:\s*{NUMBER}",
    "communication": rf"(?i)communication time:\s*{NUMBER}",
}
COLLECTIVE_ROW = re.compile(r"(?i)nccl|c10d|allreduce|all_reduce|reduce_scatter|all_?gather|broadcast")
COLLECTIVE_KERNEL = re.compile(r"(?i)^nccl(Dev)?Kernel")


def read_text_log(path: Path, is_typed: bool) -> list[Reported]:
    """The runs of a text log; none when it is no known log and lay in a folder, ValueError when it was typed."""
    text = _read_text(path).replace("\r", "\n")
    if re.search("(?i)timing breakdown", text) and (is_typed or re.search(TIMING_PARTS["total"], text)):
        return _timing_log_runs(path, text)
    if "wandb: Run summary" in text or "elapsed_time_per_iteration" in text:
        return [_wandb_log_run(path, text)]
    if is_typed:
        raise ValueError(
            f"{path} is no log that is known: it has neither a 'timing breakdown' of an epoch nor a wandb run summary"
        )
    return []


def _timing_log_runs(path: Path, text: str) -> list[Reported]:
    """A file may hold several runs, each under a heading `training_b<batch>_g<ranks>`; otherwise its name says it."""
    parts = re.split(r"(?m)^#+\s*(.*training_b\d+_g\d+.*)$", text)
    sections = list(zip(parts[1::2], parts[2::2], strict=True)) or [(path.name, text)]
    return [
        _timing_log_run(path, f"{path}#{title.strip()}" if len(parts) > 1 else str(path), title, body)
        for title, body in sections
    ]


def _timing_log_run(path: Path, name: str, title: str, text: str) -> Reported:
    blocks = re.split(r"(?im)^.*?(?:(rank\s+\d+)\s+epoch\s+\d+\s+timing breakdown|(epoch\s+\d+\s+timing breakdown)"
                      r"|(average metrics)):?.*$", text)  # fmt: skip
    totals: dict[int, float] = {}
    communication: dict[int, float] = {}
    average_s = None
    for rank, single, average, body in zip(blocks[1::4], blocks[2::4], blocks[3::4], blocks[4::4], strict=True):
        found = {part: re.search(pattern, body) for part, pattern in TIMING_PARTS.items()}
        seconds = {part: _number(match[1]) for part, match in found.items() if match}
        if average:
            average_s = seconds.get("total", average_s)
            continue
        digits = re.search(r"\d+", rank or "")
        number = int(digits[0]) if digits and not single else 0
        # Several epochs of one rank add up.
        for into, part in ((totals, "total"), (communication, "communication")):
            more = seconds.get(part)
            if more is not None:
                into[number] = into.get(number, 0.0) + more
    size = re.search(r"b(\d+)_g(\d+)", title)
    losses = re.findall(rf"(?i)train loss:?\s*{NUMBER}\s*,?\s*val loss:?\s*{NUMBER}", text)
    batches = re.search(r"(?i)total batches per epoch:\s*(\d+)", text)
    world_size = int(size[2]) if size else (max(totals) + 1 if totals else None)
    times = tuple(totals[rank] for rank in sorted(totals))
    unread = [] if totals else ["total epoch time"]
    unread += [] if losses else ["train and validation loss"]
    unread += [] if size else ["global batch (the name has no b<batch>_g<ranks>)"]
    if world_size is not None and times and len(times) < world_size:
        unread.append(f"times of {world_size - len(times)} of {world_size} ranks")
    return Reported(
        path=path, name=name, form="timing log", world_size=world_size,
        global_batch_size=int(size[1]) if size else None,
        optimizer_steps=int(batches[1]) if batches else None,
        time_s=average_s if average_s is not None else (sum(times) / len(times) if times else None),
        time_meaning="mean over ranks of the epoch's time" if len(times) > 1 else "time of the epoch",
        rank_times_s=times,
        train_loss=_number(losses[-1][0]) if losses else None,
        val_loss=_number(losses[-1][1]) if losses else None,
        communication_s=tuple(communication[rank] for rank in sorted(communication)),
        unread=tuple(unread),
    )  # fmt: skip


def _wandb_log_run(path: Path, text: str) -> Reported:
    """What a program printed, with the summary that wandb prints for each of its processes at the end."""
    summaries = [_summary(block) for block in text.split("wandb: Run summary")[1:]]
    devices = [int(number) for number in re.findall(r"(?m)^\|\s*(\d+)\s*\|.*(?:MB|%|°C)", text)]
    world_size = _first_int(r"World Size:\s*(\d+)", text) or (max(devices) + 1 if devices else None)
    world_size = world_size or ranks_in_name(path.name) or len(summaries) or None
    step_losses: dict[int, list[float]] = {}
    for step, loss in re.findall(rf"Step (\d+): loss {NUMBER}", text):
        step_losses.setdefault(int(step), []).append(float(loss))
    last = step_losses[max(step_losses)] if step_losses else []
    rates = _numbers(rf"Throughput (?:\(TFLOPS\) at step|average on)\s+\d+:\s*{NUMBER}", text)
    rates = rates[-(len(summaries) or 1) :] or [s["throughput"] for s in summaries if "throughput" in s]
    times = _numbers(rf"elapsed_time_per_iteration:\s*{NUMBER}", text)
    times = times[-(len(summaries) or 1) :] or [s["iteration-time"] for s in summaries if "iteration-time" in s]
    validated = _numbers(rf"(?i)final validation loss:\s*{NUMBER}", text)
    validated = validated or [s["validation_loss"] for s in summaries if "validation_loss" in s]
    progress = re.findall(r"(\d+)/(\d+) \[(?:(\d+):)?(\d+):(\d+)<", text)
    logged = [int(step) for step in re.findall(r"(?:at step|average on)\s+(\d+):", text)]
    num_steps = max((int(total) for _, total, *_ in progress), default=None)  # a shorter bar is validation's
    seen = {int(done): 3600 * int(h or 0) + 60 * int(m) + int(s) for done, total, h, m, s in progress
            if int(total) == num_steps}  # fmt: skip
    is_module = "DataParallel.forward" in text.replace("DistributedDataParallel.forward", "")
    unread = [word for word, value in (("throughput", rates), ("iteration time", times), ("validation loss", validated))
              if not value]  # fmt: skip
    unread.append("batch (this log does not print it)")
    return Reported(
        path=path, name=str(path), form="wandb log", world_size=world_size,
        optimizer_steps=num_steps,
        time_s=max(times, default=None), time_meaning="time of one iteration",
        rate=max(rates, default=None), rate_unit="TFLOP/s", rate_is_per_rank=True,
        rank_rates=tuple(rates) if len(rates) == world_size else (),
        rank_train_losses=tuple(last) if len(last) > 1 else (),
        train_loss=last[-1] if last else next((s["loss"] for s in summaries if "loss" in s), None),
        val_loss=validated[-1] if validated else None,
        instruments=("a profiler ran (its table is in the log)",) if "ProfilerStep*" in text else (),
        is_data_parallel_module=is_module,
        details={"logged_steps": sorted({*logged, *step_losses}), "progress_s": seen},
        unread=tuple(unread),
    )  # fmt: skip


def _summary(block: str) -> dict[str, float]:
    block = block.split("wandb: 🚀")[0].split("View run")[0]
    return {name: float(value) for name, value in re.findall(rf"wandb:\s+([\w-]+)\s+{NUMBER}\s*$", block, re.M)}


def read_rank_files(paths: Sequence[Path]) -> list[Reported]:
    """`rank<r>_results_epoch<e>.json` and `eval_results_epoch<e>.json`: those of one folder are one run."""
    folders: dict[Path, list[Path]] = {}
    for path in paths:
        folders.setdefault(path.parent, []).append(path)
    return [_rank_run(folder, files) for folder, files in folders.items()]


def _rank_run(folder: Path, files: list[Path]) -> Reported:
    ranks: dict[int, dict[int, dict]] = {}
    for file in files:
        values = read_json(file)
        if not isinstance(values, dict) or not _is_number(values.get("validation_loss")):
            raise ValueError(f"{file} is no result of a rank: it has no number under 'validation_loss'")
        if match := RANK_JSON.fullmatch(file.name):
            ranks.setdefault(int(match[1]), {})[int(match[2])] = values
        elif match := PIPELINE_JSON.fullmatch(file.name):
            ranks.setdefault(0, {})[int(match[1])] = values
    is_pipeline = all(PIPELINE_JSON.fullmatch(file.name) for file in files)
    last = [ranks[rank][max(ranks[rank])] for rank in sorted(ranks)]
    times = tuple(sum(epoch["training_time"] for epoch in ranks[rank].values()) for rank in sorted(ranks)
                  if all(_is_number(epoch.get("training_time")) for epoch in ranks[rank].values()))  # fmt: skip
    rates = tuple(float(values["tokens_per_sec"]) for values in last if _is_number(values.get("tokens_per_sec")))
    unread = [] if times else ["training time (these files do not have it)"]
    unread += [] if rates else ["throughput (these files do not have it)"]
    if missing := sorted(set(range(max(ranks) + 1)) - set(ranks)):
        unread.append(f"ranks {', '.join(map(str, missing))} (no file)")
    losses = tuple(float(values["validation_loss"]) for values in last)
    return Reported(
        path=folder, name=str(folder), form="rank JSON",
        world_size=None if is_pipeline else max(ranks) + 1,
        time_s=sum(times) / len(times) if times else None,
        time_meaning="mean over ranks of the training time" if len(times) > 1 else "training time",
        rate=rates[0] if rates else None, rate_is_per_rank=True,
        rank_times_s=times if len(times) == len(ranks) else (),
        rank_rates=rates if len(rates) == len(ranks) else (),
        rank_val_losses=losses if not is_pipeline else (),
        val_loss=losses[0],
        unread=(*unread, "batch and steps (these files do not have them)"),
    )  # fmt: skip


def read_csv(path: Path, is_typed: bool) -> list[Reported]:
    """A wandb export: metrics of runs per step, or a table of profiler events."""
    try:
        rows = list(csv.reader(io.StringIO(_read_text(path)), strict=True))
    except csv.Error as error:
        raise ValueError(f"{path} is not CSV: {error}") from None
    header = [name.strip() for name in rows[0]] if rows else []
    if "Name" in header and any(name.startswith("Device Time Total") for name in header):
        return [_profiler_table(path, header, rows[1:])]
    if "Step" in header and any(" - " in name for name in header):
        return _metrics_export(path, header, rows[1:])
    if is_typed:
        raise ValueError(
            f"{path} is no wandb export that is known: its first line has neither 'Step' and '<run> - <metric>' "
            "nor 'Name' and 'Device Time Total (ms)'"
        )
    return []


def _profiler_table(path: Path, header: list[str], rows: list[list[str]]) -> Reported:
    name_at = header.index("Name")
    time_at = next(index for index, name in enumerate(header) if name.startswith("Device Time Total"))
    calls_at = header.index("Calls") if "Calls" in header else None
    cells = [row for row in rows if len(row) > max(name_at, time_at)]
    read = [(row[name_at], _number(row[time_at])) for row in cells]
    times = [(name, time) for name, time in read if time is not None]
    steps = next((_number(row[calls_at]) for row in cells if calls_at is not None and len(row) > calls_at
                  and row[name_at].startswith("ProfilerStep")), None)  # fmt: skip
    matched = [(name, time) for name, time in times if COLLECTIVE_ROW.search(name) and "reduce_kernel" not in name
               and "_cuda_kernel" not in name and not name.startswith("cudaHost")]  # fmt: skip
    names = [name for name, _ in times]
    unread = [f"{len(rows) - len(times)} rows without a time"] if len(rows) > len(times) else []
    return Reported(
        path=path, name=str(path), form="profiler table",
        world_size=ranks_in_name(path.name),
        instruments=("a profiler ran (this is its table)",),
        is_data_parallel_module="DataParallel.forward" in names and "DistributedDataParallel.forward" not in names,
        details={
            "profiled_steps": int(steps) if steps else None,
            "collective_rows_s": sum(time for _, time in matched) / 1e3,
            "collective_kernels_s": sum(time for name, time in times if COLLECTIVE_KERNEL.match(name)) / 1e3,
        },
        unread=tuple(unread),
    )  # fmt: skip


def _metrics_export(path: Path, header: list[str], rows: list[list[str]]) -> list[Reported]:
    step_at = header.index("Step")
    columns: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for index, column in enumerate(header):
        run, separator, metric = column.rpartition(" - ")
        if not separator or metric.endswith(("__MIN", "__MAX")):
            continue
        points = [(_number(row[step_at]), _number(row[index])) for row in rows if len(row) > max(index, step_at)]
        known = [(step, value) for step, value in points if step is not None and value is not None]
        columns.setdefault(run, {})[metric] = known
    return [_exported_run(path, run, metrics) for run, metrics in columns.items()]


def _exported_run(path: Path, run: str, metrics: dict[str, list[tuple[float, float]]]) -> Reported:
    def last(*patterns: str) -> float | None:
        for pattern in patterns:
            for metric, points in metrics.items():
                if re.search(pattern, metric, re.I) and points:
                    return points[-1][1]
        return None

    steps = [int(step) for points in metrics.values() for step, _ in points]
    communication = [
        value for metric, points in metrics.items() if re.search("(?i)comm", metric) for _, value in points
    ]
    iteration_s = last(r"iteration[-_ ]time")
    return Reported(
        path=path, name=f"{path}#{run}", form="wandb CSV", world_size=ranks_in_name(run),
        optimizer_steps=max(steps, default=-1) + 1 or None,
        time_s=iteration_s if iteration_s is not None else last(r"total_epoch_time|epoch_total_time"),
        time_meaning="time of one iteration" if iteration_s is not None else "time of the epoch",
        rate=last("throughput"), rate_unit="(unit not in the file)", rate_is_per_rank=True,
        train_loss=last(r"^(train|training)[-_ /]?loss", r"^loss$", r"avg_training_loss"),
        val_loss=last(r"val(idation)?[-_ /]?loss"),
        communication_s=tuple(communication),
        details={"run": run},
        unread=() if any(metrics.values()) else ("values of this run (its columns are empty)",),
    )  # fmt: skip


def merge_exports(found: list[Reported]) -> list[Reported]:
    """One metric is exported per file: what several files say of one wandb run becomes one."""
    merged: dict[Any, Reported] = {}
    for number, item in enumerate(found):
        key = ("run", item.details["run"]) if item.form == "wandb CSV" else number
        if key not in merged:
            merged[key] = item
            continue
        first = merged[key]
        fields = ("world_size", "optimizer_steps", "time_s", "rate", "train_loss", "val_loss")
        known = {name: getattr(item, name) for name in fields if getattr(first, name) is None}
        if "time_s" in known:
            known["time_meaning"] = item.time_meaning
        merged[key] = replace(first, **known, communication_s=first.communication_s + item.communication_s)
    return list(merged.values())


def read_scaling_report(path: Path) -> Reported:
    """A `scaling_report.json`: what it says of its own comparison."""
    report = read_json(path)
    if not isinstance(report, dict) or not isinstance(report.get("runs"), dict):
        raise ValueError(f"{path} is no scaling report: it has no object 'runs'")
    runs = {str(key): value for key, value in report["runs"].items() if isinstance(value, dict)}
    mismatches = [row for row in report.get("mismatches") or [] if isinstance(row, dict)]
    return Reported(
        path=path, name=str(path), form="scaling report",
        details={"status": report.get("status"), "runs": runs, "mismatches": mismatches},
        unread=() if runs else ("runs (there are none)",),
    )  # fmt: skip


def ranks_in_name(name: str) -> int | None:
    """Ranks that a run's or a file's name states: 4GPU, 2-gpus, _g4, world8."""
    match = re.search(r"(?i)(?<!\d)(\d{1,4})[\s_-]?(?:gpus?|ranks?|devices?)\b|(?:_g|world[_-]?)(\d{1,4})(?!\d)", name)
    return (int(match[1] or match[2]) or None) if match else None


def _read_text(path: Path) -> str:
    try:
        text = read_text(path, errors="replace")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None
    if re.search(r"\d{400}", text):  # beyond what a float holds, and soon beyond what Python reads
        raise ValueError(f"{path} cannot be read: it holds a number with hundreds of digits")
    return text


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _numbers(pattern: str, text: str) -> list[float]:
    """What the one group of `pattern` holds wherever it matches, where that is a finite number."""
    return [value for found in re.findall(pattern, text) if (value := _number(found)) is not None]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _first_int(pattern: str, text: str) -> int | None:
    match = re.search(pattern, text)
    return int(match[1]) if match else None
