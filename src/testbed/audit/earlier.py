"""Read the files of the five earlier projects: timing logs, results of ranks, wandb logs."""

from __future__ import annotations

import math
import re
from pathlib import Path
from statistics import fmean
from typing import Any

from testbed.audit.curves import number
from testbed.audit.printed_setup import printed_setup
from testbed.audit.reported import Reported
from testbed.audit.words import count_in_name
from testbed.errors import InputError
from testbed.io import read_json

NUMBER = r"(-?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)"
RANK_JSON = re.compile(r"(?:rank(\d+)|eval)_results_epoch(\d+)\.json")
TOTAL_TIME = rf"(?i)total epoch time:\s*{NUMBER}"


def timing_log_runs(path: Path, text: str) -> list[Reported]:
    """Read a file of one run, or of several under headings `training_b<batch>_g<ranks>`."""
    _, *parts = re.split(r"(?m)^#+\s*(.*training_b\d+_g\d+.*)$", text)
    if not parts:
        return [_timing_log_run(path, str(path), path.name, text)]
    sections = zip(parts[::2], parts[1::2], strict=True)
    return [_timing_log_run(path, f"{path}#{title.strip()}", title, body) for title, body in sections]


def _timing_log_run(path: Path, name: str, title: str, text: str) -> Reported:
    blocks = re.split(r"(?im)^.*?(?:(?:rank\s+(\d+)\s+)?epoch\s+\d+\s+timing breakdown|(average metrics)):?.*$", text)
    totals: dict[int, float] = {}
    average_s = None
    for rank, average, body in zip(blocks[1::3], blocks[2::3], blocks[3::3], strict=True):
        total = _first(TOTAL_TIME, body)
        if average:
            average_s = average_s if total is None else total
        elif total is not None:  # several epochs of one rank add up
            totals[int(rank or 0)] = totals.get(int(rank or 0), 0.0) + total
    size = re.search(r"b(\d+)_g(\d+)", title)
    losses = re.findall(rf"(?i)train loss:?\s*{NUMBER}\s*,?\s*val loss:?\s*{NUMBER}", text)
    batches = re.search(r"(?i)total batches per epoch:\s*(\d+)", text)
    world_size = int(size[2]) if size else (max(totals) + 1 if totals else None)
    times = tuple(totals[rank] for rank in sorted(totals))
    return Reported(
        path=path, name=name, form="timing log", world_size=world_size,
        global_batch_size=int(size[1]) if size else None,
        optimizer_steps=int(batches[1]) if batches else None,
        time_s=average_s if average_s is not None else fmean(times) if times else None,
        time_meaning="mean over ranks of the epoch's time" if len(times) > 1 else "time of the epoch",
        rank_times_s=times,
        train_loss=number(losses[-1][0]) if losses else None,
        val_loss=number(losses[-1][1]) if losses else None,
    )  # fmt: skip


def wandb_log_runs(path: Path, text: str) -> list[Reported]:
    """Read what a program printed, with the summary that wandb prints for each of its processes at the end."""
    summaries = [_summary(block) for block in text.split("wandb: Run summary")[1:]]
    last_lines = slice(-(len(summaries) or 1), None)  # one for each process

    def last(pattern: str, name: str) -> list[float]:
        """Return what each process said last: in its lines, or else in its summary."""
        printed = [value for found in re.findall(pattern, text) if (value := number(found)) is not None]
        return printed[last_lines] or [summary[name] for summary in summaries if name in summary]

    devices = [int(number) for number in re.findall(r"(?m)^\|\s*(\d+)\s*\|.*(?:MB|%|°C)", text)]
    world = re.search(r"World Size:\s*(\d+)", text)
    printed = printed_setup(text)
    of_engine = printed.pop("world_size", None)
    world_size = int(world[1]) if world else of_engine or (max(devices) + 1 if devices else None)
    world_size = world_size or count_in_name("devices", path.name) or len(summaries) or None
    step_losses: dict[int, list[float]] = {}
    for step, loss in re.findall(rf"Step (\d+): loss {NUMBER}", text):
        step_losses.setdefault(int(step), []).append(float(loss))
    losses = step_losses[max(step_losses)] if step_losses else []
    rates = last(rf"Throughput (?:\(TFLOPS\) at step|average on)\s+\d+:\s*{NUMBER}", "throughput")
    times = last(rf"elapsed_time_per_iteration:\s*{NUMBER}", "iteration-time")
    validated = last(rf"(?i)final validation loss:\s*{NUMBER}", "validation_loss")
    totals = [int(total) for total in re.findall(r"\d+/(\d+) \[[\d:]+<", text)]  # of progress bars
    return [Reported(
        path=path, name=str(path), form="wandb log", world_size=world_size,
        optimizer_steps=max(totals, default=None),  # a shorter bar is validation's
        time_s=max(times, default=None), time_meaning="time of one iteration",
        rate=max(rates, default=None), rate_unit="TFLOP/s", rate_is_per_rank=True,
        rank_train_losses=tuple(losses) if len(losses) > 1 else (),
        train_loss=losses[-1] if losses else next((each["loss"] for each in summaries if "loss" in each), None),
        val_loss=validated[-1] if validated else None,
        instruments=(*(["a profiler ran (its table is in the log)"] if "ProfilerStep*" in text else []),
                     *printed.pop("instruments")),
        batch_is_printed="global_batch_size" in printed,
        is_data_parallel_module="DataParallel.forward" in text.replace("DistributedDataParallel.forward", ""),
        **printed,
    )]  # fmt: skip


def _summary(block: str) -> dict[str, float]:
    block = block.split("wandb: 🚀")[0].split("View run")[0]
    return {name: float(value) for name, value in re.findall(rf"wandb:\s+([\w-]+)\s+{NUMBER}\s*$", block, re.M)}


def read_rank_files(path: Path) -> list[Reported]:
    """Read all `rank<r>_results_epoch<e>.json` and `eval_results_epoch<e>.json` in the folder of `path` as one run.

    Raises:
        InputError: one of them has no validation loss.
    """
    folder = path.parent
    ranks: dict[int, dict[int, dict]] = {}
    found = {file: match for file in sorted(folder.iterdir()) if (match := RANK_JSON.fullmatch(file.name))}
    for file, match in found.items():
        values = read_json(file)
        if not isinstance(values, dict) or not _is_number(values.get("validation_loss")):
            raise InputError(f"{file} is not a result of a rank: it has no number under 'validation_loss'")
        ranks.setdefault(int(match[1] or 0), {})[int(match[2])] = values
    is_pipeline = not any(match[1] for match in found.values())
    last = [ranks[rank][max(ranks[rank])] for rank in sorted(ranks)]
    times = tuple(sum(epoch["training_time"] for epoch in ranks[rank].values()) for rank in sorted(ranks)
                  if all(_is_number(epoch.get("training_time")) for epoch in ranks[rank].values()))  # fmt: skip
    rates = tuple(float(values["tokens_per_sec"]) for values in last if _is_number(values.get("tokens_per_sec")))
    return [Reported(
        path=folder, name=str(folder), form="rank JSON",
        world_size=None if is_pipeline else max(ranks) + 1,
        time_s=fmean(times) if times else None,
        time_meaning="mean over ranks of the training time" if len(times) > 1 else "training time",
        rate=rates[0] if rates else None, rate_is_per_rank=True,
        rank_times_s=times if len(times) == len(ranks) else (),
        rank_rates=rates if len(rates) == len(ranks) else (),
        val_loss=float(last[0]["validation_loss"]),
    )]  # fmt: skip


def _first(pattern: str, text: str) -> float | None:
    found = re.search(pattern, text)
    return number(found[1]) if found else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
