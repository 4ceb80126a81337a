"""Go on from a checkpoint that convert_checkpoint.py wrote: its step and AdamW's state, under the settings of this
start, as no record says those of the other program."""

from __future__ import annotations

import dataclasses

from testbed.checkpoint.adamw_state import RATES, rates_of
from testbed.checkpoint.folders import Checkpoint, described_shape
from testbed.config.settings import RunSettings
from testbed.errors import InputError, say


def described(checkpoint: Checkpoint, settings: RunSettings) -> Checkpoint:
    """Return the checkpoint without ranks, and say what this start has otherwise. InputError: it has another model or
    optimizer."""
    name, folder = f"--resume {checkpoint.directory}", checkpoint.directory.parent.parent
    values, before = settings.as_dict(), dataclasses.asdict(rates_of([checkpoint.settings.get(key) for key in RATES]))
    if values["optimizer"] != "adamw":
        raise InputError(
            f"{name} holds AdamW's state, and this start has --optimizer {values['optimizer']}; leave that out, or "
            f"give --init_from {folder}, which takes the weights alone"
        )
    if (shape := described_shape(checkpoint)) != settings.shape:
        raise InputError(f"{name} holds another model ({shape.describe()}); give --resume {folder} and no shape")
    others = [f"--{key} {before[key]:g}" for key in RATES if key != "learning_rate" and before[key] != values[key]]
    if others:
        say(f"note: AdamW's state in {folder} was made with {', '.join(others)}; this start has others", flush=True)
    if "learning_rate" not in settings.origin.given:
        said = f"its last step had a learning rate of {before['learning_rate']:g}, and the peak of this start is"
        say(f"note: {said} {values['learning_rate']:g}, the default (--learning_rate)", flush=True)
    return dataclasses.replace(checkpoint, world_size=0)
