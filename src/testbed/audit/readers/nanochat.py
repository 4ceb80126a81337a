"""Read the log of nanochat: scripts/base_train.py, and the scripts that print its lines."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

from testbed.audit.log_lines import Figure, LogLine, Product, Relation
from testbed.audit.readers.printed import (
    count,
    figure,
    figures,
    in_order,
    is_nan,
    last,
    longest,
    middle,
    not_found,
    only,
    only_count,
    only_figure,
    pairs_of,
    seconds,
    share,
)  # fmt: skip
from testbed.audit.reported import Reported

MARK = r"step \d+(?:/\d+)? \(\d+\.\d+%\) \| loss: "
LINE = re.compile(r"\bstep (?P<step>\d{1,12})(?:/(?P<of>\d{1,12}))? \((?P<percent>[\d.]+)%\) \| (?P<rest>loss: .*)")
START = r"(?m)^Autodetected device type: \w+"  # of each script: pre-training, then the later stages
UNTIMED_STEPS = 10  # `total time` adds up the steps behind these
MS_PER_MINUTE = 60_000.0


def read_nanochat(path: Path, text: str) -> list[Reported]:
    """Read a run. Rates are of all ranks; the loss is smoothed over steps and of one rank."""
    text, num_runs = longest(text, START, LINE)
    lines = in_order(_lines(text))
    tokens = only_count(r"Total batch size ([\d,]+)", text)
    accumulation = only_count(r"gradient accumulation steps: (\d+)", text)
    micro = only_count(r"Tokens / micro-batch / rank: (\d+) x", text)
    length = only_count(r"Tokens / micro-batch / rank: \d+ x (\d+)", text)
    per_pass = only_count(r"Tokens / micro-batch: ([\d,]+)", text)
    world_size = per_pass // (micro * length) if per_pass and micro and length else None
    peak = only_figure(r"Peak FLOPS \(BF16\): (\S+)", text)
    bpb = re.findall(r"Validation bpb: (\d+\.\d+)", text)
    return [Reported(
        path=path, name=str(path), form="nanochat log",
        world_size=world_size or None,
        global_batch_size=tokens // length if tokens and length else None,
        micro_batch_size=micro, sequence_length=length,
        num_parameters=only_count(r"(?m)^(?:Number of parameters|total\s*): ([\d,]+)$", text),
        optimizer_steps=lines[-1].step + 1 if lines else None,
        time_s=seconds(middle(lines, "dt")), time_meaning="time of one iteration",
        rate=middle(lines, "tok/sec"),
        train_loss=last(lines, "loss"),
        device_name=only(r"GPU: (.{1,80}?) \| Peak FLOPS", text),
        peak_flops=peak.value if peak and peak.value > 0 else None, mfu=share(middle(lines, "mfu")),
        lines=lines, relations=_relations(text, tokens, world_size),
        products=_products(micro, length, accumulation, world_size, tokens),
        unread=not_found({
            "number of ranks and batch": world_size and tokens,
            f"validation loss in nats (the log has {bpb[-1] if bpb else 'no'} bits per byte)": not bpb,
            f"{num_runs - 1} shorter runs in the same file": num_runs <= 1,
        }),
    )]  # fmt: skip


def _lines(text: str) -> Iterator[LogLine]:
    previous: int | None = None
    total_ms = Figure(0.0)
    for found in LINE.finditer(text):
        if "| loss: " in found["rest"]:
            continue  # two lines in one
        values = dict(pairs_of(found["rest"]))
        step, dt = int(found["step"]), figure(values.get("dt", ""))
        if previous is None or step < previous:  # of the first run or of another one
            is_next, total_ms = step <= UNTIMED_STEPS + 1, Figure(0.0)
        else:
            is_next = step == previous + 1
        if dt is None or not is_next:
            total_ms = Figure(math.nan)  # a line is missing: what they add up to is unknown from here
        elif step > UNTIMED_STEPS:
            total_ms = Figure(total_ms.value + dt.value, total_ms.slack + dt.slack)
        previous = step
        yield LogLine(step, figures([
            ("loss", figure(values.get("loss", ""))), ("dt", dt),
            ("tok/sec", figure(values.get("tok/sec", ""), is_truncated=True)),
            ("mfu", figure(values.get("bf16_mfu", values.get("mfu", "")))),
            ("percent", figure(found["percent"]) if found["of"] else None),
            ("step / steps", _ratio(step, found["of"])),
            ("total time", figure(values.get("total time", ""))),
            ("sum of dt", total_ms if total_ms.value > 0 else None),
        ]), is_nan=is_nan(values.get("loss", "")), last_step=count(found["of"] or ""))  # fmt: skip


def _ratio(step: int, of: str | None) -> Figure | None:
    steps = count(of or "")
    return Figure(step / steps) if step and steps else None


def _relations(text: str, tokens: int | None, world_size: int | None) -> tuple[Relation, ...]:
    flops = only_figure(r"Estimated FLOPs per token: (\S+)", text)
    peak = only_figure(r"Peak FLOPS \(BF16\): (\S+)", text)
    per_rate = None
    if flops and peak and peak.value > 0 and flops.value > 0 and world_size:
        value = 100 * flops.value / (peak.value * world_size)
        per_rate = Figure(value, value * (flops.slack / flops.value))  # the peak is of a table, and printed whole
    return (
        Relation("dt x tok/sec", {"dt": 1, "tok/sec": 1}, Figure(1e3 * tokens) if tokens else None, "its total batch"),
        Relation("mfu / (tok/sec)", {"mfu": 1, "tok/sec": -1}, per_rate, "its FLOPs per token, peak FLOPS and ranks"),
        Relation("% / (step / steps)", {"percent": 1, "step / steps": -1}, Figure(100.0), "the number of steps"),
        Relation("sum of dt / total time", {"sum of dt": 1, "total time": -1}, Figure(MS_PER_MINUTE), "the steps"),
    )  # fmt: skip


def _products(
    micro: int | None, length: int | None, accumulation: int | None, world_size: int | None, tokens: int | None
) -> tuple[Product, ...]:
    if not (micro and length and accumulation and world_size and tokens):
        return ()
    factors = (("micro batch", micro), ("length", length), ("accumulation steps", accumulation), ("ranks", world_size))
    return (Product(factors, ("total batch (tokens)", tokens)),)
