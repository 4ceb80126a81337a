"""Read the logs of llm.c: what train_gpt2.cu and train_gpt2.py print, and main.log (llmc/logger.h)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from testbed.audit.log_lines import Figure, LogLine, Product, Relation
from testbed.audit.readers.printed import (
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
    seconds,
    share,
)  # fmt: skip
from testbed.audit.reported import Reported

MARK = r"\bstep\s+\d+/\d+ \| (?:train )?loss "
MAIN_MARK = r"(?m)^s:\d+ (?:tel|trl|eval):"
LINE = re.compile(r"\bstep\s+(?P<step>\d{1,12})/(?P<of>\d{1,12}) \| (?:train )?loss\s+(?P<loss>\S+)(?P<rest>.*)")
KEPT = 0.95  # of the mean so far, in the rate of train_gpt2.cu
FLOAT32 = 2e-6  # relative: the mean is computed in float32


def read_llmc(path: Path, text: str) -> list[Reported]:
    """Read a run. Loss and rate are of all ranks, the MFU is of one device and one step."""
    lines = in_order(_lines(text))
    ranks = only_count(r"num_processes[ =|]+(\d+)", text)
    tokens = only_count(r"total[ _]batch[ _]size[ =|]+(\d+)", text)
    micro = only_count(r"(?:micro batch size B +\| |batch_size B=)(\d+)", text)
    length = only_count(r"(?:sequence length T +\| |seq_len T=)(\d+)", text)
    accumulation = only_count(r"setting grad_accum_steps=(\d+)", text)
    peak = only_figure(r"peak TFlops +\| (\S+)", text)
    mfu = middle(lines, "MFU")
    factors = (("micro batch B", micro), ("length T", length), ("accumulation steps", accumulation), ("ranks", ranks))
    known = tuple((name, value) for name, value in factors if value)
    return [Reported(
        path=path, name=str(path), form="llm.c log",
        world_size=ranks,
        global_batch_size=tokens // length if tokens and length else None,
        micro_batch_size=micro, sequence_length=length,
        num_parameters=only_count(r"num_parameters[: |]+(\d+)", text),
        optimizer_steps=lines[-1].step if lines else None,
        time_s=seconds(middle(lines, "ms")), time_meaning="time of one iteration",
        rate=middle(lines, "tok/s"),
        train_loss=last(lines, "loss"), val_loss=last_number(r"(?m)^(?:.{0,80}\s)?val loss (\S+)$", text),
        device_name=only(r"\| device +\| (.{1,80}?) +\|", text),
        peak_flops=peak.value * 1e12 if peak and peak.value > 0 else None, mfu=share(mfu),
        lines=lines,
        relations=(
            Relation("ms x MFU", {"ms": 1, "MFU": 1}),
            Relation("ms x tok/s, where the mean of tok/s is taken apart", {"ms": 1, "own tok/s": 1},
                     Figure(1e3 * tokens) if tokens else None, "its total batch"),
        ),
        products=(Product(known, ("total batch size", tokens)),) if tokens and len(known) == len(factors) else (),
        unread=not_found({"number of ranks": ranks, "total batch": tokens, "sequence length": length}),
    )]  # fmt: skip


def _lines(text: str) -> Iterator[LogLine]:
    """Yield the lines. `own tok/s` is the rate of the line's own step, taken out of the mean of two lines in a row."""
    is_one_run = len(re.findall(r"(?m)^\| Parameter +\| Value", text)) <= 1  # a second one begins another mean
    before: tuple[int, Figure] | None = None
    for found in LINE.finditer(text):
        step, rest = int(found["step"]), found["rest"]
        if re.search(r"step\s+\d+/", rest):
            continue  # two lines in one
        rate, mfu = _of(rf"{_REAL} tok/s", rest), _of(rf"{_REAL}% \w+ MFU", rest)
        own = rate if step == 1 or "MFU" not in rest else None  # train_gpt2.py prints the rate of the step
        if rate and own is None and is_one_run:
            weight = 1 - KEPT ** (step - 1)  # the correction of the bias; the first step is not in the mean
            mean = Figure(rate.value * weight, (rate.slack + rate.value * FLOAT32) * weight)
            if before and before[0] == step - 1:
                own = mean.minus(before[1].times(KEPT)).times(1 / (1 - KEPT))
            before = (step, mean)
        elif step == 1:
            before = (1, Figure(0.0))
        yield LogLine(step, figures([
            ("loss", figure(found["loss"])), ("ms", _of(rf"{_REAL} ms", rest)), ("tok/s", rate), ("own tok/s", own),
            ("MFU", mfu if mfu and mfu.value > 0 else None),
        ]), is_nan=is_nan(found["loss"]), last_step=int(found["of"]))  # fmt: skip


_REAL = r"(-?[\d.]+)"


def _of(pattern: str, text: str) -> Figure | None:
    found = re.search(pattern, text)
    return figure(found[1]) if found else None


def read_llmc_main_log(path: Path, text: str) -> list[Reported]:
    """Read main.log: losses, and no times."""
    losses = {name: last_number(rf"(?m)^s:\d+ {name}:(\S+)", text) for name in ("trl", "tel")}
    steps = [int(step) for step in re.findall(r"(?m)^s:(\d{1,12}) trl:", text)]
    return [Reported(
        path=path, name=str(path), form="llm.c log",
        optimizer_steps=max(steps) + 1 if steps else None,
        train_loss=losses["trl"], val_loss=losses["tel"],
        unread=not_found({"times and rates (main.log has none)": False}),
    )]  # fmt: skip
