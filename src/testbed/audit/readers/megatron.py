"""Read the text log of Megatron-LM and its forks: megatron/training/training.py (`training_log`)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from testbed.audit.log_lines import Figure, LogLine, Product, Relation
from testbed.audit.readers.printed import (
    clock_s,
    count,
    exact,
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
    pairs_of,
    seconds,
)  # fmt: skip
from testbed.audit.reported import Reported

MARK = r"iteration\s+\d+/\s*\d+ \|.{0,2000}?elapsed time per iteration \(m?s\):"
LINE = re.compile(  # bounded, so that a damaged file of one long line is read in time
    r"(?m)^(?P<head>.{0,300}?)\biteration\s+(?P<step>\d{1,12})/\s*(?P<of>\d{1,12}) \|"
    r"(?P<rest>.{0,2000}?elapsed time per iteration \(m?s\):.{0,4000})"
)
AT = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d{1,6})?")
RATES = ("tokens per gpu per second (tgs)", "tokens/sec/GPU", "tokens per GPU (tokens/s/GPU)")
TFLOPS = ("throughput per GPU (TFLOP/s/GPU)", "TFLOPs")
WORLD = r"using world size: (\d+)"


def read_megatron(path: Path, text: str) -> list[Reported]:
    """Read a run. Times are means over the logged interval, TFLOP/s are of one device."""
    lines = in_order(_lines(text))
    world_size = only_count(WORLD, text) or _argument("world_size", text)
    length = _argument("seq_length", text)
    batch, rate = last(lines, "global batch size"), middle(lines, "tokens/s/GPU")
    return [Reported(
        path=path, name=str(path), form="Megatron-LM log",
        world_size=world_size,
        global_batch_size=int(batch) if batch else None,
        micro_batch_size=_argument("micro_batch_size", text), sequence_length=length,
        optimizer_steps=lines[-1].step if lines else None,
        time_s=seconds(middle(lines, "ms")), time_meaning="time of one iteration",
        rate=rate * world_size if rate and world_size else rate, rate_is_per_rank=world_size is None,
        train_loss=last(lines, "lm loss"),
        val_loss=last_number(r"validation loss at iteration \d+(?: on validation set)? \|.{0,200}?lm loss value: (\S+)",
                             text),
        tflops=middle(lines, "TFLOP/s/GPU"),
        lines=tuple(_with_counted_samples(lines)),
        relations=(
            Relation("consumed samples per iteration / global batch size",
                     {"samples per iteration": 1, "global batch size": -1}, Figure(1.0), "its batch"),
            Relation("TFLOP/s/GPU x ms / global batch size",
                     {"TFLOP/s/GPU": 1, "ms": 1, "global batch size": -1}),
            Relation("samples per second x ms / global batch size",
                     {"samples/s": 1, "ms": 1, "global batch size": -1}, Figure(1e3), "its batch"),
            Relation("tokens/s/GPU x ms / global batch size", {"tokens/s/GPU": 1, "ms": 1, "global batch size": -1}),
        ),
        products=_products(world_size, text),
        unread=not_found({"number of ranks": world_size, "sequence length": length,
                          "throughput in tokens/s": rate}),
    )]  # fmt: skip


def _lines(text: str) -> Iterator[LogLine]:
    for found in LINE.finditer(text):
        if re.search(r"iteration\s+\d+/", found["rest"]):
            continue  # two lines in one
        values = dict(pairs_of(found["rest"]))
        seconds = figure(values.get("elapsed time per iteration (s)", ""))
        at, loss = AT.search(found["head"]), values.get("lm loss", values.get("lm-loss", ""))
        yield LogLine(int(found["step"]), figures([
            ("ms", figure(values.get("elapsed time per iteration (ms)", "")) or (seconds and seconds.times(1e3))),
            ("consumed samples", exact(values.get("consumed samples", ""))),
            ("global batch size", exact(values.get("global batch size", ""))),
            ("lm loss", figure(loss)),
            ("samples/s", figure(values.get("samples per second", ""))),
            ("TFLOP/s/GPU", _first(TFLOPS, values)), ("tokens/s/GPU", _first(RATES, values)),
        ]), clock_s(at[0]) if at else None, is_nan(loss), int(found["of"]))  # fmt: skip


def _first(names: tuple[str, ...], values: dict[str, str]) -> Figure | None:
    return next((figure(values[name]) for name in names if name in values), None)


def _with_counted_samples(lines: tuple[LogLine, ...]) -> Iterator[LogLine]:
    """Yield the lines, with the samples that each iteration since the line before consumed at an unchanged batch."""
    yield from lines[:1]
    for before, line in pairwise(lines):
        samples = [each.value("consumed samples") for each in (before, line)]
        batches = {each.value("global batch size") for each in (before, line)}
        if samples[0] is None or samples[1] is None or len(batches) > 1:
            yield line
            continue
        counted = Figure((samples[1] - samples[0]) / (line.step - before.step))
        yield replace(line, figures=line.figures | {"samples per iteration": counted})


def _argument(name: str, text: str) -> int | None:
    """Return a value of the list of arguments: `  seq_length ...... 4096`."""
    found = only(rf"(?m)^(?!.*print\]).*\b{name} \.{{3,}} ?(\d+)\s*$", text)  # DeepSpeed prints its own world_size
    return None if found is None else count(found)


def _products(world_size: int | None, text: str) -> tuple[Product, ...]:
    """Return that the parallel sizes multiply to the world; none where the line names sizes that it does not divide."""
    line = only(r"(using world size: .*)", text)
    if not line or not world_size or "encoder" in line:
        return ()
    sizes = re.findall(r"(?<![\w-])((?:data|context|tensor-model|pipeline-model)-parallel[ -]size): (\d{1,9})\b", line)
    factors = tuple((name, int(size)) for name, size in sizes)
    is_whole = {name[:4] for name, _ in factors} >= {"data", "tens", "pipe"} and all(size for _, size in factors)
    return (Product(factors, ("world size", world_size)),) if is_whole else ()
