"""Write checkpoints: a folder appears whole or not at all, and its manifest lists what it must hold.

DIR/checkpoints/step_000020/ holds what the strategy wrote, one random state per rank, a copy of the run's metrics up to
that step, checkpoint.json (what it continues) and manifest.json (size and SHA-256 of every file, written last). It is
made as .step_000020.tmp, flushed to disk, files and folders, and renamed. find.py, decide.py and load.py read them.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from testbed.checkpoint.folders import (
    ABANDONED,
    VISIBLE_WITHIN_S,
    CheckpointFailed,
    damaged_folders,
    free_name,
    is_own,
    random_state_file,
    remove,
    step_folders,
)
from testbed.checkpoint.manifest import write_manifest
from testbed.config.settings import RunSettings
from testbed.distributed import process_group, watchdog
from testbed.distributed.launch import Launch
from testbed.distributed.process_group import raise_on_any_rank, root_cause
from testbed.distributed.tensors import RanksDiffer
from testbed.io import now_utc
from testbed.run_folder import CHECKPOINTS, DESCRIPTION, METRICS
from testbed.run_folder.run_lock import FolderGone, check_held, place_of, why_gone

if TYPE_CHECKING:
    from testbed.metrics.recorder import RunRecorder
    from testbed.strategies import Strategy

LAST_WAIT_S = 5.0  # for a thread that still writes when the process is about to end


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
        """Args: resumed_step: the step of the checkpoint that this start resumes from, which needs no saving."""
        self.strategy = strategy
        self.settings = settings
        self.launch = launch
        self.recorder = recorder
        self.saved_step = resumed_step
        self.directory = Path(settings.checkpointing.checkpoint_path)
        self.folder = self.directory / CHECKPOINTS
        self._in_background = settings.checkpointing.async_mode == "async" and strategy.saves_in_background
        # Made here, by all ranks and before `limit_waiting`: --collective_timeout holds for it as for all others.
        # Not at the first save: a run whose launcher died saves too, and the store for a group is gone with torchrun.
        _ = strategy.file_group
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
        watchdog.enter("checkpoint")
        if step == self.saved_step:
            return
        self.wait()
        start_s = time.perf_counter()
        temporary = self.folder / f".step_{step:06d}.tmp"
        row = {"step": step, "bytes": None, "blocking_s": 0.0, "total_s": None, "is_asynchronous": self._in_background}
        try:
            self._raise_on_any_rank(step, self._on_rank_0(self._begin, temporary, step))
            written = _completed(self._write, temporary)
            self._raise_on_any_rank(step, written)
            finished = self._on_rank_0(self._finish, temporary, step, row, start_s, written.result())
            if self._in_background:
                self._pending = temporary, step, row, finished or written.result()
            else:
                self._raise_on_any_rank(step, finished)
        except BaseException:
            self._discard(temporary)
            raise
        row["blocking_s"] = time.perf_counter() - start_s
        self.recorder.add_checkpoint(row)
        self.saved_step = step

    def wait(self) -> None:
        """Wait until a checkpoint that is being written in the background is on disk.

        Raises:
            CheckpointFailed: it could not be written.
        """
        if self._pending is None:
            return
        start_s = time.perf_counter()
        (temporary, step, row, finished), self._pending = self._pending, None
        try:
            self._raise_on_any_rank(step, finished)
        except BaseException:
            self._discard(temporary)
            raise
        row["blocking_s"] += time.perf_counter() - start_s

    def let_finish(self) -> None:
        """Give a checkpoint that is being written in the background a moment, because the process ends."""
        finished = self._pending[3] if self._pending else None
        if finished is not None:
            wait([finished], LAST_WAIT_S)

    def _on_rank_0(self, work: Callable[..., object], *arguments: object) -> Future | None:
        self._last = self._thread.submit(work, *arguments) if self.launch.rank == 0 else None
        return self._last

    def _raise_on_any_rank(self, step: int, mine: Future | None) -> None:
        """Wait for every rank's part. Where one failed, raise its error on all."""
        process_group.wait_for_work(mine)
        cause = None if mine is None else mine.exception()
        error: FolderGone | CheckpointFailed | None = None
        if gone := why_gone(self.directory):
            error = FolderGone(gone)
        elif isinstance(cause, RanksDiffer):
            error = CheckpointFailed(f"the checkpoint of step {step} was not saved: {cause}")
        elif cause is not None:
            error = CheckpointFailed(
                f"the checkpoint of step {step} could not be written in {self.folder} (rank {self.launch.rank}: "
                f"{root_cause(cause)}); make room or make it writable, then go on with --resume"
            )
        raise_on_any_rank(error, cause, first=FolderGone)  # it is the reason why other ranks find no place

    def _discard(self, temporary: Path) -> None:
        """Delete an incomplete checkpoint to free disk space.

        A thread may be about to give it its name: then it stays, and is removed when the run is resumed.
        """
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
            "useful_wall_s": self.recorder.starts.useful_wall_s,
            "world_size": self.launch.world_size,
            "run_type": self.settings.training.run_type,
            "mesh": dataclasses.asdict(self.settings.plan.mesh),
            "settings": self.settings.as_dict(),
            "saved_utc": now_utc(),
        }
        (temporary / DESCRIPTION).write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")

    def _write(self, temporary: Path) -> Future | None:
        """Write this rank's part. Returns the strategy's future, if it continues in the background."""
        # The strategy first: its ranks wait for each other, and would wait for one that failed before it. Saving draws
        # no random number.
        written = self.strategy.save_checkpoint(temporary, in_background=self._in_background)
        torch.save(_random_state(self.settings.compute.device), temporary / random_state_file(self.launch.rank))
        return written

    def _finish(self, temporary: Path, step: int, row: dict[str, Any], start_s: float, written: Future | None) -> None:
        """Finish on rank 0 once all files are there: manifest, flush, rename, and delete the old checkpoints."""
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


def _completed(work: Callable[..., Any], *arguments: object) -> Future:
    """Do the work in this thread and return it as a future."""
    future: Future = Future()
    try:
        future.set_result(work(*arguments))
    except (Exception, CheckpointException) as error:  # PyTorch's own is not an Exception
        future.set_exception(error)
    return future


def _random_state(device_type: str) -> dict[str, torch.Tensor]:
    """Return the state of dropout's random numbers. The order of the data follows from the seed and the step."""
    state = {"cpu": torch.get_rng_state()}
    if device_type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state()
    return state


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
    """Flush files and the folders that name them: after a power cut both are there or the rename is not."""
    for path in [*directory.rglob("*"), directory]:
        _flush(path)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
