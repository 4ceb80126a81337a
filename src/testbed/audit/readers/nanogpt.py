"""Read the logs of nanoGPT (train.py) and build-nanogpt (train_gpt2.py), which print one line per logged iteration."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from testbed.audit.log_lines import Figure, LogLine, Relation
from testbed.audit.readers.printed import (
    figure,
    figures,
    in_order,
    is_nan,
    last,
    last_number,
    middle,
    not_found,
    only_count,
    seconds,
    share,
)  # fmt: skip
from testbed.audit.reported import Reported

NANOGPT_MARK = r"\biter \d+: loss \S+, time \d+\.\d+ms"
BUILD_MARK = r"\bstep\s+\d+ \| loss: \S+ \| lr:? \S+ \| norm: \S+ \| dt: "
NANOGPT_LINE = re.compile(
    r"\biter (?P<step>\d{1,12}): loss (?P<loss>\S+), time (?P<time>[\d.]+)ms(?:, mfu (?P<mfu>-?[\d.]+)%)?"
)
BUILD_FILE_MARK = r"(?m)^0 (?:val|train) \d+\.\d+$|^\d{1,12} train \d+\.\d{6}$"
BUILD_LINE = re.compile(
    r"\bstep\s+(?P<step>\d{1,12}) \| loss: (?P<loss>\S+) \| lr:? \S+ \| norm: \S+ \| dt: (?P<dt>[\d.]+)ms"
    r" \| tok/sec: (?P<rate>[\d.]+)"
)
A100_PEAK = 312e12  # the bfloat16 peak by which nanoGPT divides on every device (model.py, `estimate_mfu`)
KEPT = 0.9  # of the last logged MFU, in nanoGPT's running mean


def read_nanogpt(path: Path, text: str) -> list[Reported]:
    """Read a run. The MFU is a running mean of rank 0 against an A100, and the loss is of its last micro batch."""
    lines = in_order(_nanogpt_lines(text))
    length = only_count(r"(?m)^\s*(?:Overriding: )?block_size = (\d+)", text)
    tokens = only_count(r"tokens per iteration will be: ([\d,]+)", text)
    mfu = last(lines, "mfu")
    return [Reported(
        path=path, name=str(path), form="nanoGPT log",
        global_batch_size=tokens // length if tokens and length else None, sequence_length=length,
        micro_batch_size=only_count(r"(?m)^\s*(?:Overriding: )?batch_size = (\d+)", text),
        optimizer_steps=lines[-1].step + 1 if lines else None,
        time_s=seconds(middle(lines, "time")), time_meaning="time of one iteration",
        train_loss=last(lines, "loss"), val_loss=last_number(r"step \d+: train loss \S+, val loss (\S+)", text),
        peak_flops=A100_PEAK, mfu=share(mfu),
        lines=lines,
        relations=(Relation("(mfu - 0.9 x mfu of the line before) x time", {"new mfu": 1, "time": 1}),),
        unread=not_found({"number of ranks": False, "global batch": tokens, "sequence length": length,
                          "throughput": False}),
    )]  # fmt: skip


def _nanogpt_lines(text: str) -> Iterator[LogLine]:
    """Yield the lines. `new mfu` is what a line adds to the running mean: a tenth of the MFU of its own time."""
    printed = list(NANOGPT_LINE.finditer(text))
    steps = [int(found["step"]) for found in printed]
    interval = min((after - before for before, after in pairwise(steps) if after > before), default=0)
    mean, mean_step = None, None
    for found, step in zip(printed, steps, strict=True):
        mfu, new = figure(found["mfu"] or ""), None
        if mfu and mfu.value >= 0:
            if mean_step is not None and step - mean_step == interval:
                new = mfu.minus(mean.times(KEPT)) if mean else mfu.times(1 - KEPT)  # the first is no mean yet
            mean = mfu
        else:
            mean = None
        mean_step = step if mfu else None
        yield LogLine(step, figures([
            ("loss", figure(found["loss"])), ("time", figure(found["time"])), ("mfu", mean), ("new mfu", new),
        ]), is_nan=is_nan(found["loss"]))  # fmt: skip


def read_build_nanogpt(path: Path, text: str) -> list[Reported]:
    """Read a run. Loss and rate are of all ranks."""
    lines = in_order(
        LogLine(int(found["step"]), figures([
            ("loss", figure(found["loss"])), ("dt", figure(found["dt"])), ("tok/sec", figure(found["rate"])),
        ]), is_nan=is_nan(found["loss"]))
        for found in BUILD_LINE.finditer(text)
    )  # fmt: skip
    tokens = only_count(r"(?i)total desired batch size: (\d+)", text)
    return [Reported(
        path=path, name=str(path), form="build-nanogpt log",
        optimizer_steps=lines[-1].step + 1 if lines else None,
        time_s=seconds(middle(lines, "dt")), time_meaning="time of one iteration",
        rate=middle(lines, "tok/sec"),
        train_loss=last(lines, "loss"), val_loss=last_number(r"validation loss: (\S+)", text),
        lines=lines,
        relations=(Relation("dt x tok/sec", {"dt": 1, "tok/sec": 1}, Figure(1e3 * tokens) if tokens else None,
                            "its total batch"),),
        unread=not_found({"number of ranks": False, "total batch": tokens}),
    )]  # fmt: skip


def read_build_nanogpt_file(path: Path, text: str) -> list[Reported]:
    """Read log/log.txt of build-nanogpt: `<step> train <loss>` and `<step> val <loss>`, and no times."""
    steps = [int(step) for step in re.findall(r"(?m)^(\d{1,12}) train ", text)]
    return [Reported(
        path=path, name=str(path), form="build-nanogpt log",
        optimizer_steps=max(steps) + 1 if steps else None,
        train_loss=last_number(r"(?m)^\d+ train (\S+)", text), val_loss=last_number(r"(?m)^\d+ val (\S+)", text),
        unread=not_found({"times and rates (log.txt has none)": False}),
    )]  # fmt: skip
