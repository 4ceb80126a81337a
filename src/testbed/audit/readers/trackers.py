"""List the files that trackers and trainers keep next to a run, and what reads each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from testbed.audit.readers.event_files import read_event_files
from testbed.audit.readers.mlflow_folder import read_mlflow_run
from testbed.audit.readers.trainer_state import read_trainer_state
from testbed.audit.readers.wandb_folder import read_wandb_folder, read_wandb_log
from testbed.audit.reported import Reported
from testbed.errors import InputError

UNREADABLE = "file"  # the form of one that is of a known format by its name alone
Read = Callable[[Path, bool], list[Reported]]


def _or_say_so(read: Read) -> Read:
    """Return `read`, but of a file in a folder that cannot be read a note: archives hold links in place of files."""

    def reading(path: Path, is_typed: bool) -> list[Reported]:
        try:
            return read(path, is_typed)
        except InputError as error:
            if is_typed:
                raise
            return [Reported(path=path, name=str(path), form=UNREADABLE, unread=(str(error),))]

    return reading


def or_pass_over(read: Read) -> Read:
    """Return `read`, but without a file that cannot be read in a folder: one of such a name may be anything."""

    def reading(path: Path, is_typed: bool) -> list[Reported]:
        try:
            return read(path, is_typed)
        except InputError:
            if is_typed:
                raise
            return []

    return reading


# name of the file -> what reads it; metrics.csv of Lightning is known by its first line
TRACKERS: dict[str, Read] = {
    r".*trainer_state.*\.json": _or_say_so(read_trainer_state),
    r".*tfevents.*": _or_say_so(read_event_files),
    r".*wandb-summary\.json": _or_say_so(read_wandb_folder),
    r".*\.wandb": _or_say_so(read_wandb_log),
    r"meta\.yaml": _or_say_so(read_mlflow_run),
}
