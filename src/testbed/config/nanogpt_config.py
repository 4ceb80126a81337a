"""Read a config file of nanoGPT as our flags. It is parsed, never executed. No torch.

Such a file changes the defaults of nanoGPT's train.py, so those that decide what is trained hold where it is silent,
and where nothing that is said speaks against them.
"""

from __future__ import annotations

import ast
import operator
from collections import ChainMap
from collections.abc import Callable, Mapping
from typing import Any

from testbed.config.flag_parser import OF_OTHERS
from testbed.config.table import FLAGS
from testbed.errors import InputError

_DEFAULTS: dict[str, Any] = {
    "dataset": "openwebtext", "batch_size": 12, "gradient_accumulation_steps": 40, "block_size": 1024, "n_layer": 12,
    "n_head": 12, "n_embd": 768, "dropout": 0.0, "init_from": "scratch", "learning_rate": 6e-4, "max_iters": 600_000,
    "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95, "grad_clip": 1.0, "decay_lr": True, "warmup_iters": 2000,
    "lr_decay_iters": 600_000, "min_lr": 6e-5, "eval_interval": 2000, "eval_iters": 200, "always_save_checkpoint": True,
}  # fmt: skip
_NAMES = {*_DEFAULTS, "out_dir", "log_interval", "wandb_log", "dtype"}  # where they are not ours; OF_OTHERS has more
_NOT_TAKEN = {"wandb_project", "wandb_run_name", "bias"}  # W&B reads the environment; our GPT-2 has biases
_OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}  # fmt: skip
_OF_DECAY = {"warmup_iters", "lr_decay_iters", "min_lr"}
_OF_SHAPE = {"n_layer", "n_head", "n_embd"}
_GIVE_WAY = {  # to a flag of ours, whatever its value
    "model": _OF_SHAPE, "epochs": {"max_iters"}, "max_train_steps": {"max_iters"}, "max_tokens": {"max_iters"},
    "lr_schedule": _OF_DECAY,
}  # fmt: skip
_LARGEST = 1e18  # no setting is larger, and products of products would fill the memory


def nanogpt_flags(text: str, typed: Mapping[str, Any]) -> dict[str, Any]:
    """Return flags of ours and values; a name that is neither ours nor nanoGPT's stays. InputError: a line is something
    else than a name and a value. SyntaxError: Python cannot read it.

    Args:
        typed: flags on the command line and their values.
    """
    written: dict[str, Any] = {}
    for line in ast.parse(text, "the file").body:
        match line:
            case ast.Assign(targets=[ast.Name(id=name)]) if name in _NOT_TAKEN:
                pass
            case ast.Assign(targets=[ast.Name(id=name)]):
                written[name] = _value(line.value, ChainMap(written, _DEFAULTS))
            case ast.Import() | ast.Expr(value=ast.Constant()):  # of a name not taken; a text about the file
                pass
            case _:
                raise InputError(f"line {line.lineno} is not NAME = VALUE, and a config is read, not executed")
    return _as_ours(written, typed)


def _value(node: ast.expr, known: Mapping[str, Any]) -> Any:
    """Return a literal, a name that was given before, or numbers with + - * / and // between them."""
    match node:
        case ast.Constant(value=str() | bool() | int() | float() | None as value):
            return value
        case ast.Name(id=name) if name in known:
            return known[name]
        case ast.UnaryOp(op=ast.USub()):
            return -_number(node.operand, known)
        case ast.BinOp() if type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](_number(node.left, known), _number(node.right, known))
    raise InputError(f"the value in line {node.lineno} is no number, text, True or False, nor simple arithmetic")


def _number(node: ast.expr, known: Mapping[str, Any]) -> int | float:
    value = _value(node, known)
    if not isinstance(value, int | float) or not abs(value) < _LARGEST:
        raise InputError(f"line {node.lineno} calculates with {str(value)[:40]!r}, which is no number of a setting")
    return value


def _as_ours(written: dict[str, Any], typed: Mapping[str, Any]) -> dict[str, Any]:
    """Return what nanoGPT's settings mean here, where these are typed."""
    said = {_flag_of(name)[0]: value for name, value in written.items()} | dict(typed)
    silent = _DEFAULTS.keys() - set().union(*(_GIVE_WAY.get(flag, set()) for flag in said))
    theirs = {name: value for name, value in _DEFAULTS.items() if name in silent} | written
    dataset, is_saved_always = theirs.pop("dataset"), theirs.pop("always_save_checkpoint")
    ours: dict[str, Any] = {f"{part}_data_path": f"data/{dataset}/{part}.bin" for part in ("train", "val")}
    sequences, times = theirs.pop("batch_size"), theirs.pop("gradient_accumulation_steps")
    if not all(type(factor) is int and 0 < factor < _LARGEST for factor in (sequences, times)):
        raise InputError("batch_size and gradient_accumulation_steps must be whole numbers from 1, below 10^18")
    ours["global_batch_size"] = sequences * times
    if type(theirs["eval_iters"]) is int and theirs["eval_iters"] > 0:  # batches of batch_size; ours are global
        theirs["eval_iters"] = -(-theirs["eval_iters"] // times)
    ours |= {"save_every": theirs["eval_interval"]} if is_saved_always else {"keep_best": True}
    left_out: set[str] = set()
    if said.get("init_from", "scratch") != "scratch":  # weights decide the shape
        left_out |= _OF_SHAPE
    else:
        ours |= {"max_position_embeddings": said.get("seq_length", theirs["block_size"]), "gelu": "exact"}
    if not theirs.pop("decay_lr"):
        left_out |= _OF_DECAY
        ours |= {"lr_schedule": "constant", "warmup_steps": 0}
    for name in (name for name in theirs if name not in left_out):
        flag, meant = _flag_of(name)
        if not meant:
            ours[flag] = _spelled(flag, theirs[name])
        elif theirs[name]:  # wandb_log = True
            ours[flag] = meant
    return ours


def _flag_of(name: str) -> tuple[str, str]:
    """Return our flag for a name of nanoGPT's, and the value that it stands for, if any; another name as it is."""
    theirs = OF_OTHERS.get(name, "") if name in _NAMES and name not in FLAGS else ""
    flag, _, meant = theirs.removeprefix("--").partition(" ")
    return flag or name, meant


def _spelled(flag: str, value: Any) -> Any:
    """Return a value as our flag has it: "on" of True, "bf16" of "bfloat16"."""
    if isinstance(value, bool) and flag in FLAGS and not FLAGS[flag].is_switch:
        return "on" if value else "off"
    of, _, meant = OF_OTHERS.get(value, "").partition(" ") if isinstance(value, str) else ("", "", "")
    return meant if of == f"--{flag}" and meant else value
