"""Universal checkpoints of DeepSpeed, both ways: zero/NAME/{fp32,exp_avg,exp_avg_sq,step}.pt.

`python -m deepspeed.checkpoint.ds_to_universal` writes them too. The model's config.json must lie beside zero/: these
files do not say heads or tokens. Each is read with weights_only. What needs more is not read: zero/optimizer_state.pt,
which alone has the learning rate, and names classes of DeepSpeed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from testbed.checkpoint.adamw_state import (
    EMBEDDING,
    MOMENTS,
    AdamWState,
    Rates,
    Tensors,
    checked_state,
    expected,
    fitted,
)
from testbed.config.initial_shape import UNIVERSAL
from testbed.errors import InputError, one_line
from testbed.io import open_regular, replacing
from testbed.model.gpt2 import PREFIX, TRANSPOSED, to_transformers
from testbed.model.shape import ModelShape
from testbed.model.tensor_archive import check_finite, check_plain, load_tensors

_STATES = "zero_pp_rank_0_mp_rank_00_model_states.pt"  # of stage 3: alone it says sizes and steps
_FLAT = (
    f"ZeRO 3 saves matrices flat, and {_STATES}, which says their sizes, is missing beside zero/ or of another model"
)
_QKV = "h.0.attn.c_attn.weight"
LATEST = "latest_universal"  # beside the folder: where DeepSpeed looks for its name
_VERSION = "0.19.8"  # of the DeepSpeed whose loader takes what is written here


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
    beside = ("lm_head.weight", ".attn.bias", ".attn.masked_bias")  # the tied head, old masks
    if odd := {name for name in parameters if not name.endswith(beside)} ^ ours.keys():
        raise InputError(f"the weight {one_line(min(odd), 80)} is missing, or none of the model in config.json")
    files = [path for key in ours if (path := parameters[key] / "step.pt").exists()]
    sizes, step = ({}, 0) if files else _of_stage_3(folder / _STATES)  # stage 3 writes none
    weights = _read(parameters, "fp32", ours, shape, sizes)
    if not with_optimizer:
        return weights, None, ""
    try:
        moments = {moment: _read(parameters, moment, ours, shape, sizes) for moment in MOMENTS}
        state = checked_state(moments, [_content(path)[0] for path in files] or [step], Rates())
    except (InputError, FileNotFoundError) as error:  # the weights are worth having without it
        return weights, None, f"the optimizer's state is left out: {one_line(str(error), 200)}"
    note = "the universal checkpoint gives AdamW's moments; its learning rate, betas, eps and weight decay are not read"
    return weights, state, f"{note}, and are nanoGPT's defaults"


def _of_stage_3(path: Path) -> tuple[dict[str, torch.Size], int]:
    """Return what ZeRO 3 says beside its tensors, which are flat: their sizes, and how many updates were done."""
    content: Any = _content(path)[0] if path.exists() else {}
    try:
        sizes = {_our_name(name): size for group in content["param_shapes"] for name, size in group.items()}
        return sizes, content["global_steps"] - content["skipped_steps"]
    except (AttributeError, LookupError, TypeError):
        return {}, 0


def _our_name(name: str) -> str:
    """Return the name in `GPT2` of a parameter of ours, of transformers, or of either inside a wrapper."""
    return name.removeprefix("module.").removeprefix(PREFIX)


def _read(parameters: dict[str, Path], kind: str, ours: Tensors, shape: ModelShape, sizes: dict) -> Tensors:
    """Return one tensor of each parameter in our layout: transformers' matrices lie the other way.

    Args:
        sizes: of matrices that lie flat.
    """
    found: Tensors = {}
    for key in ours:
        content, num_bytes = _content(parameters[key] / f"{kind}.pt")
        tensor = content["param"] if isinstance(content, dict) and "param" in content else content
        check_plain([(f"{kind} of {key}", tensor)], num_bytes, UNIVERSAL)
        assert isinstance(tensor, torch.Tensor), "it is plain"
        check_finite(tensor, f"{kind} of {key}")
        if tensor.dim() == 1 < ours[key].dim():
            try:
                tensor = tensor.view(sizes[key])
            except (LookupError, RuntimeError, TypeError):
                raise InputError(f"{kind} of {key} is flat; {_FLAT}") from None
        found[key] = tensor
    is_theirs = list(found[_QKV].shape) == list(ours[_QKV].shape)[::-1]
    for key, tensor in found.items():
        turned = tensor.t() if is_theirs and key.endswith(TRANSPOSED) and tensor.dim() == 2 else tensor
        found[key] = fitted(turned, key, ours[key], shape, f"in {kind}.pt, its config.json needs")
    return found


def _content(path: Path) -> tuple[torch.Tensor | dict, int]:
    """Return what a file holds, and its bytes."""
    with open_regular(path) as file:
        return load_tensors(file, one_line(str(Path(*path.parts[-3:])), 200)), file.seek(0, 2)


def write_universal(folder: Path, weights: Tensors, state: AdamWState | None, shape: ModelShape) -> None:
    """Write what DeepSpeed's loader asks for, of transformers' GPT2LMHeadModel, under ZeRO 1 to 3.

    The optimizer has betas and eps alone. DeepSpeed takes for each group of parameters what is there, in stage 3 that
    of the first group for all, so the learning rate and the weight decay stay those of its own settings.

    Args:
        folder: empty.
        state: None writes moments of zero after no step, which begin anew.

    Raises:
        OSError: the disk refuses.
    """
    if state is None:
        zeros = {key: torch.zeros_like(tensor) for key, tensor in weights.items()}
        state = AdamWState(dict.fromkeys(MOMENTS, zeros), 0, Rates())
    for kind, tensors in {"fp32": weights, **state.moments}.items():
        for name, tensor in to_transformers(tensors, shape).items():
            place = folder / UNIVERSAL / name
            place.mkdir(parents=True, exist_ok=True)
            is_filled_up = name == PREFIX + EMBEDDING  # to the rows that DeepSpeed's model has
            content = {"param": tensor.clone(), "cat_dim": 0, "vocab_tensor": is_filled_up}
            _save(content, place / f"{kind}.pt")  # a clone, as of a slice the whole would be written
            _save(torch.tensor(float(state.step)), place / "step.pt")
    rates = {"betas": (state.rates.adam_beta1, state.rates.adam_beta2), "eps": state.rates.adam_eps}
    groups = [{**rates, "params": []} for _ in weights]  # DeepSpeed reads the state of no more groups than it finds
    # a whole number: stage 3 gives one object to all parts of its optimizer, and each would count a tensor up
    of_stage_3 = {"state": {0: {"step": state.step}}, "param_groups": groups}
    optimizer = {"ds_version": _VERSION, "param_groups": groups, "optimizer_state_dict": of_stage_3}
    _save(optimizer, folder / UNIVERSAL / "optimizer_state.pt")
    engine: dict[str, Any] = {"module": {}, "optimizer": None, "ds_version": _VERSION}
    engine |= {"global_steps": state.step, "skipped_steps": 0, "dp_world_size": 1, "mp_world_size": 1}
    of_torch = {"last_epoch": state.step, "_step_count": state.step + 1, "lr_lambdas": []}
    engine["lr_scheduler"] = {"last_batch_iteration": state.step - 1, **of_torch}  # the first is DeepSpeed's own
    for name in ("mp_rank_00_model_states.pt", _STATES):  # of stages 1 and 2; of 3
        _save(engine, folder / name)


def _save(content: Any, path: Path) -> None:
    with replacing(path) as temporary:
        torch.save(content, temporary)
