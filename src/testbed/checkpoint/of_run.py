"""Weights and AdamW's state out of a checkpoint of this program, whatever its strategy and ranks, and into one.

What convert_checkpoint.py writes is a checkpoint of the run type CONVERTED, which no strategy has: its settings are the
model's shape and AdamW's, and it has no record of steps.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from testbed.checkpoint.adamw_state import (
    EMBEDDING,
    MOMENTS,
    RATES,
    AdamWState,
    Tensors,
    checked_state,
    expected,
    rates_of,
)
from testbed.checkpoint.folders import CONVERTED, FULL_STATE, described_shape, read_description, replacing_folder
from testbed.checkpoint.manifest import why_damaged, write_manifest
from testbed.distributed.process_group import root_cause
from testbed.errors import InputError, one_line
from testbed.io import is_within, write_text
from testbed.model.shape import ModelShape
from testbed.run_folder import DESCRIPTION
from testbed.strategies import state_files


def read_state(
    folder: Path, name: str, with_optimizer: bool = True
) -> tuple[dict[str, torch.Tensor], ModelShape, AdamWState | None, str]:
    """Return the weights of a checkpoint, the model's shape, AdamW's state (None: another optimizer, or not
    `with_optimizer`), and a note on it.

    Raises:
        InputError: one sentence that begins with `name`: it is damaged, or holds no whole model.
    """
    try:
        if fault := why_damaged(folder):
            raise InputError(f"it is damaged: {fault}; name another checkpoint of the run")
        described = read_description(folder)
        settings, is_adamw = described.settings, described.settings.get("optimizer") == "adamw"
        shape = described_shape(described)
        files = folder / FULL_STATE if (folder / FULL_STATE).exists() else folder
        if not is_within(files, folder):
            raise InputError(f"{FULL_STATE} is a link that leads out of the checkpoint")
        held = sum(file.stat().st_size for file in files.glob("*.distcp"))
        needed = shape.num_parameters * (12 if is_adamw else 4)
        if held < needed:  # before memory is taken
            raise InputError(f"its tensors have {held:,} bytes, the model that checkpoint.json names needs {needed:,}")
        state = _read(files, shape, is_adamw and with_optimizer)
        if not with_optimizer:
            return state["model"], shape, None, f"the weights are those of step {described.step} in {folder}"
        if not is_adamw:
            return state["model"], shape, None, f"{folder}: its optimizer is not AdamW, so it begins anew"
        of_optimizer = state["optimizer"]
        steps = (tensor for key, tensor in of_optimizer.items() if key.endswith(".step"))
        moments = {moment: {key: of_optimizer[f"state.{key}.{moment}"] for key in state["model"]} for moment in MOMENTS}
        found = checked_state(moments, steps, rates_of([settings.get(key) for key in RATES]))
    except OSError as error:
        raise InputError(f"{name}: {folder} cannot be read ({error.strerror or error})") from None
    except (LookupError, RuntimeError, ValueError, CheckpointException) as error:
        raise InputError(f"{name}: {folder}: {one_line(str(root_cause(error)), 300)}") from None
    return state["model"], shape, found, f"weights and AdamW's state are those of step {described.step} in {folder}"


def _read(files: Path, shape: ModelShape, is_adamw: bool) -> dict[str, dict[str, Any]]:
    """Return the whole tensors that a state's files hold, without what stands for no token."""
    state: state_files.State = {"model": {}}
    if is_adamw:
        state["optimizer"] = {}
    for key, ours in expected(shape).items():
        state["model"][key] = torch.empty(ours.shape)
        if is_adamw:
            state["optimizer"] |= {f"state.{key}.{moment}": torch.empty(ours.shape) for moment in MOMENTS}
            state["optimizer"][f"state.{key}.step"] = torch.empty(())
    state_files.load(state, files, group=None)
    for tensors in state.values():
        for key, tensor in tensors.items():
            if tensor.dim() == 2 and EMBEDDING in key:
                tensor[shape.vocab_size :] = 0
    return state


def write_state(folder: Path, weights: Tensors, state: AdamWState, shape: ModelShape) -> None:
    """Write a checkpoint of the run type CONVERTED, which every strategy reads. OSError: the disk refuses."""
    moments = {f"state.{key}.{moment}": state.moments[moment][key] for moment in MOMENTS for key in weights}
    steps = {f"state.{key}.step": torch.tensor(float(state.step)) for key in weights}
    settings = {"optimizer": "adamw", **dataclasses.asdict(shape), **dataclasses.asdict(state.rates)}
    described: dict[str, Any] = {"step": state.step, "elapsed_s": 0.0, "useful_wall_s": 0.0, "world_size": 1}
    described |= {"run_type": CONVERTED, "mesh": {}, "settings": settings}
    with replacing_folder(folder) as made:
        state_files.save({"model": weights, "optimizer": moments | steps}, made, group=None)
        write_text(made / DESCRIPTION, json.dumps(described, indent=2) + "\n")
        write_manifest(made)
