"""Read the local folder of a W&B run: RUN/run-ID.wandb, RUN/files/wandb-summary.json, and config.yaml next to it.

The summary holds the last value of every key; `_step`, `_runtime` and `_timestamp` are W&B's own. The log has the
history.
"""

from __future__ import annotations

import math
from pathlib import Path

from testbed.audit.readers.curves import Curves, Point, numbers
from testbed.audit.readers.settings import read_settings
from testbed.audit.readers.text import text_of
from testbed.audit.readers.tracked import reported_of
from testbed.audit.readers.wandb_log import STEPS, read_history
from testbed.audit.reported import Reported
from testbed.errors import InputError
from testbed.io import read_json

SUMMARY = "wandb-summary.json"
CONSOLE = "output.log"  # what the program printed, in the same folder
FORM = "W&B folder"


def read_wandb_folder(path: Path, is_typed: bool) -> list[Reported]:
    """Read the run of a summary, with the history next to it.

    Raises:
        InputError: it is no summary.
    """
    summary = read_json(path)
    if not isinstance(summary, dict):
        raise InputError(f"{path} is no summary of a W&B run: it is no object")
    logs = sorted(each for each in path.parent.parent.glob("run-*.wandb") if each.is_file())
    return _run(path, path.parent, logs, numbers(summary), is_typed)


def read_wandb_log(path: Path, is_typed: bool) -> list[Reported]:
    """Read the run of a log that was typed, or that has no summary: of a run that was killed.

    Raises:
        InputError: it cannot be read.
    """
    files = path.parent / "files"
    if not is_typed and (files / SUMMARY).exists():
        return []
    return _run(path, files, [path], {}, is_typed)


def _run(path: Path, files: Path, logs: list[Path], summary: dict[str, float], is_typed: bool) -> list[Reported]:
    config = files / "config.yaml"
    settings = {
        name.replace(".value", "", 1): text
        for name, text in (read_settings(text_of(config)) if config.is_file() else {}).items()
    }
    curves: Curves = {}
    unread = []
    for log in logs:
        history, is_damaged = read_history(log)
        curves |= history
        if is_damaged:
            unread.append(f"what follows the damaged record in {log.name}")
    if not curves:
        unread.append("curves (a summary has last values)")
    step = next((int(summary[name]) for name in STEPS if abs(summary.get(name, math.inf)) < 1e15), None)
    curves = {name: [Point(step, value)] for name, value in summary.items() if not name.startswith("_")} | curves
    run = reported_of(path, FORM, curves, settings, unread, device_name=_device(files / "wandb-metadata.json"))
    if "_timestamp" in summary:
        run.details["final"].setdefault("_timestamp", summary["_timestamp"])
    return [run] if is_typed or run.has_figures else []


def _device(metadata: Path) -> str | None:
    """Return the name of the machine's GPUs, as their driver tells it."""
    content = read_json(metadata) if metadata.is_file() else {}
    name = content.get("gpu") if isinstance(content, dict) else None
    return name if isinstance(name, str) else None
