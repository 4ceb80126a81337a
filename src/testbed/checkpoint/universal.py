"""Weights and AdamW's state out of a universal checkpoint of DeepSpeed: zero/NAME/{fp32,exp_avg,exp_avg_sq,step}.pt.

`python -m deepspeed.checkpoint.ds_to_universal` writes it. The model's config.json must be copied beside zero/: these
files do not say heads or tokens. Each is read with weights_only. What needs more is not read: zero/optimizer_state.pt,
which alone has the learning rate, and names classes of DeepSpeed.
"""

from __future__ import annotations

from pathlib import Path

import torch

from testbed.checkpoint.adamw_state import (
    MOMENTS,
    AdamWState,
    Rates,
    Tensors,
    check_moments,
    expected,
    fitted,
    one_step,
)
from testbed.config.initial_shape import UNIVERSAL
from testbed.errors import InputError, one_line
from testbed.io import open_regular
from testbed.model.gpt2 import PREFIX, TRANSPOSED
from testbed.model.shape import ModelShape
from testbed.model.tensor_archive import check_finite, check_plain, load_tensors

_FLAT = "ZeRO 3 saves matrices flat, which does not say which way they lie: save with stage 1 or 2"
_QKV = "h.0.attn.c_attn.weight"


def read_universal(folder: Path, shape: ModelShape, with_optimizer: bool) -> tuple[Tensors, AdamWState | None, str]:
    """Return the weights, AdamW's state (None: there is none, or it is not asked for), and a note on it.

    Args:
        shape: as config.json says.

    Raises:
        InputError: one sentence, without the folder: a file is missing, damaged or of another model.
        OSError: a file cannot be read.
    """
    parameters = {_our_name(path.name): path for path in (folder / UNIVERSAL).iterdir() if path.is_dir()}
    held = sum(path.stat().st_size for path in (folder / UNIVERSAL).glob("*/fp32.pt"))
    if held < 4 * shape.num_parameters:  # before the model's names are made
        raise InputError(f"its weights have {held:,} bytes, its config.json needs {4 * shape.num_parameters:,}")
    ours = expected(shape)
    if odd := {name for name in parameters if not _is_beside(name)} ^ ours.keys():
        raise InputError(f"the weight {one_line(min(odd), 80)} is missing, or none of the model in config.json")
    weights = _read(parameters, "fp32", ours, shape)
    if not with_optimizer:
        return weights, None, ""
    try:
        moments = {moment: _read(parameters, moment, ours, shape) for moment in MOMENTS}
        check_moments(moments)
        step = one_step(_content(parameters[key] / "step.pt")[0] for key in ours)
    except (InputError, FileNotFoundError) as error:  # the weights are worth having without it
        return weights, None, f"the optimizer's state is left out: {one_line(str(error), 200)}"
    note = "the universal checkpoint gives AdamW's moments; its learning rate, betas, eps and weight decay are not read"
    return weights, AdamWState(moments, step, Rates()), f"{note}, and are nanoGPT's defaults"


def _our_name(name: str) -> str:
    """Return the name in `GPT2` of a parameter of ours, of transformers, or of either inside a wrapper."""
    return name.removeprefix("module.").removeprefix(PREFIX)


def _is_beside(name: str) -> bool:
    return name == "lm_head.weight" or name.endswith((".attn.bias", ".attn.masked_bias"))  # the tied head, old masks


def _read(parameters: dict[str, Path], kind: str, ours: Tensors, shape: ModelShape) -> Tensors:
    """Return one tensor of each parameter in our layout: transformers' matrices lie the other way."""
    found: Tensors = {}
    for key in ours:
        content, num_bytes = _content(parameters[key] / f"{kind}.pt")
        tensor = content["param"] if isinstance(content, dict) and "param" in content else content
        check_plain([(f"{kind} of {key}", tensor)], num_bytes, UNIVERSAL)
        assert isinstance(tensor, torch.Tensor), "it is plain"
        check_finite(tensor, f"{kind} of {key}")
        found[key] = tensor
        if tensor.dim() == 1 < ours[key].dim():
            raise InputError(f"{kind} of {key} is flat; {_FLAT}")
    is_theirs = list(found[_QKV].shape) == list(ours[_QKV].shape)[::-1]
    for key, tensor in found.items():
        turned = tensor.t() if is_theirs and key.endswith(TRANSPOSED) and tensor.dim() == 2 else tensor
        found[key] = fitted(turned, key, ours[key], shape, f"in {kind}.pt, its config.json needs")
    return found


def _content(path: Path) -> tuple[torch.Tensor | dict, int]:
    """Return what a file holds, and its bytes."""
    with open_regular(path) as file:
        return load_tensors(file, one_line(str(Path(*path.parts[-3:])), 200)), file.seek(0, 2)
