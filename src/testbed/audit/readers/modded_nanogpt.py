"""Read the logs of modded-nanogpt: records/*/*.txt, written by train_gpt.py behind its own source code."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from testbed.audit.log_lines import Figure, LogLine, Relation
from testbed.audit.readers.printed import figure, figures, last, last_number, not_found, seconds
from testbed.audit.reported import Reported

MARK = r"\bstep:\d+/\d+ (?:(?:val|train)_loss:\S+ )?(?:\w+:\S+ )?train_time:[\d.]+m?s\b"
LINE = re.compile(
    r"\bstep:(?P<step>\d{1,12})/\d+ (?:(?P<kind>val|train)_loss:(?P<loss>\S+) )?(?:\w+:\S+ )?"
    r"train_time:(?P<time>[\d.]+)(?P<unit>m?s)\b(?: step_avg:(?P<mean>\S+?)ms)?"
)
# Until 2025 the clock started again at step 10, and the mean was over the steps behind it.
UNTIMED_STEPS = (0, 10)


def read_modded_nanogpt(path: Path, text: str) -> list[Reported]:
    """Read a run. Its claim is the time to a validation loss: `train_time`, without validation and kernel warm-up."""
    parts = re.split(r"(?m)^={80,}\s*$", text)  # the source code, the output of nvidia-smi, the run
    text = next((part for part in reversed(parts) if LINE.search(part)), text)
    text = _last_run(text)
    untimed = min(UNTIMED_STEPS, key=lambda steps: _num_apart(text, steps))
    lines = tuple(_lines(text, untimed))  # of a step that is validated there are two
    return [Reported(
        path=path, name=str(path), form="modded-nanogpt log",
        optimizer_steps=lines[-1].step if lines else None,
        time_s=seconds(last(lines, "train_time")),
        train_loss=last_number(r"train_loss:(\S+)", text), val_loss=last_number(r"val_loss:(\S+)", text),
        protocol="time_to_loss", lines=lines, relations=_relations(untimed),
        unread=not_found({"number of ranks": False, "batch (it may change during the run)": False}),
    )]  # fmt: skip


def _last_run(text: str) -> str:
    """Return what stands behind the last place at which the steps go back."""
    lines = list(LINE.finditer(text))
    begins = [line.start() for before, line in pairwise(lines) if int(line["step"]) < int(before["step"])]
    return text[begins[-1] :] if begins else text


def _relations(untimed: int) -> tuple[Relation, ...]:
    """Return the mean's relation for the lines of steps and for those of validations: a script may differ in one."""
    timed = f"(step - {untimed})" if untimed else "step"
    return tuple(
        Relation(f"step_avg x {timed} / train_time", {"step_avg": 1, name: 1, "train_time": -1}, Figure(1.0),
                 "its own clock")
        for name in ("timed steps", "validated steps")
    )  # fmt: skip


def _num_apart(text: str, untimed: int) -> float:
    """Return how many lines contradict this way to count steps."""
    lines = list(_lines(text, untimed))
    intervals = [ends for relation in _relations(untimed) for line in lines if (ends := relation.interval(line))]
    return sum(not ends[0] <= 1 <= ends[1] for ends in intervals) if intervals else math.inf


def _lines(text: str, untimed: int) -> Iterator[LogLine]:
    for found in LINE.finditer(text):
        step, time = int(found["step"]), figure(found["time"])
        if time and found["unit"] == "s":
            time = time.times(1e3)
        yield LogLine(step, figures([
            (f"{found['kind']}_loss", figure(found["loss"] or "")),
            ("train_time", time), ("step_avg", figure(found["mean"] or "")),
            (f"{'validat' if found['kind'] == 'val' else 'tim'}ed steps",
             Figure(float(step - untimed)) if step > untimed else None),
        ]))  # fmt: skip
