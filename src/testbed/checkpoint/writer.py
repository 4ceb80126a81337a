"""Writing checkpoints: a folder appears whole or not at all, and its manifest says what it must hold.

DIR/checkpoints/step_000020/ holds what the strategy wrote, one random state per rank, a copy of the run's metrics up to
that step, checkpoint.json (what it continues) and manifest.json (size and SHA-256 of every file, written last). It is
made as .step_000020.tmp, flushed to disk, files and folders, and renamed. Reading them is resume.py.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from testbed.checkpoint.manifest import MANIFEST, write_manifest
from testbed.config.settings import RunSettings
from testbed.distributed import process_group
from testbed.distributed.launch import Launch
from testbed.io import now_utc, read_json
from testbed.run_files import CHECKPOINTS, METRICS
from testbed.run_lock import FolderGone, check_held, place_of, why_gone

if TYPE_CHECKING:
    from testbed.metrics.recorder import RunRecorder
    from testbed.strategies import Strategy

DESCRIPTION = "checkpoint.json"
STEP_FOLDER = re.compile(r"step_(\d+)")
DAMAGED_FOLDER = re.compile(r"step_\d+\.damaged(\.\d+)?")
DAMAGED, ABANDONED = ".damaged", ".abandoned"  # what a folder is called that no start goes on from
LAST_WAIT_S = 5.0  # for a thread that still writes when the process is about to end
VISIBLE_WITHIN_S = 60.0  # a network file system shows a folder's new files after at most so long


class CheckpointFailed(Exception):
    """A checkpoint could not be written or read."""


@dataclass(frozen=True)
class Checkpoint:
    """What checkpoint.json says of the folder that it lies in."""

    directory: Path
    step: int  # optimizer steps done
    elapsed_s: float  # wall time since the first step began, over all starts up to here
    useful_wall_s: float  # wall time of all starts that led to here, without what was lost on the way
    world_size: int
    run_type: str
    mesh: dict[str, int]
    settings: dict[str, Any]


class CheckpointWriter:
    """Saves a run's checkpoints, keeps the newest --keep_last of them, and records what each cost.

    All ranks call its methods together, between two optimizer steps.
    """

    def __init__(
        self,
        strategy: Strategy,
        settings: RunSettings,
        launch: Launch,
        recorder: RunRecorder,
        resumed_step: int | None = None,
    ):
        """Args: resumed_step: the step of the checkpoint that this start goes on from, which needs no saving."""
        self.strategy = strategy
        self.settings = settings
        self.launch = launch
        self.recorder = recorder
        self.saved_step = resumed_step
        self.directory = Path(settings.checkpointing.checkpoint_path)
        self.folder = self.directory / CHECKPOINTS
        self._in_background = settings.checkpointing.async_mode == "async" and getattr(
            strategy, "saves_in_background", False
        )
        # made here, by all ranks and before `limit_waiting`: --collective_timeout holds for it as for all others
        _ = getattr(strategy, "file_group", None)
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._last: Future | None = None  # what the thread was given last
        self._pending: tuple[Path, int, dict[str, Any], Future | None] | None = None

    def save(self, step: int) -> None:
        """Write a checkpoint of optimizer step `step`, unless the newest is of that step.

        With --async_mode async it returns when the state is copied to host memory; `wait` then waits for the rest.

        Raises:
            CheckpointFailed: on every rank; nothing of this checkpoint stays, the earlier ones stay as they were.
            FolderGone: on every rank; the run's folder has another name now, or none.
        """
        if step == self.saved_step:
            return
        self.wait()
        start_s = time.perf_counter()
        temporary = self.folder / f".step_{step:06d}.tmp"
        row = {"step": step, "bytes": None, "blocking_s": 0.0, "total_s": None, "is_asynchronous": self._in_background}
        try:
            self._done_by_all(step, self._on_rank_0(self._begin, temporary, step))
            written = _at_once(self._write, temporary)
            self._done_by_all(step, written)
            finished = self._on_rank_0(self._finish, temporary, step, row, start_s, written.result())
            if self._in_background:
                self._pending = temporary, step, row, finished or written.result()
            else:
                self._done_by_all(step, finished)
        except BaseException:
            self._discard(temporary)
            raise
        row["blocking_s"] = time.perf_counter() - start_s
        self.recorder.add_checkpoint(row)
        self.saved_step = step

    def wait(self) -> None:
        """Until a checkpoint that is being written in the background is on disk.

        Raises:
            CheckpointFailed: it could not be written.
        """
        if self._pending is None:
            return
        start_s = time.perf_counter()
        (temporary, step, row, finished), self._pending = self._pending, None
        try:
            self._done_by_all(step, finished)
        except BaseException:
            self._discard(temporary)
            raise
        row["blocking_s"] += time.perf_counter() - start_s

    def let_finish(self) -> None:
        """The process ends early: give a checkpoint that is being written in the background a moment to be whole."""
        finished = self._pending[3] if self._pending else None
        if finished is not None:
            wait([finished], LAST_WAIT_S)

    def _on_rank_0(self, work: Callable[..., object], *arguments: object) -> Future | None:
        self._last = self._thread.submit(work, *arguments) if self.launch.rank == 0 else None
        return self._last

    def _done_by_all(self, step: int, mine: Future | None) -> None:
        """Wait for every rank's part; where one failed, all end with its words."""
        process_group.wait_for_work(mine)
        error = None if mine is None else mine.exception()
        gone = why_gone(self.directory)  # then a rank that finds no place for its files has not the reason
        faults = process_group.gather_objects((gone, None if error is None else cause(error)))
        if any(words for words, _ in faults):
            raise FolderGone(next(words for words, _ in faults if words)) from error
        for rank, (_, words) in enumerate(faults):
            if words is not None:
                raise CheckpointFailed(
                    f"the checkpoint of step {step} could not be written in {self.folder} (rank {rank}: {words}); make "
                    "room or make it writable, then go on with --resume"
                ) from error

    def _discard(self, temporary: Path) -> None:
        """Half a checkpoint would keep a full disk full. But nothing is taken away from a thread that may be about to
        give it its name: what then stays is removed when the run is resumed."""
        if self._last is not None and wait([self._last], LAST_WAIT_S).done:
            place = place_of(self.directory)  # what has its name now may be another run's
            if place is not None:
                shutil.rmtree(place / temporary.relative_to(self.directory), ignore_errors=True)

    def _begin(self, temporary: Path, step: int) -> None:
        check_held(self.directory)
        self.folder.mkdir(exist_ok=True)  # and never its parents: a folder that has vanished is not made again
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        self.recorder.write("running")  # the rows up to here belong to the checkpoint
        shutil.copyfile(self.directory / METRICS, temporary / METRICS)
        description = {
            "step": step,
            "elapsed_s": self.recorder.elapsed_s,
            "useful_wall_s": self.recorder.useful_wall_s,
            "world_size": self.launch.world_size,
            "run_type": self.settings.training.run_type,
            "mesh": dataclasses.asdict(self.settings.plan.mesh),
            "settings": self.settings.as_dict(),
            "saved_utc": now_utc(),
        }
        (temporary / DESCRIPTION).write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")

    def _write(self, temporary: Path) -> Future | None:
        """This rank's part. Returns what is done when the strategy's files are, if that goes on in the background."""
        # The strategy first: its ranks wait for each other, and for one that failed before it they would wait in vain.
        # Saving draws no random number.
        written = self.strategy.save_checkpoint(temporary, in_background=self._in_background)
        torch.save(_random_state(), temporary / random_state_file(self.launch.rank))
        return written

    def _finish(self, temporary: Path, step: int, row: dict[str, Any], start_s: float, written: Future | None) -> None:
        """What rank 0 does once all files are there: manifest, flush, rename, and the old ones go."""
        if written is not None:
            written.result()
        _wait_for_files(temporary / random_state_file(rank) for rank in range(self.launch.world_size))
        num_bytes = write_manifest(temporary)
        _flush_to_disk(temporary)
        check_held(self.directory)
        final = self.folder / f"step_{step:06d}"
        if os.path.lexists(final) and not is_own(final):  # the name is needed, the files of whoever made them stay
            final.replace(free_name(final.with_name(final.name + ABANDONED)))
        remove(final)  # of this step already: what this start went on from is not saved again
        temporary.replace(final)
        _flush(self.folder)
        own = [folder for folder in step_folders(self.folder) if is_own(folder)]
        for old in own[: -self.settings.checkpointing.keep_last]:
            remove(old)
        for damaged in damaged_folders(self.folder):  # kept for whoever wants to look, until there is a newer
            remove(damaged)
        row["bytes"] = num_bytes
        row["total_s"] = time.perf_counter() - start_s


def _at_once(work: Callable[..., Any], *arguments: object) -> Future:
    """What this thread does now, as a future."""
    future: Future = Future()
    try:
        future.set_result(work(*arguments))
    except (Exception, CheckpointException) as error:  # PyTorch's own is no Exception
        future.set_exception(error)
    return future


def step_folders(folder: Path) -> list[Path]:
    """The finished checkpoints in a folder, by step. Whether they are whole is another question."""
    found = [(int(match[1]), path) for path in folder.glob("step_*") if (match := STEP_FOLDER.fullmatch(path.name))]
    return [path for _, path in sorted(found) if path.is_dir()]


def damaged_folders(folder: Path) -> list[Path]:
    """The checkpoints that were found damaged: what has such a name and holds a file that only a checkpoint has."""
    named = [path for path in folder.glob("step_*") if DAMAGED_FOLDER.fullmatch(path.name)]
    return [path for path in named if any((path / name).is_file() for name in (DESCRIPTION, MANIFEST))]


def is_own(folder: Path) -> bool:
    """Whether a folder is a checkpoint of the step in its name, and so may be deleted for a newer one."""
    try:
        return folder.name == f"step_{read_description(folder).step:06d}"
    except ValueError:
        return False


def other_step(folder: Path) -> int | None:
    """The step that a checkpoint's description says where its name says another: somebody renamed it. None: they agree,
    or one of the two says nothing."""
    named = STEP_FOLDER.fullmatch(folder.name.removesuffix(DAMAGED).removesuffix(ABANDONED))
    try:
        step = read_description(folder).step
    except ValueError:
        return None
    return step if named is not None and int(named[1]) != step else None


def read_description(directory: Path) -> Checkpoint:
    """What a checkpoint's folder says of itself.

    Raises:
        ValueError: one sentence: checkpoint.json is missing, damaged, or of an earlier version.
    """
    content = read_json(directory / DESCRIPTION)
    kinds = {"step": int, "elapsed_s": float, "useful_wall_s": float, "world_size": int}
    kinds |= {"run_type": str, "mesh": dict, "settings": dict}
    for name, kind in kinds.items():
        value = content.get(name) if isinstance(content, dict) else None
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise ValueError(f"{directory / DESCRIPTION}: {name} is {value!r:.80}, which no checkpoint says")
        least = {"step": 1, "world_size": 1, "elapsed_s": 0, "useful_wall_s": 0}.get(name)
        if least is not None and not least <= value < math.inf:
            raise ValueError(f"{directory / DESCRIPTION}: {name} is {value!r:.80}, which no checkpoint says")
    return Checkpoint(directory, **{name: content[name] for name in kinds})


def random_state_file(rank: int) -> str:
    return f"random_state_rank{rank}.pt"


def _random_state() -> dict[str, torch.Tensor]:
    """Dropout's random numbers; the data order needs none, it follows from the seed and the step."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def cause(error: BaseException) -> str:
    """The first line of what went wrong; PyTorch's distributed checkpoint wraps each rank's."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    words = next(iter(str(error).splitlines()), "")
    if "inline_container" in words:  # PyTorch's own writer tells how far it came, not what the system said
        words = f"the disk took only a part of a file ({words})"
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def remove(folder: Path) -> None:
    """Delete a checkpoint, so that at no moment half of one stands under its name. Of a link goes the link: what it
    leads to lies where somebody put it."""
    hidden = folder.with_name(f".{folder.name}.old.tmp")
    for path in (hidden, folder):
        if path.is_symlink():
            path.unlink()
    shutil.rmtree(hidden, ignore_errors=True)
    if folder.exists():
        folder.replace(hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def free_name(path: Path) -> Path:
    """`path`, or where something has that name the first of PATH.2, PATH.3, ... that nothing has."""
    names = itertools.chain([path], (path.with_name(f"{path.name}.{number}") for number in itertools.count(2)))
    return next(name for name in names if not os.path.lexists(name))


def _wait_for_files(paths: Iterable[Path]) -> None:
    deadline_s = time.monotonic() + VISIBLE_WITHIN_S
    for path in paths:
        while not path.exists():
            if time.monotonic() > deadline_s:
                raise OSError(
                    f"{path.name} was written by another node and is not to be seen on rank 0's; --checkpoint_path "
                    "must lie on a file system that all nodes share"
                )
            time.sleep(0.5)


def _flush_to_disk(directory: Path) -> None:
    """Files and the folders that name them: after a power cut both are there or the rename is not."""
    for path in [*directory.rglob("*"), directory]:
        _flush(path)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
