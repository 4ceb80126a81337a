"""Read the log of torchtitan: torchtitan/components/metrics.py (`MetricsProcessor.log`), torchtitan/trainer.py."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

from testbed.audit.log_lines import Figure, LogLine, Product, Relation
from testbed.audit.readers.printed import (
    clock_s,
    figure,
    figures,
    in_order,
    is_nan,
    last,
    last_number,
    middle,
    not_found,
    only,
    only_count,
    only_figure,
    share,
)  # fmt: skip
from testbed.audit.reported import Reported

MARK = r"step:\s*\d+\s+loss:.{0,500}?\b(?:tps|wps):"
LINE = re.compile(  # bounded, so that a damaged file of one long line is read in time
    r"(?m)^(?P<head>.{0,300}?)(?<!validate )\bstep:\s*(?P<step>\d{1,12})\s+"
    r"(?P<rest>loss:.{0,500}?\b(?:tps|wps):.{0,500})"
)
AT = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:,\d{3})?")
MESH = r"Building (?:\d-D )?device mesh with (.*)"  # pp=1, dp_shard=8 or, until 2025, ['dp_shard', 'tp'], [4, 2]
UNKNOWN_PEAK = r"Peak flops undefined for: (.{1,80}?), fallback to A100"
DATA = ("dp", "dp_replicate", "dp_shard")


def read_torchtitan(path: Path, text: str) -> list[Reported]:
    """Read the lines of the first rank that prints a loss. Rates are of one device, and so is the reserved memory."""
    lines = in_order(_lines(text))
    ranks = _ranks(text)
    local, batch = only_count(r"local batch size (\d+)", text), only_count(r"global batch size (\d+)", text)
    accumulation = only_count(r"gradient accumulation steps (\d+)", text)
    length = only_count(r"sequence length (\d+)", text)
    rate = middle(lines, "tps")
    world_size = ranks["world"] if ranks else None
    return [Reported(
        path=path, name=str(path), form="torchtitan log",
        world_size=world_size,
        global_batch_size=batch, micro_batch_size=local, sequence_length=length,
        num_parameters=only_count(r"size: ([\d,]+) total parameters", text),
        optimizer_steps=lines[-1].step if lines else None,
        rate=rate * world_size if rate is not None and world_size else rate, rate_is_per_rank=world_size is None,
        train_loss=last(lines, "loss"),
        val_loss=last_number(r"validate step:\s*\d+\s+loss:\s*(\S+)", text),
        device_name=only(r"\b[A-Z]{3,5} capacity: (.{1,80}?) with", text) or only(UNKNOWN_PEAK, text),
        peak_flops=_peak(text), mfu=share(middle(lines, "mfu")), tflops=middle(lines, "tflops"),
        lines=lines, relations=_relations(text, is_one_run=length is not None),
        products=_products(local, accumulation, ranks["data"] if ranks else None, batch),
        details={"peak_is_of": "an A100" if re.search(UNKNOWN_PEAK, text) else None},
        unread=not_found({"number of ranks (no line 'Building device mesh')": ranks, "global batch": batch,
                          "sequence length": length}),
    )]  # fmt: skip


def _lines(text: str) -> Iterator[LogLine]:
    for found in LINE.finditer(text):
        if re.search(r"step:\s*\d+\s+loss:", found["rest"]):
            continue  # two lines in one
        values: dict[str, str] = dict(re.findall(r"(\w+):\s*([^\s%]+)", found["rest"]))
        memory = re.search(r"memory:\s*([\d.]+)GiB\(([\d.]+)%\)", found["rest"])
        loss = figure(values.get("loss", ""))
        if loss and loss.value < 0:  # pipeline stages without the loss print -1 or -2
            loss = None
        at = AT.search(found["head"])
        yield LogLine(
            int(found["step"]),
            figures([
                ("loss", loss),
                ("tps", figure(values.get("tps", values.get("wps", "")))),
                *((name, figure(values.get(name, ""))) for name in ("tflops", "mfu")),
                ("memory_gib", figure(memory[1]) if memory else None),
                ("memory_percent", figure(memory[2]) if memory else None),
            ]),
            clock_s(at[0]) if at else None,
            is_nan(values.get("loss", "")),
        )  # fmt: skip


def _ranks(text: str) -> dict[str, int] | None:
    """Return the ranks of the device mesh and, of them, those that read other data; expert ranks are among both."""
    mesh = only(MESH, text)
    found = re.findall(r"\b([a-z_]+)=(\d{1,6})\b", mesh or "")
    if not found:
        found = list(zip(re.findall(r"'(\w+)'", mesh or ""), re.findall(r"\b\d{1,6}\b", mesh or ""), strict=False))
    sizes = {name: int(size) for name, size in found if name in ("pp", "cp", "tp", *DATA)}
    if not sizes or 0 in sizes.values():
        return None
    return {"world": math.prod(sizes.values()), "data": math.prod(sizes.get(name, 1) for name in DATA)}


def _peak(text: str) -> float | None:
    peak = only_figure(r"Peak FLOPS used for computing MFU: (\S+)", text)
    return peak.value if peak and peak.value > 0 else None


def _relations(text: str, is_one_run: bool) -> tuple[Relation, ...]:
    """Return what follows from `tps`: TFLOP/s is FLOPs per token x tps, MFU is TFLOP/s over the peak."""
    peak = only_figure(r"Peak FLOPS used for computing MFU: (\S+)", text)
    capacity = only_figure(r"\b[A-Z]{3,5} capacity: .{1,80}? with (\S+?)GiB memory", text)
    per_tflops = None
    if peak and peak.low > 0:
        per_tflops = Figure(1e14 / peak.value, 1e14 / peak.low - 1e14 / peak.value)
    return (
        Relation("mfu / tflops", {"mfu": 1, "tflops": -1}, per_tflops, "its peak FLOPS"),
        Relation("tflops / tps", {"tflops": 1, "tps": -1}, is_fixed=is_one_run),
        Relation("mfu / tps", {"mfu": 1, "tps": -1}, is_fixed=is_one_run),
        Relation("memory GiB / %", {"memory_gib": 1, "memory_percent": -1}, capacity and capacity.times(0.01),
                 "the memory of its device"),
    )  # fmt: skip


def _products(
    local: int | None, accumulation: int | None, data_ranks: int | None, batch: int | None
) -> tuple[Product, ...]:
    if not (local and accumulation and data_ranks and batch):
        return ()
    factors = (("local batch size", local), ("accumulation steps", accumulation), ("data ranks", data_ranks))
    return (Product(factors, ("global batch size", batch)),)
