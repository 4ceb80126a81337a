"""Begin a start of a run on all ranks: find the checkpoint, decide whether it fits, and take the folder.

Only rank 0 reads whole files, touches the run's folder and decides. The others are sent the decision, or the error.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

from testbed.checkpoint import folder_owner
from testbed.checkpoint.changed_settings import changes_of_work, in_words
from testbed.checkpoint.decide import Start, decide_start
from testbed.checkpoint.find import Found, find, lock, quarantine
from testbed.checkpoint.folders import VISIBLE_WITHIN_S, CheckpointFailed
from testbed.config.settings import RunSettings
from testbed.distributed import process_group, watchdog
from testbed.distributed.launch import Launch
from testbed.distributed.process_group import raise_on_any_rank, root_cause
from testbed.errors import InputError, say
from testbed.run_folder import reuse, run_lock

if TYPE_CHECKING:
    from testbed.metrics.recorder import RunRecorder


def begin(
    settings: RunSettings, launch: Launch, check_data: Callable[[], dict[str, str]], refusal: str | None
) -> Start:
    """Decide how to begin, and make the run's folder this start's own. All ranks call it.

    Args:
        check_data: reads the token files and returns their hashes; only rank 0 calls it.
        refusal: why this rank cannot start, if it found out before.

    Raises:
        InputError: on every rank, one sentence: what was typed does not go with what was found.
        CheckpointFailed: on every rank: rank 0 could not read or write.
    """
    raise_on_any_rank(None if refusal is None else InputError(refusal))
    mine = process_group.start_on_rank_0(lambda: _begin(settings, launch, check_data))
    process_group.wait_for_work(mine)
    cause = None if mine is None else mine.exception()
    raise_on_any_rank(_as_sent(cause), cause)
    start = process_group.gather_objects(_without_metrics(mine))[0]
    _check_visible(settings, launch)
    return start if mine is None else mine.result()


def _as_sent(error: BaseException | None) -> Exception | None:
    """Return rank 0's error as the other ranks can raise it."""
    if error is None:
        return None
    return InputError(str(error)) if isinstance(error, InputError) else CheckpointFailed(root_cause(error))


def _without_metrics(mine: Future[Start] | None) -> Start | None:
    """Return rank 0's decision as the other ranks need it."""
    return None if mine is None else dataclasses.replace(mine.result(), metrics=None)


def _check_visible(settings: RunSettings, launch: Launch) -> None:
    """Check that every rank sees what rank 0 wrote, or checkpoints would be in pieces on several machines.

    Raises:
        InputError: on every rank: one of them does not.
    """
    needs_it = settings.checkpointing.save_every or settings.training.stop_at_step or settings.checkpointing.resume
    lock_file = Path(settings.checkpointing.checkpoint_path) / run_lock.LOCK
    deadline_s = time.monotonic() + (VISIBLE_WITHIN_S if launch.num_nodes > 1 and needs_it else 0.0)
    while not (sees_it := lock_file.exists()) and time.monotonic() < deadline_s:
        time.sleep(0.5)
    refusal = (
        f"--checkpoint_path {settings.checkpointing.checkpoint_path}: rank {launch.rank} does not see the folder that "
        "rank 0 made; "
        "saving and resuming need a file system that all nodes share"
    )
    raise_on_any_rank(InputError(refusal) if needs_it and not sees_it else None)


def _begin(settings: RunSettings, launch: Launch, check_data: Callable[[], dict[str, str]]) -> Start:
    """Find, decide and take the folder. Only rank 0 does."""
    sha256 = check_data()
    directory = Path(settings.checkpointing.checkpoint_path)
    if settings.checkpointing.overwrite:
        folder_owner.check_link(directory)
    else:
        folder_owner.refuse_stranger(directory)
    if settings.checkpointing.resume is None:
        lock(directory)
        if settings.checkpointing.overwrite and (held := reuse.held_files(directory)):
            say(f"--overwrite: replaces in {directory}: {folder_owner.names_of(held)}", flush=True)
        reuse.claim(directory, settings.checkpointing.overwrite)
        return Start(sha256)
    found = find(settings)
    steps_done = watchdog.steps_done(directory)  # before the folder is cleared
    start = decide_start(settings, launch, sha256, found, steps_done)
    if start.is_complete:
        run_lock.release(directory)
        patience = settings.training.early_stop_patience
        steps = start.metrics["steps"] if start.metrics else []
        done = f", {steps[-1]['step']:,} steps" if patience is None and steps else ""
        larger = "" if patience is None else f", unless --early_stop_patience is larger than {patience}"
        say(f"--resume: {directory} is already complete{done}; nothing is left to do{larger}", flush=True)
        return start
    _take_folder(directory, settings, start, found)
    if start.checkpoint is not None:
        say(f"--resume: continues after step {start.step}, from {start.checkpoint.directory}", flush=True)
    return start


def _take_folder(directory: Path, settings: RunSettings, start: Start, found: Found) -> None:
    """Clear what the start replaces out of the run's folder.

    Raises:
        InputError: it begins with another run's checkpoint, and the folder holds a run already.
    """
    if not start.is_other_run:
        reuse.reopen(directory, from_the_start=start.checkpoint is None)
        quarantine(directory, start.step, found.skipped)
    elif found.is_repeated:
        reuse.claim(directory, overwrite=True)
    elif held := reuse.held_files(directory):
        raise InputError(
            f"--resume {settings.checkpointing.resume} begins a new run from another run's checkpoint, but "
            "--checkpoint_path "
            f"{directory} already holds one ({held[0].name}); give --resume auto to continue that one, or another "
            "--checkpoint_path"
        )


def record(start: Start, recorder: RunRecorder) -> None:
    """Take over what earlier starts recorded, and record how this one begins. Only rank 0 has anything to record."""
    metrics = {} if start.metrics is None and recorder.is_writer and start.is_other_run else start.metrics
    if metrics is None:
        return
    checkpoint, segment = start.checkpoint, recorder.starts.current
    segment["resumed_from"] = str(checkpoint.directory) if checkpoint else None
    segment["setting_changes"] = list(start.setting_changes)
    if start.is_other_run:
        recorder.starts.begin_after(start.step)
        if start.steps_done > start.step:  # this start again, and what it had done before its first checkpoint
            segment.update(lost_steps=start.steps_done - start.step, lost_s=None)
        trained = f"in run {metrics['run_id']}" if metrics else "elsewhere, and converted"
        recorder.note_other_mathematics(f"steps 1 to {start.step} trained {trained}")
    elif checkpoint is None:
        recorder.restore(metrics, 0, start.steps_done, elapsed_s=0.0, useful_wall_s=0.0)
    else:
        recorder.restore(metrics, start.step, start.steps_done, checkpoint.elapsed_s, checkpoint.useful_wall_s)
        if start.is_record_cut_off:
            segment.update(lost_steps=None, lost_s=None)
    if of_work := changes_of_work(start.setting_changes):
        recorder.note_other_mathematics(f"from step {start.step + 1} on {in_words(of_work)}")
