"""Calibrate: start ranks that measure, and put their answers together into calibration.json. No torch."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testbed.distributed.launch import Launch, read_launch, usable_cores
from testbed.distributed.processes import Interrupted, Stop, run
from testbed.errors import Failure
from testbed.experiments.calibration.sizes import BY_NAME
from testbed.experiments.calibration.work import FLAGS_OF_KIND, Work
from testbed.experiments.made_up_tokens import write_made_up_tokens
from testbed.io import SOURCE, now_utc
from testbed.memory_model.devices import Device, Link
from testbed.planner.calibration import (
    BETWEEN,
    OPERATIONS,
    WITHIN,
    Calibration,
    check_machine,
    facts_here,
    from_json,
    read_calibration,
)
from testbed.sweep.request import facts_of_machine
from testbed.sweep.runner import reason_of_failure

WORKER = "testbed.experiments.calibration.worker"
MOST_RANKS = 8  # at work at once: more of one machine are taken to be like these
VOCABULARY = 1000  # of the made-up tokens: the smallest of the models that are trained
SPARE_S = 20.0  # to start and to end
LONGEST_S = 600.0
PASSES = 3  # over everything that is measured: a machine that others share is slow for minutes at a time
MEASURED = ("seconds", "low", "high", "sent_bytes")  # of the rows of a calibration


@dataclass(frozen=True, kw_only=True)
class CalibrationRequest:
    """A calibration to be made. `seconds`: at most, about. `is_quick`: of sizes that say nothing, for a trial."""

    device: str
    devices: int
    precision: str
    seconds: float
    is_quick: bool = False

    @property
    def numbers_of_ranks(self) -> list[int]:
        """One, two, and as many as there are devices, up to MOST_RANKS."""
        most = min(self.devices, MOST_RANKS)
        return sorted({1, min(2, most), most})


def calibrate(asked: CalibrationRequest, stop: Stop, say: Callable[[str], None]) -> Calibration:
    """Measure everything PASSES times over, in one start for each number of ranks.

    So a drift of the machine meets operations and whole steps, one rank and several alike. What a pass has no time for
    it leaves out at the end; each pass begins with other whole steps.

    Raises:
        Failure: a start ended without an answer.
        Interrupted: a signal came.
    """
    started_s = time.perf_counter()
    answers = []
    numbers = asked.numbers_of_ranks
    with tempfile.TemporaryDirectory(prefix="calibration-") as made:
        folder = Path(made)
        write_made_up_tokens(folder, VOCABULARY)
        passes = 1 if asked.is_quick else PASSES
        for number, (index, ranks) in itertools.product(range(passes), enumerate(numbers)):
            left_s = asked.seconds - (time.perf_counter() - started_s)
            of_pass_s = asked.seconds * (number + 1) / passes - (time.perf_counter() - started_s)
            say(
                f"pass {number + 1} of {passes}: measuring on {ranks} rank{'s' * (ranks > 1)} at once, "
                f"about {left_s:.0f} s left in all"
            )
            work = work_of(asked, folder, ranks, max(of_pass_s / (len(numbers) - index) - SPARE_S, 5.0), number)
            answers.append(_answer(work, folder, ranks, stop))
    return together(asked, answers, time.perf_counter() - started_s)


def calibrate_here(out: Path, minutes: float, precision: str | None, is_quick: bool, say: Callable[[str], None]) -> int:
    """Measure this machine and write `out`; returns the exit code.

    Started by a launcher on several nodes, measure the collectives between them, and add them to `out`, which one of
    the nodes has made before.

    Raises:
        InputError, Failure: what was asked for cannot be, or a start failed.
    """
    launch = read_launch()
    if launch.is_distributed:
        return _calibrate_link(out, is_quick, launch, say)
    device, devices = devices_here()
    asked = CalibrationRequest(
        device=device,
        devices=devices,
        precision=precision or ("fp32" if device == "cpu" else "bf16"),
        seconds=60 * minutes,
        is_quick=is_quick,
    )
    with Stop() as stop:
        try:
            calibration = calibrate(asked, stop, say)
        except Interrupted:
            return stop.exit_code or 1
    out.parent.mkdir(parents=True, exist_ok=True)
    calibration.write(out)
    say(f"{out}: {len(calibration.timings)} operations and collectives, "
        f"{len(calibration.steps)} whole steps, in {calibration.made['seconds']} s")  # fmt: skip
    return 0


def _calibrate_link(out: Path, is_quick: bool, launch: Launch, say: Callable[[str], None]) -> int:
    """Measure the collectives between nodes with the ranks that a launcher has started."""
    from testbed.experiments.calibration.worker import carry_out

    before = read_calibration(out)
    check_machine(before, facts_here(), out)
    device = before.device.kind
    work = Work(
        out=str(out),
        data="",
        device=device,
        precision=next(iter(before.device.peak_flops)),
        seconds=LONGEST_S,
        sizes="quick" if is_quick else device,
        kinds=[],
        link=BETWEEN,
    )
    answer = carry_out(work, launch)
    if answer is not None:
        after = with_link(before, answer)
        after.write(out)
        say(f"{out}: collectives {BETWEEN} added, {launch.world_size} ranks on {launch.num_nodes} nodes")
    return 0


def work_of(asked: CalibrationRequest, folder: Path, ranks: int, seconds: float, number: int = 0) -> Work:
    """Return what one start measures. `number`: of the pass."""
    name = "quick" if asked.is_quick else asked.device
    return Work(
        out=str(folder / f"answer_{ranks}.json"),
        data=str(folder),
        device=asked.device,
        precision=asked.precision,
        seconds=seconds,
        sizes=name,
        kinds=list(FLAGS_OF_KIND),
        first=number * len(FLAGS_OF_KIND) * len(BY_NAME[name].settings) // PASSES,
    )


def _answer(work: Work, folder: Path, ranks: int, stop: Stop) -> dict[str, Any]:
    """Start the ranks, and return what they measured."""
    file, log = folder / f"work_{ranks}.json", folder / f"log_{ranks}.txt"
    work.write(file)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *launcher, "-m", WORKER, str(file)]
    path = os.pathsep.join(filter(None, (str(SOURCE), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path}
    if work.device == "cpu":  # one core is one device, as in a sweep
        environment["OMP_NUM_THREADS"] = "1"
    ended = run(command, log, stop, work.seconds + LONGEST_S, env=environment)
    if ended.was_stopped:
        raise Interrupted
    if ended.exit_code != 0:
        raise Failure(f"calibration on {ranks} ranks: {reason_of_failure(folder, log, ended.exit_code)}")
    return dict(json.loads(Path(work.out).read_text(encoding="utf-8")))


def together(asked: CalibrationRequest, answers: Sequence[dict[str, Any]], seconds: float) -> Calibration:
    """Put the answers of all starts into one calibration."""
    memory: dict[str, float] = {}
    for answer in answers:
        memory |= {name: max(found, memory.get(name, 0.0)) for name, found in answer["memory"].items()}
    facts = answers[0]["machine"]
    rows = {name: medians([row for each in answers for row in each[name]]) for name in ("timings", "steps")}
    whole = from_json(
        {
            **rows,
            "device": dataclasses.asdict(device_of(asked, rows["timings"], facts)),
            "backend": "nccl" if asked.device == "cuda" else "gloo",
            "overlap": statistics.median([each["overlap"] for each in answers if "overlap" in each] or [1.0]),
            "memory": memory,
            "machine_facts": facts,
            "made": {"date_utc": now_utc(), "commit": answers[0]["commit"], "seconds": round(seconds)},
        }
    )
    links = (link_of(whole),) if any(each.link for each in whole.timings) else ()
    return dataclasses.replace(whole, links=links)


def medians(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row for all that measured the same: the median, and the widest quartiles of a whole step."""
    same: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        same.setdefault(json.dumps([row[name] for name in row if name not in MEASURED]), []).append(row)
    found = []
    for of_one in same.values():
        row = {**of_one[0]}
        for name in set(MEASURED) & set(row):
            middle = {"low": min, "high": max}.get(name, statistics.median)
            row[name] = middle([each[name] for each in of_one])
        found.append(row)
    return found


def device_of(asked: CalibrationRequest, timings: Sequence[dict[str, Any]], facts: dict[str, Any]) -> Device:
    """Return one rank's share of the machine, at the best rates that were measured."""
    products = (row for row in timings if OPERATIONS.get(row["operation"]) == "m, n, k")
    peak = max(2 * math.prod(row["size"]) / row["seconds"] for row in products)
    copied = max(2 * row["size"][0] / row["seconds"] for row in timings if row["operation"] == "copy")
    return Device(
        name=facts["device"],
        memory_bytes=facts["memory_bytes"] / (asked.devices if asked.device == "cpu" else 1),
        peak_flops={asked.precision: peak},
        memory_bytes_per_s=copied,
        kind=asked.device,
        source="measured by scripts/plan.py --calibrate",
    )


def link_of(measured: Calibration, name: str = WITHIN) -> Link:
    """Return a link by its fastest and its smallest all-reduce."""
    rows = [each for each in measured.timings if each.operation == "all_reduce" and each.link == name]
    rate = max(2 * (each.ranks - 1) / each.ranks * each.size[0] / each.seconds for each in rows)
    return Link(name=name, latency_s=min(each.seconds for each in rows), bytes_per_s=rate, source="measured")


def with_link(calibration: Calibration, answer: dict[str, Any]) -> Calibration:
    """Return a calibration with the collectives that were measured between nodes."""
    rows = (*(row for row in calibration.timings if row.link != BETWEEN), *answer["timings"])
    changed = dataclasses.replace(calibration, timings=rows)
    links = (*(each for each in calibration.links if each.name != BETWEEN), link_of(changed, BETWEEN))
    return dataclasses.replace(changed, links=links)


def devices_here() -> tuple[str, int]:
    """Return the kind of this machine's devices and their number: CUDA devices, else cores."""
    number = facts_of_machine()["devices"]
    return ("cuda", number) if number else ("cpu", usable_cores())
