"""Carry faults out: the reference runs, then drill after drill, each from its first start to its verdict."""

from __future__ import annotations

import dataclasses
import queue
import re
import shutil
import signal
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from testbed.distributed.processes import Interrupted, Stop
from testbed.errors import Failure
from testbed.experiments.fault_drill.damage import SmallDisk, damage_files, folder_of_run, newest_but_one
from testbed.experiments.fault_drill.faults import DAMAGE, ENDS_IN_ORDER, LAUNCH, PROCESSES, RESTARTING, Fault, Moment
from testbed.experiments.fault_drill.start import MARKER, POLL_S, StartedRun, Timeline, end_marked
from testbed.experiments.fault_drill.verdict import (
    Reference,
    mark_of,
    problems_of_files,
    problems_of_resuming,
    segments_of,
    weights_sha256,
)
from testbed.experiments.fault_drill.work import Work, surroundings
from testbed.io import now_utc
from testbed.metrics.file import read_metrics
from testbed.run_files import CHECKPOINTS, METRICS, WEIGHTS
from testbed.sweep.plan import folder_name
from testbed.sweep.request import Variant

IN_ORDER = ("preempted", "complete")  # marks of a run that lost nothing when it was told to end
MOST_STARTS = 5  # those with a fault included
TRIES = 3  # a fault that comes too late is tried again earlier
START_LIMIT_S = 180.0  # of a start without a fault: then it hangs
SPARE_S = 30.0  # beyond what a run may take by its own limits after a fault: processes die slowly on a busy machine
END = "end"
# how a run words a full disk: Linux, and PyTorch's writer of archives, which knows only that too few bytes were written
_DISK_IS_FULL = re.compile(r"No space left|File too large|PytorchStreamWriter|unexpected pos")


class DrillFailed(Failure):
    """There is nothing to compare drilled runs with."""


@dataclass
class Drills:
    """Hold what all drills of one call share. `jobs`: that run side by side."""

    work: Work
    variants: Mapping[str, Variant]  # by their text
    out_dir: Path
    disk_method: str
    stop: Stop
    jobs: int = 1
    references: dict[str, Reference] = field(default_factory=dict)  # by the text of the variant
    session: str = field(default_factory=lambda: uuid.uuid4().hex[:12])

    def make_reference(self, text: str) -> dict[str, Any]:
        """Make the reference run of a run type. Returns its metrics.

        Raises:
            DrillFailed: it ends otherwise than complete.
            Interrupted: a signal came.
        """
        self._go_on()
        directory = self._fresh(f"reference_{folder_name(text)}")
        directory.mkdir(parents=True)
        start = self._begin(PROCESSES, text, directory, f"reference_{folder_name(text)}", 0, self._extensions(None))
        left = start.wait_for_end(START_LIMIT_S + 120, POLL_S)  # the first one may compile an extension of DeepSpeed's
        self._go_on()
        if left or set(start.exit_codes) != {0} or mark_of(directory) != "complete":
            raise DrillFailed(f"the reference run of {text} failed; what it said: {start.log}")
        metrics = read_metrics(directory / METRICS)
        newest = max((directory / CHECKPOINTS).glob("step_*"))
        needed = 3 * sum(path.stat().st_size for path in newest.rglob("*") if path.is_file())
        seconds = start.timeline.seconds
        losses = [row["loss"] for row in metrics["steps"]]
        timeline = {**start.timeline.seen, END: seconds}
        sha256 = weights_sha256(directory / WEIGHTS[0])
        self.references[text] = Reference(sha256, losses, timeline, needed, seconds)
        shutil.rmtree(directory)
        return metrics

    def run_all(self, faults: Sequence[Fault]) -> Iterator[dict[str, Any]]:
        """Yield each fault's row as its drill ends. A signal ends it early."""
        slots: queue.Queue[int] = queue.Queue()
        for slot in range(self.jobs):
            slots.put(slot)

        def drill(fault: Fault) -> dict[str, Any]:
            slot = slots.get()
            try:
                return self.run(fault, slot)
            finally:
                slots.put(slot)

        with ThreadPoolExecutor(self.jobs) as pool:
            waiting = {pool.submit(drill, fault) for fault in faults}
            try:
                while waiting and self.stop.signal_number is None:
                    done, waiting = wait(waiting, timeout=0.2, return_when=FIRST_COMPLETED)
                    for each in done:
                        yield each.result()
            except Interrupted:
                return
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
                end_marked(self.session)  # so that drills under way see their run end, and then the signal

    def run(self, fault: Fault, slot: int = 0) -> dict[str, Any]:
        """Drill one fault. Returns its row in fault_drill.json.

        Raises:
            Interrupted: a signal came.
        """
        started_utc, started_s = now_utc(), time.perf_counter()
        for number in range(TRIES):
            row = self._try(_earlier(fault, 0.5**number), slot)
            if row["problems"] or (row["struck"] and _is_where_meant(fault, row)):
                break
        return {
            **{each.name: getattr(fault, each.name) for each in dataclasses.fields(fault)},
            "shares": list(fault.shares),
            "moments": [dataclasses.asdict(moment) for moment in fault.moments],
            "tries": number + 1,
            "started_utc": started_utc,
            "seconds": time.perf_counter() - started_s,
            **row,
        }

    def _try(self, fault: Fault, slot: int) -> dict[str, Any]:
        reference, name = self.references[fault.run_type], f"fault_{fault.number:04d}"
        directory, extensions = self._fresh(name), self._extensions(slot)
        starts: list[dict[str, Any]] = []
        problems: list[str] = []
        try:
            with folder_of_run(fault, directory, reference.needed_bytes, self.disk_method) as disk:
                while len(starts) < MOST_STARTS and not (starts and _is_done(starts[-1])):
                    said = self._start(fault, len(starts), directory, name, extensions, disk)
                    problems += said.pop("problems")
                    starts.append(said)
                    self._go_on()
                    if len(starts) == 1 and not _is_done(said):
                        self._between_starts(fault, directory, disk, said)
                segments = segments_of(directory)
                lost_steps = sum(segment["lost_steps"] or 0 for segment in segments) if segments else None
                problems += self._verdict(fault, starts, segments, lost_steps or 0, directory, extensions)
                struck = starts[0]["struck"] is not None
                kept = self.out_dir / "lost" / name
                shutil.rmtree(kept, ignore_errors=True)
                if problems:
                    shutil.copytree(directory, kept)  # to be looked into
        finally:
            end_marked(f"{self.session}-{name}")
        shutil.rmtree(directory, ignore_errors=True)
        return {
            "struck": struck,
            "survived": False if problems else True if struck else None,
            "problems": [self._without_folders(problem) for problem in problems],
            "lost_steps": lost_steps,
            "starts": starts,
        }

    def _start(
        self, fault: Fault, number: int, directory: Path, name: str, extensions: Path, disk: SmallDisk | None
    ) -> dict[str, Any]:
        """Make one start, with its fault where it has one. Later starts are two plain processes: the quickest there
        is."""
        launcher = fault.launcher if number < max(1, len(fault.moments)) else PROCESSES
        limit = disk.file_size_limit if disk and number == 0 else None
        start = self._begin(launcher, fault.run_type, directory, name, number, extensions, limit)
        struck, struck_s = None, None
        if number < len(fault.moments):
            struck = self._inject(fault, fault.moments[number], start)
            struck_s = time.perf_counter()
        goes_on = struck is None or launcher == RESTARTING
        limit_s = START_LIMIT_S if goes_on else self.work.collective_timeout + self.work.grace + SPARE_S
        left = start.wait_for_end(limit_s)
        now_s, mark = time.perf_counter(), mark_of(directory)
        problems = []
        if left:
            problems.append(f"start {number + 1}: after {limit_s:.0f} s these processes were left: {'; '.join(left)}")
        elif set(start.exit_codes) == {0} and mark != "complete":
            problems.append(f"start {number + 1}: exit code 0, but its folder says {mark}")
        is_done = mark == "complete" and set(start.exit_codes) == {0}
        if disk is not None and number == 0 and start.says(_DISK_IS_FULL):
            what = f"{disk.method}: room for {disk.num_bytes:,} bytes"
            struck = {"what": what, "after_s": None, "saving": None, "newest_saved": None}
        if is_done and fault.signal in (signal.SIGKILL, signal.SIGSTOP) and launcher != RESTARTING:
            struck = None  # a run that was killed does not complete: the fault came too late
        if not (left or struck or is_done):
            problems.append(f"start {number + 1}, which nothing disturbed, ended with {start.exit_codes}, mark {mark}")
        return {
            "launcher": launcher,
            "exit_codes": start.exit_codes,
            "seconds": start.timeline.seconds,
            "struck": struck,
            "ended_after_s": None if struck_s is None or goes_on else now_s - struck_s,
            "mark": mark,
            "begun": start.times_begun(),
            "newest_whole": start.timeline.newest_saved(),
            "saves": sorted(int(event.split()[1]) for event in start.timeline.seen if event.startswith("save ")),
            "said": [self._without_folders(line) for line in start.said()],
            "problems": problems,
        }

    def _inject(self, fault: Fault, moment: Moment, start: StartedRun) -> dict[str, Any] | None:
        """Wait for the moment and send the signal. Returns what was done; None where the run had ended before."""
        wait_s = moment.share * _seconds_to_next(self.references[fault.run_type].timeline, moment.after)
        if not start.wait_for(moment, wait_s, START_LIMIT_S):
            return None
        if mark_of(start.timeline.directory) == "complete":
            return None  # its processes only have to end
        was_saving, newest_saved = start.timeline.saving(), start.timeline.newest_saved()
        after_s = start.timeline.seconds
        pids = start.send(fault.target, fault.signal, START_LIMIT_S)
        if not pids:
            return None
        # of a save that was seen before and after, it is sure that the signal came within it
        saving = was_saving and start.timeline.saving()
        what = f"{fault.signal.name} to {fault.target}"
        return {"what": what, "after_s": after_s, "saving": saving, "newest_saved": newest_saved}

    def _between_starts(self, fault: Fault, directory: Path, disk: SmallDisk | None, first: dict[str, Any]) -> None:
        """Do what happens to the files between the first start and the second."""
        if disk is not None:
            disk.make_room()
        if fault.kind in DAMAGE and first["struck"] is not None:
            done = damage_files(fault, directory)
            first["struck"] = None if done is None else {**first["struck"], "what": done}
            if fault.kind in ("truncated_checkpoint", "flipped_bit") and done is not None:
                first["newest_whole"] = newest_but_one(directory)

    def _verdict(
        self, fault: Fault, starts: list[dict[str, Any]], segments: list[dict[str, Any]], lost_steps: int,
        directory: Path, extensions: Path,
    ) -> list[str]:  # fmt: skip
        if not _is_done(starts[-1]):
            return [f"not complete after {len(starts)} starts"]
        found = problems_of_files(directory, self.references[fault.run_type], extensions)
        found += problems_of_resuming(starts, segments)
        if fault.launcher == RESTARTING and len(starts) > 1:
            found.append("torchrun --max-restarts did not bring the run to its end by itself")
        if fault.kind in ENDS_IN_ORDER and fault.moments[0].after != LAUNCH and lost_steps:
            found.append(f"{lost_steps} steps were trained again, though a signal ends a run in order")
        is_training = fault.moments and fault.moments[0].after.startswith("save")  # all ranks have begun: one is saved
        if fault.kind in (*ENDS_IN_ORDER, "kill_launcher") and is_training and starts[0]["mark"] not in IN_ORDER:
            found.append(f"a signal, or the launcher's death, did not end the run in order: mark {starts[0]['mark']}")
        return found

    def _begin(
        self, launcher: str, text: str, directory: Path, name: str, number: int, extensions: Path,
        file_size_limit: int | None = None,
    ) -> StartedRun:  # fmt: skip
        logs = self.out_dir / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        log = logs / f"{name}_start_{number + 1}.log"
        log.unlink(missing_ok=True)
        commands = self.work.commands(launcher, self.work.arguments(self.variants[text], directory))
        environment = surroundings(extensions, (MARKER, f"{self.session}-{name}"))
        return StartedRun(commands, environment, Timeline(directory), log, file_size_limit)

    def _fresh(self, name: str) -> Path:
        directory = self.out_dir.resolve() / "runs" / name
        shutil.rmtree(directory, ignore_errors=True)
        return directory

    def _extensions(self, slot: int | None) -> Path:
        """TORCH_EXTENSIONS_DIR: drills side by side must not see each other's locks. None: of the reference runs."""
        built = self.out_dir.resolve() / "torch_extensions"
        if slot is None:
            built.mkdir(parents=True, exist_ok=True)
            return built
        own = built.with_name(f"torch_extensions_{slot}")
        if not own.exists():
            shutil.copytree(built, own)
        return own

    def _without_folders(self, line: str) -> str:
        """Return a line for the record, which should not name the folders of this machine."""
        program = str(self.work.program)
        shorter = line.replace(f"{self.out_dir.resolve()}/runs/", "").replace(str(self.out_dir.resolve()), "DIR")
        return shorter.replace(program, self.work.program.name).replace(sys.executable, "python")

    def _go_on(self) -> None:
        if self.stop.signal_number is not None:
            raise Interrupted


def _is_done(start: dict[str, Any]) -> bool:
    """Return whether the run and its exit codes say that it is complete."""
    return start["mark"] == "complete" and set(start["exit_codes"]) == {0}


def _is_where_meant(fault: Fault, row: dict[str, Any]) -> bool:
    """Return whether a kill within a save came within one, as far as can be seen from outside."""
    return fault.kind != "kill_rank_saving" or row["starts"][0]["struck"]["saving"]


def _earlier(fault: Fault, factor: float) -> Fault:
    moments = tuple(Moment(moment.after, moment.share * factor) for moment in fault.moments)
    shares = (fault.shares[0] * factor, fault.shares[1]) if fault.kind == "disk_full" else fault.shares
    return dataclasses.replace(fault, moments=moments, shares=shares)


def _seconds_to_next(timeline: Mapping[str, float], event: str) -> float:
    """Return the seconds from an event of the reference run to the next one."""
    later = [seconds for seconds in timeline.values() if seconds > timeline[event]]
    return min(later) - timeline[event] if later else 0.0
