"""Calibrate: start ranks that measure, and put their answers together into calibration.json. No torch."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testbed.distributed.launch import usable_cores
from testbed.distributed.processes import Interrupted, Stop, run
from testbed.errors import Failure
from testbed.experiments.calibration import sizes
from testbed.experiments.calibration.work import Work
from testbed.experiments.fault_drill.work import write_made_up_tokens
from testbed.io import SOURCE, now_utc
from testbed.planner.calibration import (
    BETWEEN,
    WITHIN,
    Calibration,
    ComputeTimes,
    LinkTimes,
    WholeStep,
    read_calibration,
    write_calibration,
)
from testbed.planner.residuals import FLAGS_OF_KIND
from testbed.sweep.runner import reason_of_failure

WORKER = "testbed.experiments.calibration.worker"
MOST_RANKS = 8  # at work at once: more of one machine are taken to be like these
VOCABULARY = 1000  # of the made-up tokens: the smallest of the models that are trained
SPARE_S = 20.0  # to start and to end
LONGEST_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Asked:
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


def calibrate(asked: Asked, stop: Stop, say: Callable[[str], None]) -> Calibration:
    """Measure, in one start for each number of ranks.

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
        for index, ranks in enumerate(numbers):
            left_s = asked.seconds - (time.perf_counter() - started_s)
            say(f"measuring on {ranks} rank{'s' * (ranks > 1)} at once, about {left_s:.0f} s left in all")
            work = work_of(asked, folder, ranks, max(left_s / (len(numbers) - index) - SPARE_S, 5.0))
            answers.append(_answer(work, folder, ranks, stop))
    return together(asked, answers, time.perf_counter() - started_s)


def work_of(asked: Asked, folder: Path, ranks: int, seconds: float) -> Work:
    """Return what one start measures."""
    of_device = sizes.CPU if asked.device == "cpu" else sizes.GPU
    messages = sizes.QUICK_MESSAGES if asked.is_quick else sizes.MESSAGES[asked.device]
    settings = sizes.QUICK_SETTINGS if asked.is_quick else sizes.SETTINGS[asked.device]
    return Work(
        out=str(folder / f"answer_{ranks}.json"),
        data=str(folder),
        device=asked.device,
        precision=asked.precision,
        seconds=seconds,
        blocks=3 if asked.is_quick else 7,
        sizes=dataclasses.asdict(sizes.QUICK if asked.is_quick else of_device),
        message_bytes=messages if ranks > 1 else (),
        kinds=tuple(FLAGS_OF_KIND),
        settings=settings,
        rounds=1 if asked.is_quick else 3,
        steps=3 if asked.is_quick else 5,
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


def together(asked: Asked, answers: Sequence[dict[str, Any]], seconds: float) -> Calibration:
    """Put the answers of all starts into one calibration."""
    links = [answer["link"] for answer in answers if "link" in answer]
    memory: dict[str, float] = {}
    for answer in answers:
        memory |= {name: max(found, memory.get(name, 0.0)) for name, found in answer["memory"].items()}
    first = answers[0]
    return Calibration(
        machine=first["machine"],
        precision=asked.precision,
        date_utc=now_utc(),
        commit=first["commit"],
        seconds=seconds,
        compute=tuple(ComputeTimes(**answer["compute"]) for answer in answers),
        links={WITHIN: LinkTimes(**links[-1])} if links else {},
        whole_steps=tuple(WholeStep(**step) for answer in answers for step in answer["whole_steps"]),
        memory=memory,
    )


def devices_here() -> tuple[str, int]:
    """Return the kind of this machine's devices and their number: CUDA devices, else cores."""
    from testbed.sweep.request import facts_of_machine

    number = facts_of_machine()["devices"]
    return ("cuda", number) if number else ("cpu", usable_cores())


def add_link_between_nodes(path: Path, link: dict[str, Any]) -> Calibration:
    """Put collectives that were measured between nodes into an existing file, and return its content."""
    before = read_calibration(path)
    after = dataclasses.replace(before, links={**before.links, BETWEEN: LinkTimes(**link)})
    write_calibration(path, after)
    return after
