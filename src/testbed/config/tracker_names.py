"""Name the trackers of --track, and the packages that they need. No torch."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Iterable

from testbed.errors import InputError

TENSORBOARD, WANDB, MLFLOW, TRACKIO = "tensorboard", "wandb", "mlflow", "trackio"
TRACKERS = (TENSORBOARD, WANDB, MLFLOW, TRACKIO)  # each is the name of its package too


def tracker_names(text: str) -> str:
    """Return names with commas between them, each once. argparse.ArgumentTypeError: one of them is unknown."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if unknown := [name for name in names if name not in TRACKERS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(TRACKERS)}")
    if not names:
        raise argparse.ArgumentTypeError(f"{text!r} names no tracker; there are {', '.join(TRACKERS)}")
    return ",".join(dict.fromkeys(names))


def trackers_of(track: str | None, tensorboard: bool) -> tuple[str, ...]:
    """Return the names of --track, and TensorBoard's with --tensorboard."""
    named = track.split(",") if track else []
    return tuple(dict.fromkeys([*([TENSORBOARD] if tensorboard else []), *named]))


def check_installed(names: Iterable[str]) -> None:
    """Raise InputError where a tracker's package is missing."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise InputError(f"--track {name} needs the package {name}; install it with pip install {name}")
