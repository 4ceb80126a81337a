"""Make the runs of a program that resumes where it stopped: a complete run is not made again. No torch."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from testbed.distributed.processes import Stop, run
from testbed.io import SOURCE
from testbed.metrics.file import read_metrics
from testbed.run_folder import METRICS
from testbed.sweep.runner import reason_of_failure


def is_done(words: Sequence[str], folder: Path, log: Path) -> bool:
    """Return whether the run in a folder is complete, and its log says that this command made it."""
    if not (folder / METRICS).exists() or not log.exists():
        return False
    with log.open(encoding="utf-8", errors="replace") as file:
        is_same = file.readline().rstrip("\n") == f"$ {shlex.join(words)}"
    return is_same and read_metrics(folder / METRICS)["status"] == "complete"


def make(
    words: Sequence[str], folder: Path, log: Path, stop: Stop, timeout_s: float, variables: Mapping[str, str]
) -> str | None:
    """Make one run from its beginning, in the repository and without a network. Return why it failed.

    Args:
        words: its command, which begins with "python": the interpreter of this program.
        variables: of the environment, besides those of this program.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier try
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **variables}
    command = [sys.executable if word == "python" else word for word in words]
    ended = run(command, log, stop, timeout_s, words, env=environment, cwd=SOURCE.parent)
    if ended.was_late:
        return f"it ran longer than --run_timeout_s {timeout_s:g} and was ended"
    return None if ended.exit_code == 0 else reason_of_failure(folder, log, ended.exit_code)
